"""dynamo.agentic_mooncake v2: jobs, turns and what waits for what."""

from __future__ import annotations

import random
import re

import pytest

from tenuto.core.errors import DataError
from tenuto.core.reuse import count_shared_tokens
from tenuto.workload.load import load_workload
from tenuto.workload.schema import After

HEADER = {
    "schema": "dynamo.agentic_mooncake",
    "version": 2,
    "block_size": 64,
    "hash_id_scope": "local",
    "source": {"format": "test", "digest": "d"},
}


def edge(request_id, delay_ms=0.0, trigger="completion", relation="sequence"):
    return {"request_id": request_id, "trigger": trigger, "delay_ms": delay_ms, "relation": relation}


def row(request_id, *dependencies, **more):
    fields = {
        "request_id": request_id,
        "play_id": "p",
        "session_id": "main",
        "model": "m",
        "not_before_ms": 0.0,
    }
    fields |= {
        "input_length": 100,
        "output_length": 5,
        "hash_ids": [1, 2],
        "dependencies": list(dependencies),
    }
    return fields | more


PLAY = [
    row("r1"),
    row("r2", edge("r1", 500.0), edge("c1", 100.0, relation="join"), not_before_ms=9000, hash_ids=[1, 3]),
    row("c0", edge("r1", 20.0, "dispatch", "spawn"), session_id="child", not_before_ms=20.0),
    row("d0", edge("c0", relation="replay_barrier"), edge("r1", relation="spawn"), session_id="second"),
    row("c1", edge("c0", 250.0), session_id="child", not_before_ms=700.0),
    row("r3", edge("r2", 1.0), edge("c1", relation="replay_barrier"), output_length=0, not_before_ms=9500),
]


def test_a_play_becomes_jobs_that_wait_for_each_other(write_rows):
    main, child, second = load_workload(write_rows(HEADER, *PLAY)).jobs
    assert (main.job_id, main.parent, main.arrival_s) == ("p/main", None, 0.0)
    assert (child.job_id, child.parent, child.arrival_s) == ("p/child", "p/main", 0.02)
    assert [turn.tool_s for turn in main.turns] == [0.5, 0.001, 0.0]
    assert [turn.at_s for turn in main.turns] == [None, 9.0, 9.5]
    assert [turn.tool for turn in main.turns] == ["tool_use", "tool_use", None]
    assert main.turns[1].after == (After("p/child", 1, "finished", 0.1),)
    assert main.turns[2].after == (After("p/child", 1, "finished", 0.0),)
    assert main.turns[2].num_output_tokens == 1
    assert child.turns[0].after == (After("p/main", 0, "sent", 0.02),)
    assert (child.turns[0].tool_s, child.turns[1].after) == (0.25, ())
    assert (second.parent, [event.job_id for event in second.turns[0].after]) == (
        "p/main",
        ["p/child", "p/main"],
    )
    assert count_shared_tokens(main.turns[0].prompt, main.turns[1].prompt) == 64
    assert count_shared_tokens(main.turns[0].prompt, child.turns[0].prompt) == 100


def test_rows_may_come_in_any_order(write_rows):
    expected = {job.job_id: job for job in load_workload(write_rows(HEADER, *PLAY)).jobs}
    for seed in range(5):
        rows = random.Random(seed).sample(PLAY, len(PLAY))
        jobs = {job.job_id: job for job in load_workload(write_rows(HEADER, *rows)).jobs}
        assert jobs == expected


def test_plays_share_neither_blocks_nor_names(write_rows):
    other = [
        {**one, "request_id": "q" + one["request_id"], "play_id": "q"}
        | {"dependencies": [{**d, "request_id": "q" + d["request_id"]} for d in one["dependencies"]]}
        for one in PLAY
    ]
    jobs = load_workload(write_rows(HEADER, *PLAY, *other), jps=1, arrival="fixed").jobs
    assert [(job.job_id, job.arrival_s) for job in jobs[::3]] == [("p/main", 1.0), ("q/main", 2.0)]
    assert count_shared_tokens(jobs[0].turns[0].prompt, jobs[3].turns[0].prompt) == 0


def test_a_session_that_does_two_things_at_once_is_two_jobs(write_rows):
    path = write_rows(HEADER, row("r1"), row("r2", edge("r1", 10.0)), row("r3", edge("r1", 30.0)))
    first, second = load_workload(path).jobs
    assert [len(first.turns), len(second.turns)] == [2, 1]
    assert (second.job_id, second.parent) == ("p/main/r3", "p/main")
    assert second.turns[0].after == (After("p/main", 0, "finished", 0.03),)


def test_what_waits_for_nothing_is_tied_to_the_plays_first_request(write_rows):
    late = row("late", session_id="other", not_before_ms=400.0)
    second, first = load_workload(write_rows(HEADER, late, row("r1", not_before_ms=100.0))).jobs
    assert (first.parent, second.parent) == (None, "p/main")
    assert second.turns[0].after == (After("p/main", 0, "sent", pytest.approx(0.3)),)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{**HEADER, "schema": "other"}], ":1: schema: must be 'dynamo.agentic_mooncake'"),
        ([{**HEADER, "version": 1}], ":1: version: must be 2"),
        ([{**HEADER, "hash_id_scope": "global"}], ":1: hash_id_scope"),
        ([{**HEADER, "block_size": 0}], ":1: block_size"),
        ([HEADER], "no request"),
        ([HEADER, row("a"), row("a")], ":3: request_id: 'a' is also in"),
        ([HEADER, row("a", edge("b"))], r":2: dependencies\[0\].request_id: 'b' is no request of play 'p'"),
        ([HEADER, row("a"), row("b", edge("a"), play_id="q")], r":3: dependencies\[0\].request_id: 'a'"),
        ([HEADER, row("a", edge("a"))], ":2: dependencies: the request waits for itself"),
        (
            [HEADER, row("a", edge("b", relation="join")), row("b", edge("a", relation="join"))],
            ":2: dependencies: requests wait for each other in a circle",
        ),
        (
            [HEADER, row("a", edge("b")), row("b", edge("a"))],
            ":2: dependencies: the request waits for itself",
        ),
        ([HEADER, row("a", edge("a", relation="spawn"))], ":2: dependencies: requests wait for each other"),
        ([HEADER, row("a", edge("b", trigger="x"))], r"dependencies\[0\].trigger: must be one of"),
        ([HEADER, row("a", edge("b", relation="x"))], r"dependencies\[0\].relation: must be one of"),
        ([HEADER, row("a", edge("b", delay_ms=-1))], r"dependencies\[0\].delay_ms"),
        ([HEADER, row("a", dependencies="b")], ":2: dependencies: must be a list"),
        ([HEADER, row("a", not_before_ms=-1.0)], ":2: not_before_ms"),
        ([HEADER, row("a", input_length=200)], ":2: hash_ids: 4 blocks are needed"),
        ([HEADER, row("a", play_id=None)], ":2: play_id"),
    ],
)
def test_a_malformed_play_is_refused(write_rows, rows, words):
    path = write_rows(*rows)
    with pytest.raises(DataError, match=words) as error:
        load_workload(path)
    assert re.match(re.escape(str(path)), str(error.value))
