"""Each metric against figures worked out by hand; the first are the glossary's example."""

from __future__ import annotations

import csv
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.core import reuse
from tenuto.core.errors import ConfigError
from tenuto.records import metrics
from tenuto.records.metrics import (
    Gaps,
    get_job_rates,
    get_rate,
    make_record,
    measure_goodput,
    parse_limits,
)
from tenuto.records.schema import Goodput, Stats, TurnRecord
from tenuto.records.text import format_time_s, is_overloaded, write_csv
from tenuto.sim.machine import build
from tenuto.sim.setup import Setup
from tenuto.sim.simulation import Clients, Simulation
from tenuto.workload import LoadOptions, make_workload


def make_turn(job: str = "a", turn: int = 1, due_s: float = 0.0, **changes: object) -> TurnRecord:
    return TurnRecord(job=job, turn=turn, due_s=due_s, **changes)  # type: ignore[arg-type]


def test_the_example_of_the_glossary() -> None:
    computed = reuse.count_computed_tokens(100, 20)
    reusable = reuse.count_reusable_tokens(120, computed, 150, 16)
    assert (computed, reusable) == (119, 112)
    assert reuse.count_missed_tokens(reusable, 64) + reuse.count_lost_tokens(155, 144) == 59


@pytest.mark.parametrize(
    ("shared", "computed", "prompt", "expected"),
    [
        (128, 128, 129, 128),  # The last prompt token is always computed,
        (128, 128, 128, 112),  # so a prompt that is cached whole loses its last block.
        (200, 127, 300, 112),  # The output's last token has no KV.
        (40, 127, 300, 32),  # Compacted: only the system prompt is left.
        (0, 127, 300, 0),
        (1, 1, 0, 0),
    ],
)
def test_reusable_tokens_in_full_blocks(shared: int, computed: int, prompt: int, expected: int) -> None:
    assert reuse.count_reusable_tokens(shared, computed, prompt, 16) == expected


def test_hits_of_what_other_jobs_left_are_not_negative_misses() -> None:
    assert reuse.count_missed_tokens(0, 96) == 0
    assert reuse.count_lost_tokens(90, 96) == 0


def test_percentiles_are_numpys() -> None:
    values = [5.0, 1.0, 9.0, 2.5, 2.5, 7.0]
    for percent in (0, 50, 90, 95, 99, 100):
        assert metrics.get_percentile(values, percent) == pytest.approx(np.percentile(values, percent))
    with pytest.raises(ValueError, match="no values"):
        metrics.get_percentile([], 50)


def test_a_summary_leaves_out_what_is_not_known() -> None:
    assert metrics.summarise([4.0, None, 2.0]) == Stats(
        3.0, 3.0, pytest.approx(3.8), pytest.approx(3.9), pytest.approx(3.98), 4.0, 2.0
    )
    assert metrics.summarise([None]) is None


def test_job_times_count_from_when_the_first_turn_was_due() -> None:
    turns = [
        make_turn("late", 1, 5.0, sent_s=6.0, last_token_s=7.0),
        make_turn("early", 2, 9.0, last_token_s=12.0),
        make_turn("early", 1, 1.0, last_token_s=4.0),
        make_turn("failed", 1, 0.0, status="failed"),
        make_turn("half", 1, 0.0, last_token_s=3.0),
        make_turn("child", 1, 2.0, last_token_s=3.0),
    ]
    num_turns = {"late": 1, "early": 2, "failed": 1, "half": 2, "child": 1}
    times_s = metrics.get_job_times_s(turns, num_turns, {"child": "early"})
    assert list(times_s.items()) == [("early", 11.0), ("late", 2.0)]
    assert metrics.get_makespan_s(turns) == 12.0
    assert metrics.get_slowdown(times_s, {"early": 5.5, "late": 2.0}) == metrics.summarise([1.0, 2.0])


