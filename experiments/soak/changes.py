"""Changes that an operator makes to a running engine: sound ones, and ones that must be refused."""

from __future__ import annotations

import json
import random
from typing import Any

from experiments.fuzz.hostile import make_value
from experiments.soak.engine import Failure
from tenuto.core.loader import get_policy_names

OWN_POLICIES = [
    "tests.vllm.policies:KeepAll",
    "tests.vllm.policies:LeasedLast",
    "tests.vllm.policies:OneJobAtATime",
]
LEFT_OUT = ("clairvoyant", "priority")
"""Policies that a running engine cannot change to."""


def make_change(rng: random.Random) -> dict[str, Any]:
    """A sound change."""
    names = [name for name in get_policy_names() if name not in LEFT_OUT]
    return rng.choice(
        (
            {"mode": rng.choice(("on", "on", "off", "shadow"))},
            {"policy": rng.choice((*names, *OWN_POLICIES))},
            {"limits": {"max_lease_s": rng.choice((1.0, 600.0)), "max_parallel_turns": rng.choice((1, 5))}},
            {"canary": {"share": rng.random()}},
            {"canary": {"tenants": [f"tenant{rng.randrange(3)}"], "groups": ["a"]}},
            {"canary": None},
        )
    )


def make_bad_change(rng: random.Random) -> Any:
    """A change that no engine may take."""
    return rng.choice(
        (
            {"mode": make_value(rng), "no such key": 1},
            {"policy": "os:system"},
            {"policy": rng.choice(LEFT_OUT[:1])},
            {"limits": {"max_lease_s": -1}},
            {"limits": {"max_leased_share": "x"}},
            {"canary": {"share": 2}},
            {"options": {"no such option": make_value(rng)}},
            [make_value(rng)],
            {},
        )
    )


def try_changes(scheduler: Any, rng: random.Random) -> None:
    """A change, sound or bad. Raises Failure if a sound one is refused, or if a bad one changes anything."""
    if rng.random() < 0.7:
        apply(scheduler, make_change(rng))
        return
    before = _ask(scheduler, {"do": "status"})
    change = make_bad_change(rng)
    answer = _ask(scheduler, {"do": "change", "change": change, "by": "soak"})
    if answer["ok"] or answer["error"].startswith("failed") or _ask(scheduler, {"do": "status"}) != before:
        raise Failure(f"a bad change was not refused: {change!r}: {answer}")


def apply(scheduler: Any, change: dict[str, Any]) -> None:
    """Apply a sound change. Raises Failure if it is refused."""
    answer = _ask(scheduler, {"do": "change", "change": change, "by": "soak"})
    if not answer["ok"]:
        raise Failure(f"a change was refused: {change}: {answer['error']}")


def _ask(scheduler: Any, request: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(scheduler.control.answer(json.dumps(request)))
    return answer
