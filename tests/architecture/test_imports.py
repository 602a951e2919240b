"""Who may import whom, and what is not imported before it is used."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "tenuto"

PLANTED = {
    "rooms build on the rooms below them, and never on those above or beside": (
        "core",
        "import tenuto.policies.stock",
    ),
    "the simulator's rooms build on the rooms below them": ("sim/kv", "import tenuto.sim.engine.state"),
    "the engines never name a policy or a router": ("sim", "import tenuto.policies.stock"),
    "one policy never imports another": ("policies/published", "import tenuto.policies.stock"),
    "one router never imports another": ("routers", "import tenuto.routers.published"),
    "only the command line knows the simulated server": ("sim", "import tenuto.sim.server.engine"),
    "plotting only in tenuto.report": ("workload", "import matplotlib"),
    "torch and vLLM only in tenuto.vllm": ("core", "import torch"),
}
"""For each contract: a room, and a line in it that breaks the contract."""


def run_python(
    code: str, *, cwd: Path = ROOT, source: Path = ROOT / "src"
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def lint_imports(root: Path) -> dict[str, bool]:
    """Whether each contract of a source tree is kept."""
    pytest.importorskip("importlinter")
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    result = run_python(code, cwd=root, source=root / "src")
    verdicts = re.findall(r"^(.+) (KEPT|BROKEN)(?: \(.*ignored.*\))?$", result.stdout, re.MULTILINE)
    assert verdicts, result.stdout + result.stderr
    contracts = {name: verdict == "KEPT" for name, verdict in verdicts}
    assert (result.returncode == 0) == all(contracts.values())
    return contracts


def get_contract_names() -> list[str]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return [contract["name"] for contract in settings["tool"]["importlinter"]["contracts"]]


def test_the_import_rules_hold() -> None:
    assert lint_imports(ROOT) == dict.fromkeys(get_contract_names(), True)


def test_each_import_rule_sees_what_it_forbids(tmp_path: Path) -> None:
    assert PLANTED.keys() == set(get_contract_names())
    shutil.copytree(PACKAGE, tmp_path / "src" / "tenuto", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for number, (room, line) in enumerate(PLANTED.values()):
        (tmp_path / "src" / "tenuto" / room / f"planted_{number}.py").write_text(
            line + "\n", encoding="utf-8"
        )
    assert lint_imports(tmp_path) == dict.fromkeys(PLANTED, False)


def get_loaded(code: str) -> set[str]:
    """Top-level modules that are loaded once this code has run, but were not before."""
    marker = "-- loaded --"
    result = run_python(
        f"import sys\nbefore = set(sys.modules)\n{code}\n"
        f"names = {{name.partition('.')[0] for name in set(sys.modules) - before}}\n"
        f"print({marker!r}, *sorted(names))"
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.splitlines()[-1].removeprefix(marker).split())


def test_the_probe_sees_what_is_loaded() -> None:
    assert {"tenuto", "httpx"} <= get_loaded("import tenuto, httpx.__version__")


def test_importing_tenuto_loads_nothing_heavy() -> None:
    assert get_loaded("import tenuto") - sys.stdlib_module_names == {"tenuto"}


def test_core_wire_estimators_and_policies_need_the_standard_library_only() -> None:
    modules = [
        ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        for room in ("core", "wire", "estimators", "policies")
        for path in sorted((PACKAGE / room).rglob("*.py"))
        if path.name != "__init__.py"
    ]
    assert "tenuto.core.driver" in modules
    loaded = get_loaded("\n".join(f"import {module}" for module in modules))
    assert loaded - sys.stdlib_module_names == {"tenuto"}


@pytest.mark.skipif(not (PACKAGE / "cli").exists(), reason="there is no command line yet")
@pytest.mark.parametrize(
    "arguments",
    [
        *([], ["--help"], ["--version"], ["policies"]),
        *([command, "--help"] for command in ("bench", "replay", "ab", "profile")),
    ],
)
def test_the_command_line_loads_nothing_heavy(arguments: list[str]) -> None:
    loaded = get_loaded(
        "from tenuto.cli import main\n"
        "try:\n"
        f"    status = main({arguments!r})\n"
        "except SystemExit as end:\n"
        "    status = end.code\n"
        "assert not status, status"
    )
    assert "tenuto" in loaded
    heavy = {"torch", "vllm", "httpx", "transformers", "prometheus_client", "numpy", "scipy", "aiohttp"}
    assert not loaded & (heavy | {"jinja2", "matplotlib", "rich", "pandas"})


def test_the_help_of_serve_loads_no_simulator() -> None:
    """It starts servers, and its help is what an operator asks for first."""
    code = "import sys\nfrom tenuto.cli import load_command\nload_command('serve')\n"
    result = run_python(f"{code}print([name for name in sys.modules if name.startswith('tenuto.sim')])")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "[]"


def test_verify_and_top_need_no_extra_for_what_they_read() -> None:
    assert "aiohttp" not in get_loaded("import tenuto.client.verify, tenuto.report.top")
