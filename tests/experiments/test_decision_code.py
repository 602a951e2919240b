"""Which code decided in a run: what changes the digest of a record, and what a table says of older ones."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from experiments import decision_code
from experiments.decision_code import (
    STEPS,
    Code,
    _close,
    _find_engine,
    _read,
    check_one_code,
    digest_code,
    find_mixed,
    say_code,
    take_last,
)
from tenuto.core.errors import ConfigError
from tenuto.sim.run import run
from tenuto.sim.setup import Fleet, Setup
from tenuto.workload.load import LoadOptions

SRC = decision_code.ROOT / "src" / "tenuto"
CACHED = ("digest_engine", "_digest_place", "_digest_rules", "_digest_steps", "_find_engine", "_read")


def forget() -> None:
    for name in CACHED:
        getattr(decision_code, name).cache_clear()


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(SRC, folder / "src" / "tenuto", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture
def tree(copy: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the sources that a test may change, if it changes them back."""
    monkeypatch.setattr(decision_code, "ROOT", copy)
    forget()
    yield copy / "src" / "tenuto"
    forget()


RUNS = {
    "stock": (Setup(policy="stock"), LoadOptions(jps=1)),
    "stock, adaptive": (Setup(policy="stock", step_tokens="adaptive:3"), LoadOptions(jps=1)),
    "tenuto": (Setup(policy="tenuto"), LoadOptions(jps=1)),
    "tenuto @512": (Setup(policy="tenuto", step_tokens=512), LoadOptions(jps=1)),
    "autellix+": (Setup(policy="autellix+"), LoadOptions(workload="bfcl", jps=1)),
    "trace": (Setup(policy="stock"), LoadOptions(workload="sessions.jsonl")),
    "fleet": (Setup(policy="stock", fleet=Fleet(servers=("", ""), router="cache-aware")), LoadOptions(jps=1)),
}


def find_stale(tree: Path, file: str, old: str, new: str) -> set[str]:
    """The runs whose records go stale by a change of a file."""
    before = {name: digest_code(*run) for name, run in RUNS.items()}
    path = tree / file
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    assert old in text
    path.write_text(text.replace(old, new, 1) if old else text + new, encoding="utf-8")
    forget()
    stale = {name for name, run in RUNS.items() if digest_code(*run) != before[name]}
    path.write_text(text, encoding="utf-8")
    return stale


@pytest.mark.parametrize(
    ("file", "old", "new", "stale"),
    [
        ("sim/engine/scheduler.py", "", "\nNEW = 1\n", set(RUNS)),
        ("core/leases.py", "", "\nNEW = 1\n", set(RUNS)),
        ("workload/transform.py", "", "\nNEW = 1\n", set(RUNS)),
        ("policies/tenuto.py", "", "\nNEW = 1\n", {"tenuto", "tenuto @512"}),
        ("estimators/remaining_work.py", "", "\nNEW = 1\n", {"tenuto", "tenuto @512"}),
        ("estimators/step_size.py", "", "\nNEW = 1\n", {"tenuto", "stock, adaptive"}),
        ("estimators/step_times.py", "", "\nNEW = 1\n", {"tenuto", "tenuto @512", "stock, adaptive"}),
        ("policies/published/autellix.py", "", "\nNEW = 1\n", {"autellix+"}),
        ("routers/published.py", "", "\nNEW = 1\n", {"fleet"}),
        ("workload/generators/agents.py", "", "\nNEW = 1\n", {"autellix+"}),
        ("workload/formats/mooncake.py", "", "\nNEW = 1\n", {"trace"}),
        ("workload/load.py", "def _find_reader(", "def _find_reader(more: int, ", {"trace"}),
        # A release's number.
        ("core/__init__.py", '__version__ = "', '__version__ = "9.', set()),
        # Another policy, generator, reader, GPU or command; words; what measures.
        ("policies/published/new.py", "", "NEW = 1\n", set()),
        ("workload/load.py", '    "ab8": ', '    "new": None,\n    "ab8": ', set()),
        ("sim/hardware/gpus.py", "_GPUS = (", "_GPUS = (\n    None,", set()),
        ("sim/plan.py", "", "\nNEW = 1\n", set()),
        ("sim/server/app.py", "", "\nNEW = 1\n", set()),
        ("records/metrics.py", "", "\nNEW = 1\n", set()),
        ("core/leases.py", "", "\n# Words.\n", set()),
    ],
)
def test_a_record_goes_stale_only_where_its_run_may_come_out_otherwise(
    tree: Path, file: str, old: str, new: str, stale: set[str]
) -> None:
    assert find_stale(tree, file, old, new) == stale


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("code outside the digest ran")


