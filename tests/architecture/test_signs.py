"""docs/design.md says which file to change for what. Here each change is made in that file of a copy of the
source, and looked for where a user would see it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DESIGN = ROOT / "docs" / "design.md"
FAST = ("--window", "3", "--jps", "2", "--step-cost", "roofline")
PAIR = ("compare", "--gpu", "H100", "--policies", "stock,tenuto", "--seeds", "1", "--no-split")
SWEEP = (*PAIR, *FAST, "--out", "sweep")


@dataclass(frozen=True)
class Sign:
    """A planted change, and how it shows."""

    row: str
    """How the row of the table begins."""
    seen: str
    """What the commands' output must hold, and must not hold without the change."""
    commands: Sequence[Sequence[str]]
    """Arguments of `tenuto`; of the last one the output is read."""
    edits: Sequence[tuple[str, str, str]] = ()
    """A file below src/tenuto, a text in it, and what takes its place."""
    files: Mapping[str, str] = field(default_factory=dict)
    """New files below src/tenuto."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """New files that only make the change show."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Files that the commands read."""
    reads: str = ""
    """A file that the commands write, which is read instead of the output."""


POLICY = '''"""planted: does nothing of its own."""

from dataclasses import dataclass

from tenuto.core.policy import Policy
{imports}

@dataclass
class Planted(Policy):
    """Planted. Source: a test."""
{body}
'''
ROUTER = '''"""planted: always the last engine."""

from dataclasses import dataclass

from tenuto.core.router import FleetView, Route, RoutedTurn, Router, Send


@dataclass
class Planted(Router):
    """Planted. Source: a test."""

    def route(self, turn: RoutedTurn, fleet: FleetView) -> Route:
        return Send(list(fleet.engines)[-1])
'''
FORMAT = '''"""planted: a turn a line."""

from tenuto.workload.schema import Job, Span, TurnSpec


def read_planted(records):
    return [Job(f"planted-{n}", 0.0, (TurnSpec((Span(f"p{n}", 4321),), Span(f"o{n}", 5)),))
            for n, _ in enumerate(records)]
'''
GENERATOR = '''"""planted: single turns."""

from tenuto.workload.schema import Job, Span, TurnSpec


def planted_jobs(arrivals, seed):
    return [Job(f"planted-{n}", at_s, (TurnSpec((Span(f"p{n}", 4321),), Span(f"o{n}", 5)),))
            for n, at_s in enumerate(arrivals)]
'''
COMMAND = '''"""`tenuto planted`: says so."""

from tenuto.cli.command import Command


def run(given) -> int:
    print("a planted command runs")
    return 0


PLANTED = Command("Planted.", "", (), run)
'''
CHART = """

def plot_planted(group: Group, looks: Looks) -> Chart | None:
    rows = Axis(places={0: "planted row"})
    panel = Panel(marks=[Bars("p1", "planted", [(0, 0.0, 7.0)], 0.5)], x=Axis(label="x", ends=(0, 9)),
                  y=rows, has_rows=True)
    return Chart(name="planted", title="A planted chart", caption="Planted.", panels=[panel])


OF_A_SETTING:"""

