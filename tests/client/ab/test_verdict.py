"""What is said of the numbers."""

from __future__ import annotations

from typing import Any

import pytest

from tenuto.client.ab_verdict import (
    MEASURES,
    Values,
    compare,
    describe_change,
    describe_errors,
    describe_faults,
    describe_span,
    find_invalid,
    format_verdict,
    make_notes,
)


def make_pairs(ratios: list[float], baseline: float = 10.0) -> list[dict[str, Values]]:
    """Times grow with the ratio, throughput shrinks."""
    return [
        {
            arm: {m.name: baseline * (ratio if m.is_time else 1 / ratio) for m in MEASURES}
            for arm, ratio in (("stock", 1.0), ("hold", each))
        }
        for each in ratios
    ]


def say(ratios: list[float], threshold: float = 0.01) -> str:
    pairs = make_pairs(ratios)
    return format_verdict(compare(pairs, threshold), len(pairs), 6, ["Errors: none."])


@pytest.mark.parametrize(
    ("ratio", "is_time", "words"),
    [
        (0.742, True, "26 % shorter"),
        (1.26, True, "26 % longer"),
        (0.987, False, "1.3 % lower"),
        (1.5, False, "50 % higher"),
        (1.0, True, "the same"),
        (0.9996, True, "the same"),
    ],
)
def test_a_ratio_in_words(ratio: float, is_time: bool, words: str) -> None:
    assert describe_change(ratio, is_time=is_time) == words


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.69, 0.80, "20 % to 31 % shorter"),
        (1.1, 1.3, "10 % to 30 % longer"),
        (0.96, 1.09, "4.0 % shorter to 9.0 % longer"),
        (0.9998, 1.0003, "0.0 %"),
    ],
)
def test_an_interval_in_words(low: float, high: float, words: str) -> None:
    assert describe_span(low, high, is_time=True) == words


def test_a_clear_win() -> None:
    text = say([0.74, 0.75, 0.76, 0.74, 0.75, 0.76])
    assert "6 of 6 pairs of runs" in text
    assert "hold against stock: hold is faster than stock." in text
    assert "mean job time: 25 % shorter (95 % interval: 24 % to 26 % shorter; 6 pairs)" in text
    assert "throughput: 33 % higher (95 % interval: 32 % to 35 % higher; 6 pairs)" in text
    assert text.endswith("Errors: none.")


def test_a_clear_loss() -> None:
    assert "stock is faster than hold." in say([1.3, 1.31, 1.29, 1.3, 1.31, 1.29])


def test_noise() -> None:
    text = say([0.9, 1.12, 0.95, 1.05, 1.1, 0.93])
    assert "no difference in job time was seen." in text
    assert "mean job time: no difference seen (95 % interval: " in text
    assert "To see a difference of 5 % in mean job time takes about" in text


def test_few_pairs() -> None:
    text = say([0.74, 0.75, 0.76])
    assert "nothing is proved yet" in text
    assert "25 % shorter in 3 pairs, too few to trust" in text


def test_one_pair() -> None:
    assert "25 % shorter in the only pair, which proves nothing" in say([0.75])


def test_a_difference_below_the_threshold() -> None:
    assert "no difference that matters: 0.5 % longer, below the threshold" in say([1.004, 1.005, 1.006] * 2)


def test_no_pairs() -> None:
    assert format_verdict(compare([], 0.01), 0, 6, ["Errors: none."]) == (
        "0 of 6 pairs of runs: no verdict, because it needs a run on every arm\n\nErrors: none."
    )


def test_a_measure_of_zero_is_left_out() -> None:
    pairs = make_pairs([1.1, 1.2])
    pairs[0]["hold"]["mean_ttft_s"] = 0.0
    assert "mean_ttft_s" not in {each.measure.name for each in compare(pairs, 0.01)}
    assert len(compare(pairs, 0.01)) == len(MEASURES) - 1


