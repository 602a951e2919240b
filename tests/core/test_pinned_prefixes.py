"""Pinned prefixes on an engine of plain numbers: who is pinned, in which order pins go, and what is held."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, cast

import pytest

from tenuto.core.engine import Engine
from tenuto.core.jobs import Arrival, JobState, TurnState
from tenuto.core.leases import PinnedPrefixes
from tenuto.core.requests import Hints
from tenuto.core.stats import DriverStats
from tenuto.core.types import ShortHit
from tenuto.core.windows import choose_checkpoint_tokens, get_checkpoints

SIZE = 4


class Blocks:
    """Holds blocks that are named by their prefix; a prefix of n blocks has n of them, and all are cached."""

    hash_block_size = SIZE

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.turns: dict[str, TurnState] = {}

    def get_shared_blocks(self, turn_id: str, max_tokens: int) -> tuple[list[str], int]:
        hashes = self.turns[turn_id].arrival.hashes[: max_tokens // SIZE]
        return [str(each) for each in hashes], len(hashes) * SIZE

    def hold(self, blocks: list[str]) -> None:
        self.held.update(blocks)

    def release(self, blocks: list[str]) -> None:
        self.held.subtract(blocks)
        assert min(self.held.values()) >= 0
        self.held += Counter()


def make(max_blocks: int) -> tuple[Blocks, PinnedPrefixes]:
    engine = Blocks()
    return engine, PinnedPrefixes(cast("Engine", engine), max_blocks, DriverStats())


def run(
    engine: Blocks,
    pins: PinnedPrefixes,
    prefix: str,
    num_hit_tokens: int,
    *,
    short: int = 0,
    number: int = 1,
    num_blocks: int = 6,
) -> None:
    """One turn of a new job; its prompt begins with a prefix of so many blocks."""
    turn_id = f"t{len(engine.turns)}"
    hashes = [f"{prefix}{n}" for n in range(num_blocks)]
    job = JobState(turn_id, 0.0, None, num_turns=number)
    turn = engine.turns[turn_id] = TurnState(turn_id, job, 0.0, Arrival(Hints(), 100, hashes=hashes))
    pins.start(turn, num_hit_tokens, ShortHit("window 8", short) if short else None)
    pins.finish(turn)


def test_only_what_a_jobs_first_turn_finds_is_pinned() -> None:
    engine, pins = make(100)
    run(engine, pins, "a", 0)
    run(engine, pins, "a", 16, number=2)
    assert not len(pins) and not engine.held
    run(engine, pins, "a", 16)
    assert len(pins) == 1 and set(engine.held) == {"a0", "a1", "a2", "a3"}


def test_what_one_group_has_behind_the_hit_counts() -> None:
    engine, pins = make(100)
    run(engine, pins, "a", 8, short=8)
    assert len(engine.held) == 4


def test_the_one_used_longest_ago_goes_first() -> None:
    engine, pins = make(8)
    for prefix in "ab":
        run(engine, pins, prefix, 16)
    run(engine, pins, "a", 16)  # used again, and held once
    assert set(engine.held.values()) == {1} and pins.num_blocks == 8
    run(engine, pins, "c", 16)
    assert {name[0] for name in engine.held} == {"a", "c"}
    assert pins.demote() and {name[0] for name in engine.held} == {"c"}
    assert pins.demote() and not pins.demote()


def test_one_that_is_too_long_is_not_pinned() -> None:
    engine, pins = make(3)
    run(engine, pins, "a", 16)
    assert not engine.held
    engine, pins = make(0)
    run(engine, pins, "a", 4)
    assert not engine.held


def test_random_uses_hold_each_pin_once_and_leave_nothing() -> None:
    rng = random.Random(0)
    engine, pins = make(30)
    for _ in range(2000):
        run(engine, pins, rng.choice("abcdefghij"), 4 * rng.randrange(7), short=4 * rng.randrange(2))
        if rng.random() < 0.05:
            pins.demote()
        lists: list[list[Any]] = list(pins)
        assert engine.held == Counter(block for blocks in lists for block in blocks)
        assert pins.num_blocks == engine.held.total() <= 30
    pins.drop_all()
    assert not engine.held and not pins.num_blocks


@pytest.mark.parametrize(("tokens", "alignment"), [(6144, 16), (128, 16), (1632, 544)])
def test_checkpoints_are_few_and_cover_two_thirds_of_any_prefix(tokens: int, alignment: int) -> None:
    places = get_checkpoints(tokens, alignment, 200_000)
    assert places[0] == tokens and all(place % alignment == 0 for place in places)
    for number, place in enumerate(places[1:]):
        assert place - places[number] >= tokens
        assert places[number] >= (2 / 3) * (place - alignment) - alignment or number < 3
    assert len(places) < 25


def test_the_distance_is_what_full_attention_has_in_as_many_blocks() -> None:
    # Gemma-3-27B: six groups with windows of 64 blocks beside one with full attention.
    assert choose_checkpoint_tokens(6 * 64, 1 / 16, 16) == 6144
    assert choose_checkpoint_tokens(0, 1 / 16, 16) is choose_checkpoint_tokens(8, 0, 16) is None
