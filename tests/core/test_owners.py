"""Each fact of a turn, a job and a lease has one owner: one module of `core` writes it."""

from __future__ import annotations

import ast
import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

from tenuto.core.jobs import JobState, TurnState
from tenuto.core.leases import LeaseState

CORE = Path(__file__).parents[2] / "src" / "tenuto" / "core"
WITH_OTHER_BOOKS = {"dispatcher.py"}
"""What it calls a job is not a `JobState`."""


def find_writers(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """By attribute, the modules that assign it on anything but `self`."""
    writers: dict[str, set[str]] = defaultdict(set)
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Load):
                continue
            if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                writers[node.attr].add(module)
    return writers


@pytest.mark.parametrize("cls", [TurnState, JobState, LeaseState])
def test_each_fact_has_one_owner(cls: type) -> None:
    sources = {path.name: path.read_text() for path in CORE.glob("*.py")}
    writers = find_writers({name: text for name, text in sources.items() if name not in WITH_OTHER_BOOKS})
    written = {field.name: writers[field.name] for field in dataclasses.fields(cls)}
    assert any(written.values())
    assert not {name: modules for name, modules in written.items() if len(modules) > 1}


def test_a_second_owner_is_found() -> None:
    owner, other = "turn.started = True", "wait.turn.started, x = False, 1"
    assert find_writers({"a.py": owner, "b.py": "self.started = turn.started"})["started"] == {"a.py"}
    assert find_writers({"a.py": owner, "b.py": other})["started"] == {"a.py", "b.py"}
