"""What the step size is worth under each model of mixed steps: a table of docs/fidelity.md.

    python -m experiments.tables.mixed_steps [--workloads ab8,swe-bench]

Each row is one machine and load. It compares `tenuto`, with steps of every size and adaptive ones, under the
default step cost and its two bounds (`--step-cost optimistic` and `pessimistic`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from experiments.published_memory import with_published_kv
from tenuto.sim.run import run
from tenuto.sim.setup import Setup
from tenuto.workload.load import LoadOptions

LOADS = {
    "ab8": LoadOptions(jps=3),
    "swe-bench": LoadOptions(workload="swe-bench", jps=2, window_s=45),
}
SIZES = (512, 1024, 2048, None, "adaptive")
HOST_GB = 400.0
"""The published H100's."""
COSTS = ("optimistic", None, "pessimistic")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workloads", default=",".join(LOADS))
    parser.add_argument("--gpu", default="H100")
    parser.add_argument("--policy", default="tenuto")
    parsed = parser.parse_args()
    sizes = " | ".join("all 8,192" if each is None else str(each) for each in SIZES)
    print(f"| workload | `--step-cost` | {sizes} |\n|---|---|" + "---|" * len(SIZES))
    for workload in parsed.workloads.split(","):
        for cost in COSTS:
            means = " | ".join(
                f"{mean_s:.2f}" for mean_s in simulate(parsed.gpu, parsed.policy, LOADS[workload], cost)
            )
            print(f"| {workload} | {cost or '(default)'} | {means} |", flush=True)
    return 0


def simulate(gpu: str, policy: str, load: LoadOptions, cost: str | None) -> Iterator[float]:
    """Mean job times, one for each step size."""
    for size in SIZES:
        # None means what the policy wants, and `tenuto` wants adaptive steps.
        step_tokens = 8192 if size is None else size
        setup = Setup(gpu=gpu, policy=policy, step_cost=cost, step_tokens=step_tokens, host_gb=HOST_GB)
        mean_s = run(with_published_kv(setup), load).record["job_s"]["mean"]
        print(f"{load.workload} {cost} {size}: {mean_s:.2f} s", file=sys.stderr, flush=True)
        yield mean_s


if __name__ == "__main__":
    raise SystemExit(main())
