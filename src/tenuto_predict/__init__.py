"""Predicts how long a shell command takes from its text: gradient-boosted trees, evaluated in plain Python.

The policy `contextserve` asks it where it is installed: `pip install 'tenuto[predict]'`. The model is JSON,
made by experiments/tool_times/train_command_times.py: a table of programs, and trees nested as [feature,
threshold, where ≤, where >] down to leaves in ln seconds. Some 80 small trees take about 20 µs this way; a
call into the library that trained them takes milliseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from tenuto.core.errors import ConfigError
from tenuto.estimators.commands import MAX_REMEMBERED, MIN_TIME_S, CommandShape, CommandText, read_command

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


FORMAT = "tenuto-command-times-1"
SHIPPED = "command_times.json"
_MAX_DEPTH = 20
_MAX_LOG_S = 50.0

Tree = float | tuple[int, float, Any, Any]


class CommandTimes:
    """One trained model."""

    def __init__(self, model: dict[str, Any], where: str = "model") -> None:
        """`model` as it was trained. Raises ConfigError, naming `where`, if it is not a model."""
        try:
            if model["format"] != FORMAT or model["features"] != list(FEATURES):
                raise ValueError("it was made for another version of Tenuto")
            self._programs = {str(name): _read_number(log_s) for name, log_s in model["programs"].items()}
            self._default_log_s = _read_number(model["default_program"])
            self._base_log_s = _read_number(model["base"])
            self._trees = tuple(_read_tree(tree, _MAX_DEPTH) for tree in model["trees"])
            # Spread of ln(time) − prediction on templates held out of the training, for the shortest time
            # and how it grows with ln(time).
            self._least_sd, self._sd_slope = map(_read_number, model["residual_sd"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{where}: not a model of command times: {error!r}") from error
        if self._least_sd <= 0 or self._sd_slope < 0:
            raise ConfigError(f"{where}: not a model of command times: residual_sd must be above 0")
        self.read = lru_cache(MAX_REMEMBERED)(self._read)
        """Reads one shell command; remembers the last ones."""

    def _read(self, command: str) -> CommandText:
        shape = read_command(command)
        program = shape.get_main_program()
        if try_get_program_log_s(program, self._programs) is None:
            return CommandText(program, shape, None)
        features = get_features(shape, self._programs, self._default_log_s)
        total = self._base_log_s
        for tree in self._trees:
            node = tree
            while isinstance(node, tuple):
                feature, threshold, low, high = node
                node = low if features[feature] <= threshold else high
            total += node
        above = max(0.0, total - math.log(MIN_TIME_S))
        # What a command says it waits is taken at its word; the trees know of the rest.
        log_s = math.log(math.exp(min(total, _MAX_LOG_S)) + shape.wait_s)
        return CommandText(program, shape, log_s, self._least_sd + self._sd_slope * above)

    def __repr__(self) -> str:
        return f"CommandTimes({len(self._trees)} trees)"


def load_command_times(path: str | None = None) -> CommandTimes:
    """The model in a file, or the one that is beside this file. Raises ConfigError naming the file."""
    if path is None:
        return _load_shipped()
    try:
        model = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot read a model of command times: {error}") from error
    return CommandTimes(model, path)


@lru_cache(1)
def _load_shipped() -> CommandTimes:
    text = resources.files("tenuto_predict").joinpath(SHIPPED).read_text(encoding="utf-8")
    return CommandTimes(json.loads(text), SHIPPED)


def _read_number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not finite")
    return number


def _read_tree(node: Any, depth: int) -> Tree:
    if not isinstance(node, list):
        return _read_number(node)
    feature, threshold, low, high = node
    if depth == 0 or not (isinstance(feature, int) and 0 <= feature < len(FEATURES)):
        raise ValueError(f"a tree is too deep, or splits on feature {feature!r}")
    return feature, _read_number(threshold), _read_tree(low, depth - 1), _read_tree(high, depth - 1)
