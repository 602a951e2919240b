"""What `tenuto compare` does: a grid of runs, further runs that explain the gains, and the table.

*The grid.* Cells run on all cores, or on a Ray cluster. Cells with a result are not run again, unless a file
that they name has changed, or a workload that is given, or the version of Tenuto.

*Where a gain over stock comes from*: smaller steps, another order, or KV that is kept. One thing changes from
each run to the next, so the three ratios of mean job times multiply to the whole:

stock as shipped ──steps──> stock with the policy's step size ──order──> the policy, keeping no KV
                                                                   ──cache──> the policy

An operator can set smaller steps without any policy. So stock is also run with each of a few sizes, and the
best of them is shown beside stock as shipped.

*The table.* One row per GPU, load and policy, over all seeds, the winner marked.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tenuto.core import __version__
from tenuto.core.errors import ConfigError, DataError
from tenuto.core.loader import find_file, get_engine_settings, load_policy
from tenuto.records.codec import Fields
from tenuto.records.files import RESULTS, digest_files, read_objects, write_whole, writing
from tenuto.records.load import read_run
from tenuto.records.metrics import FIGURES, Figure, get_geometric_mean, get_known_mean, group_by
from tenuto.records.schema import get_config
from tenuto.records.text import comes_from, explain_faults, is_overloaded
from tenuto.sim.fidelity import KnownError, get_error
from tenuto.sim.fleet import check_machines
from tenuto.sim.machine import check_step_costs, get_max_num_batched_tokens
from tenuto.sim.run import GC_THRESHOLD, NO_EXTRAS, Extras, run
from tenuto.sim.setup import Setup
from tenuto.workload.load import GENERATORS, LoadOptions, make_workload
from tenuto.workload.schema import Workload

Record = dict[str, Any]
Place = TypeVar("Place")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Cell:
    """One run of a grid."""

    setup: Setup
    load: LoadOptions
    extras: Extras = NO_EXTRAS

    @cached_property
    def files(self) -> dict[str, str]:
        """A digest of each file or folder that it names and of a workload that is given, when first asked.

        A policy or router of the user's that has no file gets a digest that no other cell has.
        """
        setup, load, given = self.setup, self.load, self.extras.workload
        router = setup.router or ""
        of_router = {} if setup.fleet is None else setup.fleet.router_options
        named = {
            f"{whose} option {key}": value
            for whose, options in (("policy", setup.options), ("router", of_router))
            for key, value in options.items()
            if isinstance(value, str) and os.path.isfile(value)
        } | {
            "policy": find_file(setup.policy),
            "router": find_file(router),
            "model": setup.model,
            "step_cost": setup.step_cost,
            "workload": "" if load.workload in GENERATORS or given is not None else load.workload,
        }
        files = digest_files(named)
        for what, name in (("policy", setup.policy), ("router", router)):
            if ":" in name and what not in files:
                # A class in a notebook: nothing tells whether it has changed, so no two runs are equal.
                files[what] = f"unknown {os.urandom(8).hex()}"
        return files if given is None else {**files, "workload": _digest_workload(given)}

    @cached_property
    def key(self) -> str:
        """Its configuration as text, with its files and the version: equal runs have equal keys."""
        return _make_key(get_config(self.setup, self.load), self.files, __version__)

    @property
    def title(self) -> str:
        """Its name in the progress output."""
        load = "" if self.load.jps is None else f" {self.load.jps:g}/s"
        setup = self.setup
        steps = "" if setup.step_tokens is None else f" @{setup.step_tokens}"
        kept = "" if setup.keep_kv else " keeping no KV"
        what = f"{setup.policy}{steps}{kept}{setup.at_router}"
        return f"{setup.gpu_names} {what}{load} seed {self.load.seed}"


def _digest_workload(workload: Workload) -> str:
    digest = hashlib.sha256(workload.loop.encode())
    for job in workload.jobs:
        digest.update(repr(job).encode())
    return digest.hexdigest()[:16]


def _make_key(config: Mapping[str, Any], files: object = None, version: object = None) -> str:
    return json.dumps([config, files or {}, version], sort_keys=True)


def make_grid(
    setups: Iterable[tuple[Setup, Extras]],
    load: LoadOptions,
    rates: Sequence[float | None],
    seeds: Sequence[int],
) -> list[Cell]:
    """Every setup under the load at every rate with every seed, each once. `rates`: jobs per second."""
    loads = [replace(load, jps=rate, seed=seed) for rate in rates for seed in seeds]
    cells = (Cell(setup, each, extras) for (setup, extras), each in itertools.product(setups, loads))
    return list({cell.key: cell for cell in cells}.values())


def check_cells(cells: Sequence[Cell]) -> list[str]:
    """The notes of all machines. Builds each and reads each workload, to find mistakes before the runs."""
    check_step_costs(cell.setup for cell in cells)
    machines = {json.dumps(get_config(cell.setup, LoadOptions())): cell for cell in cells}.values()
    notes: list[str] = []
    for cell in machines:
        notes += check_machines(cell.setup, cell.extras.policy)
    for load in dict.fromkeys(cell.load for cell in cells if cell.extras.workload is None):
        make_workload(load)
    return notes


def run_grid(
    cells: Sequence[Cell],
    arms: Sequence[Cell],
    folder: Path | None,
    *,
    workers: int | None = None,
    ray: str | None = None,
    tell: Callable[[Cell, Record], None] = lambda cell, record: None,
) -> tuple[list[Record], list[Record]]:
    """The records of some cells, and of the further runs that `make_arms` asked for.

    `folder`: where results are read and kept; None to keep none. The record of a cell that another version
    made, or that named a file which has changed since, is replaced. `tell`: called with each record as it
    comes. Raises ConfigError if results cannot be written.
    """
    every = {cell.key: cell for cell in (*cells, *arms)}
    done = {} if folder is None else read_results(folder)
    records = {key: done[key] for key in every if key in done}
    for key, record in records.items():
        tell(every[key], record)
    missing = [cell for key, cell in every.items() if key not in done]
    again = {_make_key(get_config(cell.setup, cell.load)) for cell in missing}
    kept = [record for record in done.values() if _make_key(record["config"]) not in again]
    if folder is not None and len(kept) < len(done):
        with writing(folder / RESULTS):
            write_whole(folder / RESULTS, "".join(json.dumps(record) + "\n" for record in kept))
    for cell, record in run_each(run_cell, missing, workers, ray, lambda cell: cell.load.jps or 0):
        if folder is not None:
            record = {**record, "files": cell.files} if cell.files else record
            with writing(folder / RESULTS), open(folder / RESULTS, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        records[cell.key] = record
        tell(cell, record)
    return [records[cell.key] for cell in cells], [records[cell.key] for cell in arms]


def run_each(
    call: Callable[[Place], Result],
    places: Sequence[Place],
    workers: int | None = None,
    ray: str | None = None,
    get_length: Callable[[Place], float] = lambda place: 0.0,
) -> Iterator[tuple[Place, Result]]:
    """Yield each place with the result of `call` for it, in the order in which results come.

    Calls run in `workers` processes of this machine (None: one per core; 1: this process), or on the Ray
    cluster with the address `ray`. With several processes, places with the largest `get_length` start first.
    """
    if not places:
        return
    if ray is not None:
        yield from _run_on_ray(call, places, ray)
        return
    workers = min(workers or len(os.sched_getaffinity(0)), len(places))
    if workers == 1:
        yield from ((place, call(place)) for place in places)
        return
    with open_processes(workers) as pool:
        # So no core waits for a long run at the end.
        in_order = sorted(places, key=get_length, reverse=True)
        futures = {pool.submit(call, place): place for place in in_order}
        for future in as_completed(futures):
            yield futures[future], future.result()


@contextmanager
def open_processes(num: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of `num` processes, until the context ends. After an error they end at once.

    Ctrl-C in a terminal reaches every process of the command. Only this one handles it.
    """
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num, mp_context=context, initializer=gc.set_threshold, initargs=GC_THRESHOLD)
    # A process inherits the mask. Each of the first tasks starts a process, as none is idle yet.
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for _ in range(num):
            pool.submit(int)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
    try:
        yield pool
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def run_cell(cell: Cell) -> Record:
    """One run's record."""
    return run(cell.setup, cell.load, extras=cell.extras).record


