"""Live servers with tiny models whose layers differ: the same answers with and without Tenuto, and more hits.

Dummy weights are the same in each server, so greedy answers can be compared. TENUTO_TEST_HYBRIDS names the
models to try, with commas: gemma-3, gpt-oss, qwen3-next. Each takes two servers, so none is the default.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

pytest.importorskip("vllm")

from tenuto import cli
from tenuto.client.servers.local_server import run_server
from tests.vllm.test_server import ENV, MODEL, get_command, get_free_port
from tests.vllm.tiny_models import make_model

NAMES = os.environ.get("TENUTO_TEST_HYBRIDS", "").split(",")
TENUTO = (
    *("--scheduler-cls", "tenuto.vllm.Scheduler", "--middleware", "tenuto.vllm.Middleware"),
    *(
        "--additional-config",
        json.dumps({"tenuto": {"policy": "continuum-fixed", "options": {"ttl_s": 600.0}}}),
    ),
)

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not MODEL, reason="TENUTO_TEST_MODEL names no model folder; `make test` sets it"),
    pytest.mark.skipif(NAMES == [""], reason="TENUTO_TEST_HYBRIDS names no model"),
]


class Turn(NamedTuple):
    """What one request brought."""

    answer: list[int]
    num_prompt_tokens: int
    num_hit_tokens: int


def complete(url: str, prompt: list[int], max_tokens: int, **xargs: Any) -> Turn:
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "vllm_xargs": xargs,
    }  # fmt: skip
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
    assert reply.status_code == 200, reply.text
    data = reply.json()
    details = data["usage"].get("prompt_tokens_details") or {}
    return Turn(data["choices"][0]["token_ids"], len(prompt), details.get("cached_tokens") or 0)


def run_jobs(url: str) -> list[Turn]:
    """A job of four turns, among strangers that fill the cache; then three jobs with one long prefix."""
    rng = random.Random(5)

    def make_text(num_tokens: int) -> list[int]:
        return [rng.randrange(100, 40_000) for _ in range(num_tokens)]

    prompt, turns = make_text(300), []
    for _ in range(4):
        turns.append(complete(url, prompt, 45, job_id="job", tool="ls"))
        prompt = prompt + turns[-1].answer + make_text(30)
        for _ in range(2):
            turns.append(complete(url, make_text(600), 8, is_last_step=1))
    shared = make_text(400)
    turns += [complete(url, shared + make_text(60), 8, is_last_step=1) for _ in range(3)]
    return turns


@pytest.mark.parametrize("name", NAMES)
def test_the_same_answers_and_more_hits(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(name, tmp_path / "model", Path(MODEL))
    seen = {}
    for arm, extra in (("stock", ()), ("tenuto", TENUTO)):
        port = get_free_port()
        command = [str(model) if each == MODEL else each for each in get_command(port, *extra)]
        command += ["--load-format", "dummy", "--max-num-batched-tokens", "256"]
        command[command.index("97")] = "200"
        if name == "qwen3-next":
            # The CPU build computes gated delta nets in this type only.
            command[command.index("float32")] = "bfloat16"
        with run_server(command, port, tmp_path / f"{arm}.log", env=ENV) as server:
            seen[arm] = run_jobs(server.url)
            # Chats of gpt-oss need a larger vocabulary than the tokenizer has; blocks of qwen3-next (1,056
            # tokens, so that a state fits) a longer context than the server has.
            if arm == "tenuto" and name == "gemma-3":
                status = cli.main(["verify", "--url", server.url])
                assert status == 0, capsys.readouterr().out
    assert [turn.answer for turn in seen["stock"]] == [turn.answer for turn in seen["tenuto"]]
    hits = {arm: [turn.num_hit_tokens for turn in turns] for arm, turns in seen.items()}
    print(name, "hits", hits, "prompts", [turn.num_prompt_tokens for turn in seen["stock"]])
    assert sum(hits["tenuto"]) >= sum(hits["stock"])
    if name != "qwen3-next":
        # Turns 2 to 4 of the job, in blocks of 32: all but the last token of the turn before.
        lengths = [turn.num_prompt_tokens + 44 for turn in seen["tenuto"][0:9:3]]
        assert hits["tenuto"][3:12:3] == [length // 32 * 32 for length in lengths]
