"""`tenuto plan`: the fewest GPUs for a load."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path

from tenuto.cli.command import Command, Given, Part
from tenuto.cli.simulations import GridOptions, say_notes
from tenuto.core.console import Progress, count
from tenuto.core.errors import ConfigError
from tenuto.core.settings import option
from tenuto.records.text import print_text, write_csv
from tenuto.sim.compare import Cell, check_cells
from tenuto.sim.fidelity import get_margin
from tenuto.sim.hardware.gpus import get_gpu
from tenuto.sim.plan import (
    NUM_CHANGES,
    Effect,
    Plan,
    SeedRunner,
    drop_too_small,
    format_effects,
    format_meaning,
    format_plans,
    get_best,
    make_plans,
    name_gpu,
    name_policy,
    try_changes,
)
from tenuto.sim.run import Extras
from tenuto.sim.setup import FleetOptions, Setup
from tenuto.sim.steady import Target, take_sample
from tenuto.workload.load import LoadOptions, seed_option

_CHANGES = -1
"""The number of the measurement of what changes the plan; setups are numbered from 0."""


def _read_prices(texts: Iterable[str]) -> dict[str, float]:
    """Prices by GPU, from texts such as `H100=2.5`. Raises ConfigError."""
    prices = {}
    for text in (part for each in texts for part in each.split(",") if part):
        gpu, _, price = text.partition("=")
        try:
            prices[get_gpu(gpu).name] = float(price)
        except ValueError:
            raise ConfigError(f"--price wants GPU=DOLLARS, for example H100=2.5; got {text!r}") from None
        if not 0 <= prices[get_gpu(gpu).name] < float("inf"):
            raise ConfigError(f"--price of {gpu} must be 0 or more and finite, got {price}")
    return prices


@dataclass(frozen=True, kw_only=True)
class PlanOptions(GridOptions):
    """The options of a plan."""

    GROUP = "the search"

    policies: tuple[str, ...] = option(
        ("stock", "tenuto"), "see `tenuto policies`", metavar="A,B,…", alias="--policy"
    )
    p95_s: float | None = option(None, "P95 job time to keep, seconds", above=0)
    p95_ttft_s: float | None = option(None, "P95 time to first token to keep, seconds", above=0)
    margin: float | None = option(
        None,
        "share of the targets that must be left over: with 0.1, the P95 may be 90 % of the target",
        metavar="SHARE",
        minimum=0,
        below=1,
        shown_default="the largest error of predictions that were too fast for such a GPU, at least 0.05",
    )
    jps: float = option(MISSING, "jobs arriving per second, in all", above=0, alias="--request-rate")
    seeds: tuple[int, ...] = seed_option((42, 43, 44), "a machine must be steady with each of these seeds")
    prices: dict[str, float] = option(
        dict,
        "dollars per GPU and hour; may be repeated. The cheapest plan is then the best",
        flag="--price",
        metavar="GPU=X",
        is_repeatable=True,
        read=_read_prices,
    )
    max_machines: int = option(64, "most machines to try", minimum=1)
    max_sim_jobs: int = option(
        2000, "give up a machine that is not steady after N jobs, with one seed", minimum=50
    )
    no_sensitivity: bool = option(
        False, "do not test how a little more load, longer jobs or slower steps change the plan"
    )
    workers: int | None = option(None, "processes", minimum=1, shown_default="one per core")
    as_json: bool = option(False, "print JSON instead of text", flag="--json")
    csv: Path | None = option(None, "write the table as CSV too", is_written=True)


def run(given: Given) -> int:
    """Search, and print the plans."""
    options = given.read(PlanOptions)
    seeds = tuple(dict.fromkeys(options.seeds))
    target = Target(p95_s=options.p95_s, p95_ttft_s=options.p95_ttft_s, margin=options.margin or 0.0)
    # With --router but without --servers, a fleet of one engine stands for any number.
    any_number = given.has("router") and not given.has("servers")
    wanted = options.read_setups(given, **({"servers": ("",)} if any_number else {}))
    _check_prices(options.prices, wanted)
    setups, left_out = drop_too_small(wanted)
    load = given.read(LoadOptions, jps=options.jps, seed=seeds[0])
    sample = Extras(workload=take_sample(load))
    say_notes([*left_out, *check_cells([Cell(setup, load, sample) for setup in setups])])
    progress = Progress()
    workers = options.workers or len(os.sched_getaffinity(0))
    plans: list[Plan] = []
    effects: list[Effect] = []
    runner = SeedRunner(seeds, workers=workers, max_jobs=options.max_sim_jobs, say=progress.tell)
    with progress.cleared(), runner as measure:
        num_changes = 0 if options.no_sensitivity else NUM_CHANGES
        measure.expect(_CHANGES, num_changes)
        found = make_plans(
            setups,
            load,
            target,
            measure,
            expect=measure.expect,
            max_machines=None if given.has("servers") else options.max_machines,
            prices=options.prices,
            get_margin=get_margin if options.margin is None else None,
            num_at_once=workers,
        )
        for plan in found:
            gpus = "no number of GPUs" if plan.num_gpus is None else count(plan.num_gpus, "GPU")
            progress.say(f"{name_gpu(plan)} {name_policy(plan)}: {gpus}: {plan.point}")
            plans.append(plan)
        best = get_best(plans)
        if best is not None and not options.no_sensitivity:
            for effect in try_changes(best, load, target, measure, num_at_once=workers):
                progress.say(f"{effect.name}: {effect.point}")
                effects.append(effect)
                measure.expect(_CHANGES, num_changes - len(effects))
    _print(options, plans, effects, target)
    if options.csv:
        write_csv(options.csv, [plan.to_json() for plan in plans])
    return 0 if best else 1


def _check_prices(prices: Mapping[str, float], setups: Iterable[Setup]) -> None:
    """Raise ConfigError for the price of a GPU that no plan has."""
    planned = {gpu for setup in setups for gpu in setup.engine_gpus}
    for gpu in prices:
        if gpu not in planned:
            raise ConfigError(f"--price of {gpu}: no plan has that GPU, only {', '.join(sorted(planned))}")


def _print(options: PlanOptions, plans: list[Plan], effects: list[Effect], target: Target) -> None:
    best = get_best(plans)
    if options.as_json:
        whole = {
            "target": {"p95_s": target.p95_s, "p95_ttft_s": target.p95_ttft_s},
            "plans": [plan.to_json() for plan in plans],
            "best": None if best is None else best.to_json(),
            "sensitivity": [effect.to_json() for effect in effects],
            "in_short": format_meaning(plans),
        }
        print(json.dumps(whole))
        return
    parts = [format_plans(plans, target)]
    if best is not None and effects:
        parts.append(format_effects(effects, best))
    if best is not None:
        parts.append(format_meaning(plans))
    print_text("\n\n".join(parts), options.csv)


PLAN = Command(
    summary="""\