def _run_on_ray(
    call: Callable[[Place], Result], places: Sequence[Place], address: str
) -> Iterator[tuple[Place, Result]]:
    try:
        import ray
    except ImportError:
        raise ConfigError("--ray needs Ray: pip install ray") from None
    if not ray.is_initialized():
        ray.init(address=address)
    remote = ray.remote(call)
    futures = {remote.remote(place): place for place in places}
    waiting = list(futures)
    while waiting:
        [ready], waiting = ray.wait(waiting, num_returns=1)
        yield futures[ready], ray.get(ready)


def read_results(folder: Path) -> dict[str, Record]:
    """Records of the runs that are done, by key. An incomplete last line is removed from the file.

    Raises DataError, and does not change the file, for any other line that is not a record of this version.
    """
    path, done = folder / RESULTS, {}
    if not path.exists():
        return {}
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    whole = data[: data.rfind(b"\n") + 1]
    cut: list[str] = []
    try:
        objects = read_objects(path, cut.append) if data else []
    except DataError:
        if whole:
            raise
        objects = []  # the first record was cut off
    for fields in objects:
        _check_record(fields)
        version = fields.optional_part("versions").values.get("tenuto")
        done[_make_key(fields.part("config").values, fields.values.get("files"), version)] = fields.values
    if data != whole:
        path.write_bytes(whole if cut or not objects else data + b"\n")
    return done