SIGNS = (
    Sign(
        "add a policy",
        "planted",
        [("simulate", "--policy", "planted", *FAST), ("policies",)],
        files={"policies/published/planted.py": POLICY.format(imports="", body="")},
    ),
    Sign(
        "learn something new online",
        "learned_turns",
        [("simulate", "--policy", "planted", *FAST), ("policies",)],
        files={
            "estimators/planted.py": '"""Counts turns."""\n\nNAME = "learned_turns"\n',
        },
        beside={
            "policies/published/planted.py": POLICY.format(
                imports="from tenuto.core.settings import setting\n"
                "from tenuto.estimators.planted import NAME\n",
                body='\n    weight: float = setting(1.0, f"weight of {NAME}", minimum=0)\n',
            ),
        },
    ),
    Sign(
        "read or write a new trace format",
        "4321",
        [("convert", "in.jsonl", "out.jsonl")],
        files={"workload/formats/planted.py": FORMAT},
        edits=[
            (
                "workload/load.py",
                '    if "messages" in first:\n',
                '    if "planted" in first:\n'
                "        from tenuto.workload.formats.planted import read_planted\n\n"
                "        return read_planted\n"
                '    if "messages" in first:\n',
            )
        ],
        inputs={"in.jsonl": '{"planted": 1}\n'},
        reads="out.jsonl",
    ),
    Sign(
        "add a workload generator",
        '"workload": "planted"',
        [("simulate", "--workload", "planted", "--json", *FAST)],
        files={"workload/generators/planted.py": GENERATOR},
        edits=[
            (
                "workload/load.py",
                "from tenuto.workload.hints import HINTS\n",
                "from tenuto.workload.generators.planted import planted_jobs\n"
                "from tenuto.workload.hints import HINTS\n",
            ),
            (
                "workload/load.py",
                '    "bfcl-contexts": agents.bfcl_contexts_jobs,\n',
                '    "bfcl-contexts": agents.bfcl_contexts_jobs,\n    "planted": planted_jobs,\n',
            ),
        ],
    ),
    Sign(
        "add or change a metric",
        "Planted figure",
        [SWEEP, ("report", "sweep", "--out", "page.html")],
        edits=[
            (
                "records/metrics.py",
                "FIGURES = (\n",
                "FIGURES = (\n"
                '    Figure("planted", "Planted figure", "plant", lambda runs: 0.4321, ".4f"),\n',
            )
        ],
        reads="page.html",
    ),
    Sign(
        "add a field to records",
        '"planted": 4321',
        [("simulate", "--json", *FAST)],
        edits=[
            (
                "records/schema.py",
                "    finished_jps: float | None = None\n",
                "    finished_jps: float | None = None\n    planted: int = 4321\n",
            )
        ],
    ),
    Sign(
        "add a field to the trace's record of a step",
        '"planted"',
        [("simulate", "--trace", "trace.jsonl", "--no-beside-stock", *FAST)],
        edits=[("records/trace.py", '"kind": "step",\n', '"kind": "step",\n            "planted": 4321,\n')],
        reads="trace.jsonl",
    ),
    Sign(
        "add a figure to what jobs and tenants used",
        "total,,,4321,",
        [("simulate", "--ledger", "-", *FAST)],
        edits=[
            ("core/ledger.py", 'FIGURES = ("turns",', 'FIGURES = ("planted", "turns",'),
            ("core/ledger.py", '= {"turns": self.turns}', '= {"planted": 4321, "turns": self.turns}'),
        ],
    ),
    Sign(
        "add a column to the table of `compare`",
        "plant",
        [SWEEP],
        edits=[
            ("sim/compare.py", "COLUMNS = (\n", 'COLUMNS = (\n    Column(" plant", lambda row: "  4321"),\n')
        ],
    ),
    Sign(
        "add a chart to the report",
        "A planted chart",
        [SWEEP, ("report", "sweep", "--out", "page.html")],
        edits=[
            ("report/html/charts.py", "\n\nOF_A_SETTING:", CHART),
            ("report/html/charts.py", "    plot_cdf,\n)", "    plot_cdf,\n    plot_planted,\n)"),
        ],
        reads="page.html",
    ),
    Sign(
        "add a GPU or a model",
        "PLANTED",
        [("memory", "--gpu", "PLANTED")],
        edits=[
            (
                "sim/hardware/gpus.py",
                "    # NVIDIA L40S datasheet.\n",
                '    replace(_A100_80, name="PLANTED", measured_kv_tokens=()),\n'
                "    # NVIDIA L40S datasheet.\n",
            )
        ],
    ),
    Sign(
        "route jobs over several engines in another way",
        "planted",
        [("simulate", "--servers", "2", "--router", "planted", *FAST)],
        files={"routers/planted.py": ROUTER},
    ),
    Sign(
        "add a command |",
        "a planted command runs",
        [("planted",)],
        files={"cli/planted.py": COMMAND},
        edits=[
            ("cli/__init__.py", '    "policies": (', '    "planted": ("", "planted"),\n    "policies": (')
        ],
    ),
    Sign(
        "explain a new way of losing the cache",
        "a planted meaning",
        [
            ("simulate", "--policy", "autellix", "--trace", "trace.jsonl", "--kv-tokens", "30000", *FAST),
            ("analyze", "trace.jsonl"),
        ],
        edits=[("report/diagnosis.py", "no lease: evicted like any cached block", "a planted meaning")],
    ),
)
ELSEWHERE = {
    "add an option": "tests/cli/test_options.py: an option is a field of what it belongs to",
    "read one more hint": "tests/core/test_hints.py holds every name of a job that is read",
    "read a cache wish": "tests/core/test_wishes.py: every reader has samples, and reads them",
    "change what the middleware copies": "tests/vllm/test_identity*.py",
    "add a metric to `/metrics`": "tests/sim_server/test_metrics.py: each row of the tables is on the page",
    "change which waiting turn goes first": "tests/core: test_admission, test_fair_order, test_stock_queue",
    "change which chunks host memory": "tests/core/test_tier_order.py; tests/vllm/test_tier_differential.py",
    "add a hook": "tests/core/test_told_hooks.py and tests/agreement: both engines provide each hook",
    "read or write another API": "tests/wire: what one side writes the other reads, in each format",
    "change what `plan` prints": "tests/sim/test_plan.py",
    "tell how far predictions were off": "tests/sim/test_known_errors.py: every command says it",
    "change how long a step takes": "tests/sim/test_step_cost_*.py, a file per source",
    "change what is remembered around every router": "tests/core/test_dispatcher.py",
    "simulate something else of a fleet": "tests/sim/test_fleet.py",
    "change what a simulated step computes": "tests/differential, step by step beside vLLM",
    "change when a simulated step starts": "tests/sim/test_loop.py",
    "support a new vLLM release": "tests/architecture/test_vllm_names.py: its names are nowhere else",
    "change what `tenuto validate` measures": "tests/client/test_validate.py",
}
"""Rows whose signs other tests follow."""


