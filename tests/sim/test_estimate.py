"""What `tenuto estimate` says, on machines whose job times are planted, and once on simulated ones."""

from __future__ import annotations

import json
import math
import multiprocessing
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tenuto import cli
from tenuto.core.errors import ConfigError
from tenuto.sim.estimate import (
    NUM_LOADS,
    OF_LOADS,
    OF_MACHINES,
    OF_SEEDS,
    Estimate,
    TimeUpError,
    fill,
    format_estimate,
    make_load,
    suggest_next,
)
from tenuto.sim.plan import SeedRunner
from tenuto.sim.setup import Setup, write_options
from tenuto.sim.steady import Effort, Steady
from tenuto.workload.formats.tenuto_jsonl import write_tenuto_jsonl
from tenuto.workload.load import LoadOptions, load_workload
from tests.sim_server.live import serve

STOCK = Setup(gpu="L40S", step_cost="roofline")
LOAD = LoadOptions(workload="swe-bench", jps=1.0)
Time = Callable[[str, float], float]
"""Mean job time by the case's name and the load; infinite for an overloaded machine."""


Overloads = frozenset[tuple[str, int]]
"""Cases, by name and seed."""


class Planted(SeedRunner):
    """Says what a machine does without simulating it. Time is up after so many runs."""

    def __init__(
        self, get_time_s: Time, max_runs: float = math.inf, overloads: Overloads = frozenset()
    ) -> None:
        """`overloads`: what is overloaded with these seeds."""
        super().__init__((1, 2, 3), workers=1, max_jobs=600, say=lambda make_text: None)
        self._get_time_s, self._max_runs, self.num_runs = get_time_s, max_runs, 0
        self._overloads = overloads

    def __call__(self, setup: Setup, load: LoadOptions, effort: Effort) -> list[Steady]:
        runs: list[Steady] = []
        for seed in self._seeds[: effort.num_seeds]:
            self.num_runs += 1
            if self.num_runs > self._max_runs:
                raise TimeUpError("time is up")
            name = setup.policy + ("" if setup.step_tokens is None else f" @{setup.step_tokens}")
            assert load.jps is not None
            time_s = self._get_time_s(name, load.jps)
            is_steady = math.isfinite(time_s) and (name, seed) not in self._overloads
            times_s = (time_s * (1 + seed / 100),) * 20 if is_steady else (1.0,)
            finished_jps = load.jps if is_steady else load.jps / 2
            verdict = "steady" if is_steady else "overloaded"
            runs.append(
                Steady(verdict, load.jps, finished_jps, times_s, times_s, 99.0, 9.0, 900, 0, "roofline")  # type: ignore[arg-type]
            )
            if not is_steady:
                break
        return runs


def ask(get_time_s: Time, max_runs: float = math.inf, overloads: Overloads = frozenset()) -> Estimate:
    estimate = Estimate(STOCK, LOAD)
    with suppress(TimeUpError):
        fill(estimate, Planted(get_time_s, max_runs, overloads), tell=lambda text: None)
    return estimate


def gain_above_a_half(name: str, jps: float) -> float:
    """Steps of 512 are the best of stock; Tenuto gains from 0.5 jobs/s on, more and more."""
    of_stock = {"stock": 12.0, "stock @512": 10.0}.get(name, 11.0)
    base_s = 10.0 if name == "tenuto" and jps >= 0.5 else of_stock
    return base_s * (1 + (0.8 if name == "tenuto" else 1.0) * jps)


def test_each_mean_on_the_way_says_over_how_many_seeds_it_is() -> None:
    """Over other seeds it is another time than the table's, if the table has no time for them."""
    said: list[str] = []
    with suppress(TimeUpError):
        fill(Estimate(STOCK, LOAD), Planted(gain_above_a_half, max_runs=8), tell=said.append)
    assert said[0] == "stock as it is: mean job time 24.5 s (3 seeds)"