def test_every_arm_is_compared_with_the_first() -> None:
    pairs = [{**pair, "third": pair["stock"]} for pair in make_pairs([0.8] * 6)]
    assert {(each.arm, each.baseline) for each in compare(pairs, 0.01)} == {
        ("hold", "stock"), ("third", "stock"),
    }  # fmt: skip


def test_an_arm_without_a_run_had_no_errors_because_it_had_nothing() -> None:
    turns = {"planned": 3, "ok": 3, "failed": 0, "cancelled": 0, "not_sent": 0}
    run = {"turns": turns, "client": {"failed_attempts": {}}}
    assert describe_errors({"a": [run], "b": []}) == ["Errors: none in the runs that ended; b had none."]
    assert describe_errors({"a": [run], "b": [run]}) == ["Errors: none."]


def test_hooks_that_failed_are_told_by_arm() -> None:
    runs: dict[str, list[dict[str, int | None]]] = {
        "a": [{"policy_faults": 0}, {"policy_faults": None}],
        "b": [{"policy_faults": 3}, {}],
    }
    (line,) = describe_faults(runs)
    assert line.startswith("Policy faults: on b, hooks of the policy failed 3 times in 1 of 2 runs;")


def test_invalid_figures_prove_nothing() -> None:
    pairs = make_pairs([0.5] * 6)
    comparisons = compare(pairs, 0.01, is_valid=False)
    text = format_verdict(comparisons, 6, 6, [])
    assert "nothing is proved, because figures are INVALID" in text
    assert "faster" not in text
    assert not any(each.to_json()["differs"] for each in comparisons)


def test_invalid_runs_are_one_line_for_each_reason() -> None:
    late = [{"client": {"invalid": [f"this client was late: {number} ms"]}} for number in range(3)]
    server = {"client": {"invalid": ["the server was late, by 9 ms"]}}
    good = {"client": {"invalid": []}}
    of_client, of_server = find_invalid({"a": [*late, good], "b": [late[0], server, {"client": {}}]})
    assert of_client.startswith(
        "INVALID: 3 of 4 runs of a, 1 of 3 runs of b: in the first, this client was late: 0 ms. To run "
    )
    assert of_server.startswith("INVALID: 1 of 3 runs of b: the server was late, by 9 ms. To run ")


@pytest.mark.parametrize(("jobs", "is_valid"), [(20, True), (19, True), (18, False), (4, False)])
def test_an_arm_that_loses_jobs_proves_nothing_by_the_others(jobs: int, is_valid: bool) -> None:
    """The jobs that failed took their traffic with them."""
    every = {"client": {}, "jobs_planned": 20}
    lines = find_invalid({"a": [{**every, "jobs": 20}], "b": [{**every, "jobs": jobs}]})
    assert lines == ([] if is_valid else [f"INVALID: b finished {jobs} of 20 jobs, {LESS_TRAFFIC}"])


LESS_TRAFFIC = "so these had less traffic beside them."


def test_other_versions_are_named() -> None:
    turns = dict.fromkeys(("planned", "failed", "cancelled", "not_sent"), 0)
    client = {"send_lag_s": None, "complaints": {}, "failed_attempts": {}}

    def make(tenuto: str, server: str) -> dict[str, Any]:
        return {"client": client, "turns": turns, "versions": {"tenuto": tenuto, "server": server}}

    notes = make_notes({"a": [make("1", "0.31")], "b": [make("1", "0.31"), make("2", "0.31")]})
    assert [note for note in notes if "ersion" in note] == ["Versions differ: tenuto 1 on a, 1 and 2 on b."]
    notes = make_notes({"a": [make("1", "0.31")], "b": [make("1", "0.32")]})
    assert notes[0] == "Versions differ: server 0.31 on a, 0.32 on b."
    assert not any("ersion" in note for note in make_notes({"a": [make("1", "3")], "b": [make("1", "3")]}))
