"""What the formats of rows share: block ids, times of sending, models, and rows of JSON.

Traces without text give each prompt as a list of ids, one per block of tokens; equal ids are equal tokens:

    prompt A   1  2  3  4             →  [run 1 ×3][run 4 ×1]
    prompt B   1  2  3  4  5  6       →  [run 1 ×3][run 4 ×1][run 5 ×2]
    prompt C   1  2  3  7             →  [run 1 ×3][run 7 ×1]

Ids that always follow each other become one span, so that a prompt of thousands of blocks is a few spans.
`BlockIds` goes the other way:

    prompt A   [a 40][b 20]     blocks of 16  →  0 1 2 3        (the last one holds 12 tokens)
    prompt B   [a 40][c 24]                   →  0 1 4 5        equal for 40 tokens, so for 2 whole blocks

An id names a block and everything before it. So the shared part of two prompts is rounded down to whole
blocks.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from decimal import Decimal
from itertools import pairwise
from typing import NamedTuple

from tenuto.core.reuse import count_common
from tenuto.records.codec import MAX_SECONDS, Fields
from tenuto.workload.schema import Job, Prompt, Span, TurnSpec

_UNKNOWN = "unknown"
"""The model of a request whose model is unknown, in formats that require a name."""


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
    # For each id the one that always comes next; None if ids differ, or a prompt ends with it.
    followers: dict[int, int | None] = {}
    shared: list[int] = []
    before: Sequence[int] = []
    for ids, _ in hashed:
        # Most prompts continue the one before them. What both share says nothing new.
        shared.append(count_common(before, ids))
        for one, following in pairwise(ids[max(0, shared[-1] - 1) :]):
            if followers.setdefault(one, following) != following:
                followers[one] = None
        if ids:
            followers[ids[-1]] = None
        before = ids
    prompts: list[Prompt] = []
    starts: list[int] = []
    spans: list[Span] = []
    for (ids, num_tokens), num_shared in zip(hashed, shared, strict=True):
        # Prompts with equal beginnings split equally, up to where they differ. There, a run may end earlier.
        del starts[bisect_left(starts, num_shared) :]
        del spans[max(0, len(starts) - 1) :]
        starts += [n for n in range(num_shared, len(ids)) if n == 0 or followers[ids[n - 1]] != ids[n]]
        # A run's first id identifies it.
        spans += [
            Span(f"{scope}{ids[start]}", min(end * block_size, num_tokens) - start * block_size)
            for start, end in pairwise([*starts[len(spans) :], len(ids)])
        ]
        prompts.append(tuple(spans))
    return prompts


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


def read_model(row: Fields) -> dict[str, object]:
    """A row's model as a turn's other key; none if it is not known."""
    model = row.values.get("model")
    return {"model": model} if isinstance(model, str) and model not in ("", _UNKNOWN) else {}


def get_model(turn: TurnSpec) -> str:
    """The model that a turn asked for, to be written."""
    model = turn.extra.get("model")
    return model if isinstance(model, str) and model else _UNKNOWN


def get_sent_times(jobs: Sequence[Job]) -> dict[str, list[float]]:
    """By job id, the recorded times of sending, in seconds.

    A turn without such a time is assumed to be sent its tool time after the previous turn was sent, as if
    answers took no time, because no trace says how long they took.
    """
    times: dict[str, list[float]] = {}
    for job in jobs:
        sent = [job.arrival_s]
        for before, turn in zip(job.turns, job.turns[1:], strict=False):
            sent.append(min(MAX_SECONDS, sent[-1] + before.tool_s) if turn.at_s is None else turn.at_s)
        times[job.job_id] = sent
    return times


def to_ms(seconds: float) -> Decimal:
    """Milliseconds as an exact Decimal; multiplying a float would round."""
    return Decimal(repr(seconds)).scaleb(3)


def dump_json(value: object) -> str:
    """A row as JSON. Unlike json.dumps it can write a Decimal."""
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)}: {dump_json(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(dump_json, value)) + "]"
    return json.dumps(value, allow_nan=False)
