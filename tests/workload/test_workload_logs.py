"""Agents' own logs: mini-swe-agent's trajectories, and OpenAI-style chat logs."""

from __future__ import annotations

import json
import time
import tracemalloc

import pytest

from tenuto.cli import main
from tenuto.core.errors import DataError
from tenuto.core.reuse import count_shared_tokens
from tenuto.core.types import ToolCall
from tenuto.workload.formats.conversations import Contents, Pieces, get_plain_tool
from tenuto.workload.load import load_workload
from tenuto.workload.schema import Span

SYSTEM = {"role": "system", "content": "be a good agent " * 20}
TASK = {"role": "user", "content": "mend the tests"}
ANSWER = {"role": "assistant", "content": "I look\n\n```bash\nls src\n```"}
SEEN = {"role": "user", "content": "a.py b.py"}


def answered(command, prompt_tokens, output_tokens, at_s):
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens}
    extra = {
        "actions": [{"command": command}],
        "response": {"created": int(at_s) - 2, "usage": usage},
        "timestamp": at_s,
    }
    return {"role": "assistant", "content": "PLANTED THOUGHT", "extra": extra}


def observed(at_s, text="PLANTED OUTPUT"):
    return {"role": "user", "content": text, "extra": {"timestamp": at_s, "raw_output": text}}


def make_trajectory(*messages):
    return {"trajectory_format": "mini-swe-agent-1.1", "info": {}, "messages": [SYSTEM, TASK, *messages]}


@pytest.fixture
def trajectories(tmp_path):
    folder = tmp_path / "runs"
    one = make_trajectory(
        answered("KEY=PLANTED /opt/PLANTED/pytest -x", 100, 20, 1002.5),
        observed(1004.0),
        answered("cat x", 150, 30, 1010.0),
        observed(1010.25),
        {
            "role": "user",
            "content": "one action please",
            "extra": {
                "interrupt_type": "FormatError",
                "response": {"usage": {"prompt_tokens": 200, "completion_tokens": 5}},
                "timestamp": 1015.0,
            },
        },
        answered("make", 230, 7, 1020.0),
        {"role": "exit", "content": "done", "extra": {"exit_status": "Submitted"}},
    )
    two = make_trajectory(answered("ls", 100, 4, 1007.0))
    for name, trajectory in (("one/one", one), ("two/two", two)):
        path = folder / f"{name}.traj.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(trajectory, indent=None if name == "two/two" else 2))
    return folder


def test_trajectories_become_jobs(trajectories):
    one, two = load_workload(trajectories).jobs
    assert (one.job_id, two.job_id) == ("one", "two")
    assert [(turn.num_prompt_tokens, turn.num_output_tokens) for turn in one.turns] == [
        (100, 20),
        (150, 30),
        (200, 5),
        (230, 7),
    ]
    assert [turn.tool for turn in one.turns] == ["KEY=", "cat", None, "make"]
    assert [turn.tool_s for turn in one.turns] == [1.5, 0.25, 0.0, 0.0]
    assert (one.arrival_s, two.arrival_s) == (0.0, 5.0)
    assert [turn.at_s for turn in one.turns] == [None, 4.0, 10.25, 15.0]
    first, second, third, fourth = one.turns
    assert count_shared_tokens((*first.prompt, first.output), second.prompt) == 120
    assert count_shared_tokens((*second.prompt, second.output), third.prompt) == 180
    # What could not be parsed is in no later prompt.
    assert third.output.content_id not in [span.content_id for span in fourth.prompt]
    assert count_shared_tokens(first.prompt, two.turns[0].prompt) == 100
    assert all(turn.extra == {} for turn in one.turns)