def _check_record(fields: Fields) -> None:
    """Raise DataError if a record lacks what the table needs."""
    read_run(fields)
    for name in ("gpu", "model", "workload", "policy"):
        fields.text(name)
    for name in ("mean", "p95"):
        fields.part("job_s").number(name)
    for name in ("recomputed_tokens", "prompt_tokens"):
        fields.count(name)
    fields.part("config")


# Where a gain comes from.


STOCK = "stock"
STEP_SIZES = (256, 512, 1024, 2048)
"""Step sizes that stock is also tried with, if they are below its own."""


class Arm(NamedTuple):
    """A policy, with its step size, and with or without the KV that it keeps."""

    policy: str
    step_tokens: str | None
    """The most tokens of a step, or adaptive; None for the engine's own budget."""
    keeps_kv: bool

    @property
    def name(self) -> str:
        """The policy, with its step size: stock @512."""
        return self.policy if self.step_tokens is None else f"{self.policy} @{self.step_tokens}"


class Timed(NamedTuple):
    """One run's mean job time."""

    arm: Arm
    seed: int | None
    mean_s: float


@dataclass(frozen=True)
class Split:
    """The parts of a policy's gain over stock at one load: ratios of mean job times, below 1 for a gain."""

    steps: float
    """Stock with the policy's step size, over stock as shipped."""
    order: float
    """The policy without the KV that it keeps, over stock with its step size."""
    cache: float
    """The policy, over itself without the KV that it keeps."""
    over_best: float
    """The policy, over stock with the best step size."""
    best: Arm
    """Stock with that size."""

    @property
    def over_stock(self) -> float:
        """The policy, over stock as shipped."""
        return self.steps * self.order * self.cache


def make_arms(cells: Sequence[Cell]) -> list[Cell]:
    """The further runs that the splits of a grid need. None without stock and another policy.

    These are stock with each smaller step size, and for each other policy, the policy keeping no KV and stock
    with the policy's step size. There are none for several engines.
    """
    made: dict[str, Cell] = {}
    for stock in (cell for cell in cells if _is_stock(cell) and cell.setup.fleet is None):
        others = [cell for cell in cells if not _is_stock(cell) and _get_place(cell) == _get_place(stock)]
        if not others:
            continue
        arms = [replace(cell, setup=replace(cell.setup, keep_kv=False)) for cell in others]
        if stock.setup.step_tokens is None:
            setups = get_stock_sizes(stock.setup)
            for setup, given in ((cell.setup, cell.extras.policy) for cell in others):
                policy = given or load_policy(setup.policy, setup.options)
                size = get_engine_settings(setup.policy, policy).step_tokens
                if size is not None:
                    setups.append(replace(stock.setup, step_tokens=size))
            arms += [replace(stock, setup=setup) for setup in setups]
        made |= {cell.key: cell for cell in arms}
    asked = {cell.key for cell in cells}
    return [cell for key, cell in made.items() if key not in asked]


def make_stock(setup: Setup) -> Setup:
    """Stock on this machine. Host memory that is given it uses as vLLM's own, which has no disk."""
    stock = replace(setup, policy=STOCK, options={})
    return replace(stock, offload="native", disk_gb=0.0) if setup.host_gb and not setup.offload else stock


