"""A real server with host memory and a disk: the same tokens as without, after `kill -9` and damage too."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")

from tenuto.client.servers.local_server import LocalServer, run_server
from tenuto.client.servers.scrape import parse_totals

MODEL = os.environ.get("TENUTO_TEST_MODEL", "")
BLOCK_SIZE = 32
NUM_JOBS, NUM_TURNS = 6, 3
FIRST_TOKENS, NEW_TOKENS, OUTPUT_TOKENS = 320, 70, 8

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL, reason="TENUTO_TEST_MODEL names no model folder; `make test` sets it"),
]


@contextmanager
def serve(folder: Path, name: str) -> Iterator[LocalServer]:
    """A cache of 48 blocks, host memory for all jobs, and a disk behind it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [
        *(sys.executable, "-m", "tenuto.cli", "serve", MODEL, "--served-model-name", "tiny"),
        *("--policy", "stock", "--host-gb", "0.25", "--disk", str(folder / "disk"), "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK_SIZE)),
        *("--num-gpu-blocks-override", "49", "--max-model-len", "2048", "--max-num-seqs", "8"),
        "--enable-prompt-tokens-details",
    ]
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with run_server(command, port, folder / f"{name}.log", env=env) as server:
        yield server


Asked = dict[tuple[int, int], tuple[list[int], list[int], int]]
"""By job and turn: the prompt, the answer, and how many tokens of the prompt were hits."""


async def run_jobs(url: str, name: str, asked: Asked) -> None:
    """All jobs at once. Each turn goes into `asked` as soon as it is answered."""

    async def run_job(client: httpx.AsyncClient, job: int) -> None:
        rng = random.Random(job)
        prompt = [rng.randrange(1000, 40_000) for _ in range(FIRST_TOKENS)]
        for turn in range(NUM_TURNS):
            answer, cached = await ask(client, prompt, vllm_xargs={"job_id": f"{name}-{job}", "tool": "ls"})
            asked[job, turn] = (prompt, answer, cached)
            prompt = prompt + answer + [rng.randrange(1000, 40_000) for _ in range(NEW_TOKENS)]

    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        await asyncio.gather(*(run_job(client, job) for job in range(NUM_JOBS)))


async def ask(client: httpx.AsyncClient, prompt: list[int], **more: Any) -> tuple[list[int], int]:
    """The greedy answer, and the tokens of the prompt that were hits."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0}
    response = await client.post(
        "/v1/completions", json={**body, "ignore_eos": True, "return_token_ids": True, **more}
    )
    response.raise_for_status()
    result = response.json()
    details = result["usage"]["prompt_tokens_details"] or {}
    return result["choices"][0]["token_ids"], details.get("cached_tokens") or 0


async def compute(url: str, prompts: list[list[int]]) -> list[list[int]]:
    """The answers where nothing is hit: a salt of its own hides what others stored."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        found = [await ask(client, prompt, cache_salt=f"salt{n}") for n, prompt in enumerate(prompts)]
    assert [cached for _, cached in found] == [0] * len(prompts)
    return [answer for answer, _ in found]


def get_files(folder: Path) -> list[Path]:
    return sorted((folder / "disk").rglob("*.kv"))


def wait_for_files(folder: Path, num_files: int) -> None:
    """Wait until the disk has so many chunks; fails if that does not come about."""
    end_s = time.monotonic() + 60
    while len(get_files(folder)) < num_files:
        assert time.monotonic() < end_s, f"{len(get_files(folder))} files"
        time.sleep(0.2)


def test_tokens_are_the_same_from_gpu_host_and_disk_and_after_a_kill(tmp_path: Path) -> None:
    first, cut, again = Asked(), Asked(), Asked()
    with serve(tmp_path, "first") as server:
        asyncio.run(run_jobs(server.url, "first", first))
        totals = parse_totals(httpx.get(f"{server.url}/metrics").text)
        # The cache is too small for the jobs: some of it came from host memory.
        assert totals["vllm:kv_offload_load_bytes_total"] > 0
        wait_for_files(tmp_path, NUM_JOBS * FIRST_TOKENS // BLOCK_SIZE)

        async def run_and_kill() -> None:
            running = asyncio.create_task(run_jobs(server.url, "cut", cut))
            while len(cut) < 2:
                await asyncio.sleep(0.01)
            server.signal(signal.SIGKILL)
            with pytest.raises(httpx.HTTPError):
                await running

        asyncio.run(run_and_kill())
    damaged = get_files(tmp_path)[::4]
    for path in damaged:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    with serve(tmp_path, "again") as server:
        asyncio.run(run_jobs(server.url, "again", again))
        # What the killed server left on the disk is hit by the first turns of the next one.
        assert sum(cached for (_, turn), (_, _, cached) in again.items() if turn == 0) > 0
        log = (tmp_path / "again.log").read_text(errors="replace")
        assert "is not used" in log
        prompts = [prompt for prompt, _, _ in again.values()]
        computed = asyncio.run(compute(server.url, prompts))
    assert [answer for _, answer, _ in again.values()] == computed
    assert {key: answer for key, (_, answer, _) in first.items()} == {
        key: answer for key, (_, answer, _) in again.items()
    }
    assert all(answer == first[key][1] for key, (_, answer, _) in cut.items())
