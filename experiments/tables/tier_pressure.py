"""Does a host tier that is much too small make things worse? Simulated mean job times with it and without it.

    python -m experiments.tables.tier_pressure

The KV of the jobs that are in the system is 2 to 4 times what host memory holds (the mean over a run without
a tier). Eager copies then throw out what other jobs need, and take the link from loads. Leases yield as
inside vLLM, and copies are single blocks, as in its own connector.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence

from experiments.command_line import make_parser
from experiments.published_memory import with_published_kv
from tenuto.records.schema import TurnRecord
from tenuto.sim.run import Outcome, run
from tenuto.sim.setup import Setup
from tenuto.sim.tiers.offloader import Offload
from tenuto.workload.load import LoadOptions

GIB = 2**30
TOKEN_BYTES = 131_072
"""KV of one token of llama-3.1-8b."""
BLOCK_SIZE = 16


def simulate(policy: str, args: argparse.Namespace, seed: int, host_gb: float) -> Outcome:
    """One run; without a tier if `host_gb` is 0."""
    own: Offload | None = "async" if policy == "stock" else None
    setup = Setup(
        gpu=args.gpu,
        policy=policy,
        host_gb=host_gb,
        offload=own if host_gb else "none",
        offload_chunk_tokens=BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        limits="plugin",
    )
    load = LoadOptions(workload=args.workload, jps=args.jps, window_s=args.window, seed=seed)
    return run(with_published_kv(setup), load)


def get_live_gb(turns: Sequence[TurnRecord]) -> float:
    """GiB of KV of the jobs in the system, the mean over time."""
    token_s, end_s = 0.0, 0.0
    for _, own in itertools.groupby(sorted(turns, key=lambda each: (each.job, each.turn)), lambda t: t.job):
        job = list(own)
        for turn, after in itertools.zip_longest(job, job[1:]):
            until_s = turn.last_token_s if after is None else after.due_s
            assert until_s is not None
            token_s += (until_s - turn.due_s) * ((turn.prompt_tokens or 0) + (turn.output_tokens or 0))
            end_s = max(end_s, until_s)
    return token_s / end_s * TOKEN_BYTES / GIB


def get_mean_s(outcome: Outcome) -> float:
    """Mean job time, seconds."""
    return float(outcome.record["job_s"]["mean"])


def main() -> None:
    """Simulate, and print a table."""
    parser = make_parser(__doc__)
    parser.add_argument("--policies", default="tenuto,stock,infercept,break-even")
    parser.add_argument("--gpu", default="H100")
    parser.add_argument("--workload", default="ab8")
    parser.add_argument("--jps", type=float, default=6.0)
    parser.add_argument("--window", type=float, default=30.0)
    parser.add_argument("--seeds", default="1,2,42")
    parser.add_argument("--times", default="2,3,4", help="live KV as a multiple of host memory")
    args = parser.parse_args()
    seeds = [int(each) for each in args.seeds.split(",")]
    print(
        "| policy | live KV / host memory | no tier, s | with / without (range) | hits without | hits with |"
    )
    print("|---|---|---|---|---|---|")
    for policy in args.policies.split(","):
        without = {seed: simulate(policy, args, seed, 0.0) for seed in seeds}
        for times in map(float, args.times.split(",")):
            ratios, hits = [], []
            for seed, base in without.items():
                found = simulate(policy, args, seed, get_live_gb(base.turns) / times)
                ratios.append(get_mean_s(found) / get_mean_s(base))
                hits.append(found.record["reused_tokens"] / found.record["reusable_tokens"])
            base_hits = [o.record["reused_tokens"] / o.record["reusable_tokens"] for o in without.values()]
            print(
                f"| {policy} | {times:g} | {statistics.fmean(map(get_mean_s, without.values())):.1f} "
                f"| {statistics.fmean(ratios):.3f} ({min(ratios):.3f}–{max(ratios):.3f}) "
                f"| {statistics.fmean(base_hits):.1%} | {statistics.fmean(hits):.1%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
