"""Step times fitted to observed steps, which `tenuto profile` times on a server.

    prefill step:  a + b * tokens + c * pairs             (pairs: sum of n * (context + n / 2))
    decode step:   a + b * decodes + c * context tokens
    transfer:      a + b * bytes                          (1 / b is the link's bandwidth)

No coefficient is negative: more work never takes less time. A step with prefills and decodes reads the
weights once. So its decodes count as prefill tokens, and the cost of their contexts is added.

A file of observed steps and transfers has what ran and how long it took, one JSON object per line:

    {"prefills": [[2048, 0]], "decodes": [8192, 310], "seconds": 0.0471}   chunks are [tokens, context tokens]
    {"num_bytes": 33554432, "seconds": 0.00068}                            a copy between GPU and host memory
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NamedTuple

from tenuto.core.errors import ConfigError, DataError, clean
from tenuto.records import codec
from tenuto.records.codec import MAX_TOKENS, Fields, Range, show
from tenuto.records.files import read_first, read_objects
from tenuto.records.load import FIT, STEP_TIMES, check_kind
from tenuto.sim.cost.batch import StepBatch, StepCost


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
    objects = read_objects(path)
    check_kind(objects[0], STEP_TIMES)
    for fields in objects:
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


# The features are dependent if their smallest singular value is at most this share of the largest.
_SINGULAR = 1e-6


@dataclass(frozen=True)
class Line:
    """A linear fit and how well it fits.

    Attributes:
        coefficients: the constant in seconds, then seconds per unit of each feature.
        num_observations: how many observations it was fitted to.
        r_squared: share of the variance explained; 1.0 where the observations do not vary.
        worst_residual_s: the largest distance of an observation from the fit.
    """

    coefficients: tuple[float, ...]
    num_observations: int
    r_squared: Annotated[float, Range(-math.inf, 1.0)]
    worst_residual_s: float

    def at(self, *features: float) -> float:
        """The fitted seconds."""
        constant, *slopes = self.coefficients
        return constant + sum(slope * x for slope, x in zip(slopes, features, strict=True))


def fit_line(what: str, features: Sequence[Sequence[float]], seconds: Sequence[float]) -> Line:
    """Seconds as a constant plus a slope per feature, none of them negative.

    `features` has a row per observation; `what` names the observations in errors. Raises DataError if there
    are fewer of them than coefficients, or if the features do not vary independently.
    """
    # Only fitting needs these; a simulation that uses a fit does not.
    import numpy as np
    from scipy.optimize import nnls

    num_coefficients = len(features[0]) + 1 if features else 1
    if len(features) < num_coefficients or len(features) < 2:
        raise DataError(
            f"{what}: {len(features)} observations are too few for {num_coefficients} coefficients"
        )
    matrix = np.column_stack([np.ones(len(features)), np.asarray(features, dtype=float)])
    # Tokens and pairs of tokens differ by orders of magnitude, so each column is scaled to at most 1.
    scales = np.abs(matrix).max(axis=0)
    scales[scales == 0] = 1.0
    matrix /= scales
    singular_values = np.linalg.svd(matrix, compute_uv=False)
    if singular_values[-1] <= _SINGULAR * singular_values[0]:
        raise DataError(f"{what}: the observations vary too little to tell the coefficients apart")
    measured = np.asarray(seconds, dtype=float)
    coefficients, _ = nnls(matrix, measured)
    residuals = measured - matrix @ coefficients
    variation = float(((measured - measured.mean()) ** 2).sum())
    return Line(
        coefficients=tuple(map(float, coefficients / scales)),
        num_observations=len(seconds),
        r_squared=1 - float(residuals @ residuals) / variation if variation else 1.0,
        worst_residual_s=float(np.abs(residuals).max()),
    )


@dataclass(frozen=True)
class FittedStepCost(StepCost):
    """A step cost from two fits. `link` is the host link's fit; None if no transfer was observed."""

    prefill: Line
    decode: Line
    link: Line | None = None
    poor: tuple[str, ...] = ()
    """Reasons why the fit is poor, a sentence each."""

    def seconds(self, batch: StepBatch) -> float:
        """Seconds of one step; 0.0 for an empty batch. Includes the host time of the observed steps."""
        if batch.num_prefills:
            num_tokens = batch.num_prefill_tokens + batch.num_decodes
            context_s = self.decode.coefficients[2] * batch.num_decode_context_tokens
            return self.prefill.at(num_tokens, batch.num_prefill_pairs) + context_s
        if batch.num_decodes:
            return self.decode.at(batch.num_decodes, batch.num_decode_context_tokens)
        return 0.0

    @property
    def link_bytes_per_s(self) -> float | None:
        """Bandwidth of the host link; None if no transfer was observed."""
        return 1 / self.link.coefficients[1] if self.link else None

    def save(self, path: Path) -> None:
        """Write the fits as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> FittedStepCost:
        """Read what `save` wrote. Raises DataError, which names file and field, for anything else."""
        fields = read_first(path)
        check_kind(fields, FIT)
        cost = codec.read(cls, fields)
        for name, line, num_coefficients in (
            ("prefill", cost.prefill, 3),
            ("decode", cost.decode, 3),
            ("link", cost.link, 2),
        ):
            if line is None:
                continue
            part, given = fields.part(name), line.coefficients
            if len(given) != num_coefficients:
                raise part.error("coefficients", f"must be {num_coefficients} numbers, got {len(given)}")
            if not any(given):
                raise part.error("coefficients", "must not all be 0: steps take time")
            if name == "link" and given[1] == 0:
                raise part.error("coefficients", "the second must be above 0: it is the time of a byte")
        return replace(cost, poor=tuple(map(clean, cost.poor)))


def fit_step_cost(
    steps: Sequence[ObservedStep], transfers: Sequence[ObservedTransfer] = ()
) -> FittedStepCost:
    """Fit to the steps that only prefill and to those that only decode; mixed steps are left out.

    Raises DataError if there are too few steps of one kind, or they do not determine its coefficients.
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