def replace_functions(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """All functions and methods of a module raise."""
    for owner in (module, *(each for each in vars(module).values() if inspect.isclass(each))):
        for name, function in list(vars(owner).items()):
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                monkeypatch.setattr(owner, name, refuse)


@pytest.mark.parametrize(
    ("policy", "step_tokens"),
    [("stock", None), ("stock", 512), ("continuum", 512), ("sglang-lpm", None), ("tenuto", 512)],
)
def test_a_run_with_fixed_steps_executes_nothing_that_only_adaptive_steps_need(
    policy: str, step_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(policy=policy, step_tokens=step_tokens, step_cost="roofline", host_gb=1.0)
    modules = {STEPS} if policy == "tenuto" else _close([STEPS], _find_engine())
    for name in modules:
        if _read(name):
            replace_functions(importlib.import_module(name), monkeypatch)
    load = LoadOptions(workload="random", jps=4.0, max_jobs=8)
    assert run(setup, load).record["jobs"] == 8
    with pytest.raises(AssertionError, match="outside the digest"):
        run(dataclasses.replace(setup, step_tokens="adaptive"), load)


def test_a_definition_may_move_to_another_file_that_is_loaded(tree: Path) -> None:
    before = digest_code(*RUNS["stock"])
    path = tree / "core" / "windows.py"
    (tree / "core" / "moved.py").write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    path.write_text('"""Other words."""\nfrom tenuto.core.moved import *\n', encoding="utf-8")
    forget()
    assert digest_code(*RUNS["stock"]) == before
    path.write_text((tree / "core" / "moved.py").read_text(encoding="utf-8"), encoding="utf-8")


def make(policy: str, code: str | None, row: str = "R") -> dict[str, Any]:
    return {"row": row, "policy": policy, "code": code}


def test_codes_are_not_mixed() -> None:
    whole = [make("stock", "e-p-s"), make("tenuto", "e-p-t"), make("tenuto", "e-q-t", "S")]
    assert find_mixed(whole) == [] == find_mixed([make("stock", None), make("tenuto", None)])
    assert find_mixed([make("stock", "e-p-s-n"), make("stock", "e-p-s"), make("tenuto", "e-p-t-n")]) == []
    whole.append(make("tenuto", "e-p-t-n"))
    for other in (
        make("tenuto", "e-p-t-m"),  # another chooser of sizes
        make("stock", "E-p-s"),  # another engine
        make("concur", "e-P-c"),  # in the same row other jobs
        make("tenuto", "e-p-T"),  # older rules
        {"row": "R", "policy": "stock"},  # from before records said it
    ):
        with pytest.raises(ConfigError, match="several codes"):
            check_one_code([*whole, other])


def test_what_is_older_is_said() -> None:
    present = {"stock": Code("e", "p", "s"), "tenuto": Code("e", "p", "t")}

    def say(*records: dict[str, Any]) -> str:
        return say_code(records, lambda record: present[record["policy"]])

    assert say(make("stock", "e-p-s"), make("tenuto", "e-p-t")) == "Code: engine `e`."
    assert say(make("stock", "e-p-s"), make("tenuto", "e-p-x")).endswith("of writing: `tenuto` (its rules).")
    assert "Older" in say(make("stock", "f-p-s")) and "all of it" in say(make("stock", "f-p-s"))
    assert say(make("stock", "e-q-s")).endswith("R (its machine or its jobs).")
    assert say(make("stock", "e-p-s-n")).endswith("`stock` (its sizes of steps).")
    assert "**older**: these records" in say(make("stock", None))


def test_of_several_codes_the_last_counts() -> None:
    old = [make("stock", "e-p-s"), make("tenuto", "e-p-t"), make("concur", "d-p-c")]
    new = [make("tenuto", "e-p-T")]
    assert take_last([*old, *new]) == [old[0], *new]
    steps = [make("stock", "e-p-s-m"), make("tenuto", "e-p-T-n")]
    assert take_last([*old, *new, *steps]) == [old[0], *new, steps[1]]
    assert take_last([]) == []


def test_a_digest_is_the_same_in_every_clone() -> None:
    said = decision_code.describe_model("llama-3.1-8b")
    assert "hidden_size" in said and str(decision_code.ROOT) not in said and "Path" not in said
