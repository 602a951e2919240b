"""What `tenuto validate` found on machines of users: docs/field-results.md, from their records.

    python -m experiments.tables.field_results            print it
    python -m experiments.tables.field_results --write    write it into the page

A record is a file of experiments/records/field. Its texts are a stranger's: they are cut, and make no markup.
"""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean

from experiments.command_line import make_parser
from experiments.results.tables import write_section
from tenuto.core.errors import clean
from tenuto.records.files import read_first
from tenuto.records.load import read_validation
from tenuto.records.schema import ValidatedRatio, ValidationRecord
from tenuto.records.text import MIN_PAIRS, format_validation, name_arm, name_machine

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "experiments" / "records" / "field"
PAGE = ROOT / "docs" / "field-results.md"
MAX_NAME = 60


def read_records(folder: Path = RECORDS) -> dict[str, ValidationRecord]:
    """The records by name of their file. Raises DataError."""
    return {path.stem: read_validation(read_first(path)) for path in sorted(folder.glob("*.json"))}


def format_page(records: dict[str, ValidationRecord]) -> str:
    """The part of the page between its marks."""
    gpus = {each.machine.gpu for each in records.values() if each.server.engine == "vllm"} - {None}
    if gpus:
        lines = [f"Records come from {len(gpus)} {'kind' if len(gpus) == 1 else 'kinds'} of GPU."]
    else:
        lines = ["**No record comes from a GPU.** Those below are of vLLM's CPU build, with a small model."]
    lines += [
        "",
        "| machine | model | vLLM | verdict | to stock as it is | simulated | to stock at its best step size "
        "| simulated | error of the simulator | plain requests |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(_make_row(each) for each in records.values()),
        "",
        "Ratios are of mean job times, with their 95 % intervals. An error is the simulated mean job time "
        "over the measured one, less 1, for each arm. Plain requests: time between tokens, over stock's.",
    ]
    for name, each in records.items():
        lines += ["", f"### {_escape(name_machine(each))}, {_escape(each.day)}", "", *_describe(name, each)]
    return "\n".join(lines)


def _make_row(record: ValidationRecord) -> str:
    server, main = record.server, {each.baseline: each for each in _get_main(record)}
    errors = [f"{name_arm(arm.name)} {arm.error:+.0%}" for arm in record.arms if arm.error is not None]
    cells = [
        name_machine(record),
        server.model,
        server.version or "–",
        record.verdict,
        *_format(main.get("stock")),
        *_format(main.get("stock-well-set")),
        ", ".join(errors) or "–",
        next((_format(each)[0] for each in record.ratios if each.measure == "plain_itl_s"), "–"),
    ]
    return f"| {' | '.join(map(_escape, cells))} |"


def _get_main(record: ValidationRecord) -> list[ValidatedRatio]:
    return [each for each in record.ratios if each.measure == "mean_job_s"]


def _format(each: ValidatedRatio | None) -> tuple[str, str]:
    if each is None or each.pairs < MIN_PAIRS:
        return "–", "–"
    span = "" if each.low is None or each.high is None else f" ({each.low:.2f} to {each.high:.2f})"
    return f"{each.ratio:.2f}{span}", "–" if each.simulated is None else f"{each.simulated:.2f}"


def _describe(name: str, record: ValidationRecord) -> list[str]:
    server, machine, load = record.server, record.machine, record.load
    jobs = "no load was chosen" if load is None else (
        f"{load.workload} at {load.jps:g} jobs/s for {load.window_s:g} s, lengths × {load.scale_lengths:g}"
    )  # fmt: skip
    facts = [
        f"load: {jobs}; {record.pairs_planned} pairs planned, {record.runs_per_start} in a row on one start",
        f"server: KV cache of {server.kv_tokens:,} tokens, steps of {server.max_num_batched_tokens:,} "
        f"tokens, {server.max_num_seqs} seats; {' '.join(server.flags) or 'no further flags'}",
        f"load average {machine.load_before} before, {machine.load_mean} in the mean during the runs (with "
        f"the servers and the client); {record.minutes:g} minutes",
    ]
    for arm in record.arms:
        if arm.mean_job_s:
            simulated = f", simulated {fmean(arm.simulated_job_s):.1f} s" if arm.simulated_job_s else ""
            hits = [each for each in (arm.reused_share, arm.simulated_reused_share) if each is not None]
            shares = " and ".join(f"{share:.0%}" for share in hits)
            facts.append(
                f"{name_arm(arm.name)}: mean job time {fmean(arm.mean_job_s):.1f} s{simulated}; reusable "
                f"tokens hit{' (and simulated)' if len(hits) == 2 else ''}: {shares or 'unknown'}"
            )
    lines = [*format_validation(record), *record.notes, *facts]
    return [
        *(f"- {_escape(line, 400)}" for line in lines),
        f"- [the record](../experiments/records/field/{name}.json)",
    ]


def _escape(text: str, most: int = MAX_NAME * 3) -> str:
    """Text without markup, as entities: Python-Markdown and GitHub do not escape the same characters."""
    return re.sub(r"[\\`*\[\]<>|&]", lambda match: f"&#{ord(match[0])};", clean(text)[:most])


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--write", action="store_true", help="write it into docs/field-results.md")
    if parser.parse_args().write:
        write_section(PAGE, "records", format_page(read_records()))
    else:
        print(format_page(read_records()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