def get_stock_sizes(stock: Setup) -> list[Setup]:
    """Stock with each smaller step size, which any operator can set."""
    own = get_max_num_batched_tokens(stock)
    return [replace(stock, step_tokens=size) for size in STEP_SIZES if size < own]


def _is_stock(cell: Cell) -> bool:
    return cell.setup.policy == STOCK and cell.setup.keep_kv and cell.extras.policy is None


def _get_place(cell: Cell) -> tuple[Setup, LoadOptions]:
    return replace(cell.setup, policy=STOCK, options={}), cell.load


def get_arm(record: Mapping[str, Any]) -> Arm:
    """The arm of a simulated run's record."""
    config = record.get("config") or {}
    return Arm(record["policy"], record.get("step_tokens"), config.get("keep_kv", True))


def find_best_stock(asked: Iterable[Timed], arms: Iterable[Timed]) -> Arm | None:
    """Stock with the best of the step sizes that ran with all its seeds; None without stock."""
    means = _average([*asked, *arms])
    stock = _find_stock(asked)
    if stock is None or stock not in means:
        return None
    # Stock vLLM can only have a number: its `--max-num-batched-tokens`.
    plain = [arm for arm in means if (arm.policy, arm.keeps_kv) == (STOCK, True)]
    sizes = [arm for arm in plain if arm.step_tokens is not None and arm.step_tokens.isdecimal()]
    whole = [arm for arm in (stock, *sizes) if means[arm].keys() == means[stock].keys()]
    return min(whole, key=lambda arm: get_geometric_mean(means[arm].values()))


def split_gains(asked: Sequence[Timed], arms: Sequence[Timed]) -> dict[Arm, Split]:
    """The split of each policy of one cell, if all runs that it needs had the same seeds."""
    stock, best = _find_stock(asked), find_best_stock(asked, arms)
    if stock is None or best is None:
        return {}
    by_seed = _average([*asked, *arms])
    seeds = by_seed[stock].keys()
    means = {arm: get_geometric_mean(each.values()) for arm, each in by_seed.items() if each.keys() == seeds}
    found = {}
    for arm in dict.fromkeys(timed.arm for timed in asked):
        same_steps = stock._replace(step_tokens=arm.step_tokens)
        keeps_none = arm._replace(keeps_kv=False)
        if arm.policy != STOCK and means.keys() >= {arm, same_steps, keeps_none}:
            found[arm] = Split(
                steps=means[same_steps] / means[stock],
                order=means[keeps_none] / means[same_steps],
                cache=means[arm] / means[keeps_none],
                over_best=means[arm] / means[best],
                best=best,
            )
    return found


def _find_stock(asked: Iterable[Timed]) -> Arm | None:
    return next((timed.arm for timed in asked if timed.arm.policy == STOCK), None)


def _average(runs: Iterable[Timed]) -> dict[Arm, dict[int | None, float]]:
    """Mean job time by arm and seed. Duplicate runs count once."""
    found: dict[Arm, dict[int | None, float]] = {}
    for arm, seed, mean_s in runs:
        if mean_s > 0:
            found.setdefault(arm, {})[seed] = mean_s
    return found


# The table.


TIE = 1.02
"""Policies within 2 % of the best share the cell."""

MARKS = {
    "overloaded": ("o", "more jobs arrive than finish: times depend on how long is simulated"),
    "roofline": ("r", "step times of a roofline model: larger errors than with measured tables"),
    "one seed": ("1", "another seed may change times by some per cent, and one proves nothing"),
}
"""What a reader must know of a row's numbers: the letter in the table, and what it means."""

Row = dict[str, Any]


def make_rows(records: Sequence[dict[str, Any]], arms: Sequence[dict[str, Any]] = ()) -> list[Row]:
    """One row per GPU, load and policy: means over seeds, geometric ones of times, with the lowest marked.

    `arms`: records of the runs that `make_arms` asks for. With them each cell has a row of stock with its
    best step size, and rows say where a policy's gain comes from.
    """
    best: list[dict[str, Any]] = []
    splits: dict[tuple[Any, ...], Split] = {}
    for cell in dict.fromkeys(map(_get_cell, records)):
        asked, beside = ([each for each in some if _get_cell(each) == cell] for some in (records, arms))
        runs, runs_beside = list(map(_get_timed, asked)), list(map(_get_timed, beside))
        found = find_best_stock(runs, runs_beside) if beside else None
        best += [{**each, "policy": found.name} for each in beside if found and get_arm(each) == found]
        for arm, split in split_gains(runs, runs_beside).items():
            splits[*cell, arm.policy] = split
    rows = _make_rows([*records, *best])
    for row in rows:
        known = splits.get((*_get_cell(row), row["policy"]))
        row["best_stock"] = known and known.best.name
        row["over_best_stock"] = known and known.over_best
        row["steps_ratio"] = known and known.steps
        row["order_ratio"] = known and known.order
        row["cache_ratio"] = known and known.cache
    return rows


