"""Simulations from Python: `simulate` one run, `compare` several, `check_policy` before both.

The commands `tenuto simulate`, `compare` and `check-policy` are these functions with options. Import the
names from `tenuto` itself.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenuto.core.contracts import check_contract
from tenuto.core.errors import ConfigError, PolicyError, suggest
from tenuto.core.loader import get_policy_name, load_policy
from tenuto.core.policy import Policy
from tenuto.core.policy_caller import DecisionLog
from tenuto.core.settings import find_problem
from tenuto.records.metrics import group_by
from tenuto.records.schema import TurnRecord
from tenuto.sim.compare import check_cells, format_rows, make_arms, make_grid, make_rows, run_grid
from tenuto.sim.run import Extras, Outcome, run
from tenuto.sim.setup import Setup
from tenuto.sim.simulation import Watch
from tenuto.workload import LoadOptions, Workload

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]

_LARGE = ("kind", "schema", "job_times_s", "by_turn", "config", "files", "versions", "client")
"""Parts of a record that are not columns of a frame."""


@dataclass(frozen=True, repr=False)
class SimulationResult:
    """What one simulated run came to."""

    record: dict[str, Any]
    """The run as `tenuto simulate --json` prints it: see docs/glossary.md for each number."""
    turns: Sequence[TurnRecord]
    """A record per turn, in the order in which the turns ended."""
    outcome: Outcome
    """The workload and the machine too; its names may change in any release."""

    def to_frame(self) -> pandas.DataFrame:
        """One row per turn. Raises ImportError without pandas."""
        rows = [turn.to_json() for turn in self.turns]
        return _load_pandas().DataFrame(
            [{key: value for key, value in row.items() if key not in ("kind", "schema")} for row in rows]
        )

    def __repr__(self) -> str:
        return format_rows(make_rows([self.record]))


@dataclass(frozen=True, repr=False)
class Comparison:
    """What the runs of a comparison came to; printed as the table of `tenuto compare`."""

    records: Sequence[dict[str, Any]]
    """One per run, as `SimulationResult.record`."""
    arms: Sequence[dict[str, Any]] = ()
    """Extra runs that show where a gain over stock comes from."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The table: one row per GPU, load and policy, over all seeds."""
        return make_rows(self.records, self.arms)

    @property
    def winners(self) -> dict[tuple[str, float | None], tuple[str, ...]]:
        """By GPU and jobs per second, the policies whose mean job time is within 2 % of the best."""
        by_place = group_by(self.rows, lambda row: (row["gpu"], row["jps"]))
        return {
            place: tuple(row["policy"] for row in rows if row["wins"]) for place, rows in by_place.items()
        }

    def to_frame(self) -> pandas.DataFrame:
        """One row per run; a statistic is a column `job_s.mean`. Raises ImportError without pandas."""
        rows = [{key: value for key, value in record.items() if key not in _LARGE} for record in self.records]
        return _load_pandas().json_normalize(rows)

    def __repr__(self) -> str:
        return format_rows(self.rows)


def simulate(  # noqa: PLR0913 - what a user chooses, all by keyword
    policy: str | Policy = "tenuto",
    *,
    gpu: str = "H100",
    workload: str | Workload = "ab8",
    jps: float | None = None,
    seed: int = 42,
    options: Mapping[str, Any] | None = None,
    strict: bool = False,
    watch: Watch | None = None,
    log: DecisionLog | None = None,
    **settings: Any,
) -> SimulationResult:
    """Run one workload on one simulated GPU.

    `policy`: a name of `tenuto policies`, `file.py:Class`, or a policy; the one given is copied, not changed.
    `options`: those of a policy that is named. `settings`: any other option of `tenuto simulate`, with
    underscores (`model="llama-3.1-70b", tp=4, window_s=20`). `watch` and `log` are called in every step and
    with every decision. With `strict`, a policy that raises or answers wrongly ends the run.
    Raises ConfigError, PolicyError or DataError for what makes no sense.
    """
    setup, load = _split(settings)
    load, jobs = _choose_workload(load, workload, [jps])
    given = Extras(strict=strict, workload=jobs)
    setup, extras = _place(dataclasses.replace(setup, gpu=gpu), policy, options, given)
    load = dataclasses.replace(load, jps=_from_numpy(jps), seed=_from_numpy(seed))
    outcome = run(setup, load, extras=extras, watch=watch, log=log)
    return SimulationResult(outcome.record, outcome.turns, outcome)


