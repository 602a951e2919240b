"""Which code decided in a simulated run: a digest in each kept record, and whether a table's records match.

A digest has parts, so that a record goes stale only if code that its run executes has changed:

    engine   the simulator and the core: all that `tenuto.sim.run` imports from the packages that decide
    place    this GPU, this model, and the generator of these jobs, or the readers of traces for a trace
    rules    the policy's own modules and preset, and the router's
    steps    what chooses the sizes of steps; only in the digest of a run whose steps are adaptive

A digest does not depend on comments and docstrings, or on which file a definition is in. Code that measures
(`tenuto.records`) is not in it. Records without a digest are older than all that have one.

Code may change and make the same decisions. `experiments/records/same_code.txt` has such digests in pairs.
`python -m experiments.random_scenarios --confirm` runs kept runs again and adds the pairs.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple, Self

from tenuto.core.console import count
from tenuto.core.engine import get_prompt_weight
from tenuto.core.errors import ConfigError
from tenuto.core.loader import PRESETS, get_engine_settings, load_policy, load_router
from tenuto.sim.hardware.gpus import get_gpu
from tenuto.sim.hardware.models import load_model
from tenuto.sim.setup import IDEAL, Setup
from tenuto.workload import load as loads
from tenuto.workload.load import GENERATORS, LoadOptions

ROOT = Path(__file__).parents[1]
SOURCES = ("src", "predict/src", "")
DECIDING = (
    *("tenuto.core", "tenuto.estimators", "tenuto.policies", "tenuto.routers", "tenuto.sim"),
    *("tenuto.workload", "tenuto_predict", "experiments"),
)
"""The packages whose code can change a simulated decision."""
READERS = "tenuto.workload.formats"
LOADS = ("tenuto.workload.generators", READERS)
"""Of these packages, only the modules that make a run's jobs count."""
STEPS = "tenuto.estimators.step_size"
"""The engine imports it, but runs it only if steps are adaptive."""
LISTS = {
    "tenuto.core.loader": ("PRESETS",),
    "tenuto.sim.hardware.gpus": ("_GPUS", "GPUS"),
    "tenuto.workload.load": ("GENERATORS",),
}
"""Tables of all GPUs, presets and generators. Only the entry that a run uses counts."""
READING = ("read_trace", "_find_reader", "holds_text")
"""The parts of `tenuto.workload.load` that only traces need."""
RELEASE = "__version__ = '0.1.0'"
"""Replaces the version of every release, which decides nothing. The first digests were made with this one."""
SAME = ROOT / "experiments" / "records" / "same_code.txt"
UNKNOWN = "unknown"
GONE = "gone"
"""Stands for the rules of a policy that no longer exists. No record has it."""


class Code(NamedTuple):
    """The digest of the code that decides in a run."""

    engine: str
    place: str
    rules: str
    steps: str = ""
    """Empty where the size of steps is fixed."""

    def __str__(self) -> str:
        """The text in a record."""
        return "-".join(filter(None, self))

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """The code of a record; `UNKNOWN` for each part that it does not have."""
        parts = record["code"].split("-")[:4] if record.get("code") else []
        return cls(*map(follow, parts), *[UNKNOWN] * (3 - len(parts)))


def follow(part: str) -> str:
    """The latest digest of code that makes the same decisions as the code of this one."""
    same = _read_same()
    for _ in same:
        part = same.get(part, part)
    return part


@cache
def _read_same() -> dict[str, str]:
    if not SAME.exists():
        return {}
    lines = [line.split() for line in SAME.read_text(encoding="utf-8").splitlines()]
    return {words[0]: words[1] for words in lines if len(words) > 1 and words[0] != "#"}


def write_same(pairs: Mapping[str, str], how: str) -> None:
    """Record that changed code decides the same: the digests before and after, and how that is known."""
    with SAME.open("a", encoding="utf-8") as file:
        file.writelines(f"{before} {after} {how}\n" for before, after in pairs.items())
    _read_same.cache_clear()


def draw_older(
    records: Iterable[Mapping[str, Any]], get_now: Callable[[Mapping[str, Any]], Code], per_policy: int
) -> tuple[list[Mapping[str, Any]], dict[str, str]]:
    """Runs of older code to run anew: some of each policy and one of each place, drawn at random.

    Of each policy also the run whose first tokens were latest: where turns wait, changed decisions show.
    Returns them, and the digests of before and after.
    """
    pairs: dict[str, str] = {}
    older: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        before, now = Code.of(record), get_now(record)
        if before != now:
            older.setdefault(f"policy {record['policy']}", []).append(record)
            pairs |= {old: new for old, new in zip(before, now, strict=True) if old and old != new}
        if before.place != now.place:
            older.setdefault(f"place {before.place}", []).append(record)
    rng = random.SystemRandom()
    drawn: list[Mapping[str, Any]] = []
    for what, kept in older.items():
        if what.startswith("place "):
            drawn.append(rng.choice(kept))
        else:
            drawn += [*rng.sample(kept, min(per_policy, len(kept))), max(kept, key=_get_late_s)]
    return drawn, pairs


