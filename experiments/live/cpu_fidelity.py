"""Hold the simulator, and the policies, against the real engine: vLLM on this machine's CPU.

    python experiments/live/cpu_fidelity.py --model .demo/smollm2 --out experiments/out/cpu

Times the steps of one server (`tenuto profile`); starts a server per policy, all alike but for the scheduler,
side by side; runs the same jobs on each in turn (`tenuto ab`); simulates them with the fitted step cost.
Prints predicted and measured mean job times (docs/fidelity.md) and what `tenuto ab` says of the policies
(docs/lab.md). Needs about 2.5 GB of memory per policy, and a machine that does nothing else.

A policy may be POLICY@SIZE, with steps of that size: are adaptive steps any better than the best fixed ones?

    python experiments/live/cpu_fidelity.py --policies tenuto@adaptive,tenuto@256,tenuto@512,tenuto@1024 \\
        --step-tokens 2048 --blocks 160 --seats 12 --out experiments/out/steps

And it may be POLICY+host, with host memory below the cache (docs/tiers.md); then copies are timed too. Here
the cache holds three jobs of 25 blocks, and the host memory all of them:

    python experiments/live/cpu_fidelity.py --policies stock,tenuto,tenuto+host --scale 0.06 --blocks 77 \\
        --window 8 --out experiments/out/host
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tenuto.client.ab import make_command, run_ab, run_server
from tenuto.client.options import AbOptions, Arm, BenchOptions, ProfileOptions
from tenuto.client.profile import run_profile
from tenuto.core.engine import read_step_tokens
from tenuto.core.errors import TenutoError
from tenuto.sim.cost.fitted import fit_step_cost, format_fit, get_errors, read_observations
from tenuto.sim.run import run
from tenuto.sim.setup import Setup
from tenuto.workload.load import LoadOptions

ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
BLOCK_SIZE = 32
MAX_MODEL_LEN = 2048
START_LIMIT_S = 600.0


def main() -> int:
    parsed = parse_arguments()
    parsed.out.mkdir(parents=True, exist_ok=True)
    policies = parsed.policies.split(",")
    try:
        if not parsed.costs.exists():
            # Copies are timed with a policy that holds no leases, so that prompts can be evicted.
            profiled = "stock+host" if any(map(has_host, policies)) else policies[0]
            with ExitStack() as stack:
                profile(start(stack, profiled, parsed.port, parsed), parsed)
        with ExitStack() as stack:
            with ThreadPoolExecutor(len(policies)) as pool:
                ports = range(parsed.port, parsed.port + len(policies))
                started = pool.map(lambda policy, port: start(stack, policy, port, parsed), policies, ports)
                urls = dict(zip(policies, started, strict=True))
            say(f"load average {os.getloadavg()[0]:.1f} before the runs")
            status = run_ab(make_ab_options(urls, parsed))
            say(f"load average {os.getloadavg()[0]:.1f} after the runs")
        rows = make_rows(policies, parsed)
    except TenutoError as error:
        print(f"cpu_fidelity: {error}", file=sys.stderr)
        return 2
    (parsed.out / "fidelity.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(format_rows(rows))
    return status


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path(".demo/smollm2"), help="a small model's folder")
    parser.add_argument(
        "--policies",
        default="stock,continuum-fixed,tenuto",
        metavar="A,B,…",
        help="each may be POLICY@SIZE, POLICY+host, or POLICY@SIZE+host",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--costs", type=Path, metavar="FILE", help="fitted before; default: DIR/costs.json")
    parser.add_argument("--blocks", type=int, default=120, metavar="N", help="KV blocks of 32 tokens (120)")
    parser.add_argument("--host-gb", type=float, default=2.0, metavar="GIB", help="of POLICY+host (2)")
    parser.add_argument("--step-tokens", type=int, default=512, metavar="N", help="step budget (512)")
    parser.add_argument("--seats", type=int, default=8, metavar="N", help="requests that run at once (8)")
    parser.add_argument("--jps", type=float, default=1.0, metavar="X", help="jobs per second (1)")
    parser.add_argument(
        "--window", type=float, default=10.0, metavar="S", help="they arrive for S seconds (10)"
    )
    parser.add_argument("--scale", type=float, default=0.1, metavar="X", help="of ab8's lengths (0.1)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="(3)")
    parser.add_argument("--seed", type=int, default=42, help="of the first repeat (42)")
    parser.add_argument("--port", type=int, default=8300, metavar="N", help="the first server's (8300)")
    parsed = parser.parse_args()
    parsed.costs = parsed.costs or parsed.out / "costs.json"
    return parsed


def say(text: str) -> None:
    print(f"[cpu_fidelity] {text}", file=sys.stderr, flush=True)


def read_policy(policy: str) -> tuple[str, str]:
    """The policy's name, and its step size or an empty string."""
    name, _, size = policy.removesuffix("+host").partition("@")
    return name, size


def has_host(policy: str) -> bool:
    """Whether there is host memory below the cache."""
    return policy.endswith("+host")


