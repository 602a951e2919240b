"""Each reason has its words, and its line in the operator's manual."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import pytest

from tenuto.core.types import ENDS, REFUSALS, TAKERS, WORDS, LeaseEnd, LeaseRefusal, TakenBy

OPERATING = Path(__file__).parents[2] / "docs" / "operating.md"


@pytest.mark.parametrize(("kind", "words"), [(LeaseRefusal, REFUSALS), (LeaseEnd, ENDS), (TakenBy, TAKERS)])
def test_each_reason_is_explained(kind: type[Enum], words: dict[Enum, str]) -> None:
    assert set(words) == set(kind)
    assert len(set(words.values())) == len(words)


def test_each_reason_is_in_the_manual() -> None:
    text = OPERATING.read_text(encoding="utf-8")
    section = text[text.index("### Why is there no lease?") :]
    assert [why for reasons in WORDS.values() for why in reasons if f"`{why}`" not in section] == []
