"""Many long prefixes on a model with sliding windows: what the retention interval and pins do.

    python -m experiments.tables.shared_prefixes [--prefixes 15,30,50,60] [--arms stock:0,tenuto:0] [--json]

One client sends prompts one after another. Each begins with one of the prefixes (28,000 tokens by default)
and ends with 200 tokens of its own. The prefixes come in rounds, in a new random order each. "Second use"
is the second round; the other figures count the rounds after the third, when vLLM has seen where prompts
part. An arm is a policy and vLLM's `prefix_cache_retention_interval`; policies have the plugin's limits. The
engine is simulated: four H200, Gemma-3-27B, and a KV cache that vLLM would report as 1.47 million tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from dataclasses import replace
from typing import Any

from tenuto.records.schema import TurnRecord
from tenuto.sim.machine import build
from tenuto.sim.setup import Setup
from tenuto.sim.simulation import Clients, Simulation
from tenuto.workload.schema import Job, Span, TurnSpec, Workload

NUM_UNCOUNTED = 3
REPORTED_TOKENS = 1_470_000
MODEL = Setup(gpu="H200", model="gemma-3-27b", tp=4, step_cost="roofline", host_gb=400.0)


def make_workload(num_prefixes: int, num_tokens: int, num_rounds: int, seed: int) -> Workload:
    """All prompts in the order in which the client sends them."""
    rng = random.Random(seed)
    jobs: list[Job] = []
    for number in range(num_rounds):
        for prefix in rng.sample(range(num_prefixes), num_prefixes):
            name = f"{number:03}-{prefix:03}"
            prompt = (Span(f"prefix{prefix}", num_tokens), Span(f"own{name}", 200))
            jobs.append(Job(f"{len(jobs):05}-{name}", 0.0, (TurnSpec(prompt, Span(f"out{name}", 100)),)))
    return Workload("shared-prefixes", tuple(jobs))


def get_cache_tokens() -> int:
    """Tokens of blocks of all layer groups in a cache that vLLM reports as `REPORTED_TOKENS`.

    vLLM reports how many tokens the longest possible requests would have at once.
    """
    config = build(replace(MODEL, kv_tokens=10**7)).make_scheduler().kv
    length, size = config.config.max_model_len, config.config.block_size
    return int(REPORTED_TOKENS / length * config.count_most_blocks(length) * size)


def get_hit_share(records: list[TurnRecord]) -> float:
    num_prompt = sum(each.prompt_tokens or 0 for each in records)
    return sum(each.hit_tokens or 0 for each in records) / num_prompt


def get_wait_s(record: TurnRecord) -> float:
    """Seconds from when the client sent it; before that it waited for the prompt before."""
    return (record.first_token_s or 0.0) - (record.sent_s or 0.0)


def run(num_prefixes: int, arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """One engine's figures; `arm` is a policy and an interval, such as stock:None."""
    policy, _, text = arm.partition(":")
    setup = replace(
        MODEL,
        kv_tokens=get_cache_tokens(),
        policy=policy,
        prefix_cache_retention_interval=None if text == "None" else int(text),
        limits="plugin",
    )
    machine = build(setup)
    workload = make_workload(num_prefixes, args.tokens, NUM_UNCOUNTED + args.rounds, args.seed)
    records = Simulation.of_one(machine.make_scheduler(), machine.step_cost, Clients(workload, users=1)).run()
    records = sorted(records, key=lambda each: each.job)
    second, records = records[num_prefixes : 2 * num_prefixes], records[num_prefixes * NUM_UNCOUNTED :]
    num_output = sum(each.output_tokens or 0 for each in records)
    busy_s = (records[-1].last_token_s or 0.0) - (records[0].sent_s or 0.0)
    return {
        "prefixes": num_prefixes,
        "arm": arm,
        "ttft_ms": 1000 * statistics.mean(map(get_wait_s, records)),
        "hit_share": get_hit_share(records),
        "second_use_hit_share": get_hit_share(second),
        "output_tokens_per_s": num_output / busy_s,
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prefixes", default="15,30,50,60", help="how many prefixes, with commas")
    parser.add_argument(
        "--arms", default="stock:None,stock:0,stock:8192,tenuto:0", help="POLICY:INTERVAL, with commas"
    )
    parser.add_argument("--tokens", type=int, default=28_000, help="tokens of each prefix")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON line per row")
    args = parser.parse_args()
    if not args.json:
        print("| prefixes | policy, interval | TTFT, ms | hits | hits at second use | output tokens/s |")
        print("|---|---|---|---|---|---|")
    for num_prefixes in map(int, args.prefixes.split(",")):
        for arm in args.arms.split(","):
            row = run(num_prefixes, arm, args)
            if args.json:
                print(json.dumps(row), flush=True)
            else:
                hits = f"{row['hit_share']:.0%} | {row['second_use_hit_share']:.0%}"
                speed = f"{row['output_tokens_per_s']:.1f}"
                name = arm.replace(":", ", ")
                print(f"| {num_prefixes} | {name} | {row['ttft_ms']:,.0f} | {hits} | {speed} |", flush=True)


if __name__ == "__main__":
    main()