def _get_timed(record: dict[str, Any]) -> Timed:
    return Timed(get_arm(record), record["seed"], record["job_s"]["mean"])


def _make_rows(records: Sequence[dict[str, Any]]) -> list[Row]:
    groups = group_by(records, lambda record: (*_get_cell(record), record["policy"]))
    rows = [_make_row(group) for group in groups.values()]
    for row in rows:
        rivals = [each for each in rows if _get_cell(each) == _get_cell(row)]
        best_s = min(each["mean_job_s"] for each in rivals)
        # Of a fleet it is stock behind the same router: `stock@random` for `tenuto@random`.
        names = {STOCK, STOCK + "".join(re.findall("(?<! )@[^@]*$", row["policy"]))}
        stock = [each["mean_job_s"] for each in rivals if each["policy"] in names]
        row["wins"] = row["mean_job_s"] <= TIE * best_s
        row["over_stock"] = row["mean_job_s"] / stock[0] if stock else None
    places = {policy: place for place, policy in enumerate(dict.fromkeys(row["policy"] for row in rows))}

    def rank(row: Row) -> tuple[Any, ...]:
        # Stock with another step size comes below stock.
        name = STOCK if row["policy"].startswith(f"{STOCK} @") else row["policy"]
        return (row["gpu"], row["workload"], row["jps"] or 0.0, places.get(name, places[row["policy"]]))

    return sorted(rows, key=rank)


def _make_row(group: Sequence[dict[str, Any]]) -> Row:
    """The runs of one policy at one place, one for each seed."""
    return {
        **{name: group[0][name] for name in ("gpu", "model", "workload", "jps", "policy")},
        "seeds": len(group),
        "mean_job_s": get_geometric_mean([each["job_s"]["mean"] for each in group]),
        "lowest_mean_job_s": min(each["job_s"]["mean"] for each in group),
        "highest_mean_job_s": max(each["job_s"]["mean"] for each in group),
        "p95_job_s": get_geometric_mean([each["job_s"]["p95"] for each in group]),
        "p99_job_s": _mean_times(each["job_s"].get("p99") for each in group),
        "p95_ttft_s": _mean_times((each.get("ttft_s") or {}).get("p95") for each in group),
        "offered_jps": get_known_mean(each.get("offered_jps") for each in group),
        "finished_jps": get_known_mean(each.get("finished_jps") for each in group),
        "goodput_turns_per_s": get_known_mean(
            (each.get("goodput") or {}).get("turns_per_s") for each in group
        ),
        "overloaded": any(is_overloaded(each) for each in group),
        **{figure.name: figure.get(group) for figure in FIGURES},
        "marks": ", ".join(_find_marks(group)),
        "known_error": get_error(group[0]["gpu"], group[0]["policy"], group[0].get("step_cost")).to_json(),
        "policy_faults": sum(each.get("policy_faults") or 0 for each in group),
    }


def _find_marks(group: Sequence[dict[str, Any]]) -> Iterator[str]:
    if any(is_overloaded(each) for each in group):
        yield "overloaded"
    if any(comes_from(each.get("step_cost"), "roofline") for each in group):
        yield "roofline"
    if len({each["seed"] for each in group}) == 1:
        yield "one seed"


class Column(NamedTuple):
    """A column of the printed table."""

    head: str
    """As wide as what stands below it."""
    show: Callable[[Row], str]


def _make_column(figure: Figure) -> Column:
    return Column(f" {figure.head:>7}", lambda row: f" {figure.write(row[figure.name]):>7}")