def _get_late_s(record: Mapping[str, Any]) -> float:
    return float(record["ttft_s"]["p95"])


def is_equal(was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a run found all that it found before, what it cost and which code found it aside.

    It may have figures that were not kept before.
    """
    return all(now[name] == value for name, value in was.items() if name not in ("code", "cpu_s", "versions"))


def say_confirmed(differ: Sequence[str], pairs: Mapping[str, str], per_policy: int, name: str) -> int:
    """Write down that changed code decides the same, if no run differs; returns an exit status."""
    if differ:
        print("These runs differ with the present code:", *differ, sep="\n")
        return 1
    how = (
        f"{count(per_policy, 'run')} and the latest first tokens of each policy, and one run of each place, "
        f"of {name}, are equal"
    )
    if pairs:
        write_same(pairs, how)
    print(f"{how}: {len(pairs)} digests changed." if pairs else "No run is of older code.")
    return 0


def digest_code(setup: Setup, load: LoadOptions, made_by: str | None = None) -> Code:
    """The present code of a run. `made_by`: the module that makes the jobs, if no generator does."""
    servers = setup.fleet.servers if setup.fleet is not None else ()
    router = setup.fleet.router if setup.fleet is not None else IDEAL
    gpus = (setup.gpu, *(server.partition(":")[0] or setup.gpu for server in servers))
    return Code(
        digest_engine(),
        _digest_place(tuple(dict.fromkeys(gpus)), setup.model, made_by or load.workload, made_by is not None),
        _digest_rules(setup.policy, router),
        _digest_steps() if _has_adaptive_steps(setup) else "",
    )


@cache
def digest_engine() -> str:
    """The first part of the present code of all runs."""
    return _digest(_read_modules(_find_engine()))


@cache
def _digest_place(gpus: tuple[str, ...], model: str, jobs: str, is_module: bool) -> str:
    things = [repr(get_gpu(gpu)) for gpu in gpus] + [describe_model(model)]
    if is_module:
        made_by = [jobs]
    elif jobs in GENERATORS:
        made_by = _find_modules(GENERATORS[jobs])
    else:
        parts = _dissect(_read(loads.__name__))
        made_by = [name for name in parts.imports if _is_in(name, [READERS])]
        things += [text for name, text in parts.statements if name in READING]
    return _digest([*things, *_read_modules(_close(made_by, _find_engine()))])


def describe_model(model: str) -> str:
    """A model's shape as text, without its file's path, which is different in each clone."""
    found = load_model(model)
    names = [each.name for each in dataclasses.fields(found) if each.name != "config_path"]
    return repr([(name, getattr(found, name)) for name in names])


@cache
def _digest_rules(policy: str, router: str) -> str:
    preset = PRESETS.get(policy)
    modules = [type(load_policy(policy)).__module__]
    modules += [type(load_router(router)).__module__] if router != IDEAL else []
    things = [] if preset is None else [repr((preset.policy, preset.engine, preset.options))]
    return _digest([*things, *_read_modules(_close(modules, _find_engine()))])


def _has_adaptive_steps(setup: Setup) -> bool:
    wanted = get_engine_settings(setup.policy, load_policy(setup.policy, setup.options))
    return get_prompt_weight(setup.step_tokens or wanted.step_tokens) is not None


@cache
def _digest_steps() -> str:
    return _digest(_read_modules(_close([STEPS], _find_engine())))


def _find_modules(function: Any) -> list[str]:
    """The module of a generator; for one that is defined in the list itself, those of what it calls."""
    assert isinstance(function, FunctionType)
    if function.__module__ != loads.__name__:
        return [function.__module__]
    return [vars(loads)[name].__module__ for name in function.__code__.co_names]


@cache
def _find_engine() -> frozenset[str]:
    return _close(["tenuto.sim.run"], without=(*LOADS, STEPS))


def _close(
    modules: Iterable[str], known: Collection[str] = (), without: Collection[str] = ()
) -> frozenset[str]:
    """These modules and their imports in the packages that decide, except `known` modules and `without`."""
    found: set[str] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        is_new = module not in found and module not in known and module != __name__
        if is_new and _is_in(module, DECIDING) and not _is_in(module, without):
            found.add(module)
            waiting += _dissect(_read(module)).imports
    return frozenset(found)


def _is_in(module: str, packages: Iterable[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


@cache
def _read(module: str) -> str:
    """The text of a module; empty if the name is not a module of this repository."""
    for folder in SOURCES:
        path = ROOT.joinpath(folder, *module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.exists():
                return file.read_text(encoding="utf-8")
    return ""


class _Parts(NamedTuple):
    imports: tuple[str, ...]
    """All imports, in functions too, and each imported name that may be a module."""
    statements: tuple[tuple[str, str], ...]
    """The name that each statement defines and its text, without imports and docstrings."""


@cache
def _dissect(text: str) -> _Parts:
    imports: list[str] = []
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            imports += [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
    statements = [
        (_get_name(node), ast.unparse(_without_docstrings(node)))
        for node in tree.body
        if not isinstance(node, ast.Import | ast.ImportFrom) and not _is_text(node)
    ]
    return _Parts(tuple(imports), tuple(statements))


def _read_modules(modules: Iterable[str]) -> list[str]:
    """The statements of modules, without lists."""
    return [
        RELEASE if name == "__version__" else text
        for module in modules
        for name, text in _dissect(_read(module)).statements
        if name not in (*LISTS.get(module, ()), *(READING if module == loads.__name__ else ()))
    ]


def _get_name(node: ast.stmt) -> str:
    """The name that a statement defines, if it is a function, a class, or one variable."""
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", node)
    return getattr(target, "id", getattr(target, "name", ""))


def _without_docstrings(node: ast.stmt) -> ast.stmt:
    for each in ast.walk(node):
        body = getattr(each, "body", None)
        if isinstance(body, list):
            each.body = [part for part in body if not _is_text(part)] or [ast.Pass()]  # type: ignore[attr-defined]
    return node


def _is_text(node: ast.AST) -> bool:
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)  # type: ignore[attr-defined]


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()[:8]


# Checks of a table's records.

Record = Mapping[str, Any]


def find_mixed(records: Iterable[Record]) -> list[str]:
    """Why records must not be compared with each other, in words: the differences of their code.

    All records of a table need one engine, those of a row one place, and those of a policy one set of rules.
    Those with adaptive steps need one chooser of sizes.
    """
    found: dict[str, Counter[str]] = {}
    for record in records:
        whose = ("engine", f"row {record['row']}", f"policy {record['policy']}", "adaptive steps")
        for what, part in zip(whose, Code.of(record), strict=True):
            if part:
                found.setdefault(what, Counter())[part] += 1
    return [
        f"{what}: {', '.join(f'{count} records of {part}' for part, count in parts.items())}"
        for what, parts in found.items()
        if len(parts) > 1
    ]


def check_one_code(records: Iterable[Record]) -> None:
    """Raise ConfigError if records of different code would be compared with each other."""
    if mixed := find_mixed(records):
        raise ConfigError(
            f"a table of several codes would compare what cannot be compared; {'; '.join(mixed[:3])}. "
            "Run what is older again"
        )


def take_last(records: Sequence[Record]) -> list[Record]:
    """The records with the last record's engine, of these the latest rules and steps."""
    same = [record for record in records if Code.of(record).engine == Code.of(records[-1]).engine]
    rules = {record["policy"]: Code.of(record).rules for record in same}
    same = [record for record in same if Code.of(record).rules == rules[record["policy"]]]
    steps = ["", *[code.steps for code in map(Code.of, same) if code.steps][-1:]]
    return [record for record in same if Code.of(record).steps in steps]


def say_code(records: Iterable[Record], get_present: Callable[[Record], Code]) -> str:
    """Which code made a table's records, and which records are older than the present code, in words."""
    engines: set[str] = set()
    older: dict[str, None] = {}
    for record in records:
        code, present = Code.of(record), get_present(record)
        engines.add(code.engine)
        if code.engine != present.engine:
            older["all of it (the engine)"] = None
        elif code.rules != present.rules:
            older[f"`{record['policy']}` (its rules)"] = None
        elif code.steps != present.steps:
            older[f"`{record['policy']}` (its sizes of steps)"] = None
        elif code.place != present.place:
            older[f"{record['row']} (its machine or its jobs)"] = None
    if engines == {UNKNOWN}:
        return f"{CODE} **older**: these records do not say which code made them."
    said = f"{CODE} engine {', '.join(f'`{engine}`' for engine in sorted(engines))}."
    return said + (f" **Older** than the code on the day of writing: {', '.join(older)}." if older else "")


CODE = "Code:"
"""Beginning of the line with the result of `say_code`. It changes with the code, without new records."""