def test_stock_is_shown_at_its_best_step_size_too() -> None:
    estimate = ask(gain_above_a_half)
    assert [case.setup.step_tokens for case in estimate.cases[:-1]] == [None, 256, 512, 1024]
    assert estimate.tuned.setup.step_tokens == 512
    # 256 and 1,024 are slower than 512 by more than the seeds can change.
    assert [len(case.point.runs) for case in estimate.cases] == [3, 1, 3, 1, 3]
    ratio = estimate.tenuto.get_ratio(estimate.tuned)
    assert ratio is not None and ratio.num_seeds == 3
    assert ratio.mean == pytest.approx(18 / 20) and ratio.low == pytest.approx(ratio.high)
    text = format_estimate(estimate)
    assert re.search(r"^best steps \(stock with steps of 512\) +20.4 s +20.2-20.6 +", text, re.MULTILINE)
    assert "Tenuto's mean job time over that of stock as it is: 0.75 (0.75 to 0.75 over 3 seeds)." in text
    assert "Tenuto's mean job time over that of stock at its best step size: 0.90" in text
    assert "  11% in the median, -11% to +154% (3 published means of stock on an A100-40, a roofline)" in text
    assert "only a run on the GPU can prove it" in text  # 10 % is less than that error
    commands = suggest_next(estimate, has_recording=True)
    assert commands[0].startswith("vllm serve MODEL --max-num-batched-tokens 512 ")
    assert commands[1].startswith("tenuto serve MODEL")
    assert suggest_next(estimate, has_recording=False)[0].startswith("tenuto record ")


def get_close_times_s(name: str, jps: float) -> float:
    """Steps of 512 are the best of stock with the first seed, those of 256 come next."""
    return {"stock @512": 10.0, "stock @256": 10.8, "tenuto": 11.5}.get(name, 12.0)


@pytest.mark.parametrize("max_runs", [11, math.inf])
def test_a_step_size_that_is_overloaded_with_another_seed_is_not_the_best(max_runs: float) -> None:
    """Also if time is up before all cases have run with that seed."""
    estimate = ask(get_close_times_s, max_runs, frozenset([("stock @512", 2)]))
    assert (OF_SEEDS in estimate.left_out) == (max_runs == 11)
    assert estimate.tuned.setup.step_tokens == 256
    # The next best has then as many seeds as Tenuto.
    assert len(estimate.tuned.point.runs) == len(estimate.tenuto.point.runs) == (1 if max_runs == 11 else 3)
    [command] = suggest_next(estimate, has_recording=True)
    assert command.startswith("vllm serve MODEL --max-num-batched-tokens 256 ")
    assert command.endswith("faster than Tenuto here" + (" (one seed)" if max_runs == 11 else ""))


def test_the_load_goes_down_while_there_is_a_gain() -> None:
    estimate = ask(gain_above_a_half)
    assert [tenuto.point.jps for _, tenuto in estimate.others] == [0.7, 0.49]
    assert estimate.least_jps == 0.7
    # One seed was enough where nothing turned.
    assert [len(tenuto.point.runs) for _, tenuto in estimate.others] == [1, 3]
    assert "from 0.7 jobs/s on a server on; nothing is gained at 0.49." in format_estimate(estimate)


def test_the_load_goes_up_until_there_is_a_gain() -> None:
    estimate = ask(lambda name, jps: gain_above_a_half(name, jps / 3))
    assert [tenuto.point.jps for _, tenuto in estimate.others] == [1.4, 2.0]
    assert "from 2 jobs/s on a server on; nothing is gained at 1.4." in format_estimate(estimate)
    assert not any("nothing" in line for line in suggest_next(estimate, has_recording=True))


def overload_above(stock_jps: float, tenuto_jps: float) -> Time:
    """Both are overloaded above a load, and equal below."""
    return lambda name, jps: math.inf if jps > (tenuto_jps if name == "tenuto" else stock_jps) else 10.0


def test_the_load_goes_down_where_both_are_overloaded() -> None:
    """Tenuto may serve what stock cannot, at less than the present traffic."""
    estimate = ask(overload_above(0.4, 0.75))
    assert [tenuto.point.jps for _, tenuto in estimate.others] == [0.7, 0.49, 0.34]
    assert "from 0.49 jobs/s on a server on; nothing is gained at 0.34." in format_estimate(estimate)
    assert suggest_next(estimate, has_recording=True)[0].startswith("tenuto serve MODEL")


def test_nothing_is_said_of_loads_at_which_all_are_overloaded() -> None:
    estimate = ask(overload_above(0.01, 0.01))
    assert "A server is overloaded at all loads that were tried, down to 0.24" in format_estimate(estimate)
    assert suggest_next(estimate, has_recording=True) == []


def test_nothing_is_gained_where_both_are_overloaded_first() -> None:
    estimate = ask(lambda name, jps: 10.0 if jps < 2.5 else math.inf)
    assert estimate.least_jps is None
    text = format_estimate(estimate)
    assert "Nothing is gained over stock at its best step size (2 % at least) up to 2.7 jobs/s on a" in text
    assert suggest_next(estimate, has_recording=True)[-1].startswith("vllm serve MODEL   # stock: ")
    assert len(estimate.others) < NUM_LOADS


