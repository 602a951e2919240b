"""`tenuto simulate`: one workload on one simulated GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tenuto.cli.command import Command, Part
from tenuto.cli.options import Given
from tenuto.cli.progress import Progress
from tenuto.cli.simulations import PolicyOptions, make_folder, say_notes
from tenuto.core.policy_loader import load_policy
from tenuto.core.settings import Options, option
from tenuto.sim.fleet.options import FleetOptions
from tenuto.sim.setup import Setup
from tenuto.workload.load_options import LoadOptions

_SUMMARY = """\
Run one workload on one simulated GPU: vLLM's scheduler decision by decision, GPU time from measured tables.
It needs no GPU and no vLLM.
"""

_EXAMPLES = """\
examples:
  tenuto simulate --gpu H200 --policy continuum-fixed --jps 6
  tenuto simulate --gpu H100 --policy tenuto --workload sessions/ --jps 0.05 --out runs/mine
  tenuto simulate --gpu A100-80 --policy stock --offload async --host-gb 200 --workload swe-bench --jps 1
"""

_NOTES = """\
It prints the result. With --out DIR it also writes every turn (turns.jsonl) and the KV cache over time
(occupancy.jsonl), for `tenuto report` and `tenuto analyze`.
"""


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(Options):
    """The result's."""

    GROUP = "the result"

    out: Path | None = option(None, "write result, turns and occupancy here", metavar="DIR")
    trace: Path | None = option(None, "write every step, job and decision, as a server's trace (JSONL)")
    as_json: bool = option(False, "print the record as JSON instead of text", flag="--json")
    csv: Path | None = option(None, "write the result as a row of CSV too", is_written=True)
    strict: bool = option(False, "stop with an error when the policy raises or gives a wrong answer")


def run(given: Given) -> int:
    """Simulate one run."""
    from tenuto.api import run_simulation
    from tenuto.records.csv_file import write_csv
    from tenuto.records.text import format_run
    from tenuto.records.trace import TraceOptions, TraceWriter
    from tenuto.sim.occupancy import Occupancy, write_run
    from tenuto.sim.run import Extras

    options = given.read(SimulateOptions)
    setup = given.read(PolicyOptions).read_setup(given)
    load = given.read(LoadOptions)
    if options.out:
        make_folder(options.out)
    occupancy = Occupancy() if options.out else None
    watch = occupancy if setup.fleet is None else None  # several engines have no one KV cache
    policy = load_policy(setup.policy, setup.options)
    # The commands are in the workload's own file, so hiding them here would hide nothing.
    whole = TraceOptions(commands="full")
    trace = TraceWriter(str(options.trace), policy, setup.policy, whole) if options.trace else None
    progress = Progress()
    try:
        log = trace.write if trace else None
        extras = Extras(strict=options.strict, tell=_make_tell(progress), trace=trace)
        result = run_simulation(setup, load, extras=extras, watch=watch, log=log)
    finally:
        progress.clear()
        if trace:
            trace.close()
    say_notes(result.record["notes"])
    if options.out and occupancy:
        write_run(options.out, result.outcome, occupancy)
    if options.csv:
        write_csv(options.csv, [result.record])
    print(json.dumps(result.record) if options.as_json else format_run(result.record))
    return 0


def _make_tell(progress: Progress) -> Callable[[float, int, int], None]:
    def tell(now_s: float, num_done: int, num_turns: int) -> None:
        progress.tell(lambda: f"{now_s:.0f} s simulated, {num_done} of {num_turns} turns finished")

    return tell


COMMAND = Command(
    _SUMMARY,
    _EXAMPLES,
    (Part(PolicyOptions), Part(LoadOptions), Part(FleetOptions), Part(Setup), Part(SimulateOptions)),
    run,
    notes=_NOTES,
)
