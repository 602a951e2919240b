"""`tenuto analyze` and `report`: what the files of runs say."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass
from pathlib import Path

from tenuto.cli.command import Command, Given, Part, needing
from tenuto.core.errors import ConfigError
from tenuto.core.settings import Options, option


@dataclass(frozen=True, kw_only=True)
class AnalyzeOptions(Options):
    """All options."""

    files: tuple[Path, ...] = option(MISSING, "a file or a run's folder", metavar="FILE", is_positional=True)
    jobs: tuple[str, ...] = option(
        (),
        "show this job turn by turn; a pattern with * and ? shows several",
        flag="--job",
        metavar="ID",
        is_repeatable=True,
    )
    timestamps: Path | None = option(
        None, "write the run as the Continuum prototype's scheduler_timestamps; of one file", metavar="OUT"
    )
    as_json: bool = option(False, "print the report as JSON instead of text", flag="--json")


def _run_analyze(given: Given) -> int:
    from tenuto.report.analyze import run_analyze, write_timestamps

    options = given.read(AnalyzeOptions)
    if options.timestamps:
        write_timestamps(options.files, options.timestamps)
    return run_analyze(list(options.files), jobs=list(options.jobs), as_json=options.as_json)


ANALYZE = Command(
    summary="""\
Say what happened in a run, what was lost and why.
Give it a trace of a scheduler, the folder of a run, a sweep or an `ab`, or a recording.
""",
    examples="""\
  tenuto analyze trace.jsonl
  tenuto analyze trace.jsonl --job task-17        one job turn by turn; '--job "*"' shows all
  tenuto analyze runs/stock runs/tenuto --json    two runs of the bench, for another program
  tenuto analyze results.jsonl                    which cells of a sweep have problems, and why
""",
    options=(Part(AnalyzeOptions),),
    run=_run_analyze,
    notes="""\
It reads (plain or gzip):
  a scheduler's trace               tenuto serve MODEL --trace FILE, tenuto simulate --trace FILE
  turns.jsonl, or its folder        tenuto bench --out DIR, tenuto simulate --out DIR
  a recording                       tenuto record --out FILE
  result.json, results.jsonl        of a run, a sweep or an `ab`: a diagnosis per record
  scheduler_timestamps              of the public Continuum prototype

It prints job completion times and queueing; the hit ratio and the saved tokens; how leases ended and how long
they lasted; each turn's hit and the best possible one (the part of its prompt that the previous prompt and
output cover), with the cause of the difference; T8/T1; and a diagnosis in words: linear growth, turn-2
explosion, link collapse, preemption storm, leases too short or reclaimed, prompts that change.
""",
)


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options):
    """All options."""

    GROUP = "the page"

    records: tuple[Path, ...] = option(
        MISSING, "files, and folders that are searched", metavar="RECORDS", is_positional=True
    )
    out: Path = option(Path("report.html"), "the page")
    figures: Path | None = option(None, "write every picture there, as PNG and SVG", metavar="DIR")
    trace_events: Path | None = option(None, "write the turns as Chrome trace events, for Perfetto")
    as_json: bool = option(False, "print the result as JSON instead of text", flag="--json")

    def __post_init__(self) -> None:
        super().__post_init__()
        for path, words in (
            (self.out, "--out is an HTML page; --figures DIR writes the pictures"),
            (self.figures, "--figures is a folder, for every picture as PNG and SVG"),
        ):
            if path is not None and path.suffix.lower() in (".jpg", ".pdf", ".png", ".svg"):
                raise ConfigError(f"{words}: got {path}")


def _run_report(given: Given) -> int:
    options = given.read(ReportOptions)
    with needing("report"):
        from tenuto.report.html.page import run_report
    return run_report(**asdict(options))


REPORT = Command(
    summary="""\
Make one HTML page from the records of runs: which policy wins where, and by how much. It needs no network.
RECORDS are files, or folders that are searched.
""",
    examples="""\
  tenuto compare --gpu H200 --policies stock,tenuto --jps 1,3,6 --seeds 41,42 --out sweep
  tenuto report sweep
      the sweep's page, as report.html
  tenuto report ab1
      a comparison of `tenuto ab`: the page says what its verdict says
  tenuto report runs/ --out page.html --figures figures
      and every picture as PNG and SVG, for papers
  tenuto report runs/h200-tenuto --trace-events trace.json
      and every turn as a trace that ui.perfetto.dev opens
""",
    options=(Part(ReportOptions),),
    run=_run_report,
    notes="""\
The first line says which policy wins, by how much, at which load, against which, and whether by simulation.
Charts show job completion times and cache hits against load, latency turn by turn, the KV cache over time,
and a timeline of jobs. At the end are the commands that make the runs again.

Two policies with the same seed are a pair. A policy wins if the 95 % interval of its pairs' ratios leaves out
1, as in `tenuto ab`. If 1 is inside it, nobody wins. Measured runs need 6 pairs. INVALID runs prove nothing.

The page is made from:
  result.json, results.jsonl   as `tenuto simulate`, `tenuto compare` and `tenuto bench` write them
  turns.jsonl                  beside a result: the timeline
  occupancy.jsonl              beside a result: the KV cache over time
  a scheduler's JSONL trace    of `tenuto serve --trace FILE`: both, of a live server
""",
)
