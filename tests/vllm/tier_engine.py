"""Runs jobs on real engines with host memory and a disk, one after the other in a process of their own.

    python -m tests.vllm.tier_engine MODEL FOLDER CONNECTORS...

CONNECTORS, with commas: ours, example (vLLM's ExampleConnector), lmcache (its server must run, at
LMCACHE_PORT). More than one go under vLLM's MultiConnector, in this order.

An engine's folder is FOLDER/CONNECTORS. Writes a line to its rounds.jsonl for each round of turns: greedy
answers, and how many tokens of each prompt were hits. Then answers all prompts once more without what was
stored, which a salt hides.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

BLOCK_SIZE = 32
NUM_BLOCKS = 33
NUM_JOBS, NUM_TURNS = 6, 3
FIRST_TOKENS, NEW_TOKENS, OUTPUT_TOKENS = 180, 70, 8
"""Answers end in the block of their prompt's end, so none is preempted; vLLM's example would lose it."""
STEP_TOKENS = 2048
"""More than the cache holds."""


def get_transfer_config(connectors: str, folder: Path) -> dict[str, Any]:
    """The value of `--kv-transfer-config`: host memory for all jobs and a disk, and others beside them."""
    from tenuto.vllm.launch import Tiers

    known: dict[str, dict[str, Any]] = {
        "ours": Tiers(0.25, str(folder / "disk")).get_transfer_config(),
        "example": {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(folder / "example")},
        },
        "lmcache": {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"lmcache.mp.port": int(os.environ.get("LMCACHE_PORT", "5555"))},
        },
    }
    chosen = [known[each] for each in connectors.split(",")]
    if len(chosen) == 1:
        return chosen[0]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": chosen},
    }


def make_engine(model: str, transfer: dict[str, Any], settings: dict[str, Any]) -> Any:
    """A cache of 32 blocks with these tiers below. `settings`: Tenuto's."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    return LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=NUM_BLOCKS,
        max_model_len=512,
        max_num_seqs=8,
        enable_prefix_caching=True,
        scheduler_cls="tenuto.vllm.Scheduler",
        max_num_batched_tokens=STEP_TOKENS,
        additional_config={"tenuto": {"strict": True, **settings}},
        kv_transfer_config=KVTransferConfig(**transfer),
        distributed_executor_backend="uni",
    )


def ask(engine: Any, prompts: list[list[int]], hints: list[dict[str, Any]], salt: str) -> list[Any]:
    """The greedy answers, all at once: tokens, and tokens of the prompt that were hits."""
    from vllm import SamplingParams

    found = engine.generate(
        [{"prompt_token_ids": p, **({"cache_salt": salt} if salt else {})} for p in prompts],
        [
            SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, extra_args=each)
            for each in hints
        ],
        use_tqdm=False,
    )
    return [(list(each.outputs[0].token_ids), each.num_cached_tokens or 0) for each in found]


def run(model: str, folder: Path, connectors: str) -> None:
    """Run the jobs on an engine with these connectors."""
    # Alone, nothing but host memory brings a turn's KV back; beside others, leases are tried too.
    settings: dict[str, Any] = {"policy": "stock" if connectors == "ours" else "tenuto"}
    if "example" in connectors:
        # Of a prompt that is computed in parts it stores the first part, under the name of the whole.
        settings["step_tokens"] = STEP_TOKENS
    engine = make_engine(model, get_transfer_config(connectors, folder), settings)
    rngs = [random.Random(job) for job in range(NUM_JOBS)]
    prompts = [[rng.randrange(1000, 40_000) for _ in range(FIRST_TOKENS)] for rng in rngs]
    asked: list[list[int]] = []
    answered: list[list[int]] = []
    with open(folder / "rounds.jsonl", "w", encoding="utf-8") as file:
        for turn in range(NUM_TURNS):
            hints = [{"job_id": f"job-{job}", "tool": "ls"} for job in range(NUM_JOBS)]
            found = ask(engine, prompts, hints, "")
            answers, cached = [each for each, _ in found], [each for _, each in found]
            file.write(json.dumps({"turn": turn, "answers": answers, "cached": cached}) + "\n")
            asked += prompts
            answered += answers
            prompts = [
                prompt + answer + [rng.randrange(1000, 40_000) for _ in range(NEW_TOKENS)]
                for prompt, answer, rng in zip(prompts, answers, rngs, strict=True)
            ]
        computed = ask(engine, asked, [{}] * len(asked), "nothing is hit")
        same = [answer for answer, _ in computed] == answered
        file.write(json.dumps({"same": same, "cached": [each for _, each in computed]}) + "\n")
    engine.llm_engine.engine_core.shutdown()


def main() -> None:
    """Run an engine for each argument."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    model, folder, *several = sys.argv[1:]
    for connectors in several:
        own = Path(folder) / connectors
        own.mkdir()
        run(model, own, connectors)
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
