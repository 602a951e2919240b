"""Train the command-time model that ships with Tenuto on the measured commands.

    pip install scikit-learn
    python experiments/tool_times/train_command_times.py

Reads data/commands.csv.gz beside it and writes src/tenuto_predict/command_times.json; the same data and
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
import sklearn
from sklearn.ensemble import GradientBoostingRegressor
from sklearn.model_selection import GroupKFold

from tenuto.estimators.commands import MIN_TIME_S, CommandShape, read_command
from tenuto_predict import FEATURES, FORMAT, SHIPPED, CommandTimes, get_features

ROOT = Path(__file__).resolve().parents[2]
SEED = 0
NUM_FOLDS = 5
PARAMETERS = {
    "loss": "huber",
    "n_estimators": 60,
    "max_leaf_nodes": 8,
    "max_depth": 6,
    "learning_rate": 0.08,
    "subsample": 0.7,
    "max_features": 0.5,
    "min_samples_leaf": 8,
    "random_state": SEED,
}
SHRINKAGE = 4
"""A program's mean counts this many commands of the overall mean beside its own."""


def read_samples(path: Path) -> tuple[list[CommandShape], np.ndarray, np.ndarray]:
    """Shapes, ln seconds without what they wait, and templates of the commands to train on."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == "train"]
    shapes = [read_command(row["command"]) for row in rows]
    working_s = [float(row["duration_s"]) - shape.wait_s for row, shape in zip(rows, shapes, strict=True)]
    log_s = [math.log(max(seconds, MIN_TIME_S)) for seconds in working_s]
    return shapes, np.array(log_s), np.array([row["template"] for row in rows])


def make_program_table(shapes: list[CommandShape], log_s: np.ndarray) -> tuple[dict[str, float], float]:
    """Mean ln seconds per main program, family of programs and imported module; and the overall mean."""
    times: dict[str, list[float]] = defaultdict(list)
    for shape, value in zip(shapes, log_s, strict=True):
        program = shape.get_main_program()
        modules = {name for name in shape.programs if name.startswith("import ")}
        for name in {program, program.partition(" ")[0], *modules}:
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


def cross_validate(features: np.ndarray, log_s: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """What trees say of the templates that they were not trained on."""
    predicted = np.zeros(len(log_s))
    for known, asked in GroupKFold(NUM_FOLDS).split(features, groups=groups):
        trees = GradientBoostingRegressor(**PARAMETERS).fit(features[known], log_s[known])
        predicted[asked] = trees.predict(features[asked])
    return predicted


def get_residual_sd(predicted: np.ndarray, log_s: np.ndarray) -> tuple[float, float]:
    """What is left unexplained, as a standard deviation.

    How much where the shortest time is predicted, and how much more for each unit of ln seconds above it.
    """
    above = np.maximum(0.0, predicted - math.log(MIN_TIME_S))
    # A normal distribution's mean deviation is √(2/π) of its standard deviation.
    spread = np.abs(log_s - predicted) * math.sqrt(math.pi / 2)
    slope, least = np.polyfit(above, spread, 1)
    return max(0.1, float(least)), max(0.0, float(slope))


def get_log10_error(predicted: np.ndarray, log_s: np.ndarray) -> float:
    return round(float(np.abs(predicted - log_s).mean()) / math.log(10), 3)


def to_json(tree: Any, node: int, rate: float) -> Any:
    """A tree nested as tenuto_predict reads it."""
    if tree.children_left[node] == tree.children_right[node]:
        return round(rate * float(tree.value[node][0][0]), 6)
    below = [to_json(tree, child[node], rate) for child in (tree.children_left, tree.children_right)]
    return [int(tree.feature[node]), round(float(tree.threshold[node]), 6), *below]


def train(path: Path) -> dict[str, Any]:
    shapes, log_s, groups = read_samples(path)
    features = make_features(shapes, log_s, groups)
    trees = GradientBoostingRegressor(**PARAMETERS).fit(features, log_s)
    programs, default = make_program_table(shapes, log_s)
    predicted = cross_validate(features, log_s, groups)
    main_program = features[:, list(FEATURES).index("main_program")]
    return {
        "format": FORMAT,
        "licence": "CC0-1.0",
        "trained_with": sklearn.__version__,
        "num_commands": len(shapes),
        "features": list(FEATURES),
        "residual_sd": [round(value, 6) for value in get_residual_sd(predicted, log_s)],
        "cross_validated_log10_error": {
            "trees": get_log10_error(predicted, log_s),
            "mean of the main program": get_log10_error(main_program, log_s),
        },
        "default_program": round(default, 6),
        "programs": {name: round(value, 6) for name, value in programs.items()},
        "base": round(float(trees.init_.constant_.ravel()[0]), 6),
        "trees": [to_json(one[0].tree_, 0, trees.learning_rate) for one in trees.estimators_],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data = ROOT / "experiments" / "tool_times" / "data" / "commands.csv.gz"
    parser.add_argument(
        "--data", type=Path, default=data, help="measured commands (default: the shipped ones)"
    )
    out = ROOT / "src" / "tenuto_predict" / SHIPPED
    parser.add_argument("--out", type=Path, default=out, help="model to write (default: the shipped one)")
    options = parser.parse_args()
    model = train(options.data)
    CommandTimes(model)
    options.out.write_text(json.dumps(model, separators=(",", ":")).replace('"trees":', '\n"trees":') + "\n")
    print(
        f"{options.out}: {len(model['trees'])} trees from {model['num_commands']} commands, "
        f"{options.out.stat().st_size} bytes. Error of log10 seconds on templates left out in turn: "
        f"{model['cross_validated_log10_error']}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
