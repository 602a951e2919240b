"""Measure how long shell commands take, as agents run them: makes data/commands.csv.gz beside it.

    python -m experiments.tool_times.measure_commands            # about half an hour; --minutes bounds it

Each command is a template of data/templates.txt with its slots filled. It is run by `bash -c` in a
folder of made trees (command_trees.py), its output read through a pipe, one at a time, in shuffled
order. Of the commands on made files one in ten runs cold: the kernel is told to drop these files' contents
before. Templates, not commands, are split into train and test. Commands on `stdlib`, `venv` and `project` see
what the machine has.
"""

from __future__ import annotations

import csv
import gzip
import io
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from experiments.command_line import make_parser
from experiments.tool_times.command_trees import SEED, WORDS, make_trees

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "tool_times" / "data"
TIME_LIMIT_S = 30.0
COLD_SHARE = 1 / 10
TEST_SHARE = 4
"""Every so-manieth template, by a hash of its text, is held out."""
MADE = ("small", "medium", "large")
REPOS = ("repo_small", "repo_large")
FILLED: dict[str, tuple[str, ...]] = {
    "tree": ("small", "small", "medium", "medium", "medium", "large", "stdlib", "venv", "project", "project"),
    "made": ("small", "medium", "medium", "large"),
    "small_made": ("small", "medium"),
    "repo": (*REPOS, "project"),
    "made_repo": REPOS,
    "log": ("logs/small.log", "logs/medium.log", "logs/large.log"),
    "small_log": ("logs/small.log", "logs/medium.log"),
    "word": tuple(WORDS),
    "word2": tuple(WORDS),
    "n": ("5", "10", "20", "40", "50", "100"),
    "m": ("120", "150", "200", "300"),
    "k": ("1", "2", "3", "5"),
    "k3": ("1", "2", "3"),
    "k10": ("4", "6", "8", "10", "12"),
    "big": ("150", "250", "400", "700", "1000"),
    "half": ("0.5", "1.5", "2.5"),
}


@dataclass(frozen=True)
class Template:
    """A kind of command; `split` is `train` or `test`."""

    name: str
    num_times: int
    text: str
    split: str


@dataclass(frozen=True)
class Sample:
    """One command that was run; `returncode` is 124 where it was stopped at the time limit."""

    template: str
    split: str
    cache: str
    returncode: int
    duration_s: float
    load_1m: float
    command: str


def read_templates(path: Path) -> list[Template]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    templates = []
    for line in lines:
        num_times, _, text = line.partition(" | ")
        digest = zlib.crc32(text.encode())
        split = "test" if digest % TEST_SHARE == 0 else "train"
        templates.append(Template(f"{digest:08x}", int(num_times), text.replace("\\n", "\n"), split))
    return templates


def get_slot_values(root: Path) -> dict[str, tuple[str, ...]]:
    """What each slot may be filled with; files and folders are relative to the folder of trees."""
    files = {tree: sorted(p for p in (root / tree).rglob("*.*") if p.is_file()) for tree in (*MADE, *REPOS)}
    files["stdlib"] = sorted((root / "stdlib").glob("*.py"))
    # As many of each tree, so that the largest does not stand for all.
    picked = [
        path for found in files.values() for path in random.Random(SEED).sample(found, min(60, len(found)))
    ]
    names = tuple(str(path.relative_to(root)) for path in picked if ".git/" not in str(path))
    folders = tuple(sorted({str(Path(name).parent) for name in names}))
    python = tuple(name for name in names if name.endswith(".py"))
    return {**FILLED, "file": names, "file2": names, "file3": names, "pyfile": python, "folder": folders}


def make_commands(templates: list[Template], root: Path, rounds: int) -> list[tuple[Template, str]]:
    """All commands to run, shuffled."""
    rng = random.Random(SEED)
    values = get_slot_values(root)
    slot = re.compile("{(" + "|".join(values) + ")}")
    commands = [
        (template, slot.sub(lambda match: rng.choice(values[match[1]]), template.text))
        for template in templates
        for _ in range(template.num_times * rounds)
    ]
    rng.shuffle(commands)
    return commands


def drop_contents(root: Path, command: str) -> bool:
    """Ask the kernel to forget the contents of the made files a command names; False if it names none."""
    named = [
        path for path in root.iterdir() if not path.is_symlink() and re.search(rf"\b{path.name}\b", command)
    ]
    named = [path for path in named if path.name not in ("out", "project")]
    for path in named:
        for file in path.rglob("*"):
            if file.is_file():
                descriptor = os.open(file, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
    return bool(named)


def run(command: str, root: Path, environment: dict[str, str]) -> tuple[int, float]:
    """Run one command; its return code (124: stopped at the limit) and seconds."""
    start_s = time.perf_counter()
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=root,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        process.communicate(timeout=TIME_LIMIT_S)
        returncode = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        returncode = 124
    return returncode, time.perf_counter() - start_s


def measure(commands: list[tuple[Template, str]], root: Path, limit_s: float) -> Iterator[Sample]:
    """Run commands until all are done or the time is over."""
    rng = random.Random(SEED)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "GIT_PAGER": "cat"}
    end_s = time.monotonic() + limit_s
    for number, (template, command) in enumerate(commands, 1):
        left_s = end_s - time.monotonic()
        if left_s < 0:
            return
        is_cold = rng.random() < COLD_SHARE and drop_contents(root, command)
        returncode, duration_s = run(command, root, environment)
        if number % 25 == 0:
            say(f"{number} of {len(commands)} commands, at most {left_s / 60:.0f} min left")
        cache = "cold" if is_cold else "warm"
        load = round(os.getloadavg()[0], 2)
        yield Sample(template.name, template.split, cache, returncode, round(duration_s, 5), load, command)


def read(path: Path) -> list[Sample]:
    """The samples of an earlier run."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return [
            Sample(
                template=row["template"],
                split=row["split"],
                cache=row["cache"],
                returncode=int(row["returncode"]),
                duration_s=float(row["duration_s"]),
                load_1m=float(row["load_1m"]),
                command=row["command"],
            )
            for row in csv.DictReader(file)
        ]


def write(samples: list[Sample], path: Path) -> None:
    """One row per command; the same samples make the same bytes."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Sample)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(sample) for sample in samples)
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def say(text: str) -> None:
    print(f"[measure] {text}", file=sys.stderr, flush=True)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER / "commands.csv.gz", help="file to write")
    parser.add_argument("--resume", action="store_true", help="go on where the file's measurements ended")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="stop after this long (default %(default)g)"
    )
    parser.add_argument(
        "--rounds", type=int, default=1, help="how often each template's count (default %(default)d)"
    )
    options = parser.parse_args()
    templates = read_templates(FOLDER / "templates.txt")
    with tempfile.TemporaryDirectory(prefix="commands-") as folder:
        root = Path(folder)
        say("making the trees")
        make_trees(root)
        commands = make_commands(templates, root, options.rounds)
        samples = read(options.out) if options.resume else []
        say(f"{len(templates)} templates, {len(commands)} commands, {len(samples)} of them measured before")
        try:
            samples.extend(measure(commands[len(samples) :], root, 60 * options.minutes))
        except KeyboardInterrupt:
            say("stopped: what was measured so far is kept")
        write(samples, options.out)
    say(f"{len(samples)} commands written to {options.out}")


if __name__ == "__main__":
    main()
