"""Each reason has its words, and its line in the operator's manual."""

from __future__ import annotations

from pathlib import Path

import pytest

from tenuto.core.types import WORDS, LeaseEnd, LeaseRefusal, Reason, TakenBy

MANUAL = Path(__file__).parents[2] / "docs" / "trouble.md"


@pytest.mark.parametrize("kind", [LeaseRefusal, LeaseEnd, TakenBy])
def test_each_reason_is_explained(kind: type[Reason]) -> None:
    assert all(reason.words for reason in kind)
    assert len({reason.words for reason in kind}) == len(kind)
    assert all(kind(reason.value) is reason for reason in kind)


def test_each_reason_is_in_the_manual() -> None:
    text = MANUAL.read_text(encoding="utf-8")
    section = text[text.index("## Why is there no lease?") :]
    assert [why for reasons in WORDS.values() for why in reasons if f"`{why}`" not in section] == []
