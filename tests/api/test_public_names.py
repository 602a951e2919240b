"""What `import tenuto` gives, and what it costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tenuto


def test_every_public_name_is_there_and_typed() -> None:
    assert len(tenuto.__all__) == len(set(tenuto.__all__))
    for name in tenuto.__all__:
        assert getattr(tenuto, name) is not None
        assert name in dir(tenuto)
    tree = ast.parse(Path(tenuto.__file__).read_text(encoding="utf-8"))
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("tenuto.")
        for alias in node.names
    }
    # What type checkers see is what there is.
    assert imported == set(tenuto.__all__)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        tenuto.simulat  # noqa: B018


def test_importing_loads_the_standard_library_alone() -> None:
    code = "import sys; before = set(sys.modules); import tenuto; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert loaded - set(sys.stdlib_module_names) == {"tenuto"}
    assert "tenuto.core.policy" not in done.stdout
