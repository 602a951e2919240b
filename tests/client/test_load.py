"""Whole runs against a fake server: what is sent, when, and what is made of the answers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tenuto.client.load import get_pause_s
from tenuto.workload.load import LoadOptions
from tests.client.conftest import GAP_S, OUTPUT_TOKENS, SYSTEM_TOKENS, TOOL_S, Ran
from tests.client.fake_server import BLOCK_SIZE, FakeServer, Reply, Request

pytestmark = pytest.mark.slow

Bench = Callable[..., Ran]


def group(server: FakeServer) -> dict[str, list[Request]]:
    """The requests of each job, without the run's name, in the order they came; not the probe's."""
    jobs: dict[str, list[Request]] = {}
    for request in server.requests:
        run, _, job = request.session.partition("/")
        assert run
        if job != "probe":
            jobs.setdefault(job, []).append(request)
    return jobs


def test_lengths_are_the_plans(bench: Bench) -> None:
    ran = bench()
    jobs = group(ran.server)
    assert set(jobs) == {"job0", "job1", "job2"}
    for job in ran.workload.jobs:
        requests = jobs[job.job_id]
        assert [len(request.prompt) for request in requests] == [t.num_prompt_tokens for t in job.turns]
        for request, turn in zip(requests, job.turns, strict=True):
            assert request.path == "/v1/completions"
            asked = ("model", "max_tokens", "min_tokens", "ignore_eos", "temperature", "stream")
            assert [request.body[key] for key in asked] == [
                "fake",
                OUTPUT_TOKENS,
                OUTPUT_TOKENS,
                True,
                0,
                True,
            ]
            assert request.body["stream_options"] == {"include_usage": True}
            said = {"job_id", "is_last_step"} | ({"tool"} if turn.tool else set())
            assert request.body["vllm_xargs"].keys() == said
    assert ran.result["client"]["complaints"] == {}
    assert {turn: each["prompt_tokens"] for turn, each in ran.result["by_turn"].items()} == {
        "1": 70,
        "2": 126,
        "3": 182,
    }


def test_prompts_extend_the_conversation_with_the_servers_answers(bench: Bench) -> None:
    jobs = group(bench().server)
    for requests in jobs.values():
        for before, after in pairwise(requests):
            num_before = len(before.prompt)
            assert after.prompt[:num_before] == before.prompt
            answer = after.prompt[num_before : num_before + OUTPUT_TOKENS]
            assert all(token_id >= 30_000 for token_id in answer)  # only the server makes such ids
    firsts = [requests[0].prompt for requests in jobs.values()]
    assert len({tuple(prompt[:SYSTEM_TOKENS]) for prompt in firsts}) == 1
    assert len({prompt[SYSTEM_TOKENS] for prompt in firsts}) == 3


def test_prompts_may_quote_the_workload_instead(bench: Bench) -> None:
    ran = bench(answers="workload")
    for requests in group(ran.server).values():
        assert all(token_id < 20_000 for request in requests for token_id in request.prompt)
        assert all("return_token_ids" not in request.body for request in requests)
    assert ran.client["answers"] == "workload"
    # The server's own counts are all there is to go by now, and they are right.
    assert ran.client["complaints"] == {}
    assert ran.result["output_tokens"] == 9 * OUTPUT_TOKENS
    # Nothing of an answer is in the cache that the next prompt could use.
    assert ran.result["recomputed_tokens"] == 0


def test_a_server_without_ids_gets_the_workloads_text(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = bench(FakeServer(lambda request: Reply(has_ids=False)))
    assert ran.client["answers"] == "workload"
    assert "does not send its answers' token ids" in capsys.readouterr().err
    assert [len(r.prompt) for r in group(ran.server)["job0"]] == [70, 126, 182]


def test_times_are_the_plans(bench: Bench) -> None:
    ran = bench(FakeServer(lambda request: Reply(ttft_s=0.03, tpot_s=0.01)))
    for number, job in enumerate(ran.workload.jobs):
        turns = [ran.get_turn(job.job_id, index + 1) for index in range(3)]
        assert turns[0]["due_s"] == job.arrival_s == pytest.approx(number * GAP_S)
        for before, after in pairwise(turns):
            assert after["due_s"] == before["last_token_s"] + TOOL_S
        for turn in turns:
            times = [turn["due_s"], turn["sent_s"], turn["first_token_s"], turn["last_token_s"]]
            assert times == sorted(times)
            assert turn["latency_s"] == turn["last_token_s"] - turn["due_s"]
            assert turn["lag_s"] == turn["sent_s"] - turn["due_s"]
            assert turn["ttft_s"] >= 0.029
            assert turn["tpot_s"] >= 0.009
        (duration,) = [ran.result["job_times_s"][job.job_id]]
        assert duration == turns[-1]["last_token_s"] - turns[0]["due_s"]
    seen = {job: [request.at_s for request in requests] for job, requests in group(ran.server).items()}
    for job in ran.workload.jobs:
        for index, at_s in enumerate(seen[job.job_id][1:], 1):
            # The server's clock is the same one; nothing came before it was due.
            gap_s = at_s - seen[job.job_id][index - 1]
            assert gap_s >= 0.03 + 5 * 0.01 + TOOL_S - 0.005


def test_an_open_loop_does_not_wait_for_a_slow_server(bench: Bench, trace: Path) -> None:
    ran = bench(
        FakeServer(lambda request: Reply(ttft_s=0.5 if "job0" in request.session else 0.0)),
        LoadOptions(workload=str(trace), loop="open"),
    )
    for number in range(3):
        for index in range(3):
            turn = ran.get_turn(f"job{number}", index + 1)
            assert turn["due_s"] == pytest.approx(GAP_S * number + 2 * TOOL_S * index)
    last = ran.get_turn("job0", 3)
    assert last["sent_s"] < ran.get_turn("job0", 1)["first_token_s"]
    assert ran.result["recomputed_tokens"] is None
    assert ran.result["jobs"] == 3


def test_users_begin_jobs_as_others_end(bench: Bench, trace: Path) -> None:
    ran = bench(load=LoadOptions(workload=str(trace), users=1))
    for before, after in pairwise(ran.workload.jobs):
        assert ran.get_turn(after.job_id, 1)["due_s"] == ran.get_turn(before.job_id, 3)["last_token_s"]
    assert ran.result["config"]["users"] == 1


def test_hints_name_job_tool_and_end(bench: Bench, trace: Path) -> None:
    ran = bench(load=LoadOptions(workload=str(trace), hints="tool"), run_id="r1")
    hints = [request.body["vllm_xargs"] for request in group(ran.server)["job1"]]
    assert hints == [
        {"job_id": "r1/job1", "tool": "ls", "is_last_step": 0},
        {"job_id": "r1/job1", "tool": "ls", "is_last_step": 0},
        {"job_id": "r1/job1", "is_last_step": 1},
    ]


def test_two_runs_share_neither_content_nor_names(bench: Bench, tmp_path: Path) -> None:
    first = group(bench().server)["job0"][0]
    (tmp_path / "out").rename(tmp_path / "before")
    second = group(bench().server)["job0"][0]
    assert first.session != second.session
    assert first.prompt[:2] != second.prompt[:2]
    (tmp_path / "out").rename(tmp_path / "before2")
    third = group(bench(run_id=first.session.partition("/")[0]).server)["job0"][0]
    assert third.prompt == first.prompt


def test_words_go_out_as_chat(bench: Bench) -> None:
    ran = bench(prompts="words")
    for requests in group(ran.server).values():
        assert [len(request.body["messages"]) for request in requests] == [1, 3, 5]
        assert requests[-1].body["messages"][1]["content"].startswith(" w30")
        assert {request.path for request in requests} == {"/v1/chat/completions"}
        # As many words as planned: the made-up server counts words and adds no template.
        assert [len(request.prompt) for request in requests] == [70, 126, 182]
    assert ran.client["complaints"] == {}
    assert ran.result["recomputed_tokens"] is None


def test_hits_are_counted(bench: Bench) -> None:
    ran = bench()
    expected = 0
    for job in ran.workload.jobs:
        for before, turn in pairwise(job.turns):
            reusable = before.num_prompt_tokens + before.num_output_tokens - 1
            cached = reusable // BLOCK_SIZE * BLOCK_SIZE
            index = job.turns.index(turn)
            assert ran.get_turn(job.job_id, index + 1)["hit_tokens"] == cached
            expected += cached
    assert ran.result["hit_tokens"] == expected
    assert ran.result["recomputed_tokens"] == 0


def test_lost_blocks_are_recomputed_tokens(bench: Bench) -> None:
    def forget(request: Request) -> Reply:
        lost = "job1" in request.session and len(request.prompt) == 126
        return Reply(usage={"prompt_tokens_details": {"cached_tokens": 16}} if lost else {})

    # Turn 2 of job 1 could have had the blocks of 70 + 6 - 1 tokens: four of 16.
    assert bench(FakeServer(forget)).result["recomputed_tokens"] == 64 - 16


class Once:
    """Misbehaves once for each request that it is asked to."""

    def __init__(self, reply: Reply, times: int = 1) -> None:
        self._reply = reply
        self._left: Counter[tuple[str, int]] = Counter()
        self._times = times

    def __call__(self, request: Request) -> Reply:
        key = (request.session, len(request.prompt))
        if "probe" in request.session or self._left[key] >= self._times:
            return Reply()
        self._left[key] += 1
        return self._reply


RETRIED = [
    (Reply(status=429, headers={"Retry-After": "0"}), "http 429"),
    (Reply(status=500), "http 500"),
    (Reply(fault="reset"), "reset"),
    (Reply(fault="reset midway"), "reset"),
    (Reply(fault="cut off"), "cut off"),
    (Reply(fault="not json"), "malformed"),
    (Reply(fault="error event"), "server error"),
    (Reply(fault="hang"), "timeout"),
]


@pytest.mark.parametrize(("reply", "kind"), RETRIED)
def test_retries_mend_and_stay_visible(bench: Bench, reply: Reply, kind: str) -> None:
    ran = bench(FakeServer(Once(reply)), retries=1, timeout_s=0.5)
    assert ran.result["turns"] == {
        "planned": 9, "ok": 9, "ok_after_retries": 9, "failed": 0, "cancelled": 0, "not_sent": 0,
        "refused": 0,
    }  # fmt: skip
    assert {name: each["count"] for name, each in ran.client["failed_attempts"].items()} == {kind: 9}
    for turn in ran.turns:
        (failure,) = turn["failures"]
        # Latency counts from the intended start, over the failed attempt and the pause.
        assert turn["due_s"] <= turn["sent_s"] <= failure["sent_s"] <= failure["failed_s"]
        assert failure["failed_s"] <= turn["first_token_s"]
        assert turn["ttft_s"] == turn["first_token_s"] - turn["due_s"]
    assert [len(request.prompt) for request in group(ran.server)["job0"]] == [70, 70, 126, 126, 182, 182]


def test_what_fails_for_good_ends_its_job_and_no_other(bench: Bench) -> None:
    def fail_one(request: Request) -> Reply:
        return Reply(status=500 if "job1" in request.session and len(request.prompt) == 126 else 200)

    ran = bench(FakeServer(fail_one), retries=2)
    assert ran.result["turns"] == {
        "planned": 9, "ok": 7, "ok_after_retries": 0, "failed": 1, "cancelled": 0, "not_sent": 1,
        "refused": 0,
    }  # fmt: skip
    assert ran.client["failed_attempts"] == {"http 500": {"count": 3, "first": "made-up 500"}}
    assert (ran.result["jobs"], len(ran.result["job_times_s"])) == (2, 2)
    failed = ran.get_turn("job1", 2)
    assert (failed["status"], len(failed["failures"]), failed["last_token_s"]) == ("failed", 3, None)


def test_a_refused_request_is_not_repeated(bench: Bench) -> None:
    ran = bench(
        FakeServer(lambda request: Reply(status=200 if "probe" in request.session else 400)), retries=5
    )
    assert ran.client["failed_attempts"] == {"http 400": {"count": 3, "first": "made-up 400"}}
    assert ran.result["turns"]["failed"] == 3
    assert ran.result["job_s"] is None
    assert ran.result["ttft_s"] is None
    assert ran.result["makespan_s"] is None
    json.dumps(ran.result, allow_nan=False)


LIES: list[tuple[dict[str, Any], str]] = [
    ({"prompt_tokens": 10_000}, "prompt count"),
    ({"prompt_tokens": "many"}, "no usage"),
    ({"completion_tokens": 999}, "output count"),
    ({"prompt_tokens_details": {"cached_tokens": 500}}, "cached count"),
]


@pytest.mark.parametrize(("lie", "kind"), LIES)
def test_a_server_that_lies_is_told_on(bench: Bench, lie: dict[str, Any], kind: str) -> None:
    ran = bench(FakeServer(lambda request: Reply(usage={} if "probe" in request.session else lie)))
    assert {name: each["count"] for name, each in ran.client["complaints"].items()} == {kind: 9}
    # What the client knows itself is not touched by it.
    assert ran.result["turns"]["ok"] == 9
    assert ran.result["prompt_tokens"] == 3 * (70 + 126 + 182)
    assert ran.result["output_tokens"] == 9 * OUTPUT_TOKENS


def test_an_impossible_cached_count_is_not_believed(bench: Bench) -> None:
    lie = {"prompt_tokens_details": {"cached_tokens": 500}}
    ran = bench(FakeServer(lambda request: Reply(usage={} if "probe" in request.session else lie)))
    assert all(turn["hit_tokens"] is None for turn in ran.turns)
    assert ran.result["recomputed_tokens"] is None
    # The server's metrics tell the truth.
    assert ran.result["hit_tokens"] == 3 * (64 + 128)


def test_a_short_answer_leaves_the_next_prompt_as_planned(bench: Bench) -> None:
    ran = bench(FakeServer(lambda request: Reply(num_tokens=2)))
    assert {name: each["count"] for name, each in ran.client["complaints"].items()} == {"output length": 9}
    assert [len(request.prompt) for request in group(ran.server)["job0"]] == [70, 126, 182]
    assert ran.result["output_tokens"] == 18


def test_no_usage_at_all(bench: Bench) -> None:
    server = FakeServer(lambda request: Reply(usage=None))
    server.has_metrics = False
    ran = bench(server)
    assert ran.client["complaints"]["no usage"]["count"] == 9
    assert ran.result["hit_tokens"] is None
    assert ran.result["preemptions"] is None
    assert ran.result["prompt_tokens"] == 3 * (70 + 126 + 182)
    assert ran.samples == []


def test_pauses_grow_within_bounds() -> None:
    pauses = [get_pause_s(attempt, None, "seed") for attempt in range(20)]
    factor = pauses[0] / get_pause_s(0, 1.0, "seed")
    assert pauses[3] == pytest.approx(8 * pauses[0])
    assert factor == pytest.approx(0.02)
    assert max(pauses) <= 60 * 1.5
    assert 10.0 <= get_pause_s(0, 10.0, "a") <= 15.0
    assert get_pause_s(0, 1e9, "a") <= 90.0
    assert get_pause_s(0, 10.0, "a") != get_pause_s(0, 10.0, "b")
