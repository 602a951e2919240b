"""Our scheduler decides what vLLM's own decides, step by step, on random workloads of conversations.

Compared after every step: tokens per request in order, preemptions, hits, drafts, both queues, and what every
free block holds, in eviction order.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("vllm")

from tenuto.core.errors import ConfigError
from tests.differential.cases import CASES, PLAIN, Case
from tests.differential.compare import Differs, compare, make_sides
from tests.differential.setups import BLOCK_SIZE, Setup
from tests.differential.sides import Turn


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("scheduler/")])
def test_same_decisions_as_vllm(name: str) -> None:
    case = CASES[name]
    steps = [step for seed in (1, 2) for step in compare(case, seed)]
    assert any(num_hit_tokens > 0 for step in steps for _, num_hit_tokens in step.started)
    assert any(step.preempted for step in steps) or "large cache" in name
    assert any(step.num_drafts for step in steps) == (case.setup.num_draft_tokens > 0)


@pytest.mark.parametrize(
    ("name", "difference"),
    [
        ("small cache", {"num_blocks": 45}),
        ("small cache", {"max_num_batched_tokens": 63}),
        ("small cache", {"reserve_full_sequence": False}),
        ("priority", {"order": "fcfs"}),
        ("watermark", {"watermark": 0.0}),
        ("threshold", {"long_prefill_token_threshold": 25}),
        ("few seats", {"max_num_seqs": 4}),
        ("hybrid", {"windows": (None, 80)}),
        ("hybrid", {"retention_interval": None}),
        ("hybrid, interval", {"retention_interval": 112}),
        ("draft model", {"has_draft_model": False}),
    ],
)
def test_every_setting_makes_a_difference(name: str, difference: dict[str, object]) -> None:
    """Else the comparison would not notice if one were ignored."""
    case = CASES[f"scheduler/{name}/1"]
    simulated = replace(case, setup=replace(case.setup, **difference))
    with pytest.raises(Differs):
        list(compare(case, 1, simulated))


def test_a_turn_that_never_fits_is_refused_not_stalled() -> None:
    """On purpose not vLLM's: a simulation with such a turn would never end, and nobody would know why."""
    setup = Setup(num_blocks=20)
    turn = Turn("r", (("too much", 20 * BLOCK_SIZE),), ("out", 5))
    with make_sides(Case(setup, PLAIN)) as (theirs, ours):
        theirs.add(turn)
        for _ in range(20):
            assert theirs.step().num_tokens == []
        with pytest.raises(ConfigError, match="needs 21 KV blocks, there are 19"):
            ours.add(turn)
        assert not ours.scheduler.state.requests