def test_the_times_of_a_turn_count_from_when_it_was_due() -> None:
    turn = make_turn(due_s=1.0, sent_s=1.5, start_s=2.0, first_token_s=4.0, last_token_s=7.0, output_tokens=4)
    times = (turn.lag_s, turn.queue_s, turn.ttft_s, turn.latency_s, turn.tpot_s)
    assert times == (0.5, 1.0, 3.0, 6.0, 1.0)
    assert make_turn(first_token_s=4.0, last_token_s=4.0, output_tokens=1).tpot_s is None
    assert json.loads(json.dumps(turn.to_json()))["latency_s"] == 6.0


def test_means_by_turn() -> None:
    turns = [
        make_turn("a", 1, 0.0, last_token_s=1.0, prompt_tokens=10),
        make_turn("b", 1, 0.0, last_token_s=3.0, prompt_tokens=20),
        make_turn("a", 2, 4.0, status="failed", prompt_tokens=40),
    ]
    [(number, means)] = metrics.get_turn_means(turns).items()
    assert (number, means.turns, means.latency_s, means.prompt_tokens) == ("1", 2, 2.0, 15.0)


def test_sums_with_an_unknown_part_are_unknown() -> None:
    assert metrics.add_up([1, 2]) == 3
    assert metrics.add_up([1, None]) is None
    assert metrics.add_up([]) is None


def test_reusable_tokens_of_a_record_that_does_not_say() -> None:
    before = make_turn(turn=1, prompt_tokens=100, output_tokens=20)
    turn = make_turn(turn=2, prompt_tokens=150)
    assert metrics.estimate_reusable_tokens(before, turn, 16) == 112
    assert metrics.estimate_reusable_tokens(None, turn, 16) == 0
    assert metrics.estimate_reusable_tokens(make_turn(), turn, 16) is None
    said = make_turn(turn=2, prompt_tokens=150, reusable_tokens=32)
    assert metrics.estimate_reusable_tokens(before, said, 16) == 32


@given(st.lists(st.floats(0, 1.7976931348623157e308), min_size=1))
def test_a_mean_lies_within_its_values(values: list[float]) -> None:
    for mean in (
        metrics.get_geometric_mean(values),
        # Half of the largest value, because a sum that rounds up would be more than a float holds.
        metrics.get_mean([value / 2 / len(values) for value in values]),
    ):
        assert 0 <= mean <= max(values)
    assert min(values) <= metrics.get_geometric_mean(values)
    assert metrics.get_geometric_mean(values[:1] * 3) == values[0] == metrics.get_mean(values[:1])


def test_the_geometric_mean() -> None:
    assert metrics.get_geometric_mean([2.0, 8.0]) == pytest.approx(4)
    assert metrics.get_geometric_mean([2.0, 0.0]) == 0
    for wrong in ([], [-1.0, 2.0]):
        with pytest.raises(ValueError):
            metrics.get_geometric_mean(wrong)


def test_counted_gaps_are_the_gaps_one_by_one() -> None:
    rng = random.Random(3)
    gaps, each = Gaps(), []
    for _ in range(200):
        seconds, count = rng.choice((0.01, 0.02, 0.5, rng.random())), rng.randint(1, 9)
        gaps.add(seconds, count)
        each += [seconds] * count
    expected, found = metrics.summarise(each), gaps.summarise()
    assert expected is not None
    assert found is not None
    for name in Stats.__dataclass_fields__:
        assert getattr(found, name) == pytest.approx(getattr(expected, name)), name


def test_no_gap_has_no_statistics() -> None:
    assert Gaps().summarise() is None


@pytest.mark.parametrize("is_async", [False, True])
def test_the_gaps_of_a_simulation_fill_the_time_between_first_and_last_tokens(is_async: bool) -> None:
    """Also where quiet steps are done at once, and where turns are preempted."""
    setup = Setup(step_cost="roofline", kv_tokens=24_000, host_gb=0.0, async_scheduling=is_async)
    found = []
    for fast_forwards in (True, False):
        machine = build(setup)
        workload = make_workload(LoadOptions(workload="bfcl", jps=8.0, window_s=2.0, scale_lengths=0.2))
        simulation = Simulation.of_one(machine.make_scheduler(), machine.step_cost, Clients(workload))
        simulation.engines[0].fast_forwards = fast_forwards
        turns = simulation.run()
        stats = simulation.gaps.summarise()
        assert stats is not None
        times = [(turn.last_token_s, turn.first_token_s, turn.output_tokens) for turn in turns]
        total_s = sum(last - first for last, first, _ in times if last is not None and first is not None)
        num_gaps = sum((count or 0) - 1 for *_, count in times)
        assert stats.mean * num_gaps == pytest.approx(total_s)
        found.append(stats)
    for name in Stats.__dataclass_fields__:
        assert getattr(found[0], name) == pytest.approx(getattr(found[1], name)), name


