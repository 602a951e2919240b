"""`tenuto plan`: the fewest GPUs for a load."""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, dataclass
from typing import Any

from tenuto.cli.command import Command, Part
from tenuto.cli.options import Given
from tenuto.cli.simulations import GridOptions, say_notes
from tenuto.core.settings import option
from tenuto.sim.setup import Setup
from tenuto.sim.sweep.cells import Cell, check_cells, make_cells, run_cell
from tenuto.sim.sweep.plan import drop_too_small, format_plans, get_best, make_plans
from tenuto.workload.load_options import LoadOptions

_SUMMARY = """\
Find the fewest GPUs, of which kind and with which policy, that keep the P95 job time within a target.
It searches over the simulator: machines are independent behind a router with session affinity.
"""

_EXAMPLES = """\
examples:
  tenuto plan --gpu H100,H200,L40S --workload swe-bench --window 300 --jps 4 --p95 60 --policies stock,tenuto
"""

_NOTES = """\
Exit status: 0 if some number of GPUs suffices, 1 if none does.
"""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(GridOptions):
    """The search's."""

    GROUP = "the search"

    policies: tuple[str, ...] = option(
        ("stock", "tenuto"), "see `tenuto policies`", metavar="A,B,…", alias="--policy"
    )
    p95_s: float = option(MISSING, "P95 job time to keep, seconds", above=0)
    jps: float = option(MISSING, "jobs arriving per second, in all", above=0)
    max_machines: int = option(64, "most machines to try", minimum=1)
    as_json: bool = option(False, "print JSON instead of text", flag="--json")


def run(given: Given) -> int:
    """Search, and print the plans."""
    options = given.read(PlanOptions)
    setups, left_out = drop_too_small(options.read_setups(given))
    load = given.read(LoadOptions, jps=options.jps)
    say_notes([*left_out, *check_cells(make_cells(setups, [load]))])

    def run_and_say(cell: Cell) -> dict[str, Any]:
        record = run_cell(cell)
        print(f"{cell.title}: P95 {record['job_s']['p95']:.1f} s", file=sys.stderr, flush=True)
        return record

    plans = list(make_plans(setups, load, options.p95_s, max_machines=options.max_machines, run=run_and_say))
    if options.as_json:
        print(json.dumps([plan.to_json() for plan in plans]))
    else:
        print(format_plans(plans, options.p95_s))
    return 0 if get_best(plans) else 1


COMMAND = Command(
    _SUMMARY,
    _EXAMPLES,
    (Part(PlanOptions), Part(LoadOptions, without=("jps",)), Part(Setup, without=("gpu",))),
    run,
    notes=_NOTES,
)
