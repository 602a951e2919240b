"""Live servers with tiny models whose layers differ: the same answers with and without Tenuto, and more hits.

Dummy weights are the same in each server, so greedy answers can be compared. TENUTO_TEST_HYBRIDS names the
models to try, with commas: gemma-3, gpt-oss, qwen3-next. Each takes three servers, so none is the default.
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
from tenuto.client.ab import run_server
from tenuto.vllm.launch import Tiers
from tests.support.processes import get_free_port
from tests.vllm.live import ENV, MARKS, MODEL, get_command
from tests.vllm.tiny_models import make_model

NAMES = os.environ.get("TENUTO_TEST_HYBRIDS", "").split(",")


def get_arguments(tenuto: dict[str, Any]) -> tuple[str, ...]:
    plugin = ("--scheduler-cls", "tenuto.vllm.Scheduler", "--middleware", "tenuto.vllm.Middleware")
    return (*plugin, "--additional-config", json.dumps({"tenuto": tenuto}))


ARMS: dict[str, tuple[str, ...]] = {
    "stock": (),
    "tenuto": get_arguments({"policy": "continuum-fixed", "options": {"ttl_s": 600.0}}),
    # All that is computed is copied to host memory, and what the GPU has lost comes from there.
    "host memory": (
        *get_arguments({"policy": "stock"}),
        *("--kv-transfer-config", json.dumps(Tiers(host_gb=0.5).get_transfer_config())),
    ),
}

pytestmark = [
    *MARKS,
    pytest.mark.skipif(NAMES == [""], reason="TENUTO_TEST_HYBRIDS names no model"),
]


class Sizes(NamedTuple):
    """What a server has, and how many tokens its requests: some blocks each, a full cache together."""

    num_blocks: int = 200
    block_size: int = 32
    max_model_len: int = 2048
    first: int = 300
    stranger: int = 600
    shared: int = 400


# A block of qwen3-next has 1,056 tokens, so that a state fits. Its first answer goes on beyond the second
# block. `tenuto verify` uses up to 35 blocks.
SIZES = {"qwen3-next": Sizes(80, 1056, 40_960, 2_090, 3_200, 1_600)}


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


def run_jobs(url: str, sizes: Sizes) -> list[Turn]:
    """A job of four turns among strangers, three jobs with one prefix, and after a flood one more of both."""
    rng = random.Random(5)

    def make_text(num_tokens: int) -> list[int]:
        return [rng.randrange(100, 40_000) for _ in range(num_tokens)]

    def run_strangers(number: int) -> list[Turn]:
        return [complete(url, make_text(sizes.stranger), 8, is_last_step=1) for _ in range(number)]

    prompt, turns = make_text(sizes.first), []
    for _ in range(4):
        turns.append(complete(url, prompt, 45, job_id="job", tool="ls"))
        prompt = prompt + turns[-1].answer + make_text(30)
        turns += run_strangers(2)
    shared = make_text(sizes.shared)
    turns += [complete(url, shared + make_text(60), 8, is_last_step=1) for _ in range(3)]
    turns += run_strangers(12)
    turns.append(complete(url, shared + make_text(60), 8, is_last_step=1))
    turns.append(complete(url, prompt, 8, job_id="job", is_last_step=1))
    return turns


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES)
def test_the_same_answers_and_more_hits(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = SIZES.get(name, Sizes())
    model = make_model(name, tmp_path / "model", Path(MODEL))
    seen = {}
    for arm, extra in ARMS.items():
        port = get_free_port()
        command = [str(model) if each == MODEL else each for each in get_command(port, *extra)]
        command += ["--load-format", "dummy", "--max-num-batched-tokens", "256"]
        command[command.index("97")] = str(sizes.num_blocks)
        command[command.index("2048")] = str(sizes.max_model_len)
        if name == "qwen3-next":
            # The CPU build computes gated delta nets in this type only.
            command[command.index("float32")] = "bfloat16"
        with run_server(command, port, tmp_path / f"{arm}.log", env=ENV) as server:
            seen[arm] = run_jobs(server.url, sizes)
            # Chats of gpt-oss need a larger vocabulary than the tokenizer has.
            if arm == "tenuto" and name != "gpt-oss":
                status = cli.main(["verify", "--url", server.url])
                said = capsys.readouterr().out
                assert status == 0 and "Hybrid model" in said, said
    for arm, turns in seen.items():
        assert [turn.answer for turn in turns] == [turn.answer for turn in seen["stock"]], arm
    hits = {arm: [turn.num_hit_tokens for turn in turns] for arm, turns in seen.items()}
    print(name, "hits", hits, "prompts", [turn.num_prompt_tokens for turn in seen["stock"]])
    # Turns 2 to 5 of the job: all but the last token of the turn before, in whole blocks.
    lengths = [turn.num_prompt_tokens + 44 for turn in seen["tenuto"][0:12:3]]
    wanted = [length - length % sizes.block_size for length in lengths]
    assert [*hits["tenuto"][3:12:3], hits["tenuto"][-1]] == wanted
    # The flood took it in stock, and host memory has it. The prefix of the last job but one is pinned.
    assert hits["stock"][-1] == 0 < hits["host memory"][-1]
    assert hits["tenuto"][-2] == sizes.shared - sizes.shared % sizes.block_size > hits["stock"][-2]