def start(stack: ExitStack, policy: str, port: int, parsed: argparse.Namespace) -> str:
    """Start a policy's server, warm it up; its URL."""
    name, size = read_policy(policy)
    arm = Arm(policy, "vllm") if policy == "stock" else Arm(policy, "policy", name)
    arguments = [
        *("--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK_SIZE)),
        *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(parsed.seats)),
        *("--max-num-batched-tokens", str(parsed.step_tokens), "--enable-prompt-tokens-details"),
        *("--num-gpu-blocks-override", str(parsed.blocks)),
        *(("--step-tokens", size) if size else ()),
        *(("--host-gb", str(parsed.host_gb)) if has_host(policy) else ()),
    ]
    command = make_command(arm, str(parsed.model), port, arguments)
    say(f"{policy}: {' '.join(command)}")
    server = run_server(
        command,
        port,
        parsed.out / f"server-{policy}.log",
        env=ENVIRONMENT,
        say=lambda text: say(f"{policy}: {text}"),
        limit_s=START_LIMIT_S,
    )
    return stack.enter_context(server).url


def profile(url: str, parsed: argparse.Namespace) -> None:
    """Time a server's steps, and fit them."""
    observations = parsed.out / "observations.jsonl"
    options = ProfileOptions(
        url=url, step_tokens=parsed.step_tokens, max_batch=min(8, parsed.seats), max_context=MAX_MODEL_LEN
    )
    run_profile(options, observations)
    steps, transfers = read_observations(observations)
    cost = fit_step_cost(steps, transfers)
    cost.save(parsed.costs)
    print(format_fit(cost, get_errors(cost, steps)), flush=True)


def make_load(seed: int, parsed: argparse.Namespace) -> LoadOptions:
    return LoadOptions(
        jps=parsed.jps, window_s=parsed.window, seed=seed, scale_lengths=parsed.scale, hints="tool"
    )


def make_ab_options(urls: dict[str, str], parsed: argparse.Namespace) -> AbOptions:
    return AbOptions(
        arms=tuple(Arm(policy, "url", url) for policy, url in urls.items()),
        bench=BenchOptions(urls=(next(iter(urls.values())),), load=make_load(parsed.seed, parsed)),
        out=parsed.out / "ab",
        repeats=parsed.repeats,
    )


def make_rows(policies: list[str], parsed: argparse.Namespace) -> list[dict[str, Any]]:
    """By policy and repeat, the mean job time as measured and as simulated."""
    rows = []
    for policy in policies:
        for repeat in range(parsed.repeats):
            result = parsed.out / "ab" / "runs" / f"{repeat + 1:03}-{policy}" / "result.json"
            if not result.exists():
                continue  # the comparison was interrupted
            measured = json.loads(result.read_text(encoding="utf-8"))
            record = simulate(policy, parsed.seed + repeat, parsed)
            rows.append(
                {
                    "policy": policy,
                    "seed": parsed.seed + repeat,
                    "jobs": record["jobs"],
                    "measured_s": measured["job_s"]["mean"],
                    "simulated_s": record["job_s"]["mean"],
                    "measured_reused": get_reused(measured),
                    "simulated_reused": get_reused(record),
                }
            )
    return rows


def get_reused(record: dict[str, Any]) -> float:
    """The share of the reusable tokens that turns hit."""
    return float(record["reused_tokens"] / record["reusable_tokens"])


def simulate(policy: str, seed: int, parsed: argparse.Namespace) -> dict[str, Any]:
    """The same jobs on the same cache, step budget and seats; the GPU's name stands for nothing here."""
    name, size = read_policy(policy)
    setup = Setup(
        model=str(parsed.model),
        policy=name,
        step_tokens=read_step_tokens(size) if size else None,
        step_cost=str(parsed.costs),
        kv_tokens=parsed.blocks * BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=parsed.step_tokens,
        max_num_seqs=parsed.seats,
        dtype="float32",
        offload="async" if has_host(policy) else "none",
        host_gb=parsed.host_gb,
        # vLLM's connector stores and loads single blocks.
        offload_chunk_tokens=BLOCK_SIZE,
        # vLLM's CPU build schedules a step after the one before.
        async_scheduling=False,
        # Every lease yields, as under the plugin: not as in the published engines.
        limits="plugin",
    )
    return run(setup, make_load(seed, parsed)).record


def format_rows(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| policy | jobs | measured, s (range) | simulated, s | error | to the first, measured | simulated "
        "| reused, measured | simulated |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    first: tuple[float, float] | None = None
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == policy]
        times = [row["measured_s"] for row in own]
        measured, simulated = statistics.fmean(times), statistics.fmean(row["simulated_s"] for row in own)
        first = first or (measured, simulated)
        num_jobs = sum(row["jobs"] for row in own)
        reused = [statistics.fmean(row[f"{how}_reused"] for row in own) for how in ("measured", "simulated")]
        lines.append(
            f"| {policy} | {num_jobs} | {measured:.2f} ({min(times):.2f}–{max(times):.2f}) "
            f"| {simulated:.2f} | {simulated / measured - 1:+.1%} | {measured / first[0]:.2f} "
            f"| {simulated / first[1]:.2f} | {reused[0]:.1%} | {reused[1]:.1%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
