"""Turns by tenant and kind of job, and how many of them are marked: a bounded table whose counts fade.

Jobs of one tenant whose prompts begin alike are of one kind. What a mark means is up to the caller.
"""

from __future__ import annotations

from collections import OrderedDict

MEMORY_TURNS = 500.0
"""Counts of a kind fade to 1/e over so many of its turns."""
MAX_KINDS = 4096
"""Tenants and prompts are made up by clients, so kinds are bounded; the one seen longest ago goes first."""
_FADE = 1 - 1 / MEMORY_TURNS


class Counts:
    """Turns, and those of them that are marked; both fade."""

    __slots__ = ("marked", "turns")

    def __init__(self) -> None:
        self.turns = self.marked = 0.0

    def observe(self, *, is_marked: bool) -> None:
        """One more turn."""
        self.turns = _FADE * self.turns + 1
        self.marked = _FADE * self.marked + is_marked


class KindCounts:
    """The counts of each kind; O(1) a turn."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[tuple[str | None, str | None], Counts] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kinds)

    def get(self, tenant: str | None, kind: str | None) -> Counts | None:
        """The counts of a kind; None if it was not seen, or was forgotten."""
        return self._kinds.get((tenant, kind))

    def observe(self, tenant: str | None, kind: str | None, *, is_marked: bool = False) -> None:
        """One more turn of this kind."""
        name = tenant, kind
        counts = self._kinds.get(name)
        if counts is None:
            counts = self._kinds[name] = Counts()
            if len(self._kinds) > MAX_KINDS:
                self._kinds.popitem(last=False)
        else:
            self._kinds.move_to_end(name)
        counts.observe(is_marked=is_marked)
