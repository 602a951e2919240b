"""Train the command-time model that ships with Tenuto on the measured commands.

    pip install 'tenuto[predict]'
    python scripts/train_command_times.py

Reads data/tool_times/commands.csv.gz and writes src/tenuto/learn/command_times.json; the same data and
release of scikit-learn make the same model. Only commands of templates marked `train` are used. An operator's
own model needs the same columns in --data and goes into the policy's option `model`.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.ensemble import GradientBoostingRegressor
from sklearn.model_selection import GroupKFold

from tenuto.learn.command_features import FEATURES, get_features
from tenuto.learn.command_times import FORMAT, SHIPPED, CommandTimes
from tenuto.learn.commands import CommandShape, read_command

ROOT = Path(__file__).resolve().parent.parent
SEED = 0
NUM_FOLDS = 5
PARAMETERS = {
    "loss": "huber",
    "n_estimators": 80,
    "max_leaf_nodes": 8,
    "max_depth": 6,
    "learning_rate": 0.08,
    "subsample": 0.7,
    "min_samples_leaf": 8,
    "random_state": SEED,
}
SHRINKAGE = 4
"""A program's mean counts this many commands of the overall mean beside its own."""


def read_samples(path: Path) -> tuple[list[CommandShape], np.ndarray, np.ndarray]:
    """Shapes, ln seconds and templates of the commands to train on."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == "train"]
    log_s = [math.log(max(float(row["duration_s"]), 1e-4)) for row in rows]
    return (
        [read_command(row["command"]) for row in rows],
        np.array(log_s),
        np.array([r["template"] for r in rows]),
    )


def make_program_table(shapes: list[CommandShape], log_s: np.ndarray) -> tuple[dict[str, float], float]:
    """Mean ln seconds per main program, and per family of programs; and the overall mean."""
    times: dict[str, list[float]] = defaultdict(list)
    for shape, value in zip(shapes, log_s, strict=True):
        program = shape.get_main_program()
        for name in {program, program.partition(" ")[0]}:
            times[name].append(float(value))
    mean = statistics.fmean(float(value) for value in log_s)
    shrunk = {
        name: (sum(found) + SHRINKAGE * mean) / (len(found) + SHRINKAGE)
        for name, found in sorted(times.items())
    }
    return shrunk, mean


def make_features(shapes: list[CommandShape], log_s: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Each command's features, its programs looked up in a table that its own template had no part in."""
    features = np.zeros((len(shapes), len(FEATURES)))
    for known, asked in GroupKFold(NUM_FOLDS).split(features, groups=groups):
        table = make_program_table([shapes[n] for n in known], log_s[known])
        for n in asked:
            features[n] = get_features(shapes[n], *table)
    return features


def get_residual_sd(features: np.ndarray, log_s: np.ndarray, groups: np.ndarray) -> float:
    """What the trees leave unexplained on templates they were not trained on."""
    residuals = np.zeros(len(log_s))
    for known, asked in GroupKFold(NUM_FOLDS).split(features, groups=groups):
        trees = GradientBoostingRegressor(**PARAMETERS).fit(features[known], log_s[known])
        residuals[asked] = log_s[asked] - trees.predict(features[asked])
    return float(residuals.std())


def to_json(tree: Any, node: int, rate: float) -> Any:
    """A tree nested as tenuto.learn.command_times reads it."""
    if tree.children_left[node] == tree.children_right[node]:
        return round(rate * float(tree.value[node][0][0]), 6)
    below = [to_json(tree, child[node], rate) for child in (tree.children_left, tree.children_right)]
    return [int(tree.feature[node]), round(float(tree.threshold[node]), 6), *below]


def train(path: Path) -> dict[str, Any]:
    shapes, log_s, groups = read_samples(path)
    features = make_features(shapes, log_s, groups)
    trees = GradientBoostingRegressor(**PARAMETERS).fit(features, log_s)
    programs, default = make_program_table(shapes, log_s)
    return {
        "format": FORMAT,
        "licence": "CC0-1.0",
        "num_commands": len(shapes),
        "features": list(FEATURES),
        "residual_sd": round(get_residual_sd(features, log_s, groups), 6),
        "default_program": round(default, 6),
        "programs": {name: round(value, 6) for name, value in programs.items()},
        "base": round(float(trees.init_.constant_.ravel()[0]), 6),
        "trees": [to_json(one[0].tree_, 0, trees.learning_rate) for one in trees.estimators_],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data = ROOT / "data" / "tool_times" / "commands.csv.gz"
    parser.add_argument(
        "--data", type=Path, default=data, help="measured commands (default: the shipped ones)"
    )
    out = ROOT / "src" / "tenuto" / "learn" / SHIPPED
    parser.add_argument("--out", type=Path, default=out, help="model to write (default: the shipped one)")
    options = parser.parse_args()
    model = train(options.data)
    CommandTimes(model)
    options.out.write_text(json.dumps(model, separators=(",", ":")).replace('"trees":', '\n"trees":') + "\n")
    print(
        f"{len(model['trees'])} trees from {model['num_commands']} commands: {options.out}, "
        f"{options.out.stat().st_size} bytes; residual sd {model['residual_sd']:.2f} of ln seconds",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
