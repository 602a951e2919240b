"""The search for the fewest machines, on queueing systems of known capacity and on the simulator."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tenuto.cli import main
from tenuto.core.errors import ConfigError
from tenuto.sim.plan import (
    Plan,
    Point,
    SeedRunner,
    format_effects,
    format_meaning,
    format_plans,
    get_best,
    make_plans,
    try_changes,
)
from tenuto.sim.setup import Setup
from tenuto.sim.steady import (
    COHORT,
    Effort,
    Settling,
    Steady,
    Target,
    make_long_workload,
    simulate_until_steady,
)
from tenuto.workload import LoadOptions
from tests.sim.test_trend import serve

H100 = Setup(gpu="H100")


def watch_queue(setup: Setup, load: LoadOptions, effort: Effort, capacity_jps: float = 1.0) -> list[Steady]:
    """A machine that is an M/M/1 queue, until it is steady, with three seeds. Its mean service is 1 s."""
    assert load.jps is not None
    runs = []
    for seed in (1, 2, 3)[: effort.num_seeds]:
        rho = load.jps * setup.step_cost_factor / capacity_jps
        arrivals_s, ends_s = serve(rho, 8000, seed)
        shortest_s = max(load.window_s or 0.0, effort.num_jobs / rho)
        settling = Settling(first_look_s=50.0, max_jobs=4000, shortest_s=shortest_s)
        verdict = None
        while verdict is None:
            now_s = settling.next_look_s
            verdict = settling.decide(arrivals_s, ends_s, now_s)
        seen = settling.last
        assert seen is not None
        # First come, first served: the n-th job to come is the n-th to leave.
        times_s = [
            end_s - arrival_s
            for arrival_s, end_s in zip(arrivals_s, ends_s, strict=True)
            if seen.warm_up_s < arrival_s < COHORT * now_s
        ]
        run = Steady(
            verdict, seen.offered_jps, seen.finished_jps, tuple(times_s), tuple(times_s),
            now_s, seen.warm_up_s, int(now_s * rho), 0, "a queue",
        )  # fmt: skip
        if verdict != "steady":
            return [run]
        runs.append(run)
    return runs


def plan_queue(jps: float, target: Target, **changes: Any) -> Plan:
    [plan] = make_plans([H100], LoadOptions(jps=jps, **changes), target, watch_queue)
    return plan


@pytest.mark.parametrize("window_s", [None, 45.0, 180.0, 600.0, 6000.0])
@pytest.mark.parametrize(("jps", "p95_s"), [(4.4, 40.0), (2.2, 30.0), (3.3, 35.0)])
def test_the_answer_is_the_queues_own_whatever_the_window(
    jps: float, p95_s: float, window_s: float | None
) -> None:
    """The P95 of an M/M/1 queue with one job a second is ln 20 / (1 − load)."""

    def is_enough(num: int) -> bool:
        return jps / num < 1 and math.log(20) / (1 - jps / num) <= p95_s

    fewest = next(num for num in range(1, 65) if is_enough(num))
    plan = plan_queue(jps, Target(p95_s=p95_s), window_s=window_s)
    assert plan.num_machines == fewest
    assert plan.fewer is not None
    assert not Target(p95_s=p95_s).is_met(plan.fewer)


def test_an_overloaded_machine_has_no_p95() -> None:
    [plan] = make_plans([H100], LoadOptions(jps=6.0), Target(p95_s=20.0), watch_queue, max_machines=3)
    assert (plan.num_machines, plan.point.verdict) == (None, "overloaded")
    text = format_plans([plan], Target(p95_s=20.0))
    assert "none" in text
    assert "3 machines: overloaded: 6 jobs/s offered, " in text
    finished = plan.point.to_json()["finished_jps"]
    assert finished == pytest.approx(3.0, rel=0.15)
    assert plan.point.to_json()["p95_s"] is None
    assert "P95 " not in text.splitlines()[1]


def test_the_margin_asks_for_more() -> None:
    # Three machines have a P95 of 11 s, four one of 6.7 s.
    assert plan_queue(2.2, Target(p95_s=18.0)).num_machines == 3
    assert plan_queue(2.2, Target(p95_s=18.0, margin=0.6)).num_machines == 4


def test_a_target_for_the_first_token_alone() -> None:
    assert plan_queue(2.2, Target(p95_ttft_s=18.0)).num_machines == 3
    with pytest.raises(ConfigError, match="--p95 or --p95-ttft"):
        Target()


def test_the_cheapest_is_best_where_all_prices_are_known() -> None:
    def measure(setup: Setup, load: LoadOptions, effort: Effort) -> list[Steady]:
        return watch_queue(setup, load, effort, capacity_jps={"H100": 2.0, "L40S": 1.0}[setup.gpu])

    def plan(prices: dict[str, float]) -> list[Plan]:
        setups = [Setup(gpu="H100"), Setup(gpu="L40S")]
        return list(make_plans(setups, LoadOptions(jps=3.0), Target(p95_s=15.0), measure, prices=prices))

    plans = plan({"H100": 3.0, "L40S": 1.0})
    assert [(each.num_gpus, each.usd_per_hour) for each in plans] == [(2, 6.0), (4, 4.0)]
    best = get_best(plans)
    assert best is not None
    assert best.setup.gpu == "L40S"
    assert "Cheapest: 4 × L40S with policy stock, 4.00 $/hour" in format_plans(plans, Target(p95_s=15.0))
    best = get_best(plan({"L40S": 1.0}))
    assert best is not None
    assert best.setup.gpu == "H100"


def test_what_a_plan_depends_on() -> None:
    target = Target(p95_s=30.0)
    plan = plan_queue(2.5, target)
    effects = list(try_changes(plan, LoadOptions(jps=2.5), target, watch_queue))
    verdicts = {effect.name: effect.is_enough for effect in effects}
    assert verdicts["steps 10 % faster"]
    assert not verdicts["load +20 %"]
    text = format_effects(effects, plan)
    assert "load +20 %" in text
    assert "not enough" in text


SMALL = Setup(gpu="L40S", step_cost="roofline", kv_tokens=60_000, host_gb=0.0, offload="none")


def simulate(jps: float, **changes: Any) -> Steady:
    load = LoadOptions(workload="bfcl", scale_lengths=0.1, jps=jps, **changes)
    return simulate_until_steady(SMALL, load, Effort(num_jobs=60), max_jobs=200)


@pytest.mark.slow
def test_a_simulated_machine_is_steady_or_overloaded() -> None:
    light = simulate(0.2)
    assert light.verdict == "steady"
    assert light.finished_jps == pytest.approx(light.offered_jps, rel=0.2)
    assert light.simulated_s * 0.2 >= 60
    assert simulate(0.2) == light
    heavy = simulate(4.0)
    assert heavy.verdict != "steady"
    assert heavy.finished_jps < 0.7 * heavy.offered_jps


@pytest.mark.slow
def test_the_shortest_time_is_kept() -> None:
    told: list[tuple[float, int, int]] = []
    load = LoadOptions(workload="bfcl", scale_lengths=0.1, jps=0.2, window_s=700.0)
    effort = Effort(num_jobs=20)
    run = simulate_until_steady(SMALL, load, effort, max_jobs=200, tell=lambda *now: told.append(now))
    assert run.simulated_s >= 700
    assert told[-1][0] >= 700
    assert told[-1][1] == pytest.approx(0.2 * told[-1][0], rel=0.4)


def test_a_window_is_no_longer_than_the_jobs_that_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenuto.sim.steady.MOST_JOBS", 300)
    run = simulate(0.2, window_s=1e6)
    assert (run.verdict, 200 < run.num_jobs < 300) == ("steady", True)


def test_the_jobs_of_a_trace_come_again_as_new_jobs(write_trace: Callable[[], str]) -> None:
    workload = make_long_workload(LoadOptions(workload=write_trace(), jps=2.0, seed=3), 20.0)
    assert len(workload.jobs) > 30
    assert len({job.job_id for job in workload.jobs}) == len(workload.jobs)
    private = [job.turns[0].output.content_id for job in workload.jobs]
    assert len(set(private)) == len(private)
    shared = {job.turns[0].prompt[0].content_id for job in workload.jobs}
    assert len(shared) == 1  # the system prompt
    arrivals_s = [job.arrival_s for job in workload.jobs]
    assert arrivals_s == sorted(arrivals_s)
    assert arrivals_s[-1] <= 20.0


def test_a_recordings_names_do_not_collide_with_those_of_copies(tmp_path: Path) -> None:
    # `tenuto record` calls a turn beside another of its job `ID~2`.
    row = {"input_length": 120, "output_length": 10, "timestamp": 0}
    path = tmp_path / "recording.jsonl"
    rows = [{**row, "session": "a"}, {**row, "session": "a~2", "parent": "a"}, {**row, "session": "b"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    jobs = make_long_workload(LoadOptions(workload=str(path), jps=1.0, seed=3), 20.0).jobs
    assert len({job.job_id for job in jobs}) == len(jobs) > 20
    assert len({job.turns[0].prompt[0].content_id for job in jobs}) == len(jobs)


@pytest.fixture
def write_trace(tmp_path: Any) -> Callable[..., str]:
    def write(pause_s: float = 0.0) -> str:
        rows = [
            {
                "session": f"s{n}", "input_length": 120, "output_length": 10, "timestamp": n * 1000,
                "prompt": [["system", 100], [f"t{n}", 20]], "output": f"o{n}",
            }
            for n in range(5)
        ]  # fmt: skip
        rows += [{**row, "delay": pause_s * 1000} for row in rows if pause_s]
        path = tmp_path / "trace.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


@pytest.mark.parametrize("command", ["plan", "estimate"])
def test_pauses_that_take_too_many_jobs_to_simulate_are_named(
    command: str, write_trace: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The answer comes at once, although 8 million jobs arrive in the time of twelve jobs."""
    target = ["--policies", "stock", "--p95", "9"] if command == "plan" else []
    load = ["--workload", write_trace(pause_s=86_400.0), "--jps", "8"]
    machine = ["--gpu", "L40S", "--step-cost", "roofline", "--workers", "1", "--seeds", "1"]
    assert main([command, *machine, *load, *target]) == 2
    problem = capsys.readouterr().err
    assert "a job takes 86,400 s on average when it is alone, so more than 1,000,000 jobs" in problem
    assert "for one machine; lower --jps, or shorten tool calls" in problem