def read_rows() -> list[str]:
    text = DESIGN.read_text(encoding="utf-8").partition("### Which room for which change?")[2]
    table = text.partition("\n## ")[0]
    return [found for found in re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE) if found != "you want to …"]


def test_every_row_of_the_table_is_followed() -> None:
    told = [*(sign.row for sign in SIGNS), *ELSEWHERE]
    rows = read_rows()
    assert len(rows) > 15
    assert [row for row in rows if not any(f"{row} |".startswith(each) for each in told)] == []
    assert [each for each in told if not any(f"{row} |".startswith(each) for row in rows)] == []


@pytest.mark.parametrize("sign", SIGNS, ids=lambda sign: sign.row)
def test_the_row_names_the_files(sign: Sign) -> None:
    line = next(
        line for line in DESIGN.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {sign.row}")
    )
    for file in [path for path, _, _ in sign.edits]:
        assert file in line, (file, line)
    for file in sign.files:
        assert f"{file.rpartition('/')[0]}/" in line, (file, line)


def run_tenuto(source: Path, folder: Path, arguments: Sequence[str]) -> str:
    environment = {**os.environ, "PYTHONPATH": str(source), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "tenuto.cli", *arguments]
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("sign", SIGNS, ids=lambda sign: sign.row)
def test_a_planted_change_shows(sign: Sign, tmp_path: Path) -> None:
    source = tmp_path / "src"
    # With what is compiled: Python compares sizes and times, so it compiles only what is changed below.
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("*.egg-info", "*.pyc.*"))
    for name, text in [*sign.files.items(), *sign.beside.items()]:
        (source / "tenuto" / name).write_text(text, encoding="utf-8")
    for name, old, new in sign.edits:
        path = source / "tenuto" / name
        text = path.read_text(encoding="utf-8")
        assert old in text, f"{name} has no {old!r} any more"
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
    for name, text in sign.inputs.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    shown = [run_tenuto(source, tmp_path, arguments) for arguments in sign.commands][-1]
    if sign.reads:
        shown = (tmp_path / sign.reads).read_text(encoding="utf-8")
    assert sign.seen in shown


def test_a_row_that_names_the_wrong_file_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "design.md"
    text = DESIGN.read_text(encoding="utf-8").replace("sim/compare.py", "sim/table.py")
    page.write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys.modules[__name__], "DESIGN", page)
    column = next(sign for sign in SIGNS if sign.row.startswith("add a column"))
    with pytest.raises(AssertionError):
        test_the_row_names_the_files(column)
