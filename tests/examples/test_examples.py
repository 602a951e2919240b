"""Every example runs to its end and prints what it promises; the notebook's cells run in order."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PRINTED = {
    "own_policy.py": ("stock", "KeepQuick"),
    "plan_capacity.py": ("A100-40", "jobs/s within"),
    "replay_trace.py": ("stock: mean job", "tenuto: mean job"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PRINTED)
def test_a_script_prints_what_it_promises(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", EXAMPLES / name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for words in PRINTED[name]:
        assert words in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_no_example_is_left_out() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == PRINTED.keys()
    assert {path.name for path in EXAMPLES.glob("*.ipynb")} == {"compare_policies.ipynb"}
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"({path.name})" in page for path in EXAMPLES.iterdir() if path.suffix in {".py", ".ipynb"})


@pytest.mark.slow
def test_the_notebook_s_cells_run_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    pytest.importorskip("pandas")
    matplotlib.use("Agg")
    notebook = json.loads((EXAMPLES / "compare_policies.ipynb").read_text(encoding="utf-8"))
    namespace: dict[str, Any] = {"__name__": "notebook"}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), namespace)
    frame = namespace["frame"]
    assert set(frame["policy"]) == {"stock", "tenuto"}
    axes = namespace["axes"]
    assert len(axes.lines) == 2
