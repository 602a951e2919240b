"""`check_contract` sees each way of breaking the contract."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tenuto.core.contracts import check_contract
from tenuto.core.errors import PolicyError
from tenuto.core.policy import Learns, Policy, setting
from tenuto.core.types import Keep, Release


@dataclass
class Faulty(Policy):
    """Sound but for one hook, which is given."""

    weights: list[float] = field(default_factory=list)
    _seen: dict[str, int] = field(init=False, default_factory=dict)
    _secret: list[int] = field(init=False, repr=False, default_factory=list)


def with_hook(name: str, hook: Callable[..., Any]) -> Policy:
    return dataclass(type("Faulty", (Faulty,), {name: hook}))()


def remember(policy, turn, view):
    policy._seen[turn.turn_id] = policy._seen.get(turn.turn_id, 0) + 1
    return Release()


def remember_where_repr_does_not_look(policy, turn, now_s):
    policy._secret.append(1)
    return (1,)


def add_an_attribute(policy, view):
    policy.added = getattr(policy, "added", 0) + 1


counter = itertools.count()


@pytest.mark.parametrize(
    ("hook", "answer", "message"),
    [
        ("retain", remember, "retain changed the policy's state"),
        ("queue_key", remember_where_repr_does_not_look, "queue_key changed the policy's state"),
        ("step_budget", add_an_attribute, "step_budget changed the policy's state"),
        ("queue_key", lambda policy, turn, now_s: (next(counter),), "queue_key answered differently"),
        ("retain", lambda policy, turn, view: Keep(random.random()), "retain answered differently"),
        ("queue_key", lambda policy, turn, now_s: [1, 2], "queue_key answered .*not a"),
        ("queue_key", lambda policy, turn, now_s: 1.0, "queue_key answered .*not a"),
        ("admit", lambda policy, turn, view: None, "admit answered None"),
        ("retain", lambda policy, turn, view: True, "retain answered True"),
        ("retain", lambda policy, turn, view: Keep, "retain answered"),
        ("reconsider", lambda policy, lease, view: lease.until_s, "reconsider answered"),
        ("evict_key", lambda policy, lease, view: lease.value, "evict_key answered"),
        ("preempt_key", lambda policy, turn, view: turn.turn_id, "preempt_key answered"),
        ("step_budget", lambda policy, view: 0.5, "step_budget answered 0.5"),
        ("step_budget", lambda policy, view: 0, "step_budget answered 0, which is not a number of tokens"),
        ("queue_key", lambda policy, turn, now_s: (turn.is_last,), "queue_key answered .*not a"),
        ("queue_key", lambda policy, turn, now_s: (turn.job.tenant or 0,), "queue_key: .*cannot be ordered"),
        (
            "preempt_key",
            lambda policy, turn, view: (turn.arrival_s, *([1] if turn.num_preemptions else [])),
            "preempt_key: .*cannot be ordered",
        ),
        ("evict_key", lambda policy, lease, view: (0, lease.turn.tool), "evict_key answered .*not a"),
        ("queue_key", lambda policy, turn, now_s: (float("nan"),), "queue_key"),
        ("evict_key", lambda policy, lease, view: (float("inf"),), "evict_key: .*is not JSON"),
        ("retain", lambda policy, turn, view: 1 / 0, "retain raised ZeroDivisionError"),
        ("retain", lambda policy, turn, view: Keep(float("inf")), "retain raised ValueError"),
        ("on_turn_finished", lambda policy, turn, now_s: 1 / 0, "on_turn_finished raised"),
        ("on_tool_returned", lambda policy, turn, tool, tool_s: 1 / 0, "on_tool_returned raised"),
        ("on_job_ended", lambda policy, turn, now_s: 1 / 0, "on_job_ended raised"),
    ],
)
def test_a_fault_is_caught(hook: str, answer: Callable[..., Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        check_contract(with_hook(hook, answer))


def test_parameters_that_are_not_json_are_caught() -> None:
    with pytest.raises(PolicyError, match=r"parameters: .*is not JSON"):
        check_contract(Faulty(weights={1, 2}))
    with pytest.raises(PolicyError, match=r"parameters: .*is not JSON"):
        check_contract(Faulty(weights=[float("nan")]))


def test_a_sound_policy_passes_and_may_learn_in_told_hooks() -> None:
    @dataclass
    class Learning(Policy):
        scale: float = setting(1.0, "seconds per turn")
        _num_finished: int = field(init=False, default=0)

        def retain(self, turn, view):
            return Keep(view.now_s + self.scale * self._num_finished + 1)

        def on_turn_finished(self, turn, now_s):
            self._num_finished += 1

    policy = Learning()
    check_contract(policy)
    assert policy._num_finished > 0
    check_contract(Faulty())


@pytest.mark.parametrize(
    ("given", "taken", "message"),
    [
        ({"seen": {1}}, None, "get_state: .*is not JSON"),
        ([1], lambda policy, state: 1 / 0, "set_state raised ZeroDivisionError"),
        ({"seen": 3}, lambda policy, state: setattr(policy, "state", {}), "set_state did not take up"),
    ],
)
def test_a_state_that_does_not_survive_a_restart_is_caught(given: Any, taken: Any, message: str) -> None:
    methods = {
        "get_state": lambda policy: getattr(policy, "state", given),
        "set_state": taken or (lambda policy, state: None),
    }
    policy = dataclass(type("Faulty", (Faulty, Learns), methods))()
    with pytest.raises(PolicyError, match=message):
        check_contract(policy)