def test_shorter_pauses_as_the_message_names_them_are_simulated(
    write_trace: Callable[..., str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenuto.sim.steady.MOST_JOBS", 100)
    monkeypatch.setattr("tenuto.sim.steady.MOST_UNSEEN_JOBS", 600)
    load = ["--workload", write_trace(pause_s=8.0), "--scale-tools", "0.5", "--jps", "12", "--window", "5"]
    machine = ["--gpu", "L40S", "--step-cost", "roofline", "--workers", "1", "--seeds", "1"]
    command = ["plan", "--policies", "stock", "--p95", "9", "--max-sim-jobs", "100", *machine, *load]
    assert main(command) == 2
    [advice] = re.findall(r"with (--scale-tools) ([\d.]+);", capsys.readouterr().err)
    assert 0.2 < float(advice[1]) < 0.5
    main([*command, *advice])
    assert "In short" in capsys.readouterr().out


PLAN = [
    *("plan", "--gpu", "L40S", "--policies", "stock", "--workload", "random", "--random-output-len", "16"),
    *("--step-cost", "roofline", "--max-sim-jobs", "200", "--seeds", "1", "--workers", "1"),
]


def test_the_plan_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*PLAN, "--jps", "2", "--p95", "10", "--p95-ttft", "5", "--price", "L40S=0.9"]
    assert main([*arguments, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["best"]["num_gpus"] == 1
    assert whole["best"]["usd_per_hour"] == 0.9
    assert whole["best"]["step_cost"] == "roofline"
    assert whole["sensitivity"][0]["change"] == "load +20 %"
    assert whole["best"]["point"]["p95_s"] < 10
    assert main([*arguments, "--no-sensitivity"]) == 0
    output = capsys.readouterr()
    assert "Cheapest: 1 × L40S with policy stock, 0.90 $/hour" in output.out
    assert "a roofline model" in output.out
    assert output.out.splitlines()[-1] == "In short: 1 × L40S is enough with stock."


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--jps", "1"], "--p95 or --p95-ttft"),
        (["--jps", "1", "--p95", "5", "--price", "H3000=1"], "unknown GPU"),
        (["--jps", "1", "--p95", "5", "--price", "H200=1"], "--price of H200: no plan has that GPU"),
        (["--jps", "1", "--p95", "5", "--price", "H100=cheap"], "--price wants GPU=DOLLARS"),
        (["--jps", "1", "--p95", "5", "--margin", "1"], "--margin must be below 1"),
        (["--p95", "5"], "--jps is missing"),
    ],
)
def test_plans_that_make_no_sense(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PLAN, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_load_of_which_no_job_comes_in_a_generators_usual_window(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*PLAN, "--jps", "0.001", "--p95", "10", "--no-sensitivity"]) == 0
    assert "1 × L40S is enough" in capsys.readouterr().out


def test_no_number_of_gpus_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--jps", "2", "--p95", "0.05", "--max-machines", "2", "--no-sensitivity"]
    assert main([*PLAN, *arguments]) == 1
    output = capsys.readouterr().out
    assert "Nothing that was tried keeps P95 job time 0.05 s" in output
    assert "more machines do not help. A job that is alone on one takes P95 0.44 s" in output
    assert "--tp" in output and "--max-machines" not in output


def test_more_machines_are_advised_where_they_help(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--jps", "40", "--p95", "1", "--max-machines", "1", "--no-sensitivity"]
    assert main([*PLAN, *arguments]) == 1
    output = capsys.readouterr().out
    assert "Allow more machines with --max-machines." in output and "do not help" not in output
    assert main([*PLAN, *arguments, "--json"]) == 1
    alone = json.loads(capsys.readouterr().out)["plans"][0]["alone"]
    assert 0 < alone["p95_ttft_s"] < alone["p95_s"] < 1


def test_machines_that_are_named_and_too_slow(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--jps",
        "2",
        "--p95",
        "0.05",
        "--no-sensitivity",
        "--servers",
        "L40S:1",
        "--router",
        "random",
    ]
    assert main([*PLAN, *arguments]) == 1
    output = capsys.readouterr().out
    assert "Name more or faster machines with --servers." in output and "--max-machines" not in output


def test_gpus_that_the_model_does_not_fit_are_left_out_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*PLAN, "--model", "qwen3-32b", "--jps", "0.5", "--p95", "90", "--no-sensitivity"]
    assert main([*arguments, "--gpu", "RTX5090,H200"]) == 0
    output = capsys.readouterr()
    assert "note: qwen3-32b leaves no KV cache on RTX5090 (tp 1): left out" in output.err
    assert "RTX5090" not in output.out
    assert main([*arguments, "--gpu", "RTX5090"]) == 2
    assert "leaves no KV cache on RTX5090" in capsys.readouterr().err


@pytest.mark.slow
def test_a_simulated_answer_does_not_depend_on_the_window() -> None:
    setup = Setup(gpu="L40S", step_cost="roofline", policy="stock")
    found = []
    for window_s in (None, 10.0, 20.0):
        load = LoadOptions(workload="random", random_output_len=16, jps=20.0, window_s=window_s)
        with SeedRunner((1,), workers=1, max_jobs=500, say=lambda words: None) as measure:
            [plan] = make_plans([setup], load, Target(p95_s=2.0), measure)
        found.append((plan.num_machines, plan.fewer and plan.fewer.verdict))
    assert len(set(found)) == 1
    assert found[0][0] is not None
    assert found[0][0] > 1


def make_plan(gpu: str, policy: str, num: int | None, p95_s: float, num_cut: int = 0) -> Plan:
    times = (p95_s,) * 20
    run = Steady("steady", 1.0, 1.0, times, times, 100.0, 10.0, 900, num_cut, "tables")
    return Plan(Setup(gpu=gpu, policy=policy), num, Point(num or 64, 4.0, (run,) * 3), None)


@pytest.mark.parametrize(
    ("stock", "words"),
    [
        ((3, 14.7), "2 × H100 with tenuto, 3 with stock; P95 job time 17.0 s against 14.7 s."),
        (
            (2, 34.0),
            "The same number of GPUs, 2 × H100, with tenuto and stock; with tenuto the P95 job time halves "
            "(17.0 s against 34.0 s).",
        ),
        ((2, 20.0), "with tenuto the P95 job time is 15 % shorter (17.0 s against 20.0 s)."),
        ((None, 99.0), "2 × H100 with tenuto; with stock no number that was tried is enough."),
    ],
)
def test_the_last_sentence_says_what_the_plans_mean(stock: tuple[int | None, float], words: str) -> None:
    plans = [make_plan("H100", "stock", *stock), make_plan("H100", "tenuto", 2, 17.0)]
    assert format_meaning(plans).endswith(words)
    both = format_meaning([make_plan("L40S", "stock", 8, 30.0), *plans])
    assert both.endswith(f"{words} 8 × L40S are enough with stock.")
    assert format_meaning([make_plan("H100", "stock", None, 1.0)]) == ""


def test_a_machine_that_cuts_jobs_short_comes_after_those_that_do_not() -> None:
    small, large = make_plan("RTX5090", "stock", 1, 5.0, num_cut=7), make_plan("H200", "stock", 2, 9.0)
    best = get_best([small, large])
    assert best is large
    assert small.to_json()["point"]["cut_turns"] == 7
    assert "RTX5090 stock: too long for this machine and left out: 7 turns" in format_plans(
        [small, large], Target(p95_s=20.0)
    )
    assert format_meaning([small, large]) == (
        "In short: 2 × H200 are enough with stock. 1 × RTX5090 is enough with stock. Some turns are too long "
        "for RTX5090: their jobs end early."
    )


def test_a_policy_whose_hooks_failed_is_marked(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\nfrom tenuto import Policy\n\n@dataclass\nclass Raises(Policy):\n"
        '    """It raises."""\n    def retain(self, turn, view):\n        raise ValueError("broken")\n'
    )
    setup = replace(SMALL, policy=f"{file}:Raises")
    load = LoadOptions(workload="bfcl", scale_lengths=0.1, jps=0.5)
    run = simulate_until_steady(setup, load, Effort(num_jobs=20), max_jobs=60)
    assert run.policy_faults > 10
    faulty, plan = Plan(setup, 1, Point(1, 0.5, (run,))), make_plan("L40S", "stock", 1, 5.0)
    _, marked, other, _, meaning, *_ = format_plans([faulty, plan], Target(p95_s=90.0)).splitlines()
    assert marked.endswith("  !")
    assert not other.endswith("!")
    assert meaning.startswith(f"! hooks of the policy failed ({run.policy_faults:,} times in all); ")
    assert faulty.to_json()["point"]["policy_faults"] == run.policy_faults