MAX_ERROR = 0.15
"""Mean relative error above which a fit is poor."""
MIN_R_SQUARED = 0.9
"""A fit that explains less of the variance is poor, unless its errors are small."""
SMALL_ERROR = 0.05
"""If all times are about equal, there is no variance to explain. Then this mean relative error is enough."""


def get_errors(cost: FittedStepCost, steps: Iterable[ObservedStep]) -> dict[str, float]:
    """The mean relative error of steps that only prefill, of those that only decode, and of mixed ones."""
    found: dict[str, list[float]] = {"prefill": [], "decode": [], "mixed": []}
    for step in steps:
        batch = step.batch
        kind = "prefill" if not batch.num_decodes else "mixed" if batch.num_prefills else "decode"
        found[kind].append(abs(cost.seconds(batch) / step.seconds - 1))
    return {kind: fmean(errors) for kind, errors in found.items() if errors}


def find_poor(
    cost: FittedStepCost, steps: Sequence[ObservedStep], transfers: Sequence[ObservedTransfer] = ()
) -> tuple[str, ...]:
    """Return a sentence for each part of the fit that does not describe the observations."""
    errors = get_errors(cost, steps)
    parts = [("prefill", cost.prefill, errors["prefill"]), ("decode", cost.decode, errors["decode"])]
    if cost.link is not None:
        link_errors = [abs(cost.link.at(each.num_bytes) / each.seconds - 1) for each in transfers]
        parts.append(("link", cost.link, fmean(link_errors)))
    return tuple(
        f"the {name} fit is poor: R2 {line.r_squared:.2f}, and it is {error:.0%} off in the mean (good: R2 "
        f"of {MIN_R_SQUARED:g} or more, {MAX_ERROR:.0%} or less)"
        for name, line, error in parts
        if error > MAX_ERROR or (line.r_squared < MIN_R_SQUARED and error > SMALL_ERROR)
    )


SHOWN = 12
"""Steps in the printed table, those farthest from the fit; --json has all."""


POOR = 1
"""Exit status: the fit is poor, so it was not written."""


