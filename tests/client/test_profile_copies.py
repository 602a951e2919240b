"""`tenuto profile` times the copies of a server that keeps KV in host memory."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

import pytest

from tenuto.client.http import Answer
from tenuto.client.profile import LOADED, STORED, time_copies
from tenuto.wire.response import Usage
from tenuto.workload.schema import Prompt

TOKEN_BYTES = 1000
KV_TOKENS = 4096
LATENCY_S, S_PER_BYTE = 0.01, 2e-9
HIT_S, S_PER_TOKEN = 0.02, 1e-3


class Server:
    """Prompts on the GPU, the least recently used go first; all of them in host memory. Its clock stands."""

    def __init__(self, *, has_tier: bool = True, holds: bool = False) -> None:
        self.has_tier, self.holds = has_tier, holds
        self.on_gpu: OrderedDict[Prompt, int] = OrderedDict()
        self.in_host: set[Prompt] = set()
        self.loaded = 0

    async def ask(self, name: str, prompt: Prompt, num_tokens: int) -> tuple[float, Answer]:
        length = prompt[0].num_tokens
        seconds = HIT_S
        if prompt not in self.on_gpu:
            if prompt in self.in_host:
                self.loaded += length * TOKEN_BYTES
                seconds += LATENCY_S + length * TOKEN_BYTES * S_PER_BYTE
            else:
                seconds += length * S_PER_TOKEN
        self.on_gpu[prompt] = length
        self.on_gpu.move_to_end(prompt)
        while not self.holds and sum(self.on_gpu.values()) > KV_TOKENS:
            self.on_gpu.popitem(last=False)
        if self.has_tier:
            self.in_host.add(prompt)
        return 0.0, Answer(seconds, seconds, None, "x", Usage(length, num_tokens, None))

    async def read_totals(self) -> dict[str, float]:
        return {STORED: 1.0, LOADED: float(self.loaded)} if self.has_tier else {}


def time(server: Server, num_kv_tokens: int | None = KV_TOKENS) -> list[dict[str, Any]]:
    return asyncio.run(time_copies(server, server.read_totals, 2048, num_kv_tokens, 2))


def test_known_costs_of_copies_are_found_again() -> None:
    found = time(Server())
    assert len(found) == 2 * 4
    for each in found:
        assert each["num_bytes"] in {n * TOKEN_BYTES for n in (512, 1024, 1536, 2048)}
        assert each["seconds"] == pytest.approx(LATENCY_S + each["num_bytes"] * S_PER_BYTE)


def test_a_server_without_a_tier_is_not_asked_anything(capsys: pytest.CaptureFixture[str]) -> None:
    server = Server(has_tier=False)
    assert time(server) == []
    assert not server.on_gpu
    assert capsys.readouterr().err == ""


def test_a_cache_of_unknown_size_cannot_be_filled() -> None:
    assert time(Server(), None) == []


def test_prompts_that_stayed_on_the_gpu_are_left_out_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert time(Server(holds=True)) == []
    assert "left out: 8 copies" in capsys.readouterr().err
