"""Goodput: which turns keep the limits, and how limits are written."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tenuto.core.errors import ConfigError
from tenuto.records.csv_file import write_csv
from tenuto.records.goodput import measure_goodput, parse_limits
from tenuto.records.metrics import Rates, get_job_rates, get_rate
from tenuto.records.schema import Goodput, TurnRecord
from tenuto.records.text import is_overloaded


def make_turn(ttft_s: float, latency_s: float, output_tokens: int = 11, status: str = "ok") -> TurnRecord:
    return TurnRecord(
        job="a", turn=1, due_s=0.0, first_token_s=ttft_s, last_token_s=latency_s,
        output_tokens=output_tokens, status=status,
    )  # type: ignore[arg-type]  # fmt: skip


TURNS = [
    make_turn(0.4, 0.9),  # 50 ms a token
    make_turn(0.6, 1.0),  # its first token is late
    make_turn(0.4, 1.4),  # 100 ms a token
    make_turn(0.5, 0.5, output_tokens=1),  # no time between tokens
    make_turn(0.1, 0.2, status="failed"),
]


def test_turns_that_keep_all_limits() -> None:
    limits = parse_limits(["ttft:500", "tpot:50"])
    assert measure_goodput(TURNS, limits, 4.0) == Goodput(limits, 2, 0.4, 0.5)
    both = measure_goodput(TURNS, parse_limits(["e2el:1000"]), None)
    assert (both.turns, both.turns_per_s) == (3, None)  # type: ignore[union-attr]
    assert measure_goodput(TURNS, {}, 4.0) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tftt:5", r"names are ttft, tpot, e2el.*did you mean ttft\?"),
        ("ttft", "number of milliseconds, got ''"),
        ("ttft:soon", "number of milliseconds, got 'soon'"),
        ("ttft:-1", "must be 0 ms or more"),
        ("ttft:nan", "must be 0 ms or more"),
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
    assert rates == (pytest.approx(4.0), pytest.approx(1.0))
    record = {"offered_jps": rates.offered_jps, "finished_jps": rates.finished_jps, "job_times_s": times_s}
    assert is_overloaded(record)
    assert not is_overloaded({**record, "job_times_s": dict.fromkeys(times_s, 9.0)})
    assert not is_overloaded({**record, "finished_jps": 3.9})
    # Each job took about as long as it would have alone: later ones were longer, and waited for nothing.
    assert not is_overloaded({**record, "slowdown": {"mean": 1.1}})
    assert is_overloaded({**record, "slowdown": {"mean": 1.5}})


def test_jobs_that_come_at_once_have_no_rate() -> None:
    """Four clients of a recording began within a millisecond: nobody offered 4,920 jobs per second."""

    def get_rates(gap_s: float) -> Rates:
        turns = [TurnRecord(job=str(n), turn=1, due_s=n * gap_s, last_token_s=11.0 + n) for n in range(4)]
        return get_job_rates(turns, {turn.job: 11.0 + n - n * gap_s for n, turn in enumerate(turns)})

    assert get_rates(0.0002) == (None, pytest.approx(1.0))
    assert get_rates(0.5) == (pytest.approx(2.0), pytest.approx(1.0))
    assert get_job_rates([], {}) == (None, None)


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
