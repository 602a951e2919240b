"""Weka sessions: turns, think times, sub-agents, and 150 recorded ones."""

from __future__ import annotations

import gzip
import json
import re

import pytest

from tenuto.core.errors import DataError
from tenuto.core.reuse import count_shared_tokens
from tenuto.workload.load import load_workload
from tenuto.workload.schema import After


def request(t, num_blocks=1, **more):
    fields = {"type": "n", "t": t, "in": 64 * num_blocks + 10, "out": 20, "hash_ids": list(range(num_blocks))}
    return fields | {"stop": "tool_use", "api_time": 2.0} | more


def sub_agent(t, agent_id, *requests, **more):
    fields = {"type": "subagent", "t": t, "agent_id": agent_id, "status": "completed", "duration_ms": 30_000}
    return fields | {"requests": list(requests)} | more


def session(*requests, **more):
    return {"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": list(requests)} | more


def load(tmp_path, trace, **settings):
    path = tmp_path / "s.json"
    path.write_text(json.dumps(trace, indent=1))
    return load_workload(path, **settings)


def test_a_session_is_a_job_that_grows_block_by_block(tmp_path):
    trace = session(
        request(0.0, 3),
        request(5.0, 5, think_time=3.2, stop="end_turn", out=0),
        request(60.0, 6, think_time=53.0),
    )
    (job,) = load(tmp_path, trace, loop="open").jobs
    assert (job.job_id, job.arrival_s) == ("s", 0.0)
    assert [turn.num_prompt_tokens for turn in job.turns] == [202, 330, 394]
    assert [turn.num_output_tokens for turn in job.turns] == [20, 1, 20]
    assert [turn.tool for turn in job.turns] == ["tool_use", None, "tool_use"]
    assert [turn.tool_s for turn in job.turns] == [3.2, 53.0, 0.0]
    assert [turn.at_s for turn in job.turns] == [None, 5.0, 60.0]
    first, second, _ = (turn.prompt for turn in job.turns)
    assert count_shared_tokens(first, second) == 3 * 64  # the last 10 tokens have no id


def test_a_rewritten_conversation_shares_what_its_ids_say(tmp_path):
    trace = session(
        request(0.0, 4), request(9.0, 4, hash_ids=[0, 1, 7, 8]), request(20.0, 4, hash_ids=[9, 10, 11, 12])
    )
    prompts = [turn.prompt for turn in load(tmp_path, trace).jobs[0].turns]
    assert count_shared_tokens(prompts[0], prompts[1]) == 2 * 64
    assert count_shared_tokens(prompts[1], prompts[2]) == 0


def test_tokens_without_an_id_are_never_shared(tmp_path):
    first, second = load(tmp_path, session(request(0.0, 2), request(9.0, 2))).jobs[0].turns
    assert first.num_prompt_tokens == second.num_prompt_tokens == 138
    assert count_shared_tokens(first.prompt, second.prompt) == 128


@pytest.mark.parametrize(
    ("first", "second", "gap_s"),
    [
        ({}, {"think_time": 7.0}, 7.0),
        ({}, {}, 8.0),  # 10 s after the start of a request of 2 s
        ({"api_time": None}, {"think_time": 99.0}, 10.0),  # think_time reaches back too far
        ({"api_time": 15.0}, {}, 0.0),  # overlapped: one after the other in a closed loop
    ],
)
def test_the_gap_is_the_recorded_pause(tmp_path, first, second, gap_s):
    trace = session(request(0.0, **first), request(10.0, **second))
    assert load(tmp_path, trace).jobs[0].turns[0].tool_s == gap_s


def test_completed_sub_agents_run_in_parallel_and_hold_the_session_back(tmp_path):
    # The session's first request ends at 2 s. Both sub-agents start at 3 s, for t is their end: 33 − 30 s
    # and 43 − 40 s. Their last requests end at 3 + 8 + 2 = 13 s and 3 + 0 + 2 = 5 s; 45 − 13 = 32 s.
    trace = session(
        request(0.0),
        sub_agent(33.0, "one", request(0.0), request(8.0, 2, think_time=6.0)),
        sub_agent(43.0, "two", request(0.0), duration_ms=40_000),
        request(45.0, 2, think_time=43.0),
        request(50.0, 3, think_time=3.0),
    )
    own, one, two = load(tmp_path, trace).jobs
    assert [job.job_id for job in (own, one, two)] == ["s", "s/one", "s/two"]
    assert (own.parent, one.parent, two.parent) == (None, "s", "s")
    assert (one.arrival_s, two.arrival_s) == (3.0, 3.0)
    assert one.turns[0].after == two.turns[0].after == (After("s", 0, "finished", 1.0),)
    assert [turn.at_s for turn in one.turns] == [None, 11.0]
    assert [turn.tool_s for turn in own.turns] == [0.0, 3.0, 0.0]
    assert own.turns[1].after == (After("s/one", 1, "finished", 32.0), After("s/two", 0, "finished", 32.0))


