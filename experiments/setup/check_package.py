"""`make package`: build what a release publishes, check it, and run it in empty environments.

Nothing of the checkout is used after the build: the commands run in an empty folder, with the environment's
Python alone. Status 0: everything may be published. The archives stay in the folder `--out`.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterable, Sequence
from email import message_from_bytes
from email.message import Message
from pathlib import Path

ROOT = Path(__file__).parents[2]
BASE: tuple[tuple[str, ...], ...] = (
    ("tenuto", "--version"),
    ("tenuto", "policies"),
    ("tenuto", "simulate", "--gpu", "H100", "--jps", "2", "--max-jobs", "4", "--no-beside-stock"),
    ("tenuto", "serve", "MODEL", "--dry-run"),
    ("python", "-m", "tenuto.cli", "--help"),
)
"""Commands that work with the base install, without vLLM. They end with status 0."""
WITH_EXTRAS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("bench", ("tenuto", "bench", "--url", "http://127.0.0.1:9", "--jps", "1", "--max-jobs", "1")),
    ("report", ("tenuto", "report", "nothing-here")),
    ("sim", ("tenuto", "serve", "--engine", "sim", "--gpu", "no-such-gpu")),
    ("top", ("tenuto", "top", "--url", "http://127.0.0.1:9", "--once")),
)
"""An extra, and a command that needs it. Without the extra, the command names it. With it, it does not."""


def read_version() -> str:
    """The version, from its one place."""
    tree = ast.parse((ROOT / "src/tenuto/core/__init__.py").read_text(encoding="utf-8"))
    [version] = [
        node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        if getattr(node.targets[0], "id", None) == "__version__"
    ]
    return str(version)


def build(out: Path) -> list[Path]:
    """The archives to publish: the sdist, the wheel made from it, and the wheel of the extra `predict`."""
    shutil.rmtree(out, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", str(out), str(ROOT))
    run(sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(ROOT / "predict"))
    run(sys.executable, "-m", "twine", "check", "--strict", *map(str, out.iterdir()))
    return sorted(out.iterdir())


def find_faults(wheel: Path, sources: Iterable[str], version: str) -> list[str]:
    """What is wrong with a wheel of Tenuto, in words. `sources`: its files, as paths below `src`."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [path] = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = message_from_bytes(archive.read(path))
        entry_points = archive.read(path.replace("METADATA", "entry_points.txt")).decode()
    faults = [f"{name} is missing" for name in sorted(set(sources) - names)]
    strange = {name.partition("/")[0] for name in names} - {"tenuto", path.partition("/")[0]}
    faults += [f"{name} does not belong in it" for name in sorted(strange)]
    if metadata["Version"] != version:
        faults.append(f"its version is {metadata['Version']}, not {version}")
    if "tenuto.vllm.plugin:register" not in entry_points:
        faults.append("vLLM would not find the plugin")
    return faults + find_page_faults(metadata)


def find_page_faults(metadata: Message) -> list[str]:
    """What would be wrong with the page on the package index."""
    page = str(metadata.get_payload())
    links = [part.partition(")")[0] for part in page.split("](")[1:]]
    return [
        f"the page's link {link} leads nowhere on the index"
        for link in links
        if not link.startswith(("https://", "http://", "#"))
    ]


def check_install(archive: Path, extras: Sequence[str] = ()) -> list[str]:
    """Install an archive into an empty environment and run it there; what is wrong, in words."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "environment"
        empty = Path(folder) / "empty"
        empty.mkdir()
        venv.create(home, with_pip=True)
        chosen = f"[{','.join(extras)}]" if extras else ""
        run(str(home / "bin/python"), "-m", "pip", "install", "--quiet", f"{archive}{chosen}")
        environment = {"PATH": f"{home / 'bin'}:/usr/bin:/bin", "HOME": folder}
        faults = []
        for command in BASE:
            status, told = call(command, empty, environment)
            if status != 0:
                faults.append(
                    f"{archive.name}: {' '.join(command)} ended with status {status}: {told[-500:]}"
                )
        _, told = call(("tenuto", "--version"), empty, environment)
        if not told.startswith(f"tenuto {read_version()}\n"):
            faults.append(f"{archive.name}: tenuto --version says {told!r}")
        for extra, command in WITH_EXTRAS:
            _, told = call(command, empty, environment)
            asks = f"pip install 'tenuto[{extra}]'" in told
            if asks == (extra in extras) or "Traceback" in told:
                state = "with" if extra in extras else "without"
                faults.append(
                    f"{archive.name}, {state} the extra {extra}: {' '.join(command)} says {told[-500:]}"
                )
        return faults


def call(command: Sequence[str], folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """A command's status, and all that it said."""
    ended = subprocess.run(
        [shutil.which(command[0], path=environment["PATH"]) or command[0], *command[1:]],
        cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    return ended.returncode, ended.stdout + ended.stderr


def run(*command: str) -> None:
    """Run a command that must not fail."""
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": ""})


def main() -> int:
    """Build and check; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=ROOT / "dist", help="folder of the archives (default: dist)"
    )
    archives = build(parser.parse_args().out.resolve())
    [wheel] = [path for path in archives if path.name.startswith("tenuto-") and path.suffix == ".whl"]
    [sdist] = [path for path in archives if path.name.endswith(".tar.gz")]
    sources = [
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src/tenuto").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    faults = find_faults(wheel, sources, read_version())
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    faults += [
        f"{name} is missing in {sdist.name}" for name in ("LICENSE", "CHANGELOG.md") if name not in names
    ]
    faults += check_install(sdist)
    faults += check_install(wheel, [extra for extra, _ in WITH_EXTRAS])
    for fault in faults:
        print(f"package: {fault}", file=sys.stderr)
    print(f"package: {len(archives)} archives in {wheel.parent}, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
