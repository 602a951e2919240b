"""The same for each of several things, some at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def each_at_once(function: Callable[[T], R], things: Sequence[T], num_at_once: int) -> Iterator[R]:
    """What a function makes of each thing, in their order; so many are made at a time, in threads."""
    if num_at_once == 1 or len(things) < 2:
        yield from map(function, things)
        return
    with ThreadPoolExecutor(num_at_once) as threads:
        yield from threads.map(function, things)
