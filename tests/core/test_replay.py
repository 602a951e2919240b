"""A decision log is enough to make the decisions again."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

import pytest

from tenuto.core.errors import DataError
from tenuto.core.limits import Limits
from tenuto.core.loader import get_policy_names, load_policy
from tenuto.core.policy import ANSWERS, TOLD_HOOKS, Policy
from tenuto.core.policy_caller import Replay, from_json, to_json
from tenuto.core.requests import Hints
from tenuto.core.types import EngineView, Job, Keep, Lease, ToolCall, Turn, Yields
from tests.support.toy_engine import ToyEngine, make_tokens

TOOLS = [ToolCall("ls", "ls"), ToolCall("pytest", "pytest -x"), None]


def run_random(policy: Policy, seed: int) -> list[dict[str, Any]]:
    """A random workload on a small engine; its log, read back from JSON."""
    lines: list[str] = []
    rng = random.Random(seed)
    engine = ToyEngine(
        policy, 30, limits=Limits(max_lease_s=30), log=lambda record: lines.append(json.dumps(record))
    )
    histories = [make_tokens(1000 * number, 10) for number in range(8)]
    now_s = 0.0
    for number in range(200):
        now_s += rng.choice((0.1, 0.7, 1.9))
        engine.driver.expire(now_s)
        job = rng.randrange(8)
        if rng.random() < 0.5 and len(histories[job]) < 80:
            hints = Hints(job_id=f"job-{job}" if job % 2 else None, expected_tool_s=rng.choice((None, 1.5)))
            engine.arrive(f"turn-{number}", now_s, histories[job], make_tokens(number, 5), hints)
        if engine.waiting and engine.driver.may_start(
            engine.waiting.get_first(), now_s, idle=not engine.running
        ):
            engine.start_first(now_s)
        if engine.running and rng.random() < 0.6:
            turn_id = rng.choice(list(engine.running))
            turn = engine.running[turn_id]
            for history in histories:
                if history == turn.prompt:
                    history.extend(turn.output + make_tokens(number, 3))
            engine.finish(turn_id, now_s, tool=rng.choice(TOOLS), is_last=rng.random() < 0.1)
        if engine.running and rng.random() < 0.1:
            victim = engine.driver.get_victim(list(engine.running), now_s)
            engine.preempt(victim or next(iter(engine.running)), now_s)
        engine.driver.get_step_size(now_s, 2048)
    assert len(lines) > 500
    return [json.loads(line) for line in lines]


def replay(records: list[dict[str, Any]], policy: Policy) -> list[str]:
    """The answers of a fresh policy that differ from a log's, in words."""
    again = Replay(policy)
    differences = [again.feed(record) for record in records]
    return [
        f"record {number}: {each.hook} was {each.was}, is {each.answer}"
        for number, each in enumerate(differences)
        if each is not None
    ]


def get_hooks(records: list[dict[str, Any]]) -> set[str]:
    return {record["hook"] for record in records if record["kind"] != "job"}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", get_policy_names())
def test_a_fresh_policy_decides_the_same_again(name: str, seed: int) -> None:
    records = run_random(load_policy(name), seed)
    assert {"queue_key", "admit", "on_turn_finished"} <= get_hooks(records)
    assert replay(records, load_policy(name)) == []


def test_the_log_covers_leases_too() -> None:
    records = run_random(load_policy("continuum-fixed"), 0)
    assert {"retain", "reconsider", "evict_key", "preempt_key", "on_tool_returned"} <= get_hooks(records)


def test_the_same_run_again_gives_the_same_log() -> None:
    assert run_random(load_policy("continuum-fixed"), 1) == run_random(load_policy("continuum-fixed"), 1)


def test_another_policy_is_told_apart() -> None:
    records = run_random(load_policy("continuum-fixed"), 0)
    assert replay(records, load_policy("continuum-fixed", {"ttl_s": 1.9}))
    assert replay(records, load_policy("stock"))


def test_a_forged_answer_is_found() -> None:
    records = run_random(load_policy("stock"), 0)
    asked = next(record for record in records if record["kind"] == "asked")
    asked["answer"][-1] += 1
    [difference] = replay(records, load_policy("stock"))
    assert difference.startswith(f"record {records.index(asked)}: queue_key was")


def test_a_log_without_what_the_policy_was_told_is_not_enough() -> None:
    records = run_random(load_policy("continuum-fixed"), 0)
    asked = [record for record in records if record["kind"] == "asked"]
    assert replay(asked, load_policy("continuum-fixed"))


def test_a_policy_that_fails_is_replayed_with_stock_s_answers() -> None:
    @dataclass
    class Failing(Policy):
        def queue_key(self, turn: Turn, now_s: float):
            return (now_s,) if turn.job.num_turns % 2 else None

    assert replay(run_random(Failing(), 0), Failing()) == []


@pytest.mark.parametrize(
    "view",
    [
        Turn("t", Job("j\tk", 1.5, 2, "tenant"), 2.0, 30, tool=ToolCall("ls", "ls -l"), is_last=False),
        Turn("t", Job("j", 1.5, 2), 2.0, 30, expected_tool_s=0.25),
        Lease(Turn("t", Job("j", 1, 1), 2, 3), 1.0, 2.0, 0.5, 3, next_turn_waiting=True),
        EngineView(1.0, 16, 100, 50, 1, 2, 2048, num_leases=3),
        Keep(3.0, 0.1, Yields.ON_DEADLOCK),
        (1, "a", None, 2.5),
    ],
)
def test_views_survive_json(view: Any) -> None:
    assert from_json(json.loads(json.dumps(to_json(view)))) == view


def test_every_asked_hook_has_its_answer() -> None:
    hooks = {name for name, value in vars(Policy).items() if callable(value) and not name.startswith("_")}
    assert set(ANSWERS) | set(TOLD_HOOKS) == hooks
    assert (ANSWERS["step_budget"], ANSWERS["queue_key"]) == ((int, type(None)), (tuple,))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hook": "retain_all"}, "asked 'retain_all'"),
        ({"hook": ["admit"]}, "asked"),
        ({"inputs": None}, "asked 'queue_key' with None"),
        ({"inputs": [{"type": "Trun"}, 1.0]}, "not those of this version.*Trun"),
        ({"inputs": [{"type": "Turn", "turn_id": "x"}, 1.0]}, "not those of this version.*job"),
        ({"answer": ...}, "answer is missing"),
    ],
)
def test_a_record_of_another_version_is_refused(change: dict[str, Any], words: str) -> None:
    records = run_random(load_policy("stock"), 0)
    asked = next(record for record in records if record.get("hook") == "queue_key")
    changed = {key: value for key, value in {**asked, **change}.items() if value is not ...}
    with pytest.raises(DataError, match=words):
        Replay(load_policy("stock")).feed(changed)
