"""Adaptive steps inside vLLM's own scheduler, against fixed ones: a table of docs/fidelity.md.

    python -m experiments.tables.engine_steps [--gpu H100] [--policy tenuto] [--seeds 42,43,44]

vLLM's scheduler runs with the plugin and without workers. A step takes what the operator tables say, in
virtual time: the chooser learns from steps of a GPU's length, and the result does not depend on this machine.
The same jobs run in the simulator. `experiments/live/cpu_fidelity.py` has the same comparison in real
time, on vLLM's CPU build. Needs vLLM.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping

import tenuto.vllm.scheduler
from experiments.command_line import make_parser
from tenuto.core.engine import StepTokens, read_step_tokens
from tenuto.records.metrics import get_geometric_mean, get_job_times_s
from tenuto.workload import LoadOptions, Workload, make_workload
from tests.agreement.engines import Sizes, build_machine, make_simulation, run_vllm
from tests.vllm.conftest import Clock

SIZES = "adaptive,256,512,1024,2048"
NUM_BLOCKS = 27_126
"""An H100's KV cache in blocks of 16 tokens, as the published sweep's server had it."""


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--gpu", default="H100")
    parser.add_argument("--policy", default="tenuto")
    parser.add_argument("--sizes", default=SIZES, help="of steps (%(default)s)")
    parser.add_argument("--budget", type=int, default=2048, help="most tokens in a step (%(default)s)")
    parser.add_argument("--seeds", default="42,43,44")
    parser.add_argument("--jps", type=float, default=8.0, help="jobs per second (%(default)s)")
    parser.add_argument("--window", type=float, default=6.0, help="they arrive for S seconds (%(default)s)")
    parser.add_argument("--scale", type=float, default=0.5, help="of ab8's lengths (%(default)s)")
    parsed = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in map(int, parsed.seeds.split(",")):
        load = LoadOptions(jps=parsed.jps, window_s=parsed.window, seed=seed, scale_lengths=parsed.scale)
        workload = make_workload(load)
        for size in parsed.sizes.split(","):
            pair = compare(workload, parsed.gpu, parsed.policy, parsed.budget, read_step_tokens(size))
            found.setdefault(size, []).append(pair)
            print(f"{size}, seed {seed}: {pair[0]:.3f} s, {pair[1]:.3f} s", file=sys.stderr, flush=True)
        print(format_table(found), flush=True)
    return 0


def compare(workload: Workload, gpu: str, policy: str, budget: int, size: StepTokens) -> tuple[float, float]:
    """Mean job times in seconds: through vLLM's scheduler, and in the simulator."""
    sizes = Sizes(
        num_blocks=NUM_BLOCKS,
        max_num_batched_tokens=budget,
        max_num_seqs=256,
        policy=policy,
        step_tokens=size,
        gpu=gpu,
        step_cost=None,
    )
    clock = Clock()
    tenuto.vllm.scheduler.time = clock  # type: ignore[attr-defined,assignment]
    cost = build_machine(sizes).step_cost
    real = run_vllm(workload, sizes, clock, cost=cost)
    times_s = [real.finish_s[job.job_id, len(job.turns) - 1] - job.arrival_s for job in workload.jobs]
    simulated_s = get_job_times_s(make_simulation(workload, sizes, cost=cost).run())
    return statistics.fmean(times_s), statistics.fmean(simulated_s.values())


def format_table(found: Mapping[str, list[tuple[float, float]]]) -> str:
    """One line per size: mean job times, their ratio to the first size's, and the simulator's error."""
    first = next(iter(found.values()))
    lines = [
        "| steps | mean job time in vLLM's scheduler, s | over the first (seeds) | simulated, s | error |",
        "|---|---|---|---|---|",
    ]
    for size, pairs in found.items():
        real, simulated = (statistics.fmean(each) for each in zip(*pairs, strict=True))
        ratios = [pair[0] / base[0] for pair, base in zip(pairs, first, strict=True)]
        mean = get_geometric_mean(ratios)
        lines.append(
            f"| {size} | {real:.2f} | {mean:.3f} ({min(ratios):.3f}-{max(ratios):.3f}) | {simulated:.2f} "
            f"| {simulated / real - 1:+.1%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
