"""The 25 features of a shell command that its time is predicted from."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tenuto.estimators.commands import CommandShape

FEATURES = {
    "main_program": "mean ln seconds of the first program other than `cd`, from the model's table",
    "slowest_program": "the same of the slowest program or imported module in the command",
    "num_chars": "characters",
    "num_words": "words",
    "num_pipes": "pipes",
    "num_sequential": "&&, ||, ; and line ends: commands one after the other",
    "num_redirects": "redirections",
    "code_chars": "characters of code in the command: here-documents, what follows -c or -e",
    "num_substitutions": "$( ) and backticks",
    "num_loops": "for, while and until",
    "num_repeaters": "programs run for many inputs: xargs, find -exec, timeit",
    "num_imports": "modules that code in the command imports",
    "num_options": "words that begin with -",
    "num_operands": "other words behind a program",
    "num_paths": "operands with a slash or a dot",
    "max_path_depth": "names in the longest path",
    "names_whole_tree": "1 if an operand is a directory as such: ends in / or ., or has **",
    "is_recursive": "1 with grep -r, cp -r, ls -R, ..., or a program that always is: find, rg, du, tar, ...",
    "num_globs": "operands with * or ?",
    "limits_output": "1 with head, -m, -maxdepth, --max-count, ...",
    "largest_number": "ln of 1 + the largest whole number in the command",
    "wait_s": "seconds that sleep is called with, in the shell or in code",
    "runs_tests": "1 with pytest, unittest, npm test, cargo test, ...",
    "builds_or_installs": "1 with make, gcc, pip install, cargo build, mypy, ...",
    "only_asks": "1 with --version, --help, --dry-run, --collect-only, make -n, ...",
}
"""Every feature and what it is; the model's trees know them by their position."""


def get_features(
    shape: CommandShape, programs_log_s: Mapping[str, float], default_log_s: float
) -> list[float]:
    """The features in the order of `FEATURES`. A program is looked up with its subcommand, then without."""
    found = (try_get_program_log_s(name, programs_log_s) for name in shape.programs)
    known = [log_s for log_s in found if log_s is not None]
    main = try_get_program_log_s(shape.get_main_program(), programs_log_s)
    return [
        default_log_s if main is None else main,
        max(known, default=default_log_s),
        shape.num_chars,
        shape.num_words,
        shape.num_pipes,
        shape.num_sequential,
        shape.num_redirects,
        shape.code_chars,
        shape.num_substitutions,
        shape.num_loops,
        shape.num_repeaters,
        shape.num_imports,
        shape.num_options,
        shape.num_operands,
        shape.num_paths,
        shape.max_path_depth,
        shape.names_whole_tree,
        shape.is_recursive,
        shape.num_globs,
        shape.limits_output,
        math.log1p(shape.largest_number),
        shape.wait_s,
        shape.runs_tests(),
        shape.builds_or_installs(),
        shape.only_asks,
    ]


def try_get_program_log_s(name: str, programs_log_s: Mapping[str, float]) -> float | None:
    """What the table says of a program, or of its family: `git` for `git log`."""
    found = programs_log_s.get(name)
    return programs_log_s.get(name.partition(" ")[0]) if found is None else found
