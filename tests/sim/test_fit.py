"""From observed steps to `--step-cost FILE`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tenuto import cli
from tenuto.core.errors import ConfigError, DataError
from tenuto.sim.cost.batch import StepBatch
from tenuto.sim.cost.fitted import FittedStepCost
from tenuto.sim.machine import build
from tenuto.sim.setup import Setup


def write_observations(path: Path, *, link: bool = False) -> Path:
    """Prefill 10 ms + 20 us a token, decode 5 ms + 1 ms each, and a link of 20 GB/s."""
    lines: list[object] = []
    for n in (100, 200, 400):
        lines += [{"prefills": [[n, c]], "seconds": 0.01 + 2e-5 * n} for c in (0, 512)]
        lines += [{"decodes": [c] * (n // 100), "seconds": 0.005 + 1e-5 * n} for c in (64, 512)]
    if link:
        lines += [{"num_bytes": n, "seconds": 1e-5 + n / 20e9} for n in (10**6, 10**7, 10**8)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    out = tmp_path / "costs.json"
    steps = write_observations(tmp_path / "steps.jsonl", link=True)
    assert cli.main(["profile", "--observations", str(steps), "--out", str(out)]) == 0
    return out


def test_a_fitted_file_is_a_step_cost_with_the_host_time_in_it(costs: Path) -> None:
    machine = build(Setup(gpu="H100", step_cost=str(costs)))
    assert isinstance(machine.step_cost, FittedStepCost)
    assert machine.step_cost.seconds(StepBatch.of(prefills=[(300, 0)])) == pytest.approx(0.016)
    assert machine.step_cost.seconds(StepBatch.of(decodes=[100, 100])) == pytest.approx(0.007)


def test_the_link_is_the_observed_one_unless_another_is_given(costs: Path) -> None:
    def get_bandwidth(**settings: object) -> float:
        setup = Setup(gpu="H100", policy="offload-sync", step_cost=str(costs), **settings)  # type: ignore[arg-type]
        machine = build(setup)
        assert machine.tiers is not None
        return machine.tiers.tiers[0].link.bytes_per_s

    assert get_bandwidth() == pytest.approx(20e9)
    assert get_bandwidth(link_gb_s=5.0) == pytest.approx(5e9)


def test_simulate_with_a_fitted_file(costs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    arguments = [
        "simulate",
        "--gpu",
        "H100",
        "--kv-tokens",
        "64000",
        "--jps",
        "0.2",
        "--window",
        "20",
        "--json",
    ]
    assert cli.main([*arguments, "--policy", "stock", "--step-cost", str(costs)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["jobs"] > 0
    # A turn's decodes alone take 19 x 6 ms, and its tokens 20 us each.
    assert record["job_s"]["mean"] > 7 * 0.5 + 8 * 19 * 0.006 + 13_000 * 2e-5


def test_files_are_fitted_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = write_observations(tmp_path / "all.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "prefills.jsonl").write_text("".join(line for line in lines if "prefills" in line))
    (tmp_path / "decodes.jsonl").write_text("".join(line for line in lines if "decodes" in line))
    halves = [
        word
        for name in ("prefills", "decodes")
        for word in ("--observations", str(tmp_path / f"{name}.jsonl"))
    ]
    out = tmp_path / "costs.json"
    assert cli.main(["profile", *halves, "--out", str(out), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert len(printed["steps"]) == len(lines)
    assert max(abs(step["error"]) for step in printed["steps"]) < 1e-6
    assert cli.main(["profile", *halves[:2], "--out", str(out)]) == 2
    assert "decode steps" in capsys.readouterr().err


def write_scattered(path: Path) -> Path:
    """Decode steps that take any time."""
    lines = [json.loads(line) for line in write_observations(path).read_text().splitlines()]
    for number, line in enumerate(line for line in lines if line.get("decodes")):
        line["seconds"] *= (0.3, 1, 3)[number % 3]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_poor_fit_is_not_written_without_saying_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps, out = write_scattered(tmp_path / "steps.jsonl"), tmp_path / "costs.json"
    command = ["profile", "--observations", str(steps), "--out", str(out)]
    assert cli.main(command) == 1
    text = capsys.readouterr().out
    assert text.startswith("POOR: the decode fit is poor: R2 ")
    assert "not written" in text and "--force" in text
    assert not out.exists()
    assert cli.main([*command, "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert (printed["written"], len(printed["fit"]["poor"])) == (False, 1)
    assert cli.main([*command, "--force"]) == 0
    assert "written to" in capsys.readouterr().out
    (note,) = [note for note in build(Setup(gpu="H100", step_cost=str(out))).notes if "poor" in note]
    assert "the decode fit is poor" in note


def test_equal_times_are_a_good_fit_although_they_explain_nothing(tmp_path: Path) -> None:
    steps, out = write_observations(tmp_path / "steps.jsonl"), tmp_path / "costs.json"
    lines = [json.loads(line) for line in steps.read_text().splitlines()]
    for number, line in enumerate(line for line in lines if line.get("decodes")):
        line["seconds"] = 0.02 + 0.0002 * (number % 2)
    steps.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert cli.main(["profile", "--observations", str(steps), "--out", str(out)]) == 0
    assert FittedStepCost.load(out).decode.r_squared < 0.9
    assert FittedStepCost.load(out).poor == ()


def test_a_malformed_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_observations(tmp_path / "steps.jsonl")
    path.write_text(path.read_text() + '{"decodes": [1], "seconds": "soon"}\n')
    assert cli.main(["profile", "--observations", str(path), "--out", str(tmp_path / "costs.json")]) == 2
    assert f"{path}:13: seconds: must be a number" in capsys.readouterr().err
    assert not (tmp_path / "costs.json").exists()


@pytest.mark.parametrize(
    "command",
    [
        ["plan", "--gpu", "H100,L40S", "--policies", "stock", "--p95", "9"],
        ["simulate", "--gpu", "H100", "--servers", "H100:1,L40S:1"],
    ],
)
def test_a_fitted_file_is_not_taken_for_several_kinds_of_gpu(
    command: list[str], costs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ["--jps", "1", "--workload", "requests", "--window", "3"]
    assert cli.main([*command, *load, "--step-cost", str(costs)]) == 2
    assert "has the step times of one kind of GPU, not of H100, L40S" in capsys.readouterr().err


def test_what_is_no_step_cost_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pessimistic, or a file that `tenuto profile` wrote"):
        build(Setup(step_cost=str(tmp_path / "missing.json")))
    (tmp_path / "other.json").write_text('{"kind": "run"}')
    words = r"other.json: is a result of runs; this command reads a fit of step times by tenuto profile"
    with pytest.raises(DataError, match=words):
        build(Setup(step_cost=str(tmp_path / "other.json")))