def test_where_stock_with_other_steps_is_faster_tenuto_is_not_suggested() -> None:
    estimate = ask(lambda name, jps: {"stock @512": 10.0, "tenuto": 11.0}.get(name, 12.0))
    [command] = suggest_next(estimate, has_recording=True)
    assert command.startswith("vllm serve MODEL --max-num-batched-tokens 512 ")
    assert "faster than Tenuto here" in command
    estimate = ask(lambda name, jps: 11.0 if name == "tenuto" else 10.0)
    [command] = suggest_next(estimate, has_recording=True)
    assert command.startswith("vllm serve MODEL   # stock: ")


def test_host_memory_that_is_given_is_stocks_too_and_in_the_commands() -> None:
    estimate = Estimate(replace(STOCK, host_gb=50.0), LOAD)
    fill(estimate, Planted(gain_above_a_half), tell=lambda text: None)
    offloads = [case.setup.offload for case in (*estimate.cases, *estimate.tried[-1])]
    assert offloads == ["native"] * 4 + [None, "native", None]
    assert format_estimate(estimate).startswith(
        "llama-3.1-8b on L40S, swe-bench, 1 jobs/s and 50 GiB of host memory on each server"
    )
    tuned, tenuto, _ = suggest_next(estimate, has_recording=True)
    assert tuned.startswith("vllm serve MODEL --max-num-batched-tokens 512 --kv-offloading-size 50 ")
    assert tenuto.startswith("tenuto serve MODEL --host-gb 50 ")
    assert "--host-gb 50 " in suggest_next(estimate, has_recording=False)[1]
    assert ask(gain_above_a_half).to_json()["host_gb"] == 0.0


def test_the_next_estimate_is_of_the_same_machine() -> None:
    setup = replace(STOCK, tp=2, kv_cache_dtype="fp8", kv_tokens=90_000, async_scheduling=False)
    estimate = Estimate(setup, LOAD, num_machines=4)
    fill(estimate, Planted(gain_above_a_half), tell=lambda text: None)
    machine = "--tp 2 --kv-cache-dtype fp8 --step-cost roofline --kv-tokens 90000 --no-async-scheduling"
    assert suggest_next(estimate, has_recording=False)[1] == (
        f"tenuto estimate --gpu L40S --model llama-3.1-8b {machine} --machines 4 --recording jobs.jsonl"
    )


def test_the_options_of_a_machine_keep_the_names_of_files() -> None:
    words = write_options(Setup(step_cost="fit-1.0", disk_gb=10.0))
    assert words == ["--step-cost", "fit-1.0", "--disk-gb", "10"]


def test_tenuto_needs_fewer_machines_for_the_same_p95() -> None:
    # With 8 machines Tenuto's are at 1.25 jobs/s each, as slow as stock's at 1.
    estimate = ask(lambda name, jps: 10.0 * (jps * (0.8 if name == "tenuto" else 1.0)) ** 2)
    assert [need.num_machines for need in estimate.needs] == [10, 8]
    assert "10 with stock as it is, 8 with Tenuto" in format_estimate(estimate)
    twice = replace(estimate, setup=replace(STOCK, tp=2))
    assert "20 with stock as it is, 16 with Tenuto" in format_estimate(twice)


def test_where_steps_are_the_gain_tenuto_is_shown_with_these_steps_too() -> None:
    estimate = ask(lambda name, jps: 10.0 if name.endswith(" @512") else 12.0)
    text = format_estimate(estimate)
    assert re.search(r"^Tenuto with steps of 512 +10.2 s ", text, re.MULTILINE)
    assert "With the same steps as that (`--step-tokens`), Tenuto's over it: 1.00" in text
    commands = suggest_next(estimate, has_recording=True)
    assert commands[0].endswith("# stock at its best step size, faster than Tenuto here with its own steps")
    assert commands[1:] == ["tenuto serve MODEL --step-tokens 512   # Tenuto with the same steps"]
    assert estimate.to_json()["tenuto_with_these_steps"]["step_tokens"] == 512


def test_a_p95_that_hardly_depends_on_the_load_tells_no_number_of_machines() -> None:
    """Chance would: 10 machines against 7, say, for times that differ by 1 %."""
    text = format_estimate(ask(lambda name, jps: 10.0 + 0.1 * jps))
    assert "cannot be told at this load: one more or less hardly changes it" in text
    assert "GPUs for 10 times" not in text


def test_a_machine_that_is_overloaded_has_no_times() -> None:
    estimate = ask(lambda name, jps: 10.0 if name == "tenuto" else math.inf)
    text = format_estimate(estimate)
    assert re.search(r"^stock as it is +overloaded: 1 jobs/s offered, 0.5 finished$", text, re.MULTILINE)
    assert estimate.tenuto.get_ratio(estimate.stock) is None
    assert estimate.tenuto.gains_over(estimate.tuned)
    assert estimate.to_json()["tenuto_over_stock"] is None
    assert estimate.needs[0].num_machines is None or estimate.needs[0].num_machines > 10


