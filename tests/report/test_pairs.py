"""The report and `tenuto ab` say the same about the same runs, and inside the interval nobody wins."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tenuto.client.ab_verdict import MEASURES, format_verdict
from tenuto.client.ab_verdict import compare as compare_arms
from tenuto.core.errors import DataError
from tenuto.records.codec import Fields
from tenuto.records.load import read_run
from tenuto.report.html.compare import Group, Winner, group_runs
from tenuto.report.html.draw import draw
from tenuto.report.html.page import make_recipe, make_report, render_page
from tenuto.report.html.sources import Sources, make_run, read_sources
from tests.report.data import make_record, write_lines


def make_ab(ratio: float, scatter: float, repeats: int = 6, threshold: float = 0.01) -> list[dict[str, Any]]:
    """The rows of a comparison of `b` with `a`, as `tenuto ab` writes them."""
    rng = random.Random(f"{ratio} {scatter} {repeats}")
    terms = {"baseline": "a", "threshold": threshold, "arms": ["a=http://x", "b=http://y"]}
    rows = []
    for repeat in range(repeats):
        for arm, factor in (("a", 1.0), ("b", ratio)):
            mean_s = 10 * factor * rng.lognormvariate(0, scatter)
            record = make_record(arm, 1.0, repeat, mean_s=mean_s, simulated=False, gpu=None)
            rows.append({**record, "ab": {"repeat": repeat + 1, "arm": arm, **terms}})
    return rows


def get_verdict(rows: list[dict[str, Any]], threshold: float) -> tuple[Any, str]:
    """What `tenuto ab` says of the mean, and the words."""
    times = ("mean_job_s", "p95_job_s", "mean_ttft_s", "p95_ttft_s", "mean_turn_s", "p95_turn_s")
    pairs = [
        {
            row["ab"]["arm"]: dict.fromkeys(times, row["job_s"]["mean"]) | {"turns_per_s": 1.0}
            for row in rows
            if row["ab"]["repeat"] == repeat
        }
        for repeat in dict.fromkeys(row["ab"]["repeat"] for row in rows)
    ]
    comparisons = compare_arms(pairs, threshold)
    return comparisons[0], format_verdict(comparisons, len(pairs), len(pairs), [])


def read(rows: list[dict[str, Any]], folder: Path) -> tuple[Group, Winner, str]:
    sources = read_sources([write_lines(folder / "results.jsonl", rows)])
    (group,) = group_runs(sources.runs)
    winner = group.try_winner(1.0)
    assert winner is not None
    return group, winner, make_report(sources).verdict.headline


@pytest.mark.parametrize(
    ("ratio", "scatter", "repeats", "threshold"),
    [
        (0.8, 0.02, 6, 0.01),
        (1.3, 0.02, 6, 0.01),
        (0.983, 0.002, 6, 0.01),  # a sure difference below 2 %
        (0.983, 0.002, 6, 0.05),  # the same, and the user does not care
        (1.02, 0.1, 8, 0.01),
        (0.7, 0.01, 3, 0.01),
        (0.7, 0.01, 1, 0.01),
    ],
)
def test_the_report_never_contradicts_ab(
    tmp_path: Path, ratio: float, scatter: float, repeats: int, threshold: float
) -> None:
    rows = make_ab(ratio, scatter, repeats, threshold)
    mean, words = get_verdict(rows, threshold)
    group, winner, headline = read(rows, tmp_path)
    contrast = group.contrast("b", "a", 1.0)
    assert contrast is not None
    assert contrast.mean.ratio == pytest.approx(mean.estimate.ratio)
    if repeats > 1:
        assert (contrast.mean.low, contrast.mean.high) == pytest.approx(
            (mean.estimate.low, mean.estimate.high)
        )
    assert contrast.differs == mean.differs
    assert ("is faster than" in headline) == ("is faster than" in words) == mean.differs
    if mean.differs:
        assert winner.policies == (("b",) if ratio < 1 else ("a",))
        assert f"{winner.policies[0]} is faster than" in words
    else:
        assert winner.is_tie
        assert winner.is_open == ("nothing is proved" in words)


def test_a_job_that_failed_on_one_arm_is_left_out_on_all(tmp_path: Path) -> None:
    rows = make_ab(1.0, 0.0)
    for row in rows:
        if row["policy"] == "b":
            # The longest job has no time; what is left is as long as on the other arm.
            times = {job: s for job, s in row["job_times_s"].items() if job != "job-4"}
            row["job_times_s"], row["jobs"] = times, 3
            row["job_s"] = None
    group, winner, _ = read(rows, tmp_path)
    contrast = group.contrast("b", "a", 1.0)
    assert contrast is not None and contrast.mean.ratio == pytest.approx(1.0)
    assert winner.is_tie


def test_seeds_of_the_simulator_need_no_six_pairs_but_an_interval(tmp_path: Path) -> None:
    def make(means: tuple[float, ...]) -> list[dict[str, Any]]:
        stock = [make_record("stock", 1.0, seed, mean_s=10) for seed in range(len(means))]
        return stock + [make_record("keep", 1.0, seed, mean_s=mean) for seed, mean in enumerate(means)]

    _, sure, _ = read(make((8.0, 8.1, 7.9)), tmp_path / "sure")
    _, unsure, headline = read(make((9.9, 5.0, 8.0)), tmp_path / "unsure")
    assert (sure.policies, sure.is_tie) == (("keep",), False)
    assert (unsure.is_tie, unsure.is_open) == (True, False)
    assert "no difference between keep and stock was seen" in headline


def test_invalid_figures_make_no_winner(tmp_path: Path) -> None:
    rows = make_ab(0.5, 0.01)
    rows[3]["client"] = {"invalid": ["the client was late"]}
    _, winner, headline = read(rows, tmp_path)
    assert winner.is_open
    assert headline.count("INVALID") == 1
    assert "INVALID: the figures of 1 of 12 runs" in render_page(make_report(read_sources([tmp_path])))


def test_an_arm_that_lost_many_jobs_does_not_win(tmp_path: Path) -> None:
    rows = make_ab(0.5, 0.01)
    for row in rows:
        row["jobs_planned"] = row["jobs"]
        if row["policy"] == "b":
            row["jobs_planned"] = 2 * row["jobs"]
    _, winner, headline = read(rows, tmp_path)
    assert winner.is_open
    assert "b did not finish many jobs, so the others had less traffic beside them" in headline


def test_pages_say_what_is_simulated(tmp_path: Path) -> None:
    def draw(**changes: Any) -> str:
        path = write_lines(tmp_path / "results.jsonl", [make_record("stock", **changes)])
        return render_page(make_report(read_sources([path])))

    assert "Simulated: stock ran alone" in draw()
    served = draw(simulated=False, client={"simulated_server": {"speed": 10}})
    assert "On a simulated server at speed 10: stock ran alone" in served
    assert served.count(">simulated server at speed 10</text>") >= 4  # in the pictures, too
    live = draw(simulated=False, client={"metrics_growth": {"vllm:prompt_tokens_total": 5}})
    assert "simulated" not in live.lower().split("<main>")[0].split("<header>")[1]


def test_a_speed_that_makes_no_sense_is_not_named() -> None:
    for speed in (10**400, -3, float("inf"), True, "fast"):
        record = make_record("stock", simulated=False, client={"simulated_server": {"speed": speed}})
        assert make_run(read_run(Fields("r:1", record)), "here").setting.kind == "simulated server"


def test_a_comparison_comes_with_its_one_command(tmp_path: Path) -> None:
    rows = make_ab(0.5, 0.01)
    for row in rows:
        row["client"] = {"url": "http://x"}
        row["config"] = {"workload": "ab8", "jps": 1.0, "seed": row["seed"], "max_jobs": 4}
        row["ab"] |= {"first_seed": 0, "repeats": 6, "model": "m", "serve_args": ["--speed", "5"]}
    page = render_page(make_report(read_sources([write_lines(tmp_path / "r.jsonl", rows)])))
    assert page.count("<pre>") == 1
    text = page.split("<pre>")[1].split("</pre>")[0].replace("<span>", "").replace("</span>", "")
    assert text == (
        "tenuto ab --arm a=http://x --arm b=http://y --model m &#39;--serve-args=--speed 5&#39; --workload "
        "ab8 --jps 1 --seed 0 --max-jobs 4 --repeats 6 --out ab"
    )


def test_no_page_without_pairs_breaks() -> None:
    assert make_report(Sources()).verdict.headline.startswith("There are no result records")


def test_whiskers_and_curves_that_would_be_empty(tmp_path: Path) -> None:
    # The slow seed's mean lies far above the mean of the P95s.
    rows = [make_record("stock", jps, seed, mean_s=mean) for jps in (1, 2) for seed, mean in ((1, 1), (2, 9))]
    for row in rows:
        row["job_s"] = dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max"), row["job_s"]["mean"])
        row["by_turn"] = {"1": row["by_turn"]["1"]}
    sources = read_sources([write_lines(tmp_path / "r.jsonl", rows)])
    (section,) = make_report(sources).sections
    assert [chart.name for chart in section.charts] == ["jct-1", "hits-1", "cdf-1"]
    figure = draw(section.charts[0])
    (axes,) = figure.axes
    assert axes.get_ylim()[1] >= 9


def test_a_live_sweep_comes_with_its_one_command(tmp_path: Path) -> None:
    rows = [
        make_record(
            "keep", jps, simulated=False, client={"url": "http://x"},
            config={"workload": "ab8", "jps": jps, "seed": 1, "goodput": ["ttft:500", "tpot:50"]},
        )
        for jps in (4.0, 2.0)
    ]  # fmt: skip
    sources = read_sources([write_lines(tmp_path / "r.jsonl", rows)])
    assert {run.setting.variant for run in sources.runs} == {""}
    (command,) = make_recipe(sources.runs, {}).commands
    assert command == (
        "tenuto bench --jps 2,4 --url http://x --workload ab8 --seed 1 --goodput ttft:500 tpot:50 --out sweep"
    )


def test_the_verdict_is_on_the_page(tmp_path: Path) -> None:
    rows = make_ab(0.8, 0.02)
    pairs = [dict.fromkeys(("a", "b"), dict.fromkeys((m.name for m in MEASURES), 2.0)) for _ in range(6)]
    for number, pair in enumerate(pairs):
        pair["b"] = {**pair["b"], "mean_job_s": 1.5 + 0.01 * number}
    comparisons = [each.to_json() for each in compare_arms(pairs, 0.01)]
    verdict = {"baseline": "a", "pairs": 6, "comparisons": comparisons}
    (tmp_path / "verdict.json").write_text(json.dumps(verdict))
    write_lines(tmp_path / "results.jsonl", rows)
    report = make_report(read_sources([tmp_path]))
    (section,) = (each for each in report.sections if each.name == "ab")
    (chart,) = section.charts
    assert [row[1] for row in chart.table.rows] == [measure.title for measure in MEASURES]
    assert chart.table.rows[0][4].startswith("24 % shorter (95 % interval:")
    assert "24 % shorter" in render_page(report)
    (tmp_path / "verdict.json").write_text('{"baseline": "a", "pairs": 0, "comparisons": []}')
    assert not any(each.name == "ab" for each in make_report(read_sources([tmp_path])).sections)
    (tmp_path / "verdict.json").write_text('{"baseline": "a", "pairs": 0, "comparisons": [{"arm": 1}]}')
    with pytest.raises(DataError, match=r"verdict\.json.*arm"):
        read_sources([tmp_path])
