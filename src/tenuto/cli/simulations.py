"""`tenuto simulate`, and what it shares with other commands on simulated GPUs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, replace
from pathlib import Path

from tenuto.cli.command import Command, Given, Part
from tenuto.core.console import Progress
from tenuto.core.loader import load_policy
from tenuto.core.settings import Options, option, parse_policy_options
from tenuto.records.files import writing
from tenuto.sim.hardware.gpus import GPUS, get_gpu
from tenuto.sim.setup import FleetOptions, Setup
from tenuto.workload.load import LoadOptions

# Shared: the choice of policies, the folder of --out, notes.


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(Options):
    """The options of one policy."""

    GROUP = "the policy"

    policy: str = option("tenuto", "see `tenuto policies`, or file.py:Class", metavar="NAME")
    options: tuple[str, ...] = option(
        (),
        "a policy's option; may be repeated, and be for one policy alone",
        flag="--option",
        metavar="[POLICY:]KEY=VALUE",
        is_repeatable=True,
    )

    def read_setup(self, given: Given) -> Setup:
        """The setup of the machine with this policy."""
        options = parse_policy_options(self.options, self.policy)
        fleet = given.read(FleetOptions).make_fleet()
        setup = given.read(Setup, policy=self.policy, options=options, fleet=fleet)
        return replace(setup, gpu=get_gpu(setup.gpu).name)


@dataclass(frozen=True, kw_only=True)
class GridOptions(Options):
    """The options of a grid: every kind of GPU with every policy."""

    GROUP = "what is compared"

    gpus: tuple[str, ...] = option(
        MISSING, f"the GPUs to simulate, of {', '.join(GPUS)}", flag="--gpu", metavar="A,B,…"
    )
    policies: tuple[str, ...] = option(
        MISSING, "see `tenuto policies`, or file.py:Class", metavar="A,B,…", alias="--policy"
    )
    options: tuple[str, ...] = option(
        (),
        "a policy's option; may be repeated, and be for one policy alone",
        flag="--option",
        metavar="[POLICY:]KEY=VALUE",
        is_repeatable=True,
    )

    def read_setups(self, given: Given) -> list[Setup]:
        """A machine for each GPU and policy, or a fleet for each of them with each router."""
        fleets = given.read(FleetOptions).make_fleets()
        return [replace(setup, fleet=fleet) for setup in self.make_setups(given) for fleet in fleets]

    def make_setups(self, given: Given) -> list[Setup]:
        """A machine for each GPU and policy."""
        return [
            given.read(
                Setup,
                gpu=get_gpu(gpu).name,
                policy=policy,
                options=parse_policy_options(self.options, policy),
                fleet=None,
            )
            for gpu in self.gpus
            for policy in self.policies
        ]


def say_notes(notes: Iterable[str]) -> None:
    """Print the notes about the machines, each once."""
    for note in dict.fromkeys(notes):
        print(f"note: {note}", file=sys.stderr, flush=True)


def make_folder(path: Path) -> None:
    """Make the folder of --out before anything runs. Raises ConfigError."""
    with writing(path, is_folder=True):
        path.mkdir(parents=True, exist_ok=True)


# tenuto simulate.

_SIMULATE_SUMMARY = """\
Run one workload on one simulated GPU: vLLM's scheduler decision by decision, GPU time from measured tables.
It needs no GPU and no vLLM.
"""

_SIMULATE_EXAMPLES = """\
examples:
  tenuto simulate --gpu H200 --policy continuum-fixed --jps 6
  tenuto simulate --gpu H100 --policy tenuto --workload sessions/ --jps 0.05 --out runs/mine
  tenuto simulate --gpu A100-80 --policy stock --offload async --host-gb 200 --workload swe-bench --jps 1
"""

_SIMULATE_NOTES = """\
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


def _run_simulate(given: Given) -> int:
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
    _SIMULATE_SUMMARY,
    _SIMULATE_EXAMPLES,
    (Part(PolicyOptions), Part(LoadOptions), Part(FleetOptions), Part(Setup), Part(SimulateOptions)),
    _run_simulate,
    notes=_SIMULATE_NOTES,
    main=("gpu", "model", "policy", "workload", "jps", "window_s", "seed", "out", "as_json", "beside_stock"),
)
