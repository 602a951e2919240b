"""The command-time model: trees by hand, the shipped one, its training, and files that are no model."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import json
import math
from pathlib import Path
from types import ModuleType

import pytest

from tenuto.core.errors import ConfigError
from tenuto.estimators.commands import read_command
from tenuto_predict import FEATURES, FORMAT, CommandTimes, get_features, load_command_times

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "experiments" / "tool_times" / "data" / "commands.csv.gz"
NAMES = list(FEATURES)


def make_model(**changes) -> dict:
    pipes, options = NAMES.index("num_pipes"), NAMES.index("num_options")
    return {
        "format": FORMAT,
        "features": NAMES,
        "programs": {"ls": -4.0, "grep": -3.0},
        "default_program": 0.0,
        "base": -2.0,
        "residual_sd": [0.5, 0.25],
        "trees": [
            [pipes, 0.5, 0.25, [options, 1.5, 1.0, 2.0]],
            [NAMES.index("main_program"), -3.5, -0.5, 0.5],
        ],
        **changes,
    }


def test_trees_by_hand() -> None:
    model = CommandTimes(make_model())
    assert model.read("ls").log_s == -2.0 + 0.25 - 0.5
    assert model.read("grep -r x | wc").log_s == -2.0 + 1.0 + 0.5
    assert model.read("grep -r x | wc -l").log_s == -2.0 + 2.0 + 0.5


def test_what_a_command_says_it_waits_is_added() -> None:
    model = CommandTimes(make_model(programs={"sleep": -3.0}, trees=[]))
    assert model.read("sleep 10").log_s == pytest.approx(math.log(10 + math.exp(-2.0)))


def test_longer_times_are_less_certain() -> None:
    model = CommandTimes(make_model(base=math.log(0.1) + 2.0, trees=[]))
    assert model.read("ls").sd == pytest.approx(0.5 + 0.25 * 2.0)
    assert CommandTimes(make_model(base=-9.0, trees=[])).read("ls").sd == 0.5


def test_a_program_it_does_not_know_is_not_predicted() -> None:
    prediction = CommandTimes(make_model()).read("frobnicate | ls")
    assert prediction.log_s is None
    assert prediction.program == "frobnicate"


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "another"},
        {"features": NAMES[1:]},
        {"programs": None},
        {"programs": {"ls": "fast"}},
        {"base": float("nan")},
        {"residual_sd": [0.0, 0.1]},
        {"residual_sd": [0.5, -0.1]},
        {"residual_sd": 0.5},
        {"trees": [[25, 0.0, 0.0, 0.0]]},
        {"trees": [[-1, 0.0, 0.0, 0.0]]},
        {"trees": [[0, 0.0, 0.0]]},
        {"trees": ["leaf"]},
        {"trees": 1},
    ],
)
def test_what_is_no_model_is_refused_by_name(changes: dict, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(make_model(**changes)))
    with pytest.raises(ConfigError, match=r"mine\.json: not a model of command times"):
        load_command_times(str(file))


@pytest.mark.parametrize("content", [b"", b"\xff", b"[" * 100_000])
def test_a_file_that_cannot_be_read_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    with pytest.raises(ConfigError, match=r"mine\.json: cannot read"):
        load_command_times(str(file))
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"mine\.json: cannot read"):
        load_command_times(str(file))


def test_the_shipped_model_tells_quick_commands_from_long_ones() -> None:
    model = load_command_times()
    for quick in ("ls -la src", "cd src && cat a.py", "sed -n '1,80p' src/a.py", "git status", "head -5 x"):
        log_s = model.read(quick).log_s
        assert log_s is not None and log_s < math.log(1.0), quick
    for slow in ("sleep 10", "cd tests && sleep 20", "pytest"):
        log_s = model.read(slow).log_s
        assert log_s is not None and log_s > math.log(0.5), slow
    assert load_command_times() is model


# The data set, and the training.


def read_rows() -> list[dict[str, str]]:
    with gzip.open(DATA, "rt", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "experiments" / "tool_times" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_data_set_is_whole_small_and_neutral() -> None:
    assert DATA.stat().st_size < 1 << 20
    rows = read_rows()
    assert len(rows) > 1500
    splits: dict[str, set[str]] = {}
    for row in rows:
        assert 0 < float(row["duration_s"]) < 60
        assert float(row["load_1m"]) >= 0 and row["cache"] in ("warm", "cold") and int(row["returncode"]) >= 0
        assert "site-packages" not in row["command"]
        assert not any(f"/{place}/" in row["command"] for place in ("root", "home", "tmp", "work"))
        splits.setdefault(row["template"], set()).add(row["split"])
    assert all(len(each) == 1 for each in splits.values())
    assert {"train"} in splits.values() and {"test"} in splits.values()
    train = {row["command"] for row in rows if row["split"] == "train"}
    # Two templates may make the same command now and then; the accuracy tables leave those out.
    num_shared = sum(row["command"] in train for row in rows if row["split"] == "test")
    assert num_shared < len(rows) / 100


@pytest.mark.slow
def test_training_again_makes_the_shipped_model_and_it_predicts_as_the_library_does() -> None:
    sklearn = pytest.importorskip("sklearn")
    training = load_script("train_command_times")
    shipped = json.loads((ROOT / "src" / "tenuto_predict" / "command_times.json").read_text())
    if sklearn.__version__ != shipped["trained_with"]:
        pytest.skip(f"the model was trained with scikit-learn {shipped['trained_with']}")
    assert training.train(DATA) == shipped
    shapes, log_s, groups = training.read_samples(DATA)
    features = training.make_features(shapes, log_s, groups)
    trees = training.GradientBoostingRegressor(**training.PARAMETERS).fit(features, log_s)
    model = load_command_times()
    table = (shipped["programs"], shipped["default_program"])
    for row in read_rows()[::50]:
        prediction = model.read(row["command"])
        if prediction.log_s is not None:
            shape = read_command(row["command"])
            expected = trees.predict([get_features(shape, *table)])[0]
            assert prediction.log_s == pytest.approx(math.log(math.exp(expected) + shape.wait_s), abs=1e-3)
