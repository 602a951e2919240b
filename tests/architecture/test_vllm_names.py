"""Only `tenuto.vllm.compat` knows vLLM's insides; elsewhere in `src` only its list `PUBLIC` is used.

Found by reading the source: imports of vLLM, names that begin with an underscore and are not ours, fields of
what our code calls `request`, `scheduler`, …, and every name that the room uses and that is nobody else's.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).parents[2] / "src" / "tenuto"
ROOM = SOURCE / "vllm" / "compat"
OTHERS = [path for path in sorted((SOURCE / "vllm").rglob("*.py")) if ROOM not in path.parents]


def read_table(name: str) -> dict[str, set[str]]:
    """A table of `compat/check.py`: by what our code calls an object, the fields of it. It needs no vLLM."""
    tree = ast.parse((ROOM / "check.py").read_text(encoding="utf-8"))
    (table,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == name
    ]
    assert isinstance(table, ast.Dict)
    found: dict[str, set[str]] = {}
    for key, value in zip(table.keys, table.values, strict=True):
        assert isinstance(key, ast.Constant) and isinstance(value, ast.Tuple)
        found[key.value] = set(ast.literal_eval(value.elts[1]).split())
    return found


PUBLIC = {**read_table("PUBLIC"), **read_table("OFFLOADING_PUBLIC")}
CALLED = {
    name: PUBLIC[name] for name in ("request", "scheduler", "output", "block", "adapter", "sampling_params")
}
CALLED |= {name: PUBLIC[name] for name in PUBLIC if name.endswith("_config")}
"""What our code calls objects of vLLM's; `job` and `tier` are names of ours too."""


def find_names(source: str) -> Iterator[tuple[int, str | None, str]]:
    """Attributes that are used, as (line, what the object is called, attribute)."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner = node.value
            if isinstance(owner, ast.Subscript):
                owner = owner.value
            called = getattr(owner, "id", None) or getattr(owner, "attr", None)
            yield node.lineno, called, node.attr
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr", "setattr", "delattr")
            and isinstance(node.args[1], ast.Constant)
        ):
            yield node.lineno, getattr(node.args[0], "id", None), str(node.args[1].value)


def find_definitions(source: str) -> set[str]:
    """Names that a source defines: functions, classes, variables, parameters, and fields of `self`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            found.add(node.attr)
    return found


def find_imports(source: str) -> Iterator[tuple[int, str]]:
    """Modules that are imported, with the line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or ""


@functools.cache
def find_standard_names() -> set[str]:
    """Names of what is built in, and of the parts of the standard library that are imported under `vllm`."""
    modules = {builtins}
    for path in (SOURCE / "vllm").rglob("*.py"):
        for _, name in find_imports(path.read_text(encoding="utf-8")):
            if name.partition(".")[0] in sys.stdlib_module_names:
                modules.add(importlib.import_module(name))
    found: set[str] = set()
    for module in modules:
        found.update(dir(module))
        for each in vars(module).values():
            found.update(dir(each) if isinstance(each, type) else ())
    return found


@functools.cache
def find_inner_names() -> set[str]:
    """The names of vLLM's that the room uses: those that nothing else has."""
    used = {name for path in ROOM.glob("*.py") for _, _, name in find_names(path.read_text(encoding="utf-8"))}
    ours = {
        name for path in SOURCE.rglob("*.py") for name in find_definitions(path.read_text(encoding="utf-8"))
    }
    return used - ours - find_standard_names() - set().union(*PUBLIC.values())


OURS_IN_SCHEDULER = find_definitions((SOURCE / "vllm" / "scheduler.py").read_text(encoding="utf-8")) | {
    *dir(dict)
}


def find_faults(source: str) -> list[str]:
    """Where a file outside the room knows more of vLLM than it may."""
    faults = {
        f"{line}: imports {name}" for line, name in find_imports(source) if name.partition(".")[0] == "vllm"
    }
    ours, inner = find_definitions(source) | find_standard_names(), find_inner_names()
    for line, called, name in find_names(source):
        called = called.lstrip("_") if called is not None else None
        is_hidden = name.startswith("_") and called not in ("self", "cls") and name not in ours
        known = CALLED.get(called or "")
        is_unlisted = known is not None and name not in known and name not in OURS_IN_SCHEDULER
        if is_hidden or is_unlisted or name in inner:
            faults.add(f"{line}: {called}.{name}")
    return sorted(faults)


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: str(path.relative_to(SOURCE)))
def test_only_the_room_knows_the_insides(path: Path) -> None:
    assert find_faults(path.read_text(encoding="utf-8")) == []


def test_the_rest_of_the_source_does_not_know_vllm() -> None:
    importing = {
        path
        for path in SOURCE.rglob("*.py")
        for _, name in find_imports(path.read_text(encoding="utf-8"))
        if name.partition(".")[0] == "vllm"
    }
    assert {path.parent for path in importing} == {ROOM}


def test_what_is_looked_for_is_there() -> None:
    assert {
        "kv_cache_manager",
        "single_type_managers",
        "block_pool",
        "get_new_blocks",
        "req_to_blocks",
    } <= find_inner_names()
    assert {"request_id", "block_hashes"} <= PUBLIC["request"]
    assert {"scheduler.py", "disk.py"} <= {path.name for path in OTHERS}


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("import vllm", "imports vllm"),
        ("def later():\n    from vllm.v1.request import Request", "imports vllm.v1.request"),
        ("scheduler._free_request(request)", "scheduler._free_request"),
        ("self._scheduler._inflight_prefills.clear()", "scheduler._inflight_prefills"),
        ("n = scheduler.kv_cache_manager.block_pool", "kv_cache_manager.block_pool"),
        ("n = request.prefill_stats", "request.prefill_stats"),
        ("n = getattr(request, 'kv_hints', None)", "request.kv_hints"),
        ("n = self._requests[0].x.req_to_blocks", "x.req_to_blocks"),
        ("n = output.scheduled_new_reqs", "output.scheduled_new_reqs"),
        ("n = vllm_config.speculative_config", "vllm_config.speculative_config"),
    ],
)
def test_a_planted_name_is_found(line: str, fault: str) -> None:
    source = (SOURCE / "vllm" / "hooks.py").read_text(encoding="utf-8") + f"\n{line}\n"
    assert any(each.endswith(fault) for each in find_faults(source))
