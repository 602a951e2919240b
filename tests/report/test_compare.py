"""Winners, speed-ups and the words for them, from numbers made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tenuto.records.codec import Fields
from tenuto.records.load import read_run
from tenuto.report.html.charts import make_tile
from tenuto.report.html.compare import Group, get_seed_spread, group_runs
from tenuto.report.html.draw import draw
from tenuto.report.html.page import make_report, render_page
from tenuto.report.html.sources import Run, Sources, make_run
from tenuto.report.html.spec import Look, Panel, format_seconds
from tenuto.report.html.verdict import describe
from tests.report.data import make_record


def read(*records: dict[str, Any]) -> list[Run]:
    return [
        make_run(read_run(Fields(f"r:{index}", record)), f"r:{index}") for index, record in enumerate(records)
    ]


def group(*records: dict[str, Any]) -> Group:
    (only,) = group_runs(read(*records))
    return only


def sentences(records: Sequence[dict[str, Any]]) -> str:
    runs = read(*records)
    return "\n".join(describe(runs, group_runs(runs)).sentences)


def test_speed_up_is_taken_seed_by_seed() -> None:
    # Seed 1: 20/10 = 2, seed 2: 40/10 = 4, seed 3: 80/10 = 8; seed 4 has no stock. The geometric mean is 4.
    cells = group(
        *(make_record("stock", 1, seed, mean_s=mean) for seed, mean in ((1, 20), (2, 40), (3, 80))),
        *(make_record("keep", 1, seed, mean_s=10) for seed in (1, 2, 3, 4)),
        make_record("stock", 2, 1),
    )
    assert cells.try_speed_up("keep", 1.0) == pytest.approx((4.0, 2.0, 8.0))
    assert cells.try_speed_up("keep", 2.0) is None


def test_without_a_common_seed_the_means_are_compared() -> None:
    cells = group(
        make_record("stock", 1, 1, mean_s=20),
        make_record("stock", 1, 2, mean_s=40),
        make_record("keep", 1, 3, mean_s=10),
    )
    assert cells.try_speed_up("keep", 1.0) == pytest.approx((3.0, 3.0, 3.0))
    winner = cells.try_winner(1.0)
    assert winner is not None and winner.is_open


def test_the_winner_is_found_over_seeds_that_all_ran() -> None:
    # Over seeds 1 and 3 keep is better; with seed 2, which stock did not run, it would be worse.
    cells = group(
        make_record("stock", 1, 1, mean_s=20),
        make_record("stock", 1, 3, mean_s=20),
        make_record("keep", 1, 1, mean_s=10),
        make_record("keep", 1, 3, mean_s=10),
        make_record("keep", 1, 2, mean_s=90),
    )
    winner = cells.try_winner(1.0)
    assert winner is not None
    assert (winner.policies, winner.speed_up, winner.is_tie) == (("keep",), 2.0, False)
    assert make_tile(winner, {"keep": Look("keep", "p1")}).shade > 0.3


@pytest.mark.parametrize("mean_s", [102.0, 1000.0])
def test_one_seed_proves_nothing(mean_s: float) -> None:
    records = [make_record("a", mean_s=100), make_record("b", mean_s=mean_s)]
    winner = group(*records).try_winner(1.0)
    assert winner is not None
    assert (winner.policies, winner.is_open, winner.against.differs) == (("a", "b"), True, False)
    text = sentences(records)
    assert "nothing is proved at 1 job/s on H200 (one seed): one seed shows no interval" in text
    assert "wins" not in text and "is faster" not in text


def test_one_policy_alone_wins_nothing() -> None:
    assert group(make_record("a"), make_record("b", job_s=None, job_times_s={})).try_winner(1.0) is None


def test_settings_are_kept_apart() -> None:
    runs = read(
        make_record("a"),
        make_record("a", gpu="H100"),
        make_record("a", model="m"),
        make_record("a", workload="w"),
        make_record("a", simulated=False),
        make_record("a", config={"tp": 2, "policy": "a"}),
    )
    assert len(group_runs(runs)) == 6


def test_a_policys_options_are_part_of_its_name() -> None:
    cells = group(make_record("a"), make_record("a", config={"policy": "a", "options": {"ttl_s": 2.0}}))
    assert cells.policies == ["a", "a (ttl_s=2)"]


def test_who_wins_where_and_by_how_much() -> None:
    runs = read(
        *(make_record(policy, jps, seed, mean_s=mean * jps)
         for policy, means in (("stock", (10, 20, 40)), ("keep", (10, 10, 10)))
         for jps, mean in zip((1, 2, 4), means, strict=True) for seed in (1, 2))
    )  # fmt: skip
    verdict = describe(runs, group_runs(runs))
    assert verdict.headline.startswith("Simulated: keep is the fastest in 2 of 3 comparisons, nobody in 1.")
    assert verdict.headline.endswith(
        "keep against stock: mean job time 50 % shorter in the median of 3 comparisons, from 75 % shorter "
        "(H200, 4 jobs/s) to the same (H200, 1 job/s); P95 75 % shorter to the same; proved in 2."
    )
    (where,), speed_ups = verdict.places, verdict.speed_ups
    assert speed_ups == ()
    assert where == "H200, llama, ab8 (simulated): a tie at 1 job/s; keep from 2 to 4 jobs/s."
    spread, origin = verdict.caveats
    assert spread.startswith("2 seeds:") and "0% in the median, 0% at most" in spread
    assert origin == "12 runs, 2 policies, 1 GPU, 1 workload, 3 loads: all simulated."


def test_many_winners_make_no_wall_of_words() -> None:
    winners = "aaabbccdeef"
    text = sentences(
        [make_record(policy, jps, seed, mean_s=10 if policy == winner else 20)
         for jps, winner in enumerate(winners, 1) for policy in "abcdef" for seed in (1, 2)]
    )  # fmt: skip
    headline = text.splitlines()[0]
    assert "a is the fastest in 3 of 11 comparisons, b in 2, c in 2, 3 others in 4." in headline
    assert headline.endswith(" 50 % shorter (H200, 3 jobs/s); P95 50 % shorter; proved in 3.")


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([make_record("a")], "a ran alone: mean job time 10 s, P95 14.4 s, 1 job/s (one seed)."),
        ([make_record("a"), make_record("a", 2, mean_s=30)], "14.4 s (H200, 1 job/s, one seed) to 30"),
        ([make_record("a"), make_record("b", 2)], "no two policies ran in the same setting at the same load"),
        ([make_record("a", job_s=None, job_times_s={})], "no record has a job completion time"),
        ([make_record(policy, 1, seed, mean_s=mean_s) for policy, mean_s in (("a", 10), ("b", 20))
          for seed in (1, 2)], "a is faster than b at 1 job/s on H200: mean"),
        ([make_record(policy, 1, seed, mean_s=mean_s) for policy, mean_s in (("a", 10), ("b", 20), ("c", 20))
          for seed in (1, 2)], "(50 % shorter than b's; 95 % interval: "),
        ([make_record(policy, 1, seed) for policy in "ab" for seed in (1, 2)],
         "no difference between a and b was seen at 1 job/s on H200"),
        ([make_record("a", mean_s=mean_s, step_cost="roofline") for mean_s in (10, 20)],
         "Roofline: step times come from a model."),
        ([make_record("a"), make_record("a", simulated=False)], "1 measured on a live server, 1 simulated."),
        ([make_record("a", None)], "the workload's own arrivals"),
        ([make_record("a")], "One seed for each setting"),
        ([], "There are no result records here"),
    ],
)  # fmt: skip
def test_the_words_for_small_sets(records: list[dict[str, Any]], said: str) -> None:
    assert said in sentences(records)


def test_seeds_without_a_common_job_are_left_out_and_counted() -> None:
    def lose(seed: int) -> list[dict[str, Any]]:
        return [make_record(policy, 1, seed, job_s=None, job_times_s={policy: 9.0}) for policy in "ab"]

    text = sentences([*lose(1), *lose(2)])
    assert "no job that took any time finished with all policies, so there is nothing to compare" in text
    assert "Left out: 2 seeds with which no job finished with all policies." in text
    text = sentences([make_record("a", 1, 1), make_record("b", 1, 1), *lose(2)])
    assert "a against b: mean job time" in text
    assert "Left out: 1 seed with which" in text
    one_more = [make_record("a", 1, 1), make_record("b", 1, 1), make_record("a", 1, 2)]
    assert "Left out" not in sentences(one_more)


def test_the_spread_between_seeds() -> None:
    # (12 - 8) / 10 = 0.4 and nothing for a cell of one seed.
    cells = group(make_record("a", 1, 1, mean_s=8), make_record("a", 1, 2, mean_s=12), make_record("a", 2, 1))
    assert get_seed_spread([cells]) == (0.4, 0.4, 0.4)
    # A mean so small that half of it is no number any more says nothing.
    assert (
        get_seed_spread([group(make_record("a", 1, 1, mean_s=0), make_record("a", 1, 2, mean_s=5e-324))])
        is None
    )


def test_missing_statistics_come_from_the_job_times() -> None:
    (run,) = read(make_record("a", job_s=None, job_times_s={"a": 1, "b": 2, "c": 3, "d": 4}))
    assert run.mean_s == 2.5 and run.record.job_s is not None
    assert run.record.job_s.p95 == pytest.approx(3.85)


def test_a_policy_whose_hooks_failed_is_marked_everywhere() -> None:
    runs = read(
        make_record("stock", policy_faults=0),
        make_record("keep", 1, 1, policy_faults=4),
        make_record("keep", 1, 2, policy_faults=0),
        make_record("old"),
    )
    report = make_report(Sources(runs=runs))
    assert {policy: look.label for policy, look in report.looks.items()} == {
        "stock": "stock", "keep": "keep !", "old": "old",
    }  # fmt: skip
    (sentence,) = (each for each in report.verdict.caveats if each.startswith("Hooks of"))
    assert sentence.startswith("Hooks of keep failed 4 times in 1 of 2 runs;")
    assert render_page(report).count("<td>keep !</td>") > 3


def test_seconds_have_three_digits() -> None:
    times = {None: "–", 0: "0 s", 0.01234: "12.3 ms", 1.5: "1.5 s", 12.345: "12.3 s", 1234.5: "1,234 s"}
    assert {value: format_seconds(value) for value in times} == times


@pytest.mark.parametrize(("means", "texts"), [((10, 20), ("ab", "X")), ((10, 10), ("tie", "tie XY", "XY"))])
def test_a_tile_of_the_map_has_a_text_for_each_room(means: tuple[int, int], texts: tuple[str, ...]) -> None:
    records = [
        make_record(policy, 1, seed, mean_s=mean_s)
        for policy, mean_s in zip(("ab", "b"), means, strict=True)
        for seed in (1, 2)
    ]
    winner = group(*records).try_winner(1.0)
    unsure = group(*records[::2]).try_winner(1.0)
    assert winner is not None and unsure is not None
    looks = {policy: Look(policy, "p1", key=key) for policy, key in (("ab", "X"), ("b", "Y"))}
    assert make_tile(winner, looks).texts == texts
    # Nothing is proved by one seed.
    assert make_tile(unsure, looks).texts == ("ab?", "X?")


@pytest.mark.parametrize(
    ("num_gpus", "num_loads", "is_narrow", "tie"),
    [
        (1, 3, False, "tie"),
        (1, 8, True, "tie"),  # the loads go down the page
        (2, 8, True, "tie"),
        (3, 3, True, "tie AB"),
        (9, 9, True, "AB"),
        (1, 9, False, "tie AB"),
    ],
)
def test_a_tile_says_as_much_as_fits(num_gpus: int, num_loads: int, is_narrow: bool, tie: str) -> None:
    records = [
        make_record(policy, load, seed, gpu=f"g{gpu}", mean_s=mean_s)
        for gpu in range(num_gpus)
        for load in range(num_loads)
        for policy, mean_s in (("a-longer-name", 10), ("another", 20 if load else 10))
        for seed in (1, 2)
    ]
    (section,) = (each for each in make_report(Sources(read(*records))).sections if each.name == "winners")
    (axes,) = draw(section.charts[0], is_narrow=is_narrow).axes
    said = {each.get_text().splitlines()[0] for each in axes.texts}
    assert said == {tie, "a-longer-name" if tie == "tie" else "A"}
    assert axes.get_ylabel() == ("load, jobs/s" if is_narrow and num_loads > num_gpus else "")


def make_split() -> list[dict[str, Any]]:
    """Stock 20 s, at its best 12 s; 15 s with tenuto's steps, 9 s in its order, 6 s with its cache."""
    times = {f"job-{n}": 4.0 * (1 + n) for n in range(12)}
    slow = {"offered_jps": 2.0, "finished_jps": 1.0, "job_times_s": times}
    rows: list[tuple[str, float, str | None, dict[str, Any]]] = [
        ("stock", 20.0, None, {}),
        ("stock", 12.0, "512", {"step_tokens": 512}),
        ("stock", 25.0, "256", {"step_tokens": 256}),
        ("stock", 15.0, "adaptive", {"step_tokens": "adaptive"}),
        ("tenuto", 9.0, "adaptive", {"keep_kv": False}),
        ("tenuto", 6.0, "adaptive", {}),
    ]
    return [
        make_record(
            policy, 1, seed, mean_s=mean_s, step_tokens=steps, config={"policy": policy, **config},
            **(slow if policy == "stock" else {}),
        )
        for policy, mean_s, steps, config in rows
        for seed in (1, 2)
    ]  # fmt: skip


