"""A policy that fails is a policy that is not listened to; the engine goes on."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass

import pytest

from tenuto.core.errors import PolicyError
from tenuto.core.policy import Policy
from tenuto.core.policy_caller import PolicyCaller, is_key, to_json
from tenuto.core.types import EngineView, Job, Keep, Release, ToolCall, Turn, Yields

TURN = Turn("t", Job("j", 1.0, 2), arrival_s=5.0, num_prompt_tokens=10, tool=ToolCall("ls", "ls -l"))
VIEW = EngineView(6.0, 16, 100, 90, 1, 2, 2048)


@dataclass
class Answering(Policy):
    """Answers what it is told to, or raises it."""

    answer: object = None

    def queue_key(self, turn, now_s):
        return self._answer()

    def retain(self, turn, view):
        return self._answer()

    def on_turn_finished(self, turn, now_s):
        self._answer()

    def _answer(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_a_good_answer_is_passed_on() -> None:
    caller = PolicyCaller(Answering(("a", 1)))
    assert caller.ask("queue_key", TURN, 6.0) == ("a", 1)
    assert caller.num_faults == 0


@pytest.mark.parametrize(
    "answer",
    [
        ZeroDivisionError("no"),
        RecursionError("deep"),
        None,
        3,
        "ab",
        [1, 2],
        (1, None),
        (1, [2]),
        ((1,), 2),
        (float("nan"),),
    ],
)
def test_a_key_that_is_none_is_replaced_by_stock_s(answer: object) -> None:
    caller = PolicyCaller(Answering(answer))
    # Stock: preempted first (0), then arrival. This turn was not preempted and arrived at 5 s.
    assert caller.ask("queue_key", TURN, 6.0) == (1, 5.0)
    assert caller.num_faults == 1


@pytest.mark.parametrize("answer", [ValueError("no"), None, True, Keep, ("keep", 3.0)])
def test_a_decision_that_is_none_is_replaced_by_stock_s(answer: object) -> None:
    caller = PolicyCaller(Answering(answer))
    assert caller.ask("retain", TURN, VIEW) == Release()
    assert caller.num_faults == 1


def test_each_fault_is_counted_and_each_hook_reported_once(caplog) -> None:
    caller = PolicyCaller(Answering(ValueError("no")))
    with caplog.at_level(logging.ERROR, logger="vllm.tenuto"):
        for _ in range(3):
            caller.ask("queue_key", TURN, 6.0)
            caller.tell("on_turn_finished", TURN, 6.0)
    assert caller.num_faults == 6
    assert caller.faults == {"queue_key": 3, "on_turn_finished": 3}
    assert [record.args[:2] for record in caplog.records] == [
        ("Answering", "queue_key"),
        ("Answering", "on_turn_finished"),
    ]
    assert "raise self.answer\nValueError: no" in caplog.text  # where it was raised


def test_an_interrupt_is_no_fault() -> None:
    class Interrupted(Answering):
        def _answer(self):
            raise KeyboardInterrupt

    caller = PolicyCaller(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        caller.ask("queue_key", TURN, 6.0)
    with pytest.raises(KeyboardInterrupt):
        caller.tell("on_turn_finished", TURN, 6.0)


def test_strict_faults_are_raised() -> None:
    caller = PolicyCaller(Answering(ValueError("no")), strict=True)
    with pytest.raises(
        PolicyError, match=r"Answering: queue_key raised ValueError\('no'\); asked with Turn\("
    ):
        caller.ask("queue_key", TURN, 6.0)
    with pytest.raises(PolicyError, match="on_turn_finished raised"):
        caller.tell("on_turn_finished", TURN, 6.0)
    with pytest.raises(PolicyError, match="answered 3, which is not a tuple"):
        PolicyCaller(Answering(3), strict=True).ask("queue_key", TURN, 6.0)


def test_only_hooks_that_are_heard_need_telling() -> None:
    caller = PolicyCaller(Answering())
    assert "on_turn_finished" in caller.heard
    assert "on_turn_started" not in caller.heard
    assert "on_turn_started" in PolicyCaller(Answering(), log=lambda record: None).heard


def test_the_log_holds_inputs_and_the_answer_that_counted() -> None:
    records: list[dict] = []
    caller = PolicyCaller(Answering(Keep(8.0, 0.5, Yields.ON_DEADLOCK)), records.append)
    caller.ask("retain", TURN, VIEW)
    caller.tell("on_turn_finished", TURN, 6.0)
    caller.policy.answer = None
    caller.ask("retain", TURN, VIEW)
    turn, view = to_json(TURN), to_json(VIEW)
    keep = {"type": "Keep", "until_s": 8.0, "value": 0.5, "yields": "on-deadlock", "why": None}
    assert json.loads(json.dumps(records)) == [
        {"kind": "asked", "hook": "retain", "inputs": [turn, view], "answer": keep},
        {"kind": "told", "hook": "on_turn_finished", "inputs": [turn, 6.0]},
        {
            "kind": "asked",
            "hook": "retain",
            "inputs": [turn, view],
            "answer": {"type": "Release", "why": None},
        },
    ]


def test_views_as_json_carry_their_type() -> None:
    as_json = to_json(TURN)
    assert (as_json["type"], as_json["job"]["type"], as_json["tool"]) == (
        "Turn",
        "Job",
        {"type": "ToolCall", "name": "ls", "command": "ls -l"},
    )
    assert to_json((1, ["a", Yields.ALWAYS])) == [1, ["a", "always"]]


def test_keys_are_tuples_of_numbers_and_strings() -> None:
    assert is_key(()) and is_key((1, 2.5, "a", float("inf"), True))
    assert not any(map(is_key, ([1], (None,), (float("nan"),), "ab", ((1,),))))