def compare(  # noqa: PLR0913 - as above
    policies: str | Policy | Sequence[str | Policy] = ("stock", "tenuto"),
    *,
    gpu: str | Sequence[str] = "H100",
    workload: str | Workload = "ab8",
    jps: float | Sequence[float] | None = None,
    seeds: int | Sequence[int] = (42,),
    strict: bool = False,
    workers: int | None = 1,
    out: str | Path | None = None,
    split: bool = True,
    **settings: Any,
) -> Comparison:
    """Run every policy on every GPU, under every load, with every seed. Of each, give one or several.

    `split`: where stock is among the policies, also run it with smaller steps, and each other policy without
    the KV that it keeps, to say how much of the gain comes from steps, order and cache.

    `workers`: processes; None takes one per core. With more than one, a script must call this below
    `if __name__ == "__main__":`, as processes import it. `out`: a folder for results.jsonl; runs that it has
    already are not run again, unless the file of a policy, the workload or the version of Tenuto has changed,
    or a policy has no file, as in a notebook. Two policies of one class are told apart by their options. All
    else, and the errors, are as in `simulate`.
    """
    setup, load = _split(settings)
    policies, gpus, rates, seeds = map(_make_list, (policies, gpu, jps, seeds))
    rates, seeds = list(map(_from_numpy, rates)), list(map(_from_numpy, seeds))
    if not (policies and gpus and rates and seeds):
        raise ConfigError("compare needs a policy, a GPU, a load and a seed at least")
    if workers is not None and not (isinstance(workers, int) and workers >= 1):
        raise ConfigError(f"workers must be at least 1, or None for one per core; got {workers!r}")
    load, jobs = _choose_workload(load, workload, rates)
    given = Extras(strict=strict, workload=jobs)
    placed = (
        _place(dataclasses.replace(setup, gpu=name), policy, None, given)
        for name in gpus
        for policy in policies
    )
    cells = make_grid(placed, load, rates, seeds)
    check_cells(cells)
    folder = None if out is None else Path(out)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    return Comparison(*run_grid(cells, make_arms(cells) if split else [], folder, workers=workers))


TRIALS = {
    "little memory, host memory below": (
        Setup(step_cost="roofline", kv_tokens=60_000, host_gb=32.0, offload="async"),
        LoadOptions(jps=2.0, window_s=8.0, seed=1),
    ),
    "little memory, no hints, leases as inside vLLM": (
        Setup(step_cost="roofline", kv_tokens=40_000, host_gb=0.0, offload="none", limits="plugin"),
        LoadOptions(jps=2.0, window_s=6.0, seed=2, hints="none"),
    ),
    "so little memory that turns are preempted, times of tools said": (
        Setup(step_cost="roofline", kv_tokens=14_000, host_gb=0.0, offload="none"),
        LoadOptions(workload="bfcl", jps=8.0, window_s=4.0, seed=1, hints="tool-time"),
    ),
}
"""What each trial is about, its machine and its load; a trial takes less than a second."""
MAX_TRIAL_S = 1000.0
"""Longest trial, in simulated seconds. Stock needs two minutes for the longest."""


def check_policy(policy: str | Policy, options: Mapping[str, Any] | None = None) -> None:
    """Check that a policy keeps its contract, then run it in short simulations under memory pressure.

    Takes a few seconds and needs no vLLM. Raises PolicyError naming the hook, what is wrong and the inputs.
    """
    made = load_policy(policy, options) if isinstance(policy, str) else _check_given(policy)
    check_contract(copy.deepcopy(made))
    extras = Extras(policy=made, strict=True, tell=_stop_if_endless)
    for about, (setup, load) in TRIALS.items():
        try:
            first, second = (
                [(turn.job, turn.turn, turn.last_token_s) for turn in run(setup, load, extras=extras).turns]
                for _ in range(2)
            )
        except PolicyError as error:
            raise PolicyError(f"in a simulation ({about}): {error}") from error
        if first != second:
            raise PolicyError(
                f"policy {get_policy_name(type(made))}: the same simulation ({about}) came out differently "
                "the second time; a policy may use no clock and no random numbers but those that it seeds "
                "itself"
            )


