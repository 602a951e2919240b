"""Turns of 18 prompt and 3 output tokens on the toy engine: 20 computed tokens, 5 blocks of 4."""

from __future__ import annotations

from typing import Any

from tenuto.core.requests import Hints
from tenuto.core.types import ToolCall
from tests.support.toy_engine import ToyEngine, make_tokens

OUTPUT = make_tokens(500, 3)


def prompt_of(number: int) -> list[int]:
    return make_tokens(10_000 * (number + 1), 18)


def run(engine: ToyEngine, number: int, now_s: float, **finish: Any) -> None:
    """Turn `t<number>` of job `j<number>` arrives, starts and finishes at once."""
    engine.arrive(f"t{number}", now_s, prompt_of(number), OUTPUT, Hints(job_id=f"j{number}"))
    assert engine.start_first(now_s) == f"t{number}"
    engine.finish(f"t{number}", now_s, **{"tool": ToolCall("ls"), **finish})


def come_back(engine: ToyEngine, number: int, now_s: float) -> None:
    """The next turn of job `j<number>`: 18 + 3 + 7 prompt and 3 output tokens, 30 computed, 8 blocks."""
    prompt = prompt_of(number) + OUTPUT + make_tokens(600, 7)
    engine.arrive(f"t{number}b", now_s, prompt, OUTPUT, Hints(job_id=f"j{number}"))


def pinned(engine: ToyEngine) -> list[str]:
    return [lease.job_id for lease in engine.driver.leases]