COLUMNS = (
    Column(f"  {'policy':18}", lambda row: f"  {row['policy']:18}"),
    Column(f" {'mean':>9}", lambda row: f" {row['mean_job_s']:8.2f}s{'*' if row['wins'] else ' '}"),
    Column(f" {'':3}", lambda row: f" {_get_letters(row):3}"),
    Column(f" {'spread':>15}", lambda row: f" {_format_spread(row):>15}"),
    Column(f" {'P95':>9}", lambda row: f" {row['p95_job_s']:8.1f}s"),
    Column(f" {'/stock':>7}", lambda row: f" {_format(row['over_stock'], '.2f'):>7}"),
    *map(_make_column, FIGURES),
    Column(
        f" {'done/s':>7}",
        lambda row: f" {_format(row['finished_jps'], '.3g'):>7}{'+' if row['overloaded'] else ' '}",
    ),
)
GOODPUT = Column(f" {'goodput':>9}", lambda row: f" {_format(row['goodput_turns_per_s'], '.3g'):>8}")
"""Shown only if limits were given."""


def format_rows(rows: Sequence[Row]) -> str:
    """The table as text. A star marks the best policy of a cell and all policies within 2 % of it."""
    has_goodput = any(row["goodput_turns_per_s"] is not None for row in rows)
    columns = (*COLUMNS, GOODPUT) if has_goodput else COLUMNS
    lines = [f"{'gpu':11} {'jobs/s':>6}{''.join(column.head for column in columns)}"]
    cell = None
    for row in rows:
        same, cell = _get_cell(row) == cell, _get_cell(row)
        if not same and len(lines) > 1:
            lines.append("")
        place = f"{row['gpu']:11} {_format(row['jps'], 'g'):>6}"
        shown = "".join(column.show(row) for column in columns)
        failed = "  !" if row["policy_faults"] else ""
        lines.append(f"{' ' * len(place) if same else place}{shown}{failed}".rstrip())
    lines.append(
        "\n*: the lowest mean, and what is within 2 % of it; `tenuto report` says whether that is sure\n"
        "hits: share of the reusable tokens; done/s: jobs finished per second, + where more arrive"
    )
    if has_goodput:
        lines.append("goodput: turns per second that keep the limits")
    lines += [f"{sign}: {words}" for mark, (sign, words) in MARKS.items() if _has_mark(rows, mark)]
    lines += _format_errors(rows)
    lines += _format_splits(rows)
    num_faults = sum(row["policy_faults"] for row in rows)
    if num_faults:
        lines += ["", explain_faults(num_faults)]
    return "\n".join(lines)


def _format_errors(rows: Sequence[Row]) -> list[str]:
    lines = ["known error of such means (below 0: too fast)"]
    for error, alike in group_by(rows, lambda row: str(KnownError(**row["known_error"]))).items():
        names = dict.fromkeys(f"{row['gpu']} {row['policy'].partition(' ')[0]}" for row in alike)
        lines.append(f"  {error}: {', '.join(names)}")
    return lines


def _format_splits(rows: Sequence[Row]) -> list[str]:
    split = [row for row in rows if row["steps_ratio"] is not None]
    if not split:
        return []
    lines = [
        "\nmean job time over stock's, and where the difference comes from",
        f"{'gpu':11} {'jobs/s':>6}  {'policy':18} {'/stock':>7} {'':3} = {'steps':>6} × {'order':>5} × "
        f"{'cache':>5}    over stock at its best step size",
    ]
    for row in split:
        lines.append(
            f"{row['gpu']:11} {_format(row['jps'], 'g'):>6}  {row['policy']:18} "
            f"{row['over_stock']:7.2f} {_get_letters(row):3} = {row['steps_ratio']:6.2f} × "
            f"{row['order_ratio']:5.2f} × {row['cache_ratio']:5.2f}    "
            f"{row['over_best_stock']:.2f} of {row['best_stock']}"
        )
    lines.append(
        "steps: stock with the policy's step size, over stock; order: the policy without the KV that it "
        "keeps, over that;\ncache: the policy, over that"
    )
    return lines


def _get_letters(row: Row) -> str:
    return "".join(sign for mark, (sign, _) in MARKS.items() if _has_mark([row], mark))


def _has_mark(rows: Sequence[Row], mark: str) -> bool:
    return any(mark in row["marks"].split(", ") for row in rows)


def _get_cell(row: Row) -> tuple[Any, ...]:
    return (row["gpu"], row["model"], row["workload"], row["jps"])


def _mean_times(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return get_geometric_mean(known) if known else None


def _format_spread(row: Row) -> str:
    return f"{row['lowest_mean_job_s']:.1f}-{row['highest_mean_job_s']:.1f}" if row["seeds"] > 1 else ""


def _format(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
