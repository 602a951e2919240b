"""One tenant attacks beside another tenant's agents and a plain probe, on vLLM's scheduler; and stock."""

from __future__ import annotations

from functools import cache

import pytest

pytest.importorskip("vllm")

from experiments.attacks.tenants import ATTACKS, STEP_S, Outcome, Size, measure


@cache
def run(policy: str, attack: str | None, size: Size) -> Outcome:
    return measure(policy, attack, size)


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_agents_keep_their_hits_and_the_probe_waits_no_longer_than_in_stock(attack: str) -> None:
    size = Size()
    stock, ours = (run(policy, attack, size) for policy in ("stock", "tenuto"))
    alone = run("tenuto", None, size)
    # A turn of the attack takes 8 steps.
    assert max(ours.waits_s) <= 1.1 * max(stock.waits_s) + 8 * STEP_S
    assert ours.hits >= 0.9 * alone.hits
    assert ours.num_agent_turns >= 0.7 * alone.num_agent_turns


def test_the_attacks_hurt_stock() -> None:
    """Otherwise the test above shows nothing."""
    stock, ours, alone = (
        run("stock", "one-shots", Size()),
        run("tenuto", "one-shots", Size()),
        run("tenuto", None, Size()),
    )
    assert max(stock.waits_s) > 3 * max(ours.waits_s)
    assert stock.hits < 0.5 * ours.hits
    assert stock.num_agent_turns < 0.7 * alone.num_agent_turns