def test_a_gain_is_split_on_the_first_screen() -> None:
    runs = read(*make_split())
    (only,) = group_runs(runs)
    assert only.policies == ["stock", "stock @best", "tenuto"]
    split = only.get_splits(1.0)["tenuto"]
    assert (split.steps, split.order, split.cache) == pytest.approx((0.75, 0.6, 2 / 3))
    text = sentences(make_split())
    assert "0.30 = 0.75 × 0.60 × 0.67, and 0.50 of stock @512, at 1 job/s (overloaded)" in text
    assert "tenuto is faster than all 2 others at 1 job/s on H200 (overloaded)" in text
    page = render_page(make_report(Sources(runs=runs)))
    assert page.count("<td>stock @best</td>") > 1
    assert "<td>stock @512</td>" not in page and "1 job/s (overloaded)" in page


def test_doubts_stand_wherever_the_numbers_of_a_load_do() -> None:
    times = {f"job-{n}": 4.0 * (1 + n) for n in range(12)}
    slow: dict[str, Any] = {"offered_jps": 2.0, "finished_jps": 1.0, "job_times_s": times}
    records = [make_record(policy, jps, **slow) for policy in ("stock", "tenuto") for jps in (1, 2)]
    hits = {"reusable_tokens": 900, "reused_tokens": 800}
    records = [{**each, **hits, **({} if each["jps"] == 2 else {"finished_jps": 2.0})} for each in records]
    for chosen in (records, records[1::2], records[1:2]):
        report = make_report(Sources(read(*chosen)))
        charts = [chart for section in report.sections for chart in section.charts]
        assert len(charts) >= 3
        said = [cell for chart in charts for row in chart.table.rows for cell in row]
        said += [chart.title for chart in charts]
        said += [each.title for chart in charts for each in chart.panels if isinstance(each, Panel)]
        said += report.verdict.sentences[:1]
        of_load = [each for each in said if "2 jobs/s" in each]
        assert len(of_load) > 3
        assert all("overloaded" in each and "one seed" in each for each in of_load)


