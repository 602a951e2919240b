"""No two modules import each other, not even over others, and not even for their types alone."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"


def find_cycle(source: Path) -> list[str]:
    """Modules of a source tree that import each other in a circle; empty if there is none.

    Every import counts: at the top, inside a function, and under TYPE_CHECKING.
    """
    modules = {get_name(path, source): path for path in sorted(source.rglob("*.py"))}
    graph = {name: set(find_imports(path, modules)) - {name} for name, path in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        return cycle
    return []


def get_name(path: Path, source: Path) -> str:
    """A file's name as a module."""
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def find_imports(path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """The modules among these that a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in modules else node.module


def test_no_modules_import_each_other() -> None:
    assert find_cycle(SOURCE) == []


@pytest.mark.parametrize(
    "line",
    [
        "from tenuto.sim.engine.scheduler import Scheduler",
        "import tenuto.sim.engine.scheduler",
        "from tenuto.sim.engine import scheduler",
        "if TYPE_CHECKING:\n    from tenuto.sim.engine.scheduler import Scheduler",
        "def later():\n    from tenuto.sim.engine.scheduler import Scheduler",
    ],
)
def test_a_planted_cycle_is_found(tmp_path: Path, line: str) -> None:
    shutil.copytree(SOURCE / "tenuto" / "sim", tmp_path / "tenuto" / "sim")
    assert find_cycle(tmp_path) == []
    with open(tmp_path / "tenuto" / "sim" / "engine" / "state.py", "a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    assert "tenuto.sim.engine.scheduler" in find_cycle(tmp_path)