def test_a_background_sub_agent_holds_nothing_back(tmp_path):
    background = sub_agent(3.0, "bg", request(0.0), status="async_launched", duration_ms=None)
    empty = sub_agent(40.0, "none")
    own, agent = load(tmp_path, session(request(0.0), background, empty, request(9.0, think_time=7.0))).jobs
    assert agent.arrival_s == 3.0
    assert agent.turns[0].after == (After("s", 0, "finished", 1.0),)
    assert own.turns[0].tool_s == 7.0
    assert own.turns[1].after == ()


@pytest.mark.parametrize(
    ("trace", "words"),
    [
        (session(), "requests: the session has no request of its own"),
        (session(sub_agent(9.0, "a", request(0.0))), r"requests\[0\].type: a sub-agent comes before"),
        (session(request(0.0), hash_id_scope="global"), "hash_id_scope: only ids local"),
        (session(request(0.0), block_size=0), "block_size: must be"),
        (session(request(0.0), id=7), "id: must be a string"),
        (session(request(0.0), request(-1.0)), r"requests\[1\].t: must be a number"),
        (session(request(5.0), request(1.0)), r"requests\[1\].t: is earlier"),
        (session(request(0.0, type="x")), r"requests\[0\].type: must be n, s or subagent"),
        (session(request(0.0, api_time=True)), r"requests\[0\].api_time: must be a number"),
        (session(request(0.0, hash_ids=[1, 2])), r"requests\[0\].hash_ids: 1 blocks are needed"),
        (session(request(0.0, hash_ids=[None])), r"requests\[0\].hash_ids\[0\]: must be a whole number"),
        (session(request(0.0, out=10**18)), r"requests\[0\].out: must be a whole number"),
        (session(request(0.0) | {"in": 0}), r"requests\[0\].in: must be a whole number from 1"),
        (session(request(0.0), sub_agent(9.0, "a", request(0.0), status="failed")), r"\[1\].status: must be"),
        (
            session(request(0.0), sub_agent(9.0, "a", request(0.0, out=-1))),
            r"requests\[1\].requests\[0\].out",
        ),
        (
            session(request(0.0), sub_agent(9.0, "a", request(0.0)), sub_agent(9.0, "a", request(0.0))),
            r"requests\[2\].agent_id: is also another",
        ),
    ],
)
def test_a_malformed_session_is_refused(tmp_path, trace, words):
    with pytest.raises(DataError, match=words) as error:
        load(tmp_path, trace)
    assert str(error.value).startswith(str(tmp_path / "s.json"))


def test_a_directory_is_read_in_order_of_names_or_not_at_all(tmp_path):
    for number in (2, 1):
        data = json.dumps(session(request(0.0), id=f"s{number}")).encode()
        (tmp_path / f"{number}.json.gz").write_bytes(gzip.compress(data))
    (tmp_path / "README.md").write_text("not a session")
    assert [job.job_id for job in load_workload(tmp_path).jobs] == ["s1", "s2"]
    (tmp_path / "3.json").write_text('{"id": "s3"}')
    with pytest.raises(DataError, match=r"3\.json:1: hash_id_scope: is missing"):
        load_workload(tmp_path)
    (tmp_path / "3.json").write_text(json.dumps(session(request(0.0), id="s2")))
    with pytest.raises(DataError, match=re.escape(f"'s2' is also the id of {tmp_path / '2.json.gz'}:1")):
        load_workload(tmp_path)


def test_a_directory_without_sessions_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"no \.json"):
        load_workload(tmp_path)


def test_sessions_may_stand_in_one_file_line_by_line(write_rows):
    path = write_rows(session(request(0.0), id="a"), session(request(0.0), id="b"))
    a, b = load_workload(path).jobs
    assert count_shared_tokens(a.turns[0].prompt, b.turns[0].prompt) == 0  # ids are local to a session


@pytest.mark.slow
def test_the_recorded_sessions_are_read_whole(weka_sessions):
    workload = load_workload(weka_sessions, jps=1.0, loop="open")
    own = [job for job in workload.jobs if job.parent is None]
    turns = [turn for job in workload.jobs for turn in job.turns]
    assert (len(own), len(workload.jobs), len(turns)) == (150, 161, 7090)
    trace = json.loads(gzip.decompress((weka_sessions / "trace_0010.json.gz").read_bytes()))
    job = next(job for job in own if job.job_id == "trace_0010")
    lengths = [entry["in"] for entry in trace["requests"] if entry["type"] != "subagent"]
    assert [turn.num_prompt_tokens for turn in job.turns] == lengths
    # Three sub-agents of one turn, recorded as ending one after the other, started within 11 ms.
    starts_s = [
        j.arrival_s - job.arrival_s for j in workload.jobs if re.match("trace_0010/agent_00[234]", j.job_id)
    ]
    assert max(starts_s) - min(starts_s) < 0.012
    assert len(job.turns[9].after) == 3


@pytest.mark.slow
def test_the_recorded_sessions_hit_as_often_as_published(weka_sessions, reference):
    jobs = load_workload(weka_sessions).jobs
    hit = sum(
        count_shared_tokens(turn.prompt, following.prompt)
        for job in jobs
        for turn, following in zip(job.turns, job.turns[1:], strict=False)
    )
    rate = hit / sum(turn.num_prompt_tokens for job in jobs for turn in job.turns)
    assert rate == pytest.approx(
        reference("tool_times.json")["agentx_coding_sessions"]["prefix_hit_rate"], abs=0.01
    )