def _stop_if_endless(now_s: float, num_done: int, num_turns: int) -> None:
    if now_s > MAX_TRIAL_S:
        raise PolicyError(
            f"only {num_done} of {num_turns} turns finished in {now_s:.0f} s, many times what stock needs "
            "for all; perhaps turns preempt each other (preempt_key, may_preempt), or steps are too small"
        )


def _split(settings: Mapping[str, Any]) -> tuple[Setup, LoadOptions]:
    """Give each setting to the dataclass that has it. Raises ConfigError for one that none has."""
    of_setup, of_load = ({field.name for field in dataclasses.fields(cls)} for cls in (Setup, LoadOptions))
    # What `simulate` takes by name, `compare` takes for several runs, or of each policy.
    known = {*of_setup, *of_load, "policies", "seeds"}
    for name in settings:
        if name not in of_setup | of_load or name in ("policy", "options", "seed"):
            raise ConfigError(f"no option {name!r}{suggest(name, known - {name})}")
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else _from_numpy(value)
        for name, value in settings.items()
    }
    return (
        Setup(**{name: value for name, value in given.items() if name in of_setup}),
        LoadOptions(**{name: value for name, value in given.items() if name in of_load}),
    )


def _make_list(given: Any) -> list[Any]:
    """One value or several, as a list."""
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]


def _from_numpy(value: Any) -> Any:
    """A number of numpy's as Python's own; any other value as it is, for the options' own checks."""
    try:
        return value.item()
    except (AttributeError, TypeError, ValueError):  # not numpy's, or several numbers
        return value


def _place(
    setup: Setup, policy: str | Policy, options: Mapping[str, Any] | None, given: Extras
) -> tuple[Setup, Extras]:
    """The setup with a policy. One that is given as an object gets a label that tells its options."""
    if isinstance(policy, str):
        return dataclasses.replace(setup, policy=policy, options=options or {}), given
    if options:
        raise ConfigError("options are for a policy that is named; this one has its own")
    policy = _check_given(policy)
    name, changed = get_policy_name(type(policy)), _get_changed(policy)
    label = name.rpartition(":")[2].rpartition(".")[2]
    if changed:
        label += f"({', '.join(f'{key}={value}' for key, value in changed.items())})"
    return (
        dataclasses.replace(setup, policy=name, options=changed),
        dataclasses.replace(given, policy=policy, label=label),
    )


def _get_changed(policy: Policy) -> dict[str, Any]:
    """The parameters that are not at their defaults. Raises ConfigError for one that no record can hold."""
    changed = {}
    for field in dataclasses.fields(policy):
        make = field.default_factory
        default = field.default if make is dataclasses.MISSING else make()
        if not field.init or (value := getattr(policy, field.name)) == default:
            continue
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            name = get_policy_name(type(policy))
            raise ConfigError(
                f"policy {name!r}: key {field.name!r} must be a JSON value, got {value!r}; if it holds "
                "state, declare it with init=False"
            ) from None
        changed[field.name] = value
    return changed


def _check_given(policy: object) -> Policy:
    """The policy, if it is an object within its bounds. Raises PolicyError or ConfigError."""
    if not isinstance(policy, Policy):
        raise PolicyError(f"give a policy by its name or as an object, such as MyPolicy(); got {policy!r}")
    for field in dataclasses.fields(policy):
        value = getattr(policy, field.name)
        # A plain field has no bounds, and a default of its author's may be infinite.
        is_bounded = field.init and field.metadata and value != field.default
        if is_bounded and (problem := find_problem(value, field.metadata)):
            name = get_policy_name(type(policy))
            raise ConfigError(f"policy {name!r}: key {field.name!r} {problem}")
    return policy


def _choose_workload(
    load: LoadOptions, workload: str | Workload, rates: Iterable[float | None]
) -> tuple[LoadOptions, Workload | None]:
    if isinstance(workload, str):
        return dataclasses.replace(load, workload=workload), None
    if not isinstance(workload, Workload):
        raise ConfigError(f"workload must be a name, a file's path as text, or a Workload; got {workload!r}")
    if any(rate is not None for rate in rates):
        raise ConfigError("jps is for a workload that is named; this one has its arrivals")
    return dataclasses.replace(load, workload=workload.name), workload


def _load_pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise ImportError("to_frame needs pandas: pip install pandas") from None
    return pandas
