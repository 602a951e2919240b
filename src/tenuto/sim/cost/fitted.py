"""Step times fitted to observed steps.

    prefill step:  a + b * tokens + c * pairs             (pairs: sum of n * (context + n / 2))
    decode step:   a + b * decodes + c * context tokens
    transfer:      a + b * bytes                          (1 / b is the link's bandwidth)

No coefficient is negative: more work never takes less time. A step with prefills and decodes reads the
weights once, so its decodes are counted as tokens of the prefill, and the cost of their contexts is added.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tenuto.core.errors import DataError
from tenuto.core.messages import clean
from tenuto.records.fields import Fields
from tenuto.records.files import read_first
from tenuto.sim.cost.batch import StepBatch
from tenuto.sim.cost.least_squares import Line, fit_line
from tenuto.sim.cost.observed import ObservedStep, ObservedTransfer


@dataclass(frozen=True)
class FittedStepCost:
    """A step cost from two fits; `link` is the host link's fit, None where no transfer was observed."""

    prefill: Line
    decode: Line
    link: Line | None = None
    poor: tuple[str, ...] = ()
    """Why it does not describe the steps that it was fitted to, a sentence for each reason."""

    def seconds(self, batch: StepBatch) -> float:
        """Seconds of one step; 0.0 for an empty batch. Contains the host time that the observed steps had."""
        if batch.num_prefills:
            num_tokens = batch.num_prefill_tokens + batch.num_decodes
            context_s = self.decode.coefficients[2] * batch.num_decode_context_tokens
            return self.prefill.at(num_tokens, batch.num_prefill_pairs) + context_s
        if batch.num_decodes:
            return self.decode.at(batch.num_decodes, batch.num_decode_context_tokens)
        return 0.0

    @property
    def link_bytes_per_s(self) -> float | None:
        """Bandwidth of the host link; None where no transfer was observed."""
        return 1 / self.link.coefficients[1] if self.link else None

    def save(self, path: Path) -> None:
        """Write the fits as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> FittedStepCost:
        """Read what `save` wrote.

        Raises:
            DataError: the file is something else; the message names file and field.
        """
        fields = read_first(path)
        return cls(
            prefill=_read_line(fields.part("prefill"), num_coefficients=3),
            decode=_read_line(fields.part("decode"), num_coefficients=3),
            link=_read_line(fields.part("link"), num_coefficients=2) if "link" in fields else None,
            poor=_read_sentences(fields),
        )


def fit_step_cost(
    steps: Sequence[ObservedStep], transfers: Sequence[ObservedTransfer] = ()
) -> FittedStepCost:
    """Fit to the steps that only prefill and to those that only decode; mixed steps are left out.

    Raises:
        DataError: there are too few steps of one kind, or they do not tell its coefficients apart.
    """
    prefills = [step for step in steps if not step.batch.num_decodes]
    decodes = [step for step in steps if not step.batch.num_prefills]
    return FittedStepCost(
        prefill=fit_line(
            "prefill steps, by tokens and pairs",
            [(step.batch.num_prefill_tokens, step.batch.num_prefill_pairs) for step in prefills],
            [step.seconds for step in prefills],
        ),
        decode=fit_line(
            "decode steps, by decodes and context tokens",
            [(step.batch.num_decodes, step.batch.num_decode_context_tokens) for step in decodes],
            [step.seconds for step in decodes],
        ),
        link=_fit_link(transfers) if transfers else None,
    )


def _fit_link(transfers: Sequence[ObservedTransfer]) -> Line:
    line = fit_line(
        "transfers, by bytes", [(t.num_bytes,) for t in transfers], [t.seconds for t in transfers]
    )
    if line.coefficients[1] == 0:
        raise DataError("transfers, by bytes: larger ones do not take longer, so they show no bandwidth")
    return line


def _read_sentences(fields: Fields) -> tuple[str, ...]:
    value = fields.values.get("poor") or []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise fields.error("poor", "must be a list of sentences")
    return tuple(map(clean, value))


def _read_line(fields: Fields, num_coefficients: int) -> Line:
    coefficients = fields.numbers("coefficients")
    if len(coefficients) != num_coefficients:
        raise fields.error("coefficients", f"must be {num_coefficients} numbers, got {len(coefficients)}")
    return Line(
        coefficients,
        fields.count("num_observations"),
        fields.number("r_squared", 1.0, -math.inf),
        fields.number("worst_residual_s"),
    )
