"""What strangers wrote, in messages: safe to print, and short enough to read."""

from __future__ import annotations

import pytest

from tenuto.core.console import count
from tenuto.core.errors import MAX_MESSAGE_CHARS, DataError, bound_message, clean


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("plain é 😀", "plain é 😀"),
        ("a\x1b[31mb", "a [31mb"),
        ("\u202eabc\u2028", "abc"),
        ("\ud800x\ufeff", "x"),
        ("a\nb\tc", "a b c"),
    ],
)
def test_clean(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned


def test_a_message_keeps_its_lines_its_beginning_and_its_end() -> None:
    assert bound_message("a\n  b") == "a\n  b"
    said = str(DataError(f"trace.jsonl:7: {'x' * 10**6} is wrong; try this\x00\ud800"))
    assert len(said) <= MAX_MESSAGE_CHARS
    assert said.startswith("trace.jsonl:7: xxx")
    assert said.rstrip().endswith("is wrong; try this")
    said.encode()


def test_a_number_has_its_noun() -> None:
    words = [count(number, "run") for number in (0, 1, 2, 1000)]
    assert words == ["0 runs", "1 run", "2 runs", "1,000 runs"]
    assert [count(1, "copy"), count(2, "copy"), count(1, "loss"), count(2, "loss")] == [
        "1 copy", "2 copies", "1 loss", "2 losses",
    ]  # fmt: skip
