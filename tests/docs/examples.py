"""The blocks of the docs: what they are, how each is run, and which output follows from which command.

Commands run as they are printed, in the order of their page and in one folder per page. What is changed is in
the tables below and nowhere else: addresses become those of two simulated servers, a server of vLLM becomes
its own dry run or, in an A/B, a simulated one, and a load becomes a short one in one process. A line that
cannot run here has its reason.

    python -m tests.docs.examples --write      # the outputs in the pages anew, where commands make them
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from tenuto import cli

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

COMMANDS = re.compile(
    r"(?:[A-Z_]+=(?:'[^']*'|\S+) )*(?:\.venv/bin/)?"
    r"(?:tenuto|vllm|vllm-router|pip|python|make|curl|export|git|lmcache|aiperf|guidellm|P=)\b"
)
"""How a block of commands begins."""

NOT_RUN: tuple[tuple[str, str], ...] = (
    (
        r"(\S*/)?pip install|git clone|python -m venv",
        "needs a network: test_every_install_line_names_what_there_is",
    ),
    (r"docker |helm ", "needs a daemon or a cluster: tests/docs/test_deploy.py reads their files"),
    (r"make \w", "builds environments: test_every_make_line_is_a_target"),
    (r"vllm serve", "needs vLLM: tests/vllm/test_documents.py lets vLLM parse it"),
    (r"vllm-router", "needs servers elsewhere; tests/unchanged_clients and experiments/routers run it"),
    (r"aiperf|guidellm", "needs that harness: tests/harnesses runs it in the same way"),
    (r"lmcache|TENUTO_TEST_CONNECTORS=", "needs LMCache, which is no package of the tests"),
    (r"(VLLM\w+=\S+ )+tenuto ab", "measures for an hour on servers of vLLM"),
    (r"tenuto ab .*localhost:810[12]", "measures servers of vLLM on a GPU"),
    (
        r"(\.venv/bin/)?python (-m )?(experiments|tests)",
        "takes minutes to hours: test_every_script_has_its_flags",
    ),
    (
        r"tenuto profile|tenuto simulate --step-cost",
        "times a server's steps for minutes: tests/client/test_profile.py",
    ),
    (r"tenuto validate MODEL", "measures servers for half an hour: tests/client/test_validate.py"),
    (r"claude ", "needs that client: tests/unchanged_clients runs it where it is installed"),
    (r"tenuto estimate", "takes minutes: tests/sim/test_estimate.py"),
    (r"tenuto (compare|plan) .*(--router|\$P|--p95)", "takes minutes; its flags are parsed by tests/cli"),
    (
        r"tenuto control set .*--canary",
        "the simulated server has no canaries; tests/vllm/test_control_http.py",
    ),
)
"""Lines that are not run, and why not."""

CHANGED: tuple[tuple[str, str], ...] = (
    (r"\.venv/bin/tenuto", "tenuto"),
    (r"(http://)?(localhost|127\.0\.0\.1):8000|http://(a|router|router1|ROUTER):\d+|(?<=A=)…", "{one}"),
    (r"http://(b|router2):\d+|(?<=B=)…", "{two}"),
    (r"TENUTO_ADMIN_KEY=\S+", "TENUTO_ADMIN_KEY=secret"),
    (r"tenuto serve MODEL", "tenuto serve llama-3.1-8b --dry-run"),
    (r"tenuto top", "tenuto top --once"),
    (r"tenuto bench", "tenuto bench --max-jobs 2 --max-turns 2 --scale-tools 0.01"),
    (r"tenuto ab", "tenuto ab --max-jobs 2 --max-turns 2 --scale-tools 0.01 --repeats 1"),
    (r"(?<=\w=)vllm(?= )", "sim:stock"),
    (r"(?<=\w=)policy:", "sim:"),
    (r"--model (MODEL|Qwen/Qwen3-8B)", "--model llama-3.1-8b"),
    (r"tenuto replay(?=.*--url)", "tenuto replay --scale-tools 0.01"),
    (r"(tenuto simulate .*--window) \d+", r"\1 4"),
    (r"tenuto (compare|simulate)(?!.*--window)", r"tenuto \1 --window 4"),
    # Processes of their own would each read the tables of step times again.
    (r"tenuto compare", "tenuto compare --workers 1"),
)
"""What is changed in a line before it runs: addresses, servers, the length of loads, and processes."""

STARTED = re.compile(r"tenuto (serve --engine sim|record)\b")
"""Commands that run until they are stopped."""

PLAIN = re.compile(r"tenuto( [^|&;<>$`*?~#()\n]*)?")
"""Commands of which a shell does nothing but split the words."""

NOT_COMPARED: Mapping[tuple[str, str], str] = {
    ("docs/demo.md", "Per turn, mean over the jobs:"): "one run of `make demo` on a real vLLM",
    ("docs/start/planner.md", "gpu         policy"): "takes minutes; --write makes it anew",
    ("docs/design.md", "src/tenuto/"): "a drawing: test_the_rooms_of_the_drawing_exist",
    ("docs/design.md", "cli > report >"): "the layers, which the import rules check",
    ("docs/design.md", "arrive ──►"): "a drawing",
}
"""Blocks that are neither commands, nor code, nor the output of the command before: what they are."""

VARIES = re.compile(r"(wall time +)[\d.]+")
"""What differs between two runs of a deterministic command."""


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    language: str
    text: str

    @property
    def is_commands(self) -> bool:
        """Whether its lines are for a shell."""
        return self.language == "bash" or (not self.language and COMMANDS.match(self.text) is not None)

    def get_lines(self) -> list[str]:
        """The commands: joined where a backslash ends them, without comments at their ends."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in (re.sub(r"(^|\s{2,})#.*", "", each).strip() for each in lines) if line]