def test_whiskers_of_equal_seeds_have_no_length() -> None:
    # Three equal numbers, added and divided by three, may be another number.
    runs = [
        make_record("a", 1, seed, reusable_tokens=10_000 + number, reused_tokens=9_000)
        for number in range(40)
        for seed in range(7)
    ]
    for number in range(0, len(runs), 7):
        (section, *_) = make_report(Sources(read(*runs[number : number + 7]))).sections
        for chart in section.charts:
            draw(chart)


def test_steps_that_all_policies_have_are_a_setting_of_their_own() -> None:
    records = [
        make_record(policy, config={"policy": policy, "step_tokens": 512}, step_tokens="512")
        for policy in ("stock", "tenuto")
    ]
    (only,) = group_runs(read(*records))
    assert (only.policies, only.setting.variant) == (["stock", "tenuto"], "step_tokens 512")
    plain = [make_record(policy, step_tokens=None) for policy in ("stock", "tenuto")]
    assert [each.policies for each in group_runs(read(*plain, *records))] == [
        ["stock", "tenuto"],
        ["tenuto"],
    ]


def test_the_middle_of_one_seed_is_its_value() -> None:
    # The exponential of a logarithm is another number in one case of six; whiskers were then negative.
    for number in range(1, 200):
        pair = make_record("stock", mean_s=7.3), make_record("keep", mean_s=number / 700)
        found = group(*pair).try_speed_up("keep", 1.0)
        assert found is not None and found.low == found.middle == found.high
