"""The order in which the arms run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Slot(NamedTuple):
    """One run: one arm in one repeat."""

    repeat: int
    """Number of the repeat, counted from 0."""
    arm: str

    @property
    def name(self) -> str:
        """The name of the run's folder. Names sort by repeat."""
        return f"{self.repeat + 1:03}-{self.arm}"


def make_order(arms: Sequence[str], repeats: int) -> list[Slot]:
    """Order the runs so that each repeat reverses the order of the one before: A B, B A, A B.

    If the machine becomes slower or faster at a constant rate, two repeats affect all arms equally.
    """
    return [
        Slot(repeat, arm)
        for repeat in range(repeats)
        for arm in (arms if repeat % 2 == 0 else reversed(arms))
    ]