Find the fewest GPUs that keep the P95 job time within a target, and their kind and policy. It searches with
the simulator. With --router, all machines are simulated behind that router. Without it, they are independent,
as behind a perfect router with session affinity.
""",
    examples="""\
  tenuto plan --gpu H100,H200,L40S --workload swe-bench --jps 4 --p95 120 --policies stock,tenuto
  tenuto plan --gpu H100 --router sticky-least-loaded --workload swe-bench --jps 4 --p95 120
  tenuto plan --gpu H100 --servers H100:2,L40S:4 --router tenuto --workload swe-bench --jps 4 --p95 120
  tenuto plan --gpu H100,L40S --price H100=2.5,L40S=0.9 --workload jobs.jsonl --jps 2 --p95-ttft 3
""",
    options=(
        Part(PlanOptions),
        Part(LoadOptions, without=("jps", "seed", "users", "max_jobs", "loop", "scale_rate", "goodput")),
        Part(FleetOptions, without=("faults",)),
        Part(Setup, without=("gpu",)),
    ),
    run=run,
    notes="""\
Each machine is simulated until it is steady: its warm-up is left out, and the number of jobs in it must
hardly grow, with every seed. A machine whose queue grows has no P95, because its times depend on the length
of the run. The plan calls it overloaded, and says how many jobs it finishes. An overload of less than about
5 % may not be seen. Near its capacity a machine may also count as not steady until --max-sim-jobs is higher.

So the answer does not depend on --window, which only sets the least time to simulate. The jobs of a trace are
repeated, in random order, each time as new jobs. A run ends as "too slow" if its P95 would exceed 1.3 times
the target less its margin, even if all open jobs had ended at that moment.

With --servers, only these machines are simulated, and no others are tried.

Exit status: 0 if some number of GPUs suffices, 1 if none does.
""",
    main=("gpus", "policies", "jps", "p95_s", "p95_ttft_s", "workload", "model", "tp", "prices", "router"),
)