@pytest.mark.parametrize(
    ("max_runs", "num_seeds", "left_out"),
    [(14, 3, [OF_LOADS, OF_MACHINES]), (12, 1, [OF_SEEDS, OF_LOADS, OF_MACHINES]), (30, 3, [OF_MACHINES])],
)
def test_what_there_is_no_time_for_is_named(max_runs: int, num_seeds: int, left_out: list[str]) -> None:
    estimate = ask(gain_above_a_half, max_runs)
    assert estimate.left_out == left_out
    # Means over different seeds are not compared.
    shown = (estimate.stock, estimate.tuned, estimate.tenuto)
    assert [len(case.point.runs) for case in shown] == [num_seeds] * 3
    text = format_estimate(estimate)
    assert f"There was no time for: {'; '.join(left_out)}. Allow more with --limit." in text
    assert "Tenuto gains over" not in text or OF_LOADS not in left_out


def test_without_one_seed_of_each_there_is_no_answer() -> None:
    assert ask(gain_above_a_half, 4).cases == []


def test_a_load_is_one_machines_share(tmp_path: Path) -> None:
    assert make_load(STOCK, replace(LOAD, jps=3.0), 4).jps == 0.75
    file = tmp_path / "jobs.jsonl"
    write_tenuto_jsonl(file, load_workload("bfcl", jps=2.0, window_s=20.0, arrival="fixed").jobs)
    recorded = LoadOptions(workload=str(file))
    assert make_load(STOCK, recorded, 4).jps == pytest.approx(0.5)
    write_tenuto_jsonl(file, load_workload("bfcl", jps=1.0, window_s=1.0, arrival="fixed").jobs)
    with pytest.raises(ConfigError, match="does not say how often jobs come; say it with --jps"):
        make_load(STOCK, recorded, 1)


SMALL = (
    *("--gpu", "L40S", "--step-cost", "roofline", "--recording", "probes", "--jps", "4"),
    *("--seeds", "1", "--workers", "1"),
)


@pytest.mark.slow
def test_simulated_machines_end_to_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.sim.estimate.NUM_LOADS", 1)
    monkeypatch.setattr("tenuto.cli.estimate.MAX_JOBS", 150)
    assert cli.main(["estimate", *SMALL, "--json", "--limit", "10000"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [case["step_tokens"] for case in told["cases"]] == [None, 256, 512, 1024, None]
    assert told["cases"][-1]["policy"] == "tenuto"
    assert all(case["verdict"] == "steady" and case["mean_s"] > 0 for case in told["cases"])
    # Nothing can be gained where jobs have one short turn.
    assert told["tenuto_over_tuned"]["mean"] == pytest.approx(1.0, abs=0.02)
    assert told["gains_from_jps_per_machine"] is None
    # Short jobs take as long on fewer machines.
    assert told["machines"][0]["num"] > 1
    assert told["left_out"] == [] and told["next"]


@pytest.mark.parametrize("jps", ["4", "0.001"])
def test_time_that_is_up_is_an_error_before_the_first_answer(
    jps: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """At any rate, also one at which no job comes in a generator's usual window."""
    assert cli.main(["estimate", *SMALL[:6], "--jps", jps, *SMALL[8:], "--limit", "0.001"]) == 2
    assert "no result after 0.001 s; allow more with --limit" in capsys.readouterr().err


@pytest.mark.slow
def test_runs_that_are_left_out_are_not_waited_for(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.sim.estimate.ONE_SEED", Effort(num_jobs=20_000, num_seeds=1))
    monkeypatch.setattr("tenuto.cli.estimate.MAX_JOBS", 20_000)
    arguments = ["--gpu", "L40S", "--step-cost", "roofline", "--jps", "0.1"]
    assert cli.main(["estimate", *arguments, "--workers", "2", "--limit", "3"]) == 2
    assert "no result after 3 s" in capfd.readouterr().err
    assert not multiprocessing.active_children()


def test_a_server_says_its_model_and_its_cache(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SMALL, "--limit", "0.001"]
    with serve(gpu="L40S", model="qwen3-8b", kv_tokens=48_000) as live:
        assert cli.main(["estimate", "--url", live.url, *arguments]) == 2
    told = capsys.readouterr().err
    assert "serves qwen3-8b with a KV cache of 48,000 tokens" in told
    assert cli.main(["estimate", "--url", live.url, *arguments]) == 2
    assert f"no answer from {live.url}" in capsys.readouterr().err
