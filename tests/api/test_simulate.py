"""`tenuto.simulate` and `tenuto.compare`: names or objects, the records of the commands, frames."""

from __future__ import annotations

import importlib
import json
import math
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import tenuto
from tenuto import ConfigError, Keep, Policy, PolicyError, setting

SMALL: dict[str, Any] = {"gpu": "A100-40", "window_s": 8.0, "seed": 1, "step_cost": "roofline"}


@dataclass
class Holding(Policy):
    """Keeps everything; counts what it retained."""

    keep_s: float = setting(5.0, "seconds", minimum=0)
    _num_finished: int = field(init=False, default=0)

    def retain(self, turn, view):
        return Keep(view.now_s + self.keep_s)

    def on_turn_finished(self, turn, now_s):
        self._num_finished += 1


@dataclass
class Endless(Policy):
    """Has no limits, if nobody sets any."""

    cap: float = math.inf
    keep_s: float = setting(math.inf, "seconds", minimum=0)


@dataclass
class Seeing(Policy):
    """Forgot that state is not a parameter."""

    seen: dict[str, int] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)


@dataclass
class Failing(Policy):
    """Raises when it is asked what to retain."""

    def retain(self, turn, view):
        raise ValueError("planted")


def forget_what_differs(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in ("wall_s", "policy", "config")}


def test_a_policy_given_is_the_same_as_one_named_and_is_not_changed() -> None:
    policy = Holding(keep_s=3.0)
    first, second = (tenuto.simulate(policy, jps=1.0, **SMALL) for _ in range(2))
    assert policy == Holding(keep_s=3.0)
    named = tenuto.simulate(f"{__name__}:Holding", options={"keep_s": 3.0}, jps=1.0, **SMALL)
    records = [forget_what_differs(each.record) for each in (first, second, named)]
    assert records[0] == records[1] == records[2]
    assert first.record["policy"] == "Holding(keep_s=3.0)"
    assert first.record["config"]["options"] == {"keep_s": 3.0}
    assert "Holding(keep_s=3.0)" in repr(first)


def test_a_workload_given_is_the_same_as_one_named() -> None:
    workload = tenuto.load_workload("ab8", jps=1.0, seed=1, window_s=8.0)
    given = tenuto.simulate("stock", workload=workload, **SMALL)
    named = tenuto.simulate("stock", jps=1.0, **SMALL)
    assert (
        [turn.finish_s for turn in given.turns] == [turn.finish_s for turn in named.turns]
        if hasattr(given.turns[0], "finish_s")
        else [turn.last_token_s for turn in given.turns] == [turn.last_token_s for turn in named.turns]
    )
    with pytest.raises(ConfigError, match="this one has its arrivals"):
        tenuto.simulate("stock", workload=workload, jps=1.0, **SMALL)


