"""Timing a server's steps from outside, and fitting them: `tenuto profile`."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tenuto import cli
from tenuto.client import profile as run_module
from tenuto.client.address import ServerError
from tenuto.client.http import Answer, RequestFailed, RequestWriter, TokenIds
from tenuto.client.options import ProfileOptions
from tenuto.client.profile import (
    OUTPUT_TOKENS,
    Decode,
    Prefill,
    ProfilePlan,
    get_max_context,
    make_plan,
)
from tenuto.wire.response import Usage
from tests.client.fake_server import BLOCK_SIZE, FakeServer, Reply, serving

PREFILL = (0.01, 2e-5, 3e-9)
DECODE = (0.005, 1e-3, 1e-7)


class KnownServer:
    """Answers in no time of its own; the times in its answers are those of the coefficients above."""

    def __init__(self, *, has_cache: bool = True, tells_hits: bool = True, max_running: int = 99) -> None:
        self.has_cache, self.tells_hits, self.max_running = has_cache, tells_hits, max_running
        self.prompts: list[list[int]] = []
        self.num_running = 0

    async def stream_answer(self, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        asked = json.loads(body)
        prompt, num_tokens = asked["prompt"], asked["max_tokens"]
        now_s = asyncio.get_running_loop().time()
        place, self.num_running = self.num_running, self.num_running + 1
        await asyncio.sleep(0)
        num_decodes = self.num_running
        await asyncio.sleep(0)
        self.num_running -= 1
        cached = self.count_cached(prompt)
        self.prompts.append(prompt)
        n = len(prompt) - cached
        first_s = now_s + PREFILL[0] + PREFILL[1] * n + PREFILL[2] * n * (cached + n / 2)
        context = num_decodes * (len(prompt) + num_tokens // 2)
        last_s = first_s + (num_tokens - 1) * (DECODE[0] + DECODE[1] * num_decodes + DECODE[2] * context)
        late_s = 1e6 if place >= self.max_running else 0.0
        usage = Usage(len(prompt), num_tokens, cached if self.tells_hits else None)
        return Answer(first_s + late_s, last_s + late_s, None, "x", usage)

    def count_cached(self, prompt: list[int]) -> int:
        if not self.has_cache:
            return 0
        longest = 0
        for before in self.prompts:
            same = next((i for i, (a, b) in enumerate(zip(prompt, before, strict=False)) if a != b), None)
            shared = min(len(prompt), len(before)) if same is None else same
            longest = max(longest, min(shared, len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE)
        return longest


def time_plan(server: KnownServer, plan: ProfilePlan, repeats: int = 1) -> list[dict[str, Any]]:
    writer = RequestWriter("fake", TokenIds(), "salt")
    asker = run_module.Asker(server, writer)  # type: ignore[arg-type]

    async def time() -> list[dict[str, Any]]:
        # The clock stands: a slow machine must not show in the answers' times.
        asyncio.get_running_loop().time = lambda: 0.0  # type: ignore[method-assign]
        return await run_module._time_plan(asker, plan, repeats, limit_s=None)

    return asyncio.run(time())


def test_known_costs_are_found_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan(step_tokens=512, max_context=2048, max_batch=4, num_kv_tokens=None)
    steps = time_plan(KnownServer(), plan, repeats=2)
    assert len(steps) == len(plan.steps)
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    out = tmp_path / "costs.json"
    assert cli.main(["profile", "--observations", str(tmp_path / "steps.jsonl"), "--out", str(out)]) == 0
    fit = json.loads(out.read_text())
    assert fit["prefill"]["coefficients"] == pytest.approx(PREFILL, rel=1e-3)
    assert fit["decode"]["coefficients"] == pytest.approx(DECODE, rel=1e-3)
    assert "prefill" in capsys.readouterr().out


@pytest.mark.parametrize("can_retry", [True, False])
def test_a_step_that_fails_once_is_timed_again(
    can_retry: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_module, "PAUSE_S", 0.0)
    server, calls, answer = KnownServer(), itertools.count(), KnownServer.stream_answer

    async def stream_answer(self: KnownServer, *given: Any) -> Any:
        if next(calls) == 20:
            raise RequestFailed("http 503", "busy", can_retry=can_retry)
        return await answer(self, *given)

    monkeypatch.setattr(KnownServer, "stream_answer", stream_answer)
    plan = make_plan(step_tokens=512, max_context=2048, max_batch=4, num_kv_tokens=None)
    if not can_retry:
        with pytest.raises(RequestFailed, match="busy"):
            time_plan(server, plan)
        return
    assert len(time_plan(server, plan)) >= len(plan.steps) - 1
    assert "a step is timed again: http 503: busy" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_said_before_anything_is_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["profile", "--url", "http://127.0.0.1:9", "--out", str(tmp_path / "c.json")]
    assert cli.main([*command, "--save", str(tmp_path)]) == 2
    assert f"cannot write {tmp_path}" in capsys.readouterr().err
    assert cli.main([*command, "--save", str(tmp_path / "s.jsonl")]) == 2
    assert not (tmp_path / "s.jsonl").exists()
    # What was there before stays, such as a device.
    (tmp_path / "s.jsonl").write_text("")
    assert cli.main([*command, "--save", str(tmp_path / "s.jsonl")]) == 2
    assert (tmp_path / "s.jsonl").exists()


def test_prefills_of_another_length_than_meant_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ProfilePlan(prefills=(Prefill(64, 0), Prefill(64, 512)), decodes=())
    assert len(time_plan(KnownServer(has_cache=False), plan)) == 1
    assert "1 prefills found something else in the prefix cache" in capsys.readouterr().err


def test_decodes_that_waited_for_each_other_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ProfilePlan(prefills=(), decodes=(Decode(4, 128), Decode(2, 128)))
    (step,) = time_plan(KnownServer(max_running=2), plan)
    assert step["decodes"] == [128 + OUTPUT_TOKENS // 2] * 2
    assert "Set --max-batch" in capsys.readouterr().err


def test_answers_in_one_piece_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "DECODE", (0.0, 0.0, 0.0))
    assert not time_plan(KnownServer(), ProfilePlan(prefills=(), decodes=(Decode(1, 128),)))


def test_the_plan_stays_within_what_the_server_holds() -> None:
    plan = make_plan(step_tokens=2048, max_context=4000, max_batch=16, num_kv_tokens=8000)
    assert max(step.num_tokens for step in plan.prefills) == 2048
    assert all(step.num_tokens + step.num_context_tokens <= 4000 for step in plan.prefills)
    assert all(step.num_decodes * (step.num_context_tokens + OUTPUT_TOKENS) <= 4000 for step in plan.decodes)
    assert all(step.num_context_tokens % 128 == 0 for step in plan.steps)
    assert {step.num_decodes for step in plan.decodes} == {1, 2, 4, 8, 16}


def test_a_prefill_and_decodes_of_the_same_numbers_are_two_steps() -> None:
    plan = ProfilePlan(prefills=(Prefill(4, 128),), decodes=(Decode(4, 128),))
    first, second = time_plan(KnownServer(), plan)
    assert first["prefills"] == [[4, 128]]
    assert second["decodes"] == [128 + OUTPUT_TOKENS // 2] * 4


def test_the_longest_context_is_what_the_model_and_the_cache_allow() -> None:
    assert get_max_context(None, None, None) == 16384
    assert get_max_context(4096, 2048, None) < 2048
    assert get_max_context(4096, 8192, 6400) == 3200


@pytest.mark.parametrize("has_metrics", [True, False])
def test_a_live_server_is_timed_and_fitted(
    has_metrics: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = FakeServer(lambda request: Reply(ttft_s=len(request.prompt) / 1e5, tpot_s=0.001))
    server.has_metrics = has_metrics
    out = tmp_path / "costs.json"
    with serving(server) as url:
        few = ["--step-tokens", "512", "--max-context", "1024", "--max-batch", "2", "--repeats", "1"]
        # One millisecond a step is no more than a busy machine's noise, so the fit may be poor.
        assert cli.main(["profile", "--url", url, "--out", str(out), "--json", "--force", *few]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["fit"] == json.loads(out.read_text())
    saved = (tmp_path / "costs.observations.jsonl").read_text().splitlines()
    assert len(saved) == len(printed["steps"])
    assert all(json.loads(line)["seconds"] > 0 for line in saved)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a server with --url"),
        (["--url", "localhost:8000"], "--url must be an address like http"),
        (["--url", "http://127.0.0.1:9", "--max-batch", "1"], "--max-batch must be at least 2, got 1"),
        (
            ["--observations", "/nonexistent/steps.jsonl"],
            "/nonexistent/steps.jsonl: cannot be read: No such file",
        ),
        (["--url", "http://127.0.0.1:9", "--save", "/nonexistent/steps.jsonl"], "there is no folder"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["profile", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_server_without_room_is_refused() -> None:
    async def measure(server: FakeServer) -> None:
        async with server:
            await run_module.measure(ProfileOptions(url=server.url), num_kv_tokens=256)

    with pytest.raises(ServerError, match="too little to fit"):
        asyncio.run(measure(FakeServer()))
