"""From a trace's block ids to spans, and back.

Traces without text give each prompt as a list of ids, one per block of tokens; equal ids are equal tokens:

    prompt A   1  2  3  4             →  [run 1 ×3][run 4 ×1]
    prompt B   1  2  3  4  5  6       →  [run 1 ×3][run 4 ×1][run 5 ×2]
    prompt C   1  2  3  7             →  [run 1 ×3][run 7 ×1]

Ids that always follow each other become one span, so that a prompt of thousands of blocks is a few spans.
`BlockIds` goes the other way:

    prompt A   [a 40][b 20]     blocks of 16  →  0 1 2 3        (the last one holds 12 tokens)
    prompt B   [a 40][c 24]                   →  0 1 4 5        alike for 40 tokens, so for 2 whole blocks

An id stands for a block and everything before it, so what two prompts share is rounded down to whole blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from tenuto.records.codec import Fields
from tenuto.workload.schema import Prompt, Span


class HashedPrompt(NamedTuple):
    """A prompt as a trace gives it: the id of every block, the last of which may not be full."""

    ids: Sequence[int]
    num_tokens: int


def read_hash_ids(record: Fields, num_blocks: int) -> list[int]:
    """A row's `hash_ids`: one id for each of `num_blocks` blocks. Raises DataError."""
    ids = record.integers("hash_ids")
    if len(ids) != num_blocks:
        raise record.error(
            "hash_ids", f"{num_blocks} blocks are needed for the prompt's length, got {len(ids)}"
        )
    return ids


def make_prompts(hashed: Sequence[HashedPrompt], block_size: int, scope: str) -> list[Prompt]:
    """The prompts as spans; an id means the same in all of them, and `scope` starts every content id."""
    followers = _find_followers(hashed)
    return [_join_runs(prompt, block_size, scope, followers) for prompt in hashed]


def _find_followers(hashed: Sequence[HashedPrompt]) -> dict[int, int | None]:
    """For each id the one that always comes next; None if ids differ, or a prompt ends with it."""
    followers: dict[int, int | None] = {}
    for ids, _ in hashed:
        for one, following in pairwise(ids):
            if followers.setdefault(one, following) != following:
                followers[one] = None
        if ids:
            followers[ids[-1]] = None
    return followers


def _join_runs(prompt: HashedPrompt, block_size: int, scope: str, followers: dict[int, int | None]) -> Prompt:
    # Prompts with equal beginnings split equally, up to where they differ. A run's first id identifies it.
    ids, num_tokens = prompt
    starts = [n for n, one in enumerate(ids) if n == 0 or followers[ids[n - 1]] != one]
    ends = [*starts[1:], len(ids)] if ids else []
    return tuple(
        Span(f"{scope}{ids[start]}", min(end * block_size, num_tokens) - start * block_size)
        for start, end in zip(starts, ends, strict=True)
    )


class BlockIds:
    """Makes the ids of one scope: equal beginnings of prompts get equal ids."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._ids: dict[object, int] = {}

    def make(self, prompt: Prompt, *, with_last: bool) -> list[int]:
        """The ids of a prompt's full blocks, and with `with_last` of a last one that is not full."""
        ids: list[int] = []
        parent: int | None = None
        held: list[tuple[str, int, int]] = []
        num_free = self._block_size
        for content_id, num_tokens in prompt:
            start = 0
            while start < num_tokens:
                length = min(num_free, num_tokens - start)
                held.append((content_id, start, length))
                start, num_free = start + length, num_free - length
                if not num_free:
                    parent = self._get_id(parent, held)
                    ids.append(parent)
                    held, num_free = [], self._block_size
        if held and with_last:
            ids.append(self._get_id(parent, held))
        return ids

    def _get_id(self, parent: int | None, held: list[tuple[str, int, int]]) -> int:
        return self._ids.setdefault((parent, *held), len(self._ids))