def find_blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(ROOT).as_posix()
    return [
        Block(name, text.count("\n", 0, found.start()) + 1, found[1], found[2])
        for found in FENCED.finditer(text)
    ]


def find_outputs(page: Path) -> list[tuple[str, Block]]:
    """The blocks that show what the one command of the block before prints."""
    blocks = find_blocks(page)
    found = []
    for before, block in pairwise(blocks):
        is_output = not block.language and not block.is_commands and before.is_commands
        if is_output and len(before.get_lines()) == 1:
            found.append((before.get_lines()[0], block))
    return found


def try_get_reason(line: str) -> str | None:
    """Why a line is not run; None if it is."""
    return next((reason for pattern, reason in NOT_RUN if re.match(pattern, line)), None)


def change(line: str, one: str, two: str) -> str:
    """The line as it is run: `one` and `two` are the addresses of servers."""
    for pattern, replacement in CHANGED:
        line = re.sub(pattern, replacement.replace("{one}", one).replace("{two}", two), line)
    return line


def make_environment(folder: Path) -> dict[str, str]:
    """Where `tenuto` is the code of this repository, whatever is installed."""
    commands = folder / ".bin"
    commands.mkdir(exist_ok=True)
    script = commands / "tenuto"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tenuto.cli "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    paths = [str(ROOT / "src"), str(ROOT)]
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(paths),
        "TENUTO_ADMIN_KEY": "secret",
        "OPENAI_API_KEY": "any",
    }


def run_line(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a line: in this process if it is one plain command of ours, else by a shell, which is slower."""
    if PLAIN.fullmatch(line):
        return _run_here(line, folder)
    return subprocess.run(
        ["bash", "-c", line], cwd=folder, env=make_environment(folder), capture_output=True, text=True,
        check=False, timeout=3600,
    )  # fmt: skip


def _run_here(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words, out, err = shlex.split(line), io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        for name, value in make_environment(folder).items():
            patch.setenv(name, value)
        status = cli.main(words[1:])
    return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())


def normalise(text: str) -> str:
    """Without what differs between two runs, and without blanks at the ends of lines."""
    return "\n".join(line.rstrip() for line in VARIES.sub(r"\1…", text).strip().splitlines())


def write(page: Path) -> int:
    """Put what commands print into the page; return how many blocks changed."""
    text = page.read_text(encoding="utf-8")
    changed = 0
    for line, block in find_outputs(page):
        print(f"{block.page}:{block.line}: {line}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            done = run_line(line, Path(folder))
        if done.returncode:
            raise SystemExit(done.stderr)
        if normalise(done.stdout) != normalise(block.text):
            made = "".join(f"{each.rstrip()}\n" for each in done.stdout.strip("\n").splitlines())
            text = text.replace(f"```\n{block.text}```", f"```\n{made}```")
            changed += 1
    page.write_text(text, encoding="utf-8")
    return changed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Makes the outputs in the docs anew.")
    parser.add_argument("--write", action="store_true", required=True)
    parser.add_argument("pages", nargs="*", type=Path, default=PAGES)
    for each in parser.parse_args().pages:
        print(f"{each}: {write(each.resolve())} blocks changed")
