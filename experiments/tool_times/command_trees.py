"""Directories that the measured commands work on: trees of three sizes, logs, git histories, projects.

Everything is made from a fixed seed, apart from three that are as the machine has them: `stdlib` and `venv`
(links to the running Python's libraries) and `project` (a clone of this repository).
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import sysconfig
from pathlib import Path

SEED = 20251102
TREE_SIZES = {"small": 10, "medium": 1000, "large": 50_000}
LOG_LINES = {"small": 1000, "medium": 100_000, "large": 1_500_000}
REPO_COMMITS = {"repo_small": 30, "repo_large": 4000}
WORDS = [
    "config",
    "error",
    "value",
    "index",
    "token",
    "parse",
    "load",
    "cache",
    "block",
    "retry",
    "handler",
    "session",
    "request",
    "model",
    "test",
]
SUITES = {"quick": (20, 0.0), "medium": (150, 0.02), "slow": (12, 1.0)}
"""Test suites: tests, and seconds that each of them works."""


def make_trees(root: Path) -> None:
    """Make all directories under `root`, which must be empty or missing. About a minute and 400 MB."""
    rng = random.Random(SEED)
    for name, num_files in TREE_SIZES.items():
        _make_tree(root / name, num_files, rng)
    (root / "logs").mkdir()
    for name, num_lines in LOG_LINES.items():
        _make_log(root / "logs" / f"{name}.log", num_lines, rng)
    for name, num_commits in REPO_COMMITS.items():
        _make_repo(root / name, num_commits, rng)
    for name, (num_tests, work_s) in SUITES.items():
        _make_suite(root / f"suite_{name}", num_tests, work_s)
    _make_scripts(root / "scripts")
    _make_c_project(root / "c_small", 3, 20)
    _make_c_project(root / "c_medium", 8, 120)
    _make_c_project(root / "c_large", 24, 150)
    _make_package(root / "package")
    _make_node_and_rust(root)
    (root / "stdlib").symlink_to(sysconfig.get_paths()["stdlib"])
    (root / "venv").symlink_to(sysconfig.get_paths()["purelib"])
    here = Path(__file__).resolve().parents[2]
    _run(root, "git", "clone", "--quiet", "--no-hardlinks", str(here), "project")
    (root / "out").mkdir()


def _run(folder: Path, *command: str, stdin: bytes | None = None) -> None:
    subprocess.run(command, cwd=folder, input=stdin, check=True, stdout=subprocess.DEVNULL)


def _make_code(rng: random.Random, num_functions: int) -> str:
    lines = ['"""A module."""', "import os", ""]
    for number in range(num_functions):
        first, second = rng.choice(WORDS), rng.choice(WORDS)
        lines += [
            f"def {first}_{second}_{number}(value):",
            f'    """Return the {second} of a {first}."""',
            f"    # TODO: handle the {rng.choice(WORDS)}",
            f"    return [value + {number}, os.sep, {rng.choice(WORDS)!r}]",
            "",
        ]
    return "\n".join(lines)


def _make_tree(root: Path, num_files: int, rng: random.Random) -> None:
    for number in range(num_files):
        folder = root / f"part{number // 400}" / f"{WORDS[number // 20 % len(WORDS)]}{number // 20 % 20}"
        folder.mkdir(parents=True, exist_ok=True)
        ending = ("py", "py", "py", "md", "json")[number % 5]
        text = json.dumps({"value": number}) if ending == "json" else _make_code(rng, rng.randrange(2, 12))
        (folder / f"{rng.choice(WORDS)}_{number}.{ending}").write_text(text)


def _make_log(path: Path, num_lines: int, rng: random.Random) -> None:
    with path.open("w") as file:
        for number in range(num_lines):
            level = "ERROR" if number % 97 == 0 else "INFO"
            word, took = rng.choice(WORDS), rng.random()
            file.write(f"2026-01-01T00:00:{number % 60:02} {level} {word} id={number} took={took:.4f}\n")


def _make_repo(root: Path, num_commits: int, rng: random.Random) -> None:
    root.mkdir()
    _run(root, "git", "init", "--quiet", "--initial-branch=main")
    stream: list[str] = []
    for number in range(num_commits):
        message, code = f"Change {rng.choice(WORDS)}", _make_code(rng, 8)
        path = f"src/{rng.choice(WORDS)}/{rng.choice(WORDS)}_{number % 500}.py"
        stream.append(
            f"commit refs/heads/main\ncommitter A <a@example.com> {1_700_000_000 + number * 60} +0000\n"
            f"data {len(message)}\n{message}\nM 100644 inline {path}\ndata {len(code)}\n{code}\n"
        )
    _run(root, "git", "fast-import", "--quiet", stdin="".join(stream).encode())
    _run(root, "git", "checkout", "--quiet", "--force", "main")


def _make_suite(root: Path, num_tests: int, work_s: float) -> None:
    root.mkdir()
    for part in range(3):
        tests = [
            f"@pytest.mark.parametrize('n', range({num_tests // 3}))\n"
            f"def test_{WORDS[part]}(n):\n"
            f"    end = time.perf_counter() + {work_s}\n"
            "    while time.perf_counter() < end:\n"
            "        n += 1\n"
            "    assert n >= 0\n"
        ]
        (root / f"test_{WORDS[part]}.py").write_text(
            "import time\n\nimport pytest\n\n\n" + "\n\n".join(tests)
        )
    (root / "pytest.ini").write_text("[pytest]\n")


def _make_scripts(root: Path) -> None:
    root.mkdir()
    (root / "quick.py").write_text("import sys\nprint('hello', sys.argv[1:])\n")
    (root / "crunch.py").write_text(
        "import sys\ntotal = 0\nfor n in range(int(sys.argv[1]) * 100_000):\n"
        "    total += n * n % 7\nprint(total)\n"
    )
    (root / "walk.py").write_text(
        "import pathlib, sys\n"
        "print(sum(len(p.read_bytes()) for p in pathlib.Path(sys.argv[1]).rglob('*.py') if p.is_file()))\n"
    )
    (root / "build.sh").write_text(
        "set -e\nfor n in 1 2 3; do gcc -O2 -c c_small/part$n.c -o out/b$n.o; done\n"
    )


def _make_c_project(root: Path, num_files: int, num_functions: int) -> None:
    root.mkdir()
    for part in range(1, num_files + 1):
        body = "".join(
            f"double f{part}_{n}(double *x, int k) {{ double s = {n}; for (int i = 0; i < k; i++) "
            f"{{ s += x[i] * x[(i * {n + 1}) % k]; if (s > {n * 100}) s -= x[i] / {n + 2}; }} return s; }}\n"
            for n in range(num_functions)
        )
        (root / f"part{part}.c").write_text("#include <stdio.h>\n#include <stdlib.h>\n" + body)
    (root / "main.c").write_text('#include <stdio.h>\nint main(void) { puts("done"); return 0; }\n')
    names = " ".join(f"part{part}.o" for part in range(1, num_files + 1))
    (root / "Makefile").write_text(
        f"CFLAGS = -O2\nprogram: main.o {names}\n\t$(CC) -o $@ $^\n"
        "test: program\n\t./program\nclean:\n\trm -f *.o program\n.PHONY: test clean\n"
    )


def _make_package(root: Path) -> None:
    (root / "measured").mkdir(parents=True)
    (root / "measured" / "__init__.py").write_text(_make_code(random.Random(SEED), 20))
    (root / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "measured"\nversion = "1.0"\n[tool.setuptools]\npackages = ["measured"]\n'
    )


def _make_node_and_rust(root: Path) -> None:
    (root / "node").mkdir()
    (root / "node" / "package.json").write_text(
        '{"name": "measured", "version": "1.0.0", '
        '"scripts": {"test": "node --test", "build": "node build.js"}}'
    )
    (root / "node" / "build.js").write_text(
        "let s = 0; for (let i = 0; i < 3e8; i++) s += i % 7; console.log(s);\n"
    )
    (root / "node" / "index.test.js").write_text(
        "const test = require('node:test');\ntest('waits', () => new Promise(r => setTimeout(r, 300)));\n"
    )
    (root / "rust" / "src").mkdir(parents=True)
    (root / "rust" / "Cargo.toml").write_text(
        '[package]\nname = "measured"\nversion = "1.0.0"\nedition = "2021"\n'
    )
    functions = "".join(
        f"fn f{n}(v: &[u64]) -> u64 "
        f"{{ v.iter().map(|x| x.wrapping_mul({n}) % 7).filter(|x| x % 2 == 0).sum() }}\n"
        for n in range(300)
    )
    calls = " ".join(f"t = t.wrapping_add(f{n}(&v));" for n in range(300))
    start = "fn main() { let v: Vec<u64> = (0..100).collect(); let mut t = 0u64; "
    main = f'{start}{calls} println!("{{}}", t); }}\n'
    tests = "#[test]\nfn works() { assert_eq!(f0(&[1]), 0); }\n"
    (root / "rust" / "src" / "main.rs").write_text(functions + main + tests)


def main() -> None:
    """Make them in the folder that is named."""
    make_trees(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
