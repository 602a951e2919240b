"""Fitting observed steps: what `tenuto profile` prints and writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
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
from tenuto.sim.cost.quality import find_poor, get_errors

SHOWN = 12
"""Steps in the printed table, those farthest from the fit; --json has all."""


POOR = 1
"""Exit status: the fit is poor, so it was not written."""


def run_fit(paths: Sequence[Path], out: Path, *, force: bool = False, as_json: bool = False) -> int:
    """Fit the observations of some files together, print how good the fit is, and write it.

    A poor fit is written only with `force`, and then says so itself. Returns the exit status.
    """
    steps: list[ObservedStep] = []
    transfers: list[ObservedTransfer] = []
    for path in paths:
        found_steps, found_transfers = _read(path)
        steps += found_steps
        transfers += found_transfers
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
        print(format_fit(cost, get_errors(cost, steps)))
        print()
        print(format_rows(rows))
        print()
        print(_describe_end(cost, out, is_written=is_written))
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


def format_fit(cost: FittedStepCost, errors: Mapping[str, float]) -> str:
    """The coefficients, and how far the observations are from them. `errors`: mean relative ones, by kind."""
    lines = [f"{'':8} {'steps':>5}  {'R2':>6}  {'off':>5}  {'worst':>9}  seconds"]
    lines.append(_format_line("prefill", cost.prefill, ("token", "pair"), errors))
    lines.append(_format_line("decode", cost.decode, ("decode", "context token"), errors))
    if cost.link is not None and cost.link_bytes_per_s is not None:
        lines.append(_format_line("link", cost.link, ("byte",), errors))
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


def _format_line(name: str, line: Line, units: Sequence[str], errors: Mapping[str, float]) -> str:
    off = f"{errors[name]:.1%}" if name in errors else "–"
    constant, *slopes = line.coefficients
    terms = "".join(f" + {slope:.3g} per {unit}" for slope, unit in zip(slopes, units, strict=True))
    return (
        f"{name:8} {line.num_observations:5}  {line.r_squared:6.3f}  {off:>5}  "
        f"{line.worst_residual_s * 1000:6.2f} ms  "
        f"{constant:.3g}{terms}"
    )


def _read(path: Path) -> tuple[list[ObservedStep], list[ObservedTransfer]]:
    try:
        return read_observations(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text: {error}") from error
