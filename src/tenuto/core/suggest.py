"""Finds the known name that is nearest to an unknown name, for "did you mean" messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggest(name: object, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """The end of an error message, "; did you mean X?", or nothing where no known name is near.

    `cutoff` says how like they must be: 0 is anything, 1 the same but for upper and lower case.
    """
    by_folded = {each.lower(): each for each in known}
    near = difflib.get_close_matches(str(name).lower(), by_folded, n=1, cutoff=cutoff)
    return f"; did you mean {by_folded[near[0]]}?" if near else ""
