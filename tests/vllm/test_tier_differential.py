"""The simulated tier and the one inside vLLM: the same events, and after each the same content."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("vllm", "0.31.0")

from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key

from tenuto.core.tier_order import Use
from tenuto.sim.tiers.tier import Link, Tier
from tenuto.vllm.compat.offload import HostManager

CHUNK_TOKENS = 32


class Turn:
    """A turn of both: the chunks of its sequence, of which it computes more and more."""

    def __init__(self, name: str, chunks: list[int], use: Use) -> None:
        self.chunks = chunks
        self.use = use
        self.num_stored = 0
        self.context = ReqContext(req_id=name)
        self.keys = [make_offload_key(chunk.to_bytes(32, "big"), 0) for chunk in chunks]
        for number, key in enumerate(self.keys):
            self.context.set_offload_key_position(key, (number + 1) * CHUNK_TOKENS)


@dataclass
class Copy:
    """A copy under way, in the plugin's words."""

    end_s: float
    is_store: bool
    keys: list[Any]
    context: Any


class Both:
    """The two tiers. Copies take as long as `rng` says."""

    def __init__(self, rng: random.Random, num_chunks: int, *, longest_s: float) -> None:
        self.tier = Tier("host", num_chunks * 100, 100, Link(1e9))
        self.manager: Any = HostManager(num_chunks, "OrderedChunks", "tenuto.vllm.compat.offload")
        self.manager.asker = self
        self.now_s = 0.0
        self._rng = rng
        self._longest_s = longest_s
        self._turns: dict[str, Turn] = {}
        self._copies: list[Copy] = []

    # The host's manager asks this.

    def get_use(self, request_id: str) -> Use:
        return self._turns[request_id].use

    def count_stored(self, request_id: str, job_id: str | None, num_chunks: int) -> None:
        """Nothing."""

    # Events.

    def arrive(self, turn: Turn) -> None:
        """A turn loads what is there, behind what the GPU has of it."""
        self._turns[turn.context.req_id] = turn
        self.manager.on_new_request(turn.context)
        found = [self.manager.lookup(key, turn.context) for key in turn.keys]
        num_hit = found.index(LookupResult.HIT_PENDING) if LookupResult.HIT_PENDING in found else len(found)
        num_hit = min(num_hit, self.tier.hit_length(turn.chunks))
        skip = self._rng.randint(0, num_hit)
        if skip == num_hit or self._rng.random() < 0.2:
            return
        end_s = self._get_end_s()
        self.tier.put(turn.chunks[:num_hit], turn.use, skip)
        self.tier.hold(turn.chunks[skip:num_hit], end_s)
        self.manager.prepare_load(turn.keys[skip:num_hit], turn.context)
        self._copies.append(Copy(end_s, False, turn.keys[skip:num_hit], turn.context))
        turn.num_stored = num_hit

    def store(self, turn: Turn, end: int) -> None:
        """A step computed the chunks up to `end`."""
        first, turn.num_stored = turn.num_stored, end
        new = self.tier.put(turn.chunks[:end], turn.use, first)
        found = self.manager.prepare_store(turn.keys[first:end], turn.context)
        assert found.keys_to_store == [turn.keys[turn.chunks.index(chunk)] for chunk in new]
        end_s = self._get_end_s()
        self.tier.hold(new, end_s)
        self._copies.append(Copy(end_s, True, found.keys_to_store, turn.context))

    def finish(self, turn: Turn, key: tuple[int, ...]) -> None:
        turn.use = Use(key, turn.use.owner)
        turn.context.set_state(turn.use)
        has_used = turn.num_stored > 0
        self.manager.on_request_finished(turn.context)
        if has_used:
            self.tier.put(turn.chunks[: self.tier.hit_length(turn.chunks)], turn.use)

    def end_job(self, job_id: str) -> None:
        self.manager.drop(job_id)
        self.tier.order.drop(job_id)

    def pass_time(self) -> None:
        """Copies end."""
        self.now_s += 1
        self.tier.end_copies(self.now_s)
        for copy in sorted(self._copies, key=lambda each: each.end_s):
            if copy.end_s <= self.now_s:
                self._copies.remove(copy)
                complete = self.manager.complete_store if copy.is_store else self.manager.complete_load
                complete(set(copy.keys), copy.context)

    def check(self, turn: Turn) -> None:
        found = [self.manager.lookup(key, turn.context) for key in turn.keys]
        num_hit = found.index(LookupResult.MISS) if LookupResult.MISS in found else len(found)
        assert num_hit == self.tier.hit_length(turn.chunks)

    def _get_end_s(self) -> float:
        return self.now_s + self._rng.uniform(0, self._longest_s)


@pytest.mark.parametrize("seed", range(24))
def test_both_hold_the_same_after_every_event(seed: int) -> None:
    """Random turns of random jobs; with keys and without, with copies in flight and without."""
    rng = random.Random(seed)
    num_keys = (1, 4)[seed % 2]
    both = Both(rng, rng.choice((3, 8, 20, 60)), longest_s=(0.0, 6.0)[seed // 2 % 2])
    sequences: list[tuple[list[int], str | None]] = [([], None)]
    running: list[Turn] = []
    seen: list[Turn] = []
    for number in range(600):
        event = rng.random()
        if event < 0.3 or not running:
            before, job = rng.choice(sequences)
            if rng.random() < 0.3:
                before, job = before[: rng.randrange(len(before) + 1)], rng.choice((None, f"job{number}"))
            chunks = before + [rng.randrange(1, 10**12) for _ in range(rng.randrange(1, 5))]
            key = (rng.randrange(num_keys),) if num_keys > 1 else ()
            turn = Turn(f"t{number}", chunks[:30], Use(key, job))
            both.arrive(turn)
            running.append(turn)
            seen.append(turn)
        elif event < 0.75:
            turn = rng.choice(running)
            if turn.num_stored < len(turn.chunks):
                both.store(turn, rng.randint(turn.num_stored + 1, len(turn.chunks)))
        elif event < 0.95:
            turn = running.pop(rng.randrange(len(running)))
            both.finish(turn, (rng.randrange(num_keys),) if num_keys > 1 else ())
            sequences = [*sequences, (turn.chunks, turn.use.owner)][-8:]
        else:
            both.end_job(rng.choice([turn.use.owner or "nobody" for turn in seen[-8:]]))
        both.pass_time()
        for each in seen[-8:]:
            both.check(each)
    assert len(both.tier) == len(both.manager._policy.order) <= both.tier.capacity_chunks
    assert both.manager.num_evicted > 0
