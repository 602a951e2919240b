"""Observed steps and transfers: what really ran and how long it took, one JSON object per line.

{"prefills": [[2048, 0]], "decodes": [8192, 310], "seconds": 0.0471}    chunks are [tokens, context tokens]
{"num_bytes": 33554432, "seconds": 0.00068}                             a copy between GPU and host memory
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tenuto.core.errors import ConfigError, DataError
from tenuto.records.fields import MAX_TOKENS, Fields, show
from tenuto.records.files import read_objects
from tenuto.sim.cost.batch import StepBatch


class ObservedStep(NamedTuple):
    """One step that ran, and its wall time."""

    batch: StepBatch
    seconds: float


class ObservedTransfer(NamedTuple):
    """One copy between GPU and host memory, and its wall time."""

    num_bytes: int
    seconds: float


def read_observations(path: Path) -> tuple[list[ObservedStep], list[ObservedTransfer]]:
    """The steps and the transfers in a file. Raises DataError, which names file, line and field."""
    steps: list[ObservedStep] = []
    transfers: list[ObservedTransfer] = []
    for fields in read_objects(path):
        seconds = fields.number("seconds")
        if seconds == 0:
            raise fields.error("seconds", "must be more than 0")
        if "num_bytes" in fields:
            transfers.append(ObservedTransfer(fields.count("num_bytes"), seconds))
        else:
            steps.append(ObservedStep(_read_batch(fields), seconds))
    return steps, transfers


def _read_batch(fields: Fields) -> StepBatch:
    decodes = fields.optional(fields.integers, "decodes") or []
    if max(decodes, default=0) > MAX_TOKENS:
        raise fields.error("decodes", f"must be lengths of contexts up to {MAX_TOKENS} tokens")
    chunks = fields.values.get("prefills") or []
    if not isinstance(chunks, list) or not all(map(_is_chunk, chunks)):
        raise fields.error("prefills", f"must be a list of [tokens, context tokens], got {show(chunks)}")
    if not chunks and not decodes:
        raise fields.error("prefills", "is empty, and so is decodes; one of them must hold something")
    try:
        return StepBatch.of(prefills=[(tokens, context) for tokens, context in chunks], decodes=decodes)
    except ConfigError as error:
        raise DataError(f"{fields.place}: {error}") from None


def _is_chunk(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(type(n) is int and 0 <= n <= MAX_TOKENS for n in value)
    )
