"""A small slice of the fuzzing, the same each time; and that it notices what it looks for."""

from __future__ import annotations

import json
import logging
import random
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.fuzz import __main__, guard, run
from experiments.fuzz.mutate import Mutator
from experiments.fuzz.parsers import PARSERS, Parser
from tenuto.core.errors import DataError

NUM_INPUTS = 150


@pytest.fixture(autouse=True)
def messages() -> Iterator[None]:
    """Fuzzing silences Tenuto's messages; other tests read them."""
    logger = logging.getLogger("vllm.tenuto")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.mark.parametrize("name", PARSERS)
def test_every_parser_returns_or_says_what_is_wrong(name: str) -> None:
    found = run.run_chunk(run.Chunk(name, 1, 0, NUM_INPUTS))
    assert found.failures == {}
    assert found.inputs == NUM_INPUTS
    # Neither are all inputs nonsense, nor are all of them fine.
    assert found.refused < 0.95 * NUM_INPUTS


@pytest.mark.parametrize("name", PARSERS)
def test_the_corpus_is_sound(name: str) -> None:
    parser = PARSERS[name]
    for data in parser.load_corpus():
        failure = guard.try_input(parser.run, data).failure
        assert failure is None, failure


def test_a_long_conversation_is_read_within_the_bounds() -> None:
    said = [{"role": role, "content": str(n)} for n in range(700) for role in ("user", "assistant")]
    parser = PARSERS["workloads"]
    failure = guard.try_input(parser.run, json.dumps({"messages": said}).encode()).failure
    assert failure is None, failure


def test_inputs_are_the_same_each_time() -> None:
    corpus = PARSERS["workloads"].load_corpus()
    made = [[Mutator(random.Random(seed), corpus).make() for _ in range(50)] for seed in (3, 3, 4)]
    assert made[0] == made[1] != made[2]


def raise_plain(data: bytes) -> None:
    if b"!" in data:
        raise KeyError("x")


def raise_own(message: str) -> Any:
    def parse(data: bytes) -> None:
        if b"!" in data:
            error = DataError(message)
            error.__class__.__str__ = Exception.__str__  # type: ignore[method-assign]
            raise error

    return parse


def be_slow(data: bytes) -> None:
    while b"!" in data:
        pass


def take_memory(data: bytes) -> None:
    if b"!" in data:
        most_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        b"x" * (most_bytes + 20_000_000)


@pytest.mark.parametrize(
    ("parse", "kind"),
    [
        (raise_plain, "KeyError in "),
        (be_slow, "slow in "),
        (take_memory, "memory"),
        (raise_own(""), "no message in "),
        (raise_own("x\x1b[31m"), "a message with control characters in "),
        (raise_own("\ud800"), "a message that cannot be printed in "),
        (raise_own("x" * 9999), "a message of unbounded length in "),
    ],
)
def test_what_is_wrong_is_noticed(parse: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DataError, "__str__", DataError.__str__)
    monkeypatch.setattr(guard, "MAX_CPU_S", 0.05 if parse is be_slow else 10.0)
    monkeypatch.setattr(guard, "MAX_GROWTH_KB", 10_000)
    assert guard.try_input(parse, b"fine").failure is None
    failure = guard.try_input(parse, b"wrong!").failure
    assert failure is not None
    assert failure.kind.startswith(kind)


def test_a_failing_input_is_made_small() -> None:
    failure = guard.try_input(raise_plain, b"abc!def" * 50).failure
    assert failure is not None
    assert guard.minimise(raise_plain, b"abc!def" * 50, failure.kind) == b"!"


def test_the_command_keeps_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PARSERS, "hints", Parser("hints", "nothing", raise_on_quote))
    arguments = ["--parser", "hints", "--inputs", "60", "--out", str(tmp_path), "--json"]
    assert __main__.main(arguments) == 1
    said = json.loads(capsys.readouterr().out)["parsers"]["hints"]
    [failure] = said["failures"].values()
    assert failure["count"] > 10
    path = Path(failure["input"])
    assert path.read_bytes() == b'"'
    assert __main__.main(["--parser", "hints", "--input", str(path)]) == 1
    assert "LookupError in " in capsys.readouterr().out
    path.write_bytes(b"{}")
    assert __main__.main(["--parser", "hints", "--input", str(path)]) == 0


def raise_on_quote(data: bytes) -> None:
    if b'"' in data:
        raise LookupError