def test_settings_are_those_of_the_command() -> None:
    assert tenuto.simulate("stock", jps=1.0, tp=2, **SMALL).record["config"]["tp"] == 2
    with pytest.raises(ConfigError, match="no option 'widow_s'; did you mean window_s"):
        tenuto.simulate("stock", jps=1.0, widow_s=3)
    with pytest.raises(ConfigError, match="this one has its own"):
        tenuto.simulate(Holding(), options={"keep_s": 3.0}, jps=1.0, **SMALL)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host_gb": "10"}, "--host-gb must be float or None, got '10'"),
        ({"window_s": "3"}, "--window must be float or None, got '3'"),
        ({"window_s": 10**400}, "--window is too large a number"),
        ({"jps": "2"}, "--jps must be float or None, got '2'"),
        ({"tp": True}, "--tp must be int, got True"),
        ({"async_scheduling": None}, "--async-scheduling must be bool, got None"),
        ({"limits": None}, "--limits must be str, got None"),
        ({"fleet": 2}, "--fleet must be Fleet or None, got 2"),
        ({"goodput": "ttft:500"}, "--goodput must be tuple, got 'ttft:500'"),
        ({"gpu": 5}, "--gpu must be str, got 5"),
        ({"workload": 5}, "workload must be a name"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    for run in (lambda **given: tenuto.simulate("stock", **given), tenuto.compare):
        with pytest.raises(ConfigError, match=message):
            run(**{"jps": 1.0, "window_s": 4.0, **settings})


def test_a_comparison_takes_one_or_several_of_each() -> None:
    settings: dict[str, Any] = {"window_s": 4.0, "step_cost": "roofline", "goodput": ["ttft:500"]}
    for policy in ("stock", Holding()):
        [record] = tenuto.compare(policy, gpu="A100-40", jps=1, seeds=3, split=False, **settings).records
        assert (record["seed"], record["goodput"]["limits_ms"]) == (3, {"ttft": 500.0})
    # They were taken and not used.
    for name, near in (("seed", "; did you mean seeds"), ("options", "")):
        with pytest.raises(ConfigError, match=f"no option '{name}'{near}"):
            tenuto.compare("stock", jps=1, **settings, **{name: 3})
    for wrong in ({"workers": 0}, {"workers": "2"}, {"seeds": ["a"]}, {"seeds": 1.5}):
        with pytest.raises(ConfigError):
            tenuto.compare("stock", jps=1, **settings, **wrong)


def test_a_policy_given_is_an_object_within_its_bounds() -> None:
    calls: list[Callable[[Any], object]] = [
        lambda policy: tenuto.simulate(policy, jps=1.0, **SMALL),
        lambda policy: tenuto.compare([policy], jps=1.0, window_s=8.0),
        tenuto.check_policy,
    ]
    for call in calls:
        with pytest.raises(PolicyError, match=r"or as an object, such as MyPolicy.*Holding'>"):
            call(Holding)
        with pytest.raises(ConfigError, match="Holding': key 'keep_s' must be at least 0, got -5"):
            call(Holding(keep_s=-5))


def test_a_policy_given_may_hold_what_is_infinite() -> None:
    for policy in (Endless(), Endless(cap=-math.inf)):
        tenuto.simulate(policy, jps=1.0, strict=True, **SMALL)
    with pytest.raises(ConfigError, match="Endless': key 'keep_s' must be finite, got -inf"):
        tenuto.check_policy(Endless(keep_s=-math.inf))


def test_a_parameter_that_has_changed_is_one_that_a_record_can_hold() -> None:
    compare: dict[str, Any] = {"jps": 1.0, "window_s": 4.0, "step_cost": "roofline", "split": False}
    records = tenuto.compare([Seeing(), Seeing(seen={"a": 1})], **compare).records
    assert [each["policy"] for each in records] == ["Seeing", "Seeing(seen={'a': 1})"]
    for run in (lambda policy: tenuto.compare([policy], **compare), tenuto.simulate):
        with pytest.raises(ConfigError, match=r"Seeing': key 'names' must be a JSON value, got \{'a'\}; if"):
            run(Seeing(names={"a"}))


def test_faults_are_counted_or_stop_the_run() -> None:
    stock, failing = (tenuto.simulate(policy, jps=1.0, **SMALL) for policy in ("stock", Failing()))
    assert stock.record["policy_faults"] == 0 < failing.record["policy_faults"]
    assert "  !" in repr(failing) and "hooks of the policy failed" in repr(failing)
    assert "!" not in repr(stock)
    with pytest.raises(PolicyError, match=r"Failing: retain raised ValueError\('planted'\); asked with Turn"):
        tenuto.simulate(Failing(), jps=1.0, strict=True, **SMALL)


def test_a_comparison(tmp_path: Path) -> None:
    settings = {key: value for key, value in SMALL.items() if key not in ("gpu", "seed")}
    policies = ["stock", "stock-tuned", Holding(), Holding(keep_s=1.0)]
    result = tenuto.compare(policies, gpu="A100-40", jps=[0.5, 1.0], seeds=[1, 2], out=tmp_path, **settings)
    labels = ["stock", "stock-tuned", "Holding", "Holding(keep_s=1.0)"]
    places = [(label, jps, seed) for label in labels for jps in (0.5, 1.0) for seed in (1, 2)]
    assert [(each["policy"], each["jps"], each["seed"]) for each in result.records] == places
    assert result.winners.keys() == {("A100-40", 0.5), ("A100-40", 1.0)}
    stocks = [f"stock @{size}" for size in (256, 512, 1024)]
    assert all(set(winners) <= {*labels, *stocks} for winners in result.winners.values())
    # Beside each run of stock, three sizes of steps; beside each of the three others, one that keeps no KV.
    assert len(result.arms) == 2 * 2 * (3 + 3)
    assert all(row["cache_ratio"] for row in result.rows if row["policy"] in labels[1:])
    for row in result.rows:
        assert row["wins"] == (row["policy"] in result.winners["A100-40", row["jps"]])
    assert all(label in repr(result) for label in labels)
    lines = (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()
    again = tenuto.compare(policies, gpu="A100-40", jps=[0.5, 1.0], seeds=[1, 2], out=tmp_path, **settings)
    assert [json.loads(line)["wall_s"] for line in lines[: len(places)]] == [
        each["wall_s"] for each in again.records
    ]


def test_objects_that_have_changed_are_compared_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file, jobs = tmp_path / "object_to_change.py", tenuto.simulate(jps=1.0, **SMALL).outcome.workload
    file.write_text(
        "from dataclasses import dataclass\nfrom tenuto import Policy\n"
        "@dataclass\nclass Mine(Policy):\n    'Mine.'\n"
    )
    mine = importlib.import_module(file.stem).Mine()
    settings = {"gpu": "A100-40", "step_cost": "roofline", "split": False, "out": tmp_path}

    def run(workload: tenuto.Workload) -> list[float]:
        return [
            each["wall_s"] for each in tenuto.compare(["stock", mine], workload=workload, **settings).records
        ]

    first = run(jobs)
    assert run(jobs) == first
    file.write_text(file.read_text() + "# Another one.\n")
    second = run(jobs)
    assert (second[0] == first[0], second[1] == first[1]) == (True, False)
    third = run(replace(jobs, jobs=jobs.jobs[:-1]))
    assert not set(second) & set(third)


def test_a_policy_without_a_file_is_always_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = types.ModuleType("notebook")
    monkeypatch.setitem(sys.modules, notebook.__name__, notebook)
    cell = (
        "from dataclasses import dataclass\nfrom tenuto import Policy\n@dataclass\nclass Mine(Policy):\n"
        "    def queue_key(self, turn, now_s):\n        return (SIGN * turn.arrival_s,)\n"
    )
    settings = {"step_cost": "roofline", "kv_tokens": 30_000, "window_s": 4.0, "split": False}
    found = []
    for sign in ("1", "-1"):
        exec(cell.replace("SIGN", sign), notebook.__dict__)
        policies = ["stock", notebook.Mine()]
        found.append(tenuto.compare(policies, gpu="A100-40", jps=2.0, out=tmp_path, **settings).records)
    (stock, first), (again, second) = found
    assert stock == again and first["job_s"] != second["job_s"]
    # The new record takes the place of the old one.
    assert len((tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()) == 2


def test_rates_and_seeds_may_come_from_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    settings: dict[str, Any] = {"step_cost": "roofline", "window_s": 4.0, "split": False}
    rates, seeds = numpy.array([1, 2]), numpy.arange(2)
    records = tenuto.compare(["stock"], gpu="A100-40", jps=rates, seeds=seeds, **settings).records
    assert [(each["jps"], each["seed"]) for each in records] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    one = tenuto.simulate("stock", jps=rates[0], **(SMALL | {"window_s": 4.0, "seed": seeds[1]})).record
    assert forget_what_differs(one) == forget_what_differs(records[1])


@pytest.mark.parametrize("name", ["jps", "seed", "window_s"])
def test_several_numbers_where_one_belongs_are_an_error_of_ours(name: str) -> None:
    several = pytest.importorskip("pandas").Series([1, 2])
    for given in (several, several.to_numpy()):
        with pytest.raises(ConfigError, match=f"--{name.removesuffix('_s')} must be .*, got"):
            tenuto.simulate("stock", **(SMALL | {name: given}))


def test_frames() -> None:
    pytest.importorskip("pandas")
    result = tenuto.simulate("stock", jps=1.0, **SMALL)
    frame = result.to_frame()
    assert len(frame) == len(result.turns)
    assert {"turn", "hit_tokens", "prompt_tokens", "latency_s"} <= set(frame.columns)
    assert "kind" not in frame
    settings = {key: value for key, value in SMALL.items() if key not in ("gpu", "seed")}
    runs = tenuto.compare(["stock"], gpu="A100-40", jps=1.0, seeds=[1, 2], **settings).to_frame()
    assert list(runs["seed"]) == [1, 2] and "job_s.mean" in runs
