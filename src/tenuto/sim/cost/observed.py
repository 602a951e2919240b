"""Steps and transfers that really ran, one JSON object per line.

{"prefills": [[2048, 0]], "decodes": [8192, 310], "seconds": 0.0471}    chunks are [tokens, context tokens]
{"num_bytes": 33554432, "seconds": 0.00068}                             a copy between GPU and host memory
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from tenuto.core.errors import ConfigError, DataError
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
    """The steps and the transfers in a file; empty lines are skipped.

    Raises:
        DataError: a line is malformed; the message names file, line and field.
    """
    steps: list[ObservedStep] = []
    transfers: list[ObservedTransfer] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = _parse(line)
        except (ValueError, ConfigError) as error:
            raise DataError(f"{path}:{number}: {error}") from error
        if isinstance(record, ObservedStep):
            steps.append(record)
        else:
            transfers.append(record)
    return steps, transfers


def _parse(line: str) -> ObservedStep | ObservedTransfer:
    values = json.loads(line)
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    seconds = values.get("seconds")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise ValueError(f"field 'seconds' must be a positive number, not {seconds!r}")
    if "num_bytes" in values:
        return ObservedTransfer(_whole_numbers("num_bytes", [values["num_bytes"]])[0], seconds)
    chunks, contexts = values.get("prefills", []), values.get("decodes", [])
    if not isinstance(chunks, list) or any(
        not isinstance(chunk, list) or len(chunk) != 2 for chunk in chunks
    ):
        raise ValueError(f"field 'prefills' must be a list of [tokens, context tokens], not {chunks!r}")
    batch = StepBatch.of(
        prefills=[(n, c) for n, c in (_whole_numbers("prefills", chunk) for chunk in chunks)],
        decodes=_whole_numbers("decodes", contexts),
    )
    if not batch.num_prefills and not batch.num_decodes:
        raise ValueError("field 'prefills' or 'decodes' must not be empty")
    return ObservedStep(batch, seconds)


def _whole_numbers(field: str, values: Any) -> list[int]:
    if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"field {field!r} must hold whole numbers of 0 or more, not {values!r}")
    return values