def make_timed_turn(
    ttft_s: float, latency_s: float, output_tokens: int = 11, status: str = "ok"
) -> TurnRecord:
    return TurnRecord(
        job="a", turn=1, due_s=0.0, first_token_s=ttft_s, last_token_s=latency_s,
        output_tokens=output_tokens, status=status,
    )  # type: ignore[arg-type]  # fmt: skip


TURNS = [
    make_timed_turn(0.4, 0.9),  # 50 ms a token
    make_timed_turn(0.6, 1.0),  # its first token is late
    make_timed_turn(0.4, 1.4),  # 100 ms a token
    make_timed_turn(0.5, 0.5, output_tokens=1),  # no time between tokens
    make_timed_turn(0.1, 0.2, status="failed"),
]


def test_turns_that_keep_all_limits() -> None:
    limits = parse_limits(["ttft:500", "tpot:50"])
    assert measure_goodput(TURNS, limits, 4.0) == Goodput(limits, 2, 0.4, 0.5)
    both = measure_goodput(TURNS, parse_limits(["e2el:1000"]), None)
    assert (both.turns, both.turns_per_s) == (3, None)  # type: ignore[union-attr]
    assert measure_goodput(TURNS, {}, 4.0) is None
    uncounted = replace(TURNS[0], output_tokens=None)
    assert measure_goodput([uncounted], limits, 4.0).turns == 0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tftt:5", r"names are ttft, tpot, e2el.*did you mean ttft\?"),
        ("ttft", "number of milliseconds, got ''"),
        ("ttft:soon", "number of milliseconds, got 'soon'"),
        ("ttft:-1", "must be from 0 to 1e\\+09 ms"),
        ("ttft:nan", "must be from 0 to"),
        ("ttft:1e12", "must be from 0 to"),
    ],
)
def test_limits_that_make_no_sense(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_limits([text])


def test_rates_leave_the_ends_out() -> None:
    steady = [number / 4 for number in range(100)]
    assert get_rate(steady) == pytest.approx(4.0)
    assert get_rate([*steady, 1000.0]) == pytest.approx(4.0)
    assert get_rate([1.0]) is None
    assert get_rate([1.0, 1.0]) is None


def test_jobs_that_finish_more_slowly_than_they_arrive() -> None:
    turns = [TurnRecord(job=str(n), turn=1, due_s=n / 4, last_token_s=5.0 + n) for n in range(100)]
    times_s = {turn.job: 5.0 + int(turn.job) * 0.75 for turn in turns}
    rates = get_job_rates(turns, times_s)
    assert rates == {"offered_jps": pytest.approx(4.0), "finished_jps": pytest.approx(1.0)}
    record = {**rates, "job_times_s": times_s}
    assert is_overloaded(record)
    assert not is_overloaded({**record, "job_times_s": dict.fromkeys(times_s, 9.0)})
    assert not is_overloaded({**record, "finished_jps": 3.9})
    # Later jobs of a short run may take longer by chance.
    few_s = [5.0, 20.0, 9.0, 30.0, *[10.0] * 4, 40.0, 6.0, 12.0, 31.0]
    assert not is_overloaded({**record, "job_times_s": dict(enumerate(few_s))})
    assert is_overloaded({**record, "job_times_s": dict(enumerate(sorted(few_s)))})
    # Each job took about as long as it would have alone: later ones were longer, and waited for nothing.
    assert not is_overloaded({**record, "slowdown": {"mean": 1.1}})
    assert is_overloaded({**record, "slowdown": {"mean": 1.5}})


def test_jobs_that_fail_arrived_too_and_those_of_another_job_did_not() -> None:
    turns = [TurnRecord(job=str(n), turn=1, due_s=n / 4, last_token_s=5.0 + n / 4) for n in range(100)]
    helpers = [TurnRecord(job=f"{n}/a", turn=1, due_s=n / 4, root=str(n)) for n in range(100)]
    times_s = {turn.job: 5.0 for turn in turns if int(turn.job) % 2}
    rates = get_job_rates([*turns, *helpers], times_s)
    assert rates == {"offered_jps": pytest.approx(4.0), "finished_jps": pytest.approx(2.0)}


def test_jobs_that_come_at_once_have_no_rate() -> None:
    """Four clients of a recording began within a millisecond: nobody offered 4,920 jobs per second."""

    def get_rates(gap_s: float) -> tuple[float | None, ...]:
        turns = [TurnRecord(job=str(n), turn=1, due_s=n * gap_s, last_token_s=11.0 + n) for n in range(4)]
        times_s = {turn.job: 11.0 + n - n * gap_s for n, turn in enumerate(turns)}
        return tuple(get_job_rates(turns, times_s).values())

    assert get_rates(0.0002) == (None, pytest.approx(1.0))
    assert get_rates(0.5) == (pytest.approx(2.0), pytest.approx(1.0))
    assert set(get_job_rates([], {}).values()) == {None}


def test_the_heaviest_overload_has_its_rate() -> None:
    """Jobs that a rate of arrival brought came at that rate, however much longer the run took."""
    turns = [TurnRecord(job=str(n), turn=1, due_s=n / 500, last_token_s=10.0 + n) for n in range(100)]
    facts = dict.fromkeys(("loaded_tokens", "stored_tokens", "block_size"))
    facts |= {"policy": "stock", "gpu": "H100", "jps": 500.0, "seed": 1, "simulated": True, "wall_s": 1.0}
    record = make_record(turns, **facts)
    assert record.offered_jps == pytest.approx(500.0)
    assert is_overloaded(record.to_json())


def test_jobs_that_end_at_once_have_no_rate() -> None:
    """An end is an arrival and a time, whose sum is rounded. Two jobs are not a thousand million a second."""
    end_s = 7.4174149895332535
    turns = [TurnRecord(job=str(due_s), turn=1, due_s=due_s, last_token_s=end_s) for due_s in (0.1, 2.1)]
    times_s = {turn.job: end_s - turn.due_s for turn in turns}
    assert get_job_rates(turns, times_s) == {"offered_jps": pytest.approx(0.5), "finished_jps": None}


def test_a_time_has_the_unit_that_fits() -> None:
    times_s = (12.345, 0.0123, 0.000123, 0.0, None)
    assert list(map(format_time_s, times_s)) == ["12.35 s", "12.3 ms", "123.0 µs", "0.0 ms", "–"]


def test_a_name_in_a_csv_is_no_formula(capsys: pytest.CaptureFixture[str]) -> None:
    write_csv(Path("-"), [{"model": "=1+1", "config": {"x": "@y"}, "job_s": {"mean": -1.5}}])
    assert capsys.readouterr().out == "model,job_s.mean\n'=1+1,-1.5\n"


def test_a_csv_has_a_row_each_and_a_column_for_every_value(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    write_csv(path, [{"policy": "a", "job_s": {"p95": 1.5}, "notes": ["x"]}, {"policy": "b", "extra": None}])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [
        {"policy": "a", "job_s.p95": "1.5", "extra": ""},
        {"policy": "b", "job_s.p95": "", "extra": ""},
    ]
    # pandas, which most tables are read with, sees numbers and what is missing.
    frame = pytest.importorskip("pandas").read_csv(path)
    assert frame["job_s.p95"].tolist()[0] == 1.5
    assert frame["job_s.p95"].isna().tolist() == [False, True]
    with pytest.raises(ConfigError, match="--csv: cannot write"):
        write_csv(tmp_path / "missing" / "out.csv", [])