def test_an_import_keeps_no_text_unless_asked(trajectories, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert main(["convert", str(trajectories), str(out)]) == 0
    assert "PLANTED" not in out.read_text()
    assert [turn.tool for turn in load_workload(out).jobs[0].turns] == ["pytest", "cat", None, "make"]
    kept = tmp_path / "kept.jsonl"
    assert main(["convert", str(trajectories / "one" / "one.traj.json"), str(kept), "--keep-text"]) == 0
    assert load_workload(kept).jobs[0].turns[1].command == "cat x"
    capsys.readouterr()


@pytest.mark.parametrize(
    ("trajectory", "words"),
    [
        (make_trajectory(), "answered nothing"),
        ({**make_trajectory(ANSWER), "trajectory_format": "mini-swe-agent-3"}, "trajectory_format: must be"),
        ({"trajectory_format": "mini-swe-agent-1", "messages": [ANSWER]}, r"messages\[0\].role: an answer"),
        ({"trajectory_format": "mini-swe-agent-1", "messages": "x"}, "messages: must be a list"),
        ({"trajectory_format": "mini-swe-agent-1"}, "messages: is missing"),
    ],
)
def test_malformed_trajectories_are_refused(tmp_path, trajectory, words):
    path = tmp_path / "x.traj.json"
    path.write_text(json.dumps(trajectory))
    with pytest.raises(DataError, match=words) as error:
        load_workload(path)
    assert str(error.value).startswith(str(path))


def test_odd_values_in_a_trajectory_count_as_not_said(tmp_path):
    odd = answered(7, "many", -1, 5.0)
    odd["extra"]["timestamp"] = "noon"
    odd["extra"]["response"]["created"] = 0
    path = tmp_path / "x.traj.json"
    path.write_text(json.dumps(make_trajectory(odd, observed(True), observed(1.7e9), ANSWER)))
    (job,) = load_workload(path).jobs
    assert [turn.extra for turn in job.turns] == [{"guessed_lengths": True}] * 2
    assert job.turns[0].num_prompt_tokens > 50
    assert job.turns[1].at_s == 0.0


def test_a_conversation_that_grows_without_end_is_refused(tmp_path, write_rows):
    messages = [SYSTEM, *[TASK, ANSWER] * 2049]
    path = tmp_path / "x.traj.json"
    path.write_text(json.dumps({"trajectory_format": "mini-swe-agent-1", "messages": messages}))
    said = [{"from": message["role"], "value": message["content"]} for message in messages]
    for log in (path, write_rows({"messages": messages}), write_rows({"conversations": said})):
        with pytest.raises(DataError, match="prompt: grows over more than 2048 turns"):
            load_workload(log)


def test_a_conversation_takes_memory_once_and_not_once_per_turn():
    def measure(num_turns):
        tracemalloc.start()
        contents, hashes = Contents(), []
        for turn in range(num_turns):
            hashes.append(b"asked %d" % turn)
            prompt = contents.resolve(Pieces(hashes, [1] * len(hashes)), 9 * turn + 5)
            hashes.append(b"answered %d" % turn)
            whole = prompt.followed_by(Span(f"out{turn}", 4))
            contents.remember(whole, Pieces(hashes[-1:], [1]), 0, prompt.num_tokens)
        assert len(prompt.prompt) == 2 * num_turns - 1
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return held

    assert measure(400) < 3 * measure(200)


def test_requests_that_go_on_from_each_other_are_a_job(write_rows):
    usage = {"prompt_tokens": 120, "completion_tokens": 12}
    path = write_rows(
        {"messages": [SYSTEM, TASK], "timestamp": 1_700_000_000.0},
        {"messages": [SYSTEM, {"role": "user", "content": "something else"}], "timestamp": 1_700_000_001_000},
        {
            "messages": [SYSTEM, TASK, ANSWER, SEEN],
            "timestamp": "2023-11-14T22:13:28+00:00",
            "response": {"choices": [{"message": {"role": "assistant", "content": "done"}}], "usage": usage},
        },
    )
    one, two = load_workload(path).jobs
    assert [job.arrival_s for job in (one, two)] == [0.0, 1.0]
    first, second = one.turns
    assert first.tool == "ls"  # the next row says what the answer was
    assert (first.tool_s, second.at_s) == (8.0, 8.0)
    assert (second.num_prompt_tokens, second.num_output_tokens, second.extra) == (120, 12, {})
    assert first.extra == {"guessed_lengths": True}
    assert count_shared_tokens((*first.prompt, first.output), second.prompt) > first.num_prompt_tokens
    assert count_shared_tokens(first.prompt, two.turns[0].prompt) > 0


@pytest.mark.parametrize(
    ("more", "usage"),
    [
        ({"reasoning_content": "hm"}, {}),
        ({}, {"completion_tokens_details": {"reasoning_tokens": 40}}),
        ({}, {"output_tokens_details": {"reasoning_tokens": 40}}),
    ],
)
def test_prompts_do_not_repeat_an_answer_with_reasoning(write_rows, more, usage):
    response = {"choices": [{"message": {**ANSWER, **more}}], "usage": usage}
    path = write_rows(
        {"messages": [SYSTEM, TASK], "session": "s", "response": response},
        {"messages": [SYSTEM, TASK, ANSWER, SEEN], "session": "s"},
    )
    first, second = load_workload(path).jobs[0].turns
    assert count_shared_tokens((*first.prompt, first.output), second.prompt) == first.num_prompt_tokens


def test_whole_conversations_are_jobs_of_their_own(write_rows):
    conversation = {"messages": [SYSTEM, TASK, ANSWER, SEEN, {"role": "assistant", "content": "done"}]}
    path = write_rows(conversation, conversation, {"messages": [TASK, ANSWER]})
    jobs = load_workload(path).jobs
    assert [job.job_id for job in jobs] == ["chat-0", "chat-1", "chat-2"]
    assert [len(job.turns) for job in jobs] == [2, 2, 1]
    assert [turn.tool for turn in jobs[0].turns] == ["ls", None]
    assert jobs[0].turns[0].prompt == jobs[1].turns[0].prompt


def test_sessions_may_be_named(write_rows):
    rows = [{"messages": [TASK], "session_id": name, "created": n} for n, name in enumerate("abab")]
    jobs = load_workload(write_rows(*rows)).jobs
    assert {job.job_id: [turn.at_s for turn in job.turns] for job in jobs} == {
        "a": [None, 2.0],
        "b": [None, 3.0],
    }


def test_an_empty_session_is_no_session(write_rows):
    jobs = load_workload(write_rows({"messages": [TASK], "session_id": "", "session": "a"})).jobs
    assert [job.job_id for job in jobs] == ["a"]
    jobs = load_workload(write_rows({"messages": [TASK], "session_id": ""})).jobs
    assert [job.job_id for job in jobs] == ["chat-0"]


def test_a_row_costs_no_more_after_a_long_conversation(write_rows):
    messages = [TASK, *[ANSWER, SEEN] * 600]
    long = {"messages": messages, "session": "a"}
    asks = [[{"role": "user", "content": f"{number}"}] for number in range(300)]
    short = [{"messages": messages, "session": "a"} for messages in asks]
    times_s = []
    for rows in ([*short, long], [long, *short]):
        path = write_rows(*rows)
        start_s = time.process_time()
        load_workload(path)
        times_s.append(time.process_time() - start_s)
    assert times_s[1] < 3 * times_s[0]


@pytest.mark.parametrize("taken", ["chat-0", "chat-1"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_conversation_without_an_id_takes_no_name_of_a_session(write_rows, taken, is_first):
    named = {"messages": [TASK], "session": taken}
    others = [{"messages": [{"role": "user", "content": text}]} for text in ("one", "two")]
    jobs = load_workload(write_rows(*([named, *others] if is_first else [*others, named]))).jobs
    assert len({job.job_id for job in jobs}) == 3
    assert all(len(job.turns) == 1 for job in jobs)


def test_times_too_far_apart_are_refused(write_rows):
    rows = [{"messages": [TASK], "session": str(at_s), "created": at_s} for at_s in (0, 1.7e9)]
    with pytest.raises(DataError, match=r":2: time: must be within 1e\+09 seconds of the first, got 1.7e"):
        load_workload(write_rows(*rows))


def test_tool_calls_of_chats_are_named(write_rows):
    call = {"id": "c", "type": "function", "function": {"name": "search", "arguments": "{broken"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    (job,) = load_workload(write_rows({"messages": [TASK, message]})).jobs
    assert job.turns[0].tool == "search"


def test_guessed_lengths_are_told(write_rows, tmp_path, capsys):
    path = write_rows({"messages": [TASK, ANSWER]})
    assert main(["convert", str(path), str(tmp_path / "o.jsonl"), "--json"]) == 0
    assert "guesses" in json.loads(capsys.readouterr().out)["losses"][0]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": []}, ":1: messages: is empty"),
        ({"messages": "hello"}, ":1: messages: must be a list"),
        ({"messages": ["hello"]}, r":1: messages\[0\]: must be an object"),
        ({"messages": [{"content": "x"}]}, r":1: messages\[0\].role: is missing"),
        ({"messages": [TASK], "timestamp": "noon"}, ":1: timestamp: must be a time in ISO 8601"),
        ({"messages": [TASK], "created": -1}, ":1: created: must be a number"),
        ({"messages": [TASK], "created": True}, ":1: created: must be a number"),
    ],
)
def test_malformed_chat_logs_are_refused(write_rows, row, words):
    path = write_rows(row)
    with pytest.raises(DataError, match=words):
        load_workload(path)


def test_notes_of_a_recording_are_passed_over(write_rows):
    turn = {"session": "a", "timestamp": 0, "input_length": 9, "output_length": 2}
    failed = {"kind": "failed", "timestamp": 1, "session": "a", "why": "http 500"}
    path = write_rows({"kind": "recording", "tenuto": "0"}, failed, turn, failed)
    assert len(load_workload(path).jobs[0].turns) == 1
    with pytest.raises(DataError, match="has a recording's notes, but no turn"):
        load_workload(write_rows({"kind": "recording"}, failed))


@pytest.mark.parametrize(
    "command",
    [
        r"PASSWORD=correct\ horse make",
        r'TOKEN="x\" s3cret y" make',
        "TOKEN=$(echo hunter2 | base64) curl x",
        "TOKEN=`cat key` curl x",
        'TOKEN="`cat key` s3cret" curl x',
        r"PW='it'\''s mypass ok' make",
        'API_KEY="abc def\nmake',
        "A=1 PW=it\\ is make",
        "KEYS=(one two) make",
        "PW=$'a b' make",
    ],
)
def test_no_part_of_an_assignment_becomes_a_tools_name(command):
    name = command.split(None, 1)[0]
    assert get_plain_tool(ToolCall(name, command)) == "other"


def test_the_command_after_a_plain_assignment_is_the_tool():
    for command in ("A=1 make x", "A= make", "A=\"b c\" B='d $e' /usr/bin/make", "A=~/x:y,z make"):
        assert get_plain_tool(ToolCall(command.split(None, 1)[0], command)) == "make"
