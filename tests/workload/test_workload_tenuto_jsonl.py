"""Tenuto's own traces: read, written, and read again without a difference."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.core.errors import DataError
from tenuto.core.reuse import count_shared_tokens
from tenuto.records.codec import MAX_SECONDS
from tenuto.workload.formats.tenuto_jsonl import write_tenuto_jsonl
from tenuto.workload.load import load_workload
from tenuto.workload.schema import After, Job, Span, TurnSpec, Workload


def row(session="a", num_prompt=10, **more):
    return {"session": session, "input_length": num_prompt, "output_length": 5} | more


def test_a_row_without_content_extends_the_turn_before(write_rows):
    path = write_rows(
        row(timestamp=1500, tool="ls", command="ls -l"),
        row(num_prompt=40, delay=250),
        row(num_prompt=30, delay=1),
    )
    (job,) = load_workload(path).jobs
    first, second, third = job.turns
    assert (job.job_id, job.arrival_s, first.tool, first.command) == ("a", 1.5, "ls", "ls -l")
    assert [turn.tool_s for turn in job.turns] == [0.25, 0.001, 0.0]
    assert second.prompt == (*first.prompt, first.output, Span("a/text1", 25))
    assert third.prompt == (Span("a/text2", 30),)  # too short to hold what was before


def test_content_may_be_given_as_block_ids_or_spans(write_rows):
    path = write_rows(
        row("a", 600, timestamp=0, hash_ids=[1, 2]),
        row("b", 600, timestamp=0, hash_ids=[1, 3]),
        row("c", 100, timestamp=0, hash_ids=[1, 2], block_size=64),
        row("d", 10, timestamp=0, prompt=[["system", 8], ["task", 2]], output="answer"),
    )
    a, b, c, d = (job.turns[0] for job in load_workload(path).jobs)
    assert count_shared_tokens(a.prompt, b.prompt) == 512
    assert count_shared_tokens(a.prompt, c.prompt) == 0
    assert (d.prompt, d.output) == ((Span("system", 8), Span("task", 2)), Span("answer", 5))


def test_sessions_may_interleave_and_be_called_session_id(write_rows):
    path = write_rows(
        row("a", timestamp=0, tenant="t"),
        {"session_id": "b", "timestamp": 5, "input_length": 3, "output_length": 1, "parent": "a"},
        row(
            "a",
            20,
            delay=1,
            timestamp=70,
            tenant="t",
            after=[{"session": "b", "turn": 0, "event": "finished", "delay": 4}],
        ),
    )
    a, b = load_workload(path, loop="open").jobs
    assert (a.tenant, b.parent, b.arrival_s) == ("t", "a", 0.005)
    assert a.turns[1].at_s == 0.07
    assert a.turns[1].after == (After("b", 0, "finished", 0.004),)


def test_unknown_keys_are_kept(write_rows, tmp_path):
    more = {"ttft": 1.25, "labels": {"x": [1, None, True, "ü"]}, "empty": None}
    jobs = load_workload(write_rows(row(timestamp=0, **more), row(num_prompt=20, delay=3))).jobs
    assert jobs[0].turns[0].extra == more
    copy = tmp_path / "copy.jsonl"
    write_tenuto_jsonl(copy, jobs)
    first, second = map(json.loads, copy.read_text().splitlines())
    assert {key: first[key] for key in more} == more
    assert "ttft" not in second
    again = tmp_path / "again.jsonl"
    write_tenuto_jsonl(again, load_workload(copy).jobs)
    assert again.read_bytes() == copy.read_bytes()


names = st.text(min_size=1, max_size=8)
seconds = st.floats(0, MAX_SECONDS, allow_nan=False)
spans = st.builds(Span, names, st.integers(1, 2**20))
extras = st.dictionaries(
    names.map("x-".__add__),
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | names,
)


@st.composite
def workloads(draw):
    job_ids = draw(st.lists(names, min_size=1, max_size=3, unique=True))
    jobs = []
    for number, job_id in enumerate(job_ids):
        num_turns = draw(st.integers(1, 3))
        # Only earlier jobs are waited for, so that there is no circle.
        events = st.builds(
            After,
            st.sampled_from(job_ids[:number] or [job_id]),
            st.just(0),
            st.sampled_from(["sent", "finished"]),
            seconds,
        )
        turns = tuple(
            TurnSpec(
                prompt=tuple(draw(st.lists(spans, min_size=1, max_size=4))),
                output=draw(spans),
                tool=draw(st.none() | names),
                command=draw(st.none() | names),
                tool_s=draw(seconds) if index < num_turns - 1 else 0.0,
                at_s=draw(st.none() | seconds) if index else None,
                after=tuple(draw(st.lists(events, max_size=2))) if number else (),
                extra=draw(extras),
            )
            for index in range(num_turns)
        )
        parent = draw(st.sampled_from([None, *job_ids[:number]]))
        jobs.append(Job(job_id, draw(seconds), turns, tenant=draw(st.none() | names), parent=parent))
    return Workload("w", tuple(jobs))


@pytest.mark.slow
@given(workloads())
def test_writing_and_reading_gives_back_the_same_jobs(workload):
    with TemporaryDirectory() as directory:
        path = Path(directory) / "w.jsonl"
        write_tenuto_jsonl(path, workload.jobs)
        assert load_workload(path).jobs == workload.jobs


@pytest.mark.parametrize("name", ["ab8", "swe-bench", "bfcl"])
def test_generated_jobs_survive_a_file(name, tmp_path):
    workload = load_workload(name, jps=1, window_s=10)
    write_tenuto_jsonl(tmp_path / "w.jsonl", workload.jobs)
    assert load_workload(tmp_path / "w.jsonl").jobs == workload.jobs


def test_rows_without_content_that_grow_without_end_are_refused(write_rows):
    rows = [row(num_prompt=10 * (n + 1), **({"delay": 1} if n else {"timestamp": 0})) for n in range(2049)]
    load_workload(write_rows(*rows[:2048]))
    with pytest.raises(DataError, match=":2049: prompt: grows over more than 2048 turns"):
        load_workload(write_rows(*rows))


OTHER = [row(session="b", timestamp=0)]


def test_a_delay_of_nothing_before_the_first_turn_is_no_error(write_rows):
    assert len(load_workload(write_rows(row(timestamp=0, delay=0), row(delay=5))).jobs[0].turns) == 2


def test_long_chains_of_parents_are_read(write_rows):
    """Each is followed once: 4,000 took four minutes."""
    chain = [row(session=f"s{n}", timestamp=0, **({"parent": f"s{n - 1}"} if n else {})) for n in range(4000)]
    assert set(load_workload(write_rows(*chain)).roots.values()) == {"s0"}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row()], ":1: timestamp: is missing"),
        ([row(timestamp=0, delay=1)], ":1: delay: the first row"),
        ([row(timestamp=0), row(num_prompt=20)], ":2: delay: is missing"),
        ([row(timestamp=0), row(session=7, timestamp=0)], ":2: session: must be a string"),
        ([row(timestamp=0), {"timestamp": 0}], ":2: session_id: is missing"),
        ([row(timestamp=0, tenant="t"), row(delay=1, tenant="u")], ":2: tenant: differs"),
        ([row(timestamp=0), row(delay=1, parent="z")], ":2: parent: differs"),
        ([row(timestamp=0, tool="")], ":1: tool: must be a string"),
        ([row(timestamp=0, prompt=[["x", 9]])], ":1: prompt: does not add up to the input_length of 10"),
        ([row(timestamp=0, prompt=[])], ":1: prompt: does not add up"),
        ([row(timestamp=0, prompt="x")], r":1: prompt\[0\]: must be a pair"),
        ([row(timestamp=0, prompt=[["x", True], ["y", 9]])], r":1: prompt\[0\]: must be a pair"),
        ([row(timestamp=0, prompt=[["x", 5], ["y", -5]])], r":1: prompt\[1\]: must be a pair"),
        ([row(timestamp=0, prompt=[["x", 5], [7, 5]])], r":1: prompt\[1\]: must be a pair"),
        ([row(timestamp=0, prompt=[["x", 10]], hash_ids=[1])], ":1: prompt: is given beside hash_ids"),
        ([row(timestamp=0, hash_ids=[1, 2])], ":1: hash_ids: 1 blocks are needed"),
        ([row(timestamp=0, hash_ids=[1], block_size=0)], ":1: block_size"),
        ([row(timestamp=0, after=[{"session": "a", "turn": 0, "event": "x"}])], r"after\[0\].event"),
        (
            [row(timestamp=0, after=[{"session": "z", "turn": 0, "event": "sent", "delay": 0}])],
            r":1: after\[0\].session: 'z' is no session",
        ),
        (
            [row(timestamp=0, after=[{"session": "b", "turn": 1, "event": "sent", "delay": 0}]), *OTHER],
            r":1: after\[0\].turn: must be a whole number from 0 to 0, got 1",
        ),
        (
            [
                row(timestamp=0),
                row(delay=1, after=[{"session": "a", "turn": 1, "event": "sent", "delay": 0}]),
            ],
            ":2: after: turns wait for each other in a circle",
        ),
        ([row(timestamp=0, parent="z")], ":1: parent: 'z' is missing"),
        (
            [row(timestamp=0, parent="b"), row(session="b", timestamp=0, parent="a")],
            ":2: parent: 'a' is missing or its descendant",
        ),
    ],
)
def test_a_malformed_row_is_refused(write_rows, rows, words):
    path = write_rows(*rows)
    with pytest.raises(DataError, match=words) as error:
        load_workload(path)
    assert str(error.value).startswith(str(path))


@pytest.mark.parametrize("step", [1, -1])
def test_a_long_chain_of_parents_is_followed_once(write_rows, step):
    # In time that grows with the cube of their number, these would take hours.
    names = [f"s{number}" for number in range(20_000)][::step]
    parents = [None, *names]
    rows = [row(name, timestamp=0, parent=parent) for name, parent in zip(names, parents, strict=False)]
    del rows[0]["parent"]
    assert [job.parent for job in load_workload(write_rows(*rows[::step])).jobs] == parents[:-1][::step]
