"""`tenuto simulate`: one workload on one simulated GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tenuto.cli.command import Command, Given, Part
from tenuto.cli.simulations import PolicyOptions, make_folder, say_notes
from tenuto.core.console import Progress
from tenuto.core.loader import load_policy
from tenuto.core.settings import Options, option
from tenuto.sim.setup import FleetOptions, Setup
from tenuto.workload.load import LoadOptions

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
It prints the result, and next to it the result of stock as shipped on the same load, unless --no-beside-stock
is given. If stock's steps are too large, a smaller step size may gain as much: `tenuto compare` shows it.
With --out DIR it also writes every turn (turns.jsonl) and the KV cache over time (occupancy.jsonl), for
`tenuto report` and `tenuto analyze`.
"""


_OF_STOCK = (
    *("job_s", "slowdown", "ttft_s", "reused_tokens", "reusable_tokens", "recomputed_tokens"),
    *("offered_jps", "finished_jps", "step_cost"),
)
"""The fields of stock's run in JSON and CSV."""


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(Options):
    """The options of the result."""

    GROUP = "the result"

    out: Path | None = option(None, "write result, turns and occupancy here", metavar="DIR")
    trace: Path | None = option(None, "write every step, job and decision, as a server's trace (JSONL)")
    as_json: bool = option(False, "print the record as JSON instead of text", flag="--json")
    csv: Path | None = option(None, "write the result as a row of CSV too", is_written=True)
    ledger: Path | None = option(
        None, "write what each job and tenant used as CSV, as `tenuto ledger` does", is_written=True
    )
    beside_stock: bool = option(
        True, "also run stock as shipped on the same load, and say what it would do; one more run"
    )
    strict: bool = option(False, "stop with an error when the policy raises or gives a wrong answer")


def run(given: Given) -> int:
    """Simulate one run."""
    from tenuto.records.text import format_beside, format_run, write_csv
    from tenuto.records.trace import TraceOptions, TraceWriter
    from tenuto.sim.fidelity import get_error
    from tenuto.sim.run import Extras, Occupancy, write_run
    from tenuto.sim.run import run as simulate

    options = given.read(SimulateOptions)
    setup = given.read(PolicyOptions).read_setup(given)
    load = given.read(LoadOptions)
    if options.out:
        make_folder(options.out)
    occupancy = Occupancy() if options.out else None
    watch = occupancy if setup.fleet is None else None  # several engines have no common KV cache
    policy = load_policy(setup.policy, setup.options)
    # The commands are in the workload's own file, so hiding them here would hide nothing.
    whole = TraceOptions(commands="full")
    trace = TraceWriter(str(options.trace), policy, setup.policy, whole) if options.trace else None
    progress = Progress()
    try:
        log = trace.write if trace else None
        extras = Extras(
            strict=options.strict,
            tell=_make_tell(progress, ""),
            trace=trace,
            keeps_ledger=options.ledger is not None,
        )
        outcome = simulate(setup, load, extras=extras, watch=watch, log=log)
    finally:
        progress.clear()
        if trace:
            trace.close()
    record = outcome.record
    say_notes(record["notes"])
    error = get_error(record["gpu"], record["policy"], record["step_cost"])
    if options.out and occupancy:
        write_run(options.out, outcome, occupancy)
    if not options.as_json:
        print(format_run(record), flush=True)
        print(f"such means   were off by {error}", flush=True)
    record = {**record, "known_error": error.to_json()}
    shipped = replace(setup, policy="stock", options={}, step_tokens=None, keep_kv=True)
    if options.beside_stock and setup != shipped:
        with progress.cleared():
            extras = Extras(tell=_make_tell(progress, "stock, to compare with: "))
            stock = simulate(shipped, load, extras=extras).record
        record = {**record, "stock": {name: stock[name] for name in _OF_STOCK}}
        if not options.as_json:
            print(format_beside(record, stock))
    if options.ledger:
        from tenuto.client.control import join_ranks, write_rows

        write_rows(options.ledger, join_ranks(outcome.ledgers)[0])
    if options.csv:
        write_csv(options.csv, [record])
    if options.as_json:
        print(json.dumps(record))
    return 0


def _make_tell(progress: Progress, what: str) -> Callable[[float, int, int], None]:
    def tell(now_s: float, num_done: int, num_turns: int) -> None:
        progress.tell(lambda: f"{what}{now_s:.0f} s simulated, {num_done} of {num_turns} turns finished")

    return tell


SIMULATE = Command(
    _SUMMARY,
    _EXAMPLES,
    (Part(PolicyOptions), Part(LoadOptions), Part(FleetOptions), Part(Setup), Part(SimulateOptions)),
    run,
    notes=_NOTES,
    main=("gpu", "model", "policy", "workload", "jps", "window_s", "seed", "out", "as_json", "beside_stock"),
)
