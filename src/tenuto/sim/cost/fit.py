"""Fitting observed steps: what `tenuto profile` prints and writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tenuto.core.errors import DataError
from tenuto.sim.cost import (
    FittedStepCost,
    ObservedStep,
    ObservedTransfer,
    fit_step_cost,
    read_observations,
)
from tenuto.sim.cost.least_squares import Line

SHOWN = 12
"""Steps in the printed table, those farthest from the fit; --json has all."""


def run_fit(paths: Sequence[Path], out: Path, *, as_json: bool = False) -> int:
    """Fit the observations of some files together, write the fit and print how good it is."""
    steps: list[ObservedStep] = []
    transfers: list[ObservedTransfer] = []
    for path in paths:
        found_steps, found_transfers = _read(path)
        steps += found_steps
        transfers += found_transfers
    cost = fit_step_cost(steps, transfers)
    rows = make_rows(cost, steps)
    try:
        cost.save(out)
    except OSError as error:
        raise DataError(f"--out: cannot write {out}: {error.strerror or error}") from error
    if as_json:
        print(json.dumps({"fit": json.loads(out.read_text(encoding="utf-8")), "steps": rows}))
    else:
        print(format_fit(cost))
        print()
        print(format_rows(rows))
        print(f"\nwritten to {out}: tenuto simulate --step-cost {out} ...")
    return 0


def make_rows(cost: FittedStepCost, steps: Sequence[ObservedStep]) -> list[dict[str, Any]]:
    """Each step as it was and as it is fitted; mixed steps too, though they are not fitted to."""
    return [
        {
            **step.batch._asdict(),
            "observed_s": step.seconds,
            "fitted_s": cost.seconds(step.batch),
            "error": cost.seconds(step.batch) / step.seconds - 1,
        }
        for step in steps
    ]


def format_fit(cost: FittedStepCost) -> str:
    """The coefficients, and how far the observations are from them."""
    lines = [f"{'':8} {'steps':>5}  {'R2':>6}  {'worst':>9}  seconds"]
    lines.append(_format_line("prefill", cost.prefill, ("token", "pair")))
    lines.append(_format_line("decode", cost.decode, ("decode", "context token")))
    if cost.link is not None and cost.link_bytes_per_s is not None:
        lines.append(_format_line("link", cost.link, ("byte",)))
        lines.append(f"link bandwidth {cost.link_bytes_per_s / 1e9:.2f} GB/s")
    return "\n".join(lines)


def format_rows(rows: Sequence[dict[str, Any]]) -> str:
    """The steps that are farthest from the fit, the worst first."""
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


def _format_line(name: str, line: Line, units: Sequence[str]) -> str:
    constant, *slopes = line.coefficients
    terms = "".join(f" + {slope:.3g} per {unit}" for slope, unit in zip(slopes, units, strict=True))
    return (
        f"{name:8} {line.num_observations:5}  {line.r_squared:6.3f}  {line.worst_residual_s * 1000:6.2f} ms  "
        f"{constant:.3g}{terms}"
    )


def _read(path: Path) -> tuple[list[ObservedStep], list[ObservedTransfer]]:
    try:
        return read_observations(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text: {error}") from error
