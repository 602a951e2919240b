"""Everything public in core, estimators and policies says what it is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "tenuto"
FILES = [
    path
    for room in ("core", "estimators", "policies", "routers")
    for path in sorted((PACKAGE / room).rglob("*.py"))
]


def find_undocumented(source: str) -> list[str]:
    """Names of public modules, classes, functions and methods without a docstring."""
    module = ast.parse(source)
    found = [] if ast.get_docstring(module) else ["module"]
    return found + _find_in(module, "")


def _find_in(scope: ast.Module | ast.ClassDef, prefix: str) -> list[str]:
    found = []
    for node in scope.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name.startswith("_"):
            continue
        if not ast.get_docstring(node):
            found.append(prefix + node.name)
        if isinstance(node, ast.ClassDef):
            found += _find_in(node, f"{prefix}{node.name}.")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_everything_public_is_documented(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert find_undocumented(source) == []


def test_all_rooms_are_looked_at() -> None:
    names = {path.relative_to(PACKAGE).as_posix() for path in FILES}
    assert {"core/driver.py", "estimators/tool_times.py", "policies/stock.py"} <= names


def test_a_missing_docstring_is_found() -> None:
    source = '''
class Public:
    """Documented."""

    def documented(self):
        """Yes."""

    @property
    def bare(self):
        return 1

    def _private(self):
        return 2

async def bare():
    def inner():
        pass
'''
    assert find_undocumented(source) == ["module", "Public.bare", "bare"]
