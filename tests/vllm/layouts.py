"""Models with several kinds of layers, as vLLM groups them, and random traffic of jobs on them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec

import tenuto.vllm
from tests.vllm.kv_configs import make_scheduler_of_layers
from tests.vllm.workerless import Engine, make_config, make_request

BLOCK_SIZE = 16


def attention(window: int | None = None, *, heads: int = 1, block_size: int = BLOCK_SIZE) -> KVCacheSpec:
    """A layer with full attention, or with a sliding window. Fewer heads give blocks of more tokens."""
    common: dict[str, Any] = {"block_size": block_size, "num_kv_heads": heads, "head_size": 1}
    if window is None:
        return FullAttentionSpec(**common, dtype=torch.float32)
    return SlidingWindowSpec(**common, dtype=torch.float32, sliding_window=window)


def state(*, block_size: int, heads: int = 1) -> KVCacheSpec:
    """A layer with a recurrent state, of the size of a block of `attention(heads=heads)`."""
    page = 2 * heads * BLOCK_SIZE
    return MambaSpec(
        block_size=block_size, shapes=((page,),), dtypes=(torch.float32,), mamba_cache_mode="align"
    )


LAYOUTS: dict[str, Sequence[KVCacheSpec]] = {
    "1:1": [attention(), attention(64)],
    "1:5": [attention(), *[attention(64)] * 5],
    "window of one block": [attention(), attention(16)],
    "window of a block and a half": [attention(), attention(24)],
    "window of eight blocks": [attention(), attention(128)],
    "two windows": [attention(), attention(40), attention(100)],
    "windows only": [attention(40), attention(100)],
    "window blocks twice as large": [attention(heads=2), attention(64)],
    "window blocks four times as large": [attention(heads=4), attention(128), attention(128)],
    "full blocks twice as large": [attention(), attention(64, heads=2)],
    "states": [attention(), state(block_size=16), state(block_size=16)],
    "states in large blocks": [attention(heads=4), *[state(block_size=64, heads=4)] * 3],
    "states, all blocks large": [attention(block_size=64), *[state(block_size=64, heads=4)] * 3],
}


def start(
    name: str,
    *,
    interval: int | None = 0,
    depth: int = 1,
    num_blocks: int = 1200,
    num_drafts: int = 0,
    has_draft_model: bool = False,
    match_unit: int | None = None,
    policy: Any = None,
    transfer: Any = None,
    engine: type[Engine] = Engine,
    **config: Any,
) -> Any:
    """An engine with this layout, and a policy that leases everything unless told otherwise.

    `transfer`: vLLM's config of a connector.
    """
    tenuto_config = policy or {"policy": "tests.vllm.policies:KeepAll", "options": {"ttl_s": 1000.0}}
    config = {"max_num_seqs": 8, "max_num_batched_tokens": 128, **config}
    vllm_config = make_config(is_async=depth > 1, tenuto=tenuto_config, num_drafts=num_drafts, **config)
    if has_draft_model:
        # What the scheduler and the cache ask, without a draft model to load.
        vllm_config.speculative_config.method = "eagle"
    vllm_config.cache_config.prefix_match_unit = match_unit
    vllm_config.kv_transfer_config = transfer
    if "states" in name:
        vllm_config.cache_config.mamba_cache_mode = "align"
    scheduler = make_scheduler_of_layers(
        tenuto.vllm.Scheduler, vllm_config, LAYOUTS[name], num_blocks, retention_interval=interval
    )
    return engine(scheduler, depth=depth)


def send(engine: Engine, name: str, prompt: Sequence[int], **more: Any) -> None:
    """Add a request with hashes of the engine's own size."""
    size = engine.scheduler.hash_block_size
    engine.scheduler.add_request(make_request(name, prompt, block_size=size, **more))


def make_text(rng: random.Random, least: int, most: int) -> list[int]:
    return [rng.randrange(10, 900) for _ in range(rng.randrange(least, most))]


class Chaos:
    """Jobs that go on, fork, are edited, give up and come back under other names, at random."""

    def __init__(
        self, engine: Engine, rng: random.Random, *, num_jobs: int = 10, most_tokens: int = 500
    ) -> None:
        self.engine = engine
        self._rng = rng
        self._most_tokens = most_tokens
        shared = make_text(rng, 30, 90)
        self._talks = [shared + make_text(rng, 10, 60) for _ in range(num_jobs)]
        self._numbers = [0] * num_jobs
        self.num_events = 0

    def act(self) -> None:
        """One random event: a turn comes, a client leaves, the cache is reset, or a step is computed."""
        rng, scheduler = self._rng, self.engine.scheduler
        self.num_events += 1
        kind = rng.random()
        if kind < 0.25:
            self._send()
        elif kind < 0.28 and scheduler.requests:
            self.engine.abort(rng.choice(sorted(scheduler.requests)))
        elif kind < 0.282:
            scheduler.reset_prefix_cache()
        else:
            self.engine.step()

    def _send(self) -> None:
        rng = self._rng
        job = rng.randrange(len(self._talks))
        talk = self._talks[job]
        last = f"j{job}-{self._numbers[job]}"
        if rng.random() < 0.8 and last not in self.engine.scheduler.requests:
            talk = talk + self.engine.outputs.get(last, [])
        if len(talk) > self._most_tokens or rng.random() < 0.1:
            talk = talk[: rng.randrange(20, len(talk))]
        self._talks[job] = talk = talk + make_text(rng, 1, 60)
        self._numbers[job] += 1
        hints = rng.choice(
            (
                {"job_id": f"job{job}", "tool": "ls"},
                {"job_id": f"job{job}", "tool": "ls"},
                {"job_id": "everyone", "tool": "cat"},
                {"job_id": f"job{job}", "is_last_step": 1},
                {},
            )
        )
        send(self.engine, f"j{job}-{self._numbers[job]}", talk, max_tokens=rng.randrange(1, 40), xargs=hints)
        self.engine.outputs.pop(f"j{job}-{self._numbers[job] - 2}", None)
