"""The simulated tier and the one inside vLLM, side by side: the same turns, and after each the same content.

In one point they differ: a chunk that host memory gives up while its turn still runs is stored again by the
simulator with the turn's next chunk, and by vLLM with the job's next turn. Such turns store no more here.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key

from tenuto.sim.tiers.tier import Link, Tier
from tenuto.vllm.compat_offload import HostManager

CHUNK_TOKENS = 32


class Turn:
    """A turn of both: the chunks of its sequence, of which it computes more and more."""

    def __init__(self, name: str, chunks: list[int]) -> None:
        self.chunks = chunks
        self.num_stored = 0
        self.context = ReqContext(req_id=name)
        self.keys = [make_offload_key(chunk.to_bytes(32, "big"), 0) for chunk in chunks]
        for number, key in enumerate(self.keys):
            self.context.set_offload_key_position(key, (number + 1) * CHUNK_TOKENS)


def store(manager: Any, turn: Turn, end: int) -> None:
    """As vLLM's connector does when a step computed chunks up to `end`."""
    found = manager.prepare_store(turn.keys[turn.num_stored : end], turn.context)
    manager.complete_store(set(found.keys_to_store), turn.context)


def load(manager: Any, turn: Turn, num_hit: int) -> None:
    manager.prepare_load(turn.keys[:num_hit], turn.context)
    manager.complete_load(set(turn.keys[:num_hit]), turn.context)


def count_hits(manager: Any, turn: Turn) -> int:
    found = [manager.lookup(key, turn.context) for key in turn.keys]
    return found.index(LookupResult.MISS) if LookupResult.MISS in found else len(found)


@pytest.mark.parametrize("seed", range(12))
def test_both_hold_the_same_after_every_event(seed: int) -> None:
    rng = random.Random(seed)
    num_chunks = rng.choice((3, 8, 20, 60))
    tier = Tier("host", num_chunks * 100, 100, Link(1e9))
    manager = HostManager(num_chunks, "OrderedChunks", "tenuto.vllm.tiers.chunks")
    sequences: list[list[int]] = [[]]
    running: list[Turn] = []
    seen: list[Turn] = []
    for number in range(400):
        event = rng.random()
        if event < 0.3 or not running:
            before = rng.choice(sequences)
            chunks = before[: rng.randrange(len(before) + 1)] if rng.random() < 0.3 else list(before)
            chunks = chunks + [rng.randrange(1, 10**12) for _ in range(rng.randrange(1, 5))]
            turn = Turn(f"t{number}", chunks[:30])
            num_hit = tier.hit_length(turn.chunks)
            assert count_hits(manager, turn) == num_hit
            if num_hit:
                tier.put(turn.chunks[:num_hit])
                load(manager, turn, num_hit)
                turn.num_stored = num_hit
            running.append(turn)
            seen.append(turn)
        elif event < 0.8:
            turn = rng.choice(running)
            end = rng.randint(turn.num_stored, len(turn.chunks))
            if end > turn.num_stored and tier.hit_length(turn.chunks[: turn.num_stored]) == turn.num_stored:
                tier.put(turn.chunks[:end])
                store(manager, turn, end)
                turn.num_stored = end
        else:
            turn = running.pop(rng.randrange(len(running)))
            tier.put(turn.chunks[: tier.hit_length(turn.chunks[: turn.num_stored])])
            manager.on_request_finished(turn.context)
            sequences = [*sequences, turn.chunks][-8:]
        for each in seen[-6:]:
            assert count_hits(manager, each) == tier.hit_length(each.chunks), number
    assert len(manager._policy.order) <= num_chunks
