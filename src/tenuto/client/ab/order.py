"""Which arm runs when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Slot(NamedTuple):
    """One run: an arm's part in a repeat."""

    repeat: int
    """From 0."""
    arm: str

    @property
    def name(self) -> str:
        """Names the run's folder; sorts by repeat."""
        return f"{self.repeat + 1:03}-{self.arm}"


def make_order(arms: Sequence[str], repeats: int) -> list[Slot]:
    """Each repeat turns the order of the one before around: A B, B A, A B.

    So a machine that grows slower, or faster, at a steady rate treats all arms alike over two repeats.
    """
    return [
        Slot(repeat, arm)
        for repeat in range(repeats)
        for arm in (arms if repeat % 2 == 0 else reversed(arms))
    ]