def run_fit(paths: Sequence[Path], out: Path, *, force: bool = False, as_json: bool = False) -> int:
    """Fit the observations of all files together, print how good the fit is, and write it.

    A poor fit is written only with `force`, and the file then says that it is poor. Returns the exit status.
    """
    found = [read_observations(path) for path in paths]
    steps = [step for of_file, _ in found for step in of_file]
    transfers = [transfer for _, of_file in found for transfer in of_file]
    cost = fit_step_cost(steps, transfers)
    cost = replace(cost, poor=find_poor(cost, steps, transfers))
    rows = make_rows(cost, steps)
    is_written = force or not cost.poor
    if is_written:
        try:
            cost.save(out)
        except OSError as error:
            raise DataError(f"--out: cannot write {out}: {error.strerror or error}") from error
    if as_json:
        print(json.dumps({"fit": asdict(cost), "steps": rows, "written": is_written}))
    else:
        for reason in cost.poor:
            print(f"POOR: {reason}.")
        end = _describe_end(cost, out, is_written=is_written)
        print(format_fit(cost, get_errors(cost, steps)), format_rows(rows), end, sep="\n\n")
    return 0 if is_written else POOR


def _describe_end(cost: FittedStepCost, out: Path, *, is_written: bool) -> str:
    use = f"tenuto simulate --step-cost {out} ..."
    if not cost.poor:
        return f"written to {out}: {use}"
    if is_written:
        return f"written to {out} all the same (--force); {use} will say that it is poor"
    return (
        f"not written to {out}: what is simulated with a poor fit means little. Was the server idle, alone "
        "on its machine, and is --step-tokens no more than its --max-num-batched-tokens? Time it again, with "
        "more --repeats if single times scatter; --force writes the fit as it is"
    )


def make_rows(cost: FittedStepCost, steps: Sequence[ObservedStep]) -> list[dict[str, Any]]:
    """Each measured step and its fitted time; mixed steps too, although the fit does not use them."""
    return [
        {
            **step.batch._asdict(),
            "observed_s": step.seconds,
            "fitted_s": cost.seconds(step.batch),
            "error": cost.seconds(step.batch) / step.seconds - 1,
        }
        for step in steps
    ]


def format_fit(cost: FittedStepCost, errors: Mapping[str, float]) -> str:
    """The coefficients, and the errors of the fit. `errors`: mean relative errors by kind of step."""
    lines = [
        f"{'':8} {'steps':>5}  {'R2':>6}  {'off':>5}  {'worst':>9}  seconds",
        _format_line("prefill", cost.prefill, ("token", "pair"), errors),
        _format_line("decode", cost.decode, ("decode", "context token"), errors),
    ]
    if cost.link is not None and cost.link_bytes_per_s is not None:
        lines.append(_format_line("link", cost.link, ("byte",), errors))
        lines.append(f"link bandwidth {cost.link_bytes_per_s / 1e9:.2f} GB/s")
    return "\n".join(lines)


def format_rows(rows: Sequence[dict[str, Any]]) -> str:
    """The steps with the largest errors, the worst first."""
    worst = sorted(rows, key=lambda row: -abs(row["error"]))[:SHOWN]
    lines = [
        f"{'prefill tokens':>14} {'decodes':>8} {'context':>8} {'observed':>11} {'fitted':>11} {'error':>7}"
    ]
    for row in worst:
        context = row["num_prefill_context_tokens"] + row["num_decode_context_tokens"]
        lines.append(
            f"{row['num_prefill_tokens']:14} {row['num_decodes']:8} {context:8} "
            f"{row['observed_s'] * 1000:8.2f} ms {row['fitted_s'] * 1000:8.2f} ms {row['error']:+7.1%}"
        )
    if len(rows) > len(worst):
        lines.append(f"the {len(worst)} of {len(rows)} steps that are farthest off; all with --json")
    return "\n".join(lines)


def _format_line(name: str, line: Line, units: Sequence[str], errors: Mapping[str, float]) -> str:
    off = f"{errors[name]:.1%}" if name in errors else "–"
    constant, *slopes = line.coefficients
    terms = "".join(f" + {slope:.3g} per {unit}" for slope, unit in zip(slopes, units, strict=True))
    return (
        f"{name:8} {line.num_observations:5}  {line.r_squared:6.3f}  {off:>5}  "
        f"{line.worst_residual_s * 1000:6.2f} ms  "
        f"{constant:.3g}{terms}"
    )
