import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tenuto.core.errors import DataError
from tenuto.sim.cost.batch import StepBatch
from tenuto.sim.cost.fitted import (
    FittedStepCost,
    ObservedStep,
    ObservedTransfer,
    fit_line,
    fit_step_cost,
    read_observations,
)

PREFILLS = [StepBatch.of(prefills=[(n, c)]) for n in (256, 1024, 2048) for c in (0, 4096, 8192)]
DECODES = [StepBatch.of(decodes=[c] * num) for num in (1, 8, 64) for c in (512, 4096)]


def prefill_s(batch: StepBatch) -> float:
    return 0.004 + 20e-6 * batch.num_prefill_tokens + 1e-9 * batch.num_prefill_pairs


def decode_s(batch: StepBatch) -> float:
    return 0.005 + 10e-6 * batch.num_decodes + 30e-9 * batch.num_decode_context_tokens


def observed() -> list[ObservedStep]:
    return [
        *(ObservedStep(batch, prefill_s(batch)) for batch in PREFILLS),
        *(ObservedStep(batch, decode_s(batch)) for batch in DECODES),
        ObservedStep(StepBatch.of(prefills=[(9, 9)], decodes=[9]), 1.0),  # mixed: not fitted to
    ]


def test_steps_that_follow_the_formulas_give_their_coefficients_back() -> None:
    cost = fit_step_cost(
        observed(), [ObservedTransfer(n, 20e-6 + n / 25e9) for n in (1 << 20, 1 << 24, 1 << 26)]
    )
    assert cost.prefill.coefficients == pytest.approx((0.004, 20e-6, 1e-9), rel=1e-6)
    assert cost.decode.coefficients == pytest.approx((0.005, 10e-6, 30e-9), rel=1e-6)
    assert cost.link_bytes_per_s == pytest.approx(25e9, rel=1e-6)
    assert (cost.prefill.num_observations, cost.decode.num_observations) == (9, 6)
    assert cost.prefill.r_squared == pytest.approx(1.0)
    assert cost.prefill.worst_residual_s < 1e-9


def test_a_mixed_step_reads_the_weights_once() -> None:
    cost = fit_step_cost(observed())
    # 4 ms + (1,000 + 2) x 20 us + 500,000 pairs x 1 ns, and 3,000 context tokens x 30 ns.
    batch = StepBatch.of(prefills=[(1000, 0)], decodes=[1000, 2000])
    assert cost.seconds(batch) == pytest.approx(0.004 + 0.02004 + 0.0005 + 0.00009, rel=1e-6)
    assert cost.seconds(StepBatch.of(decodes=[1000])) == pytest.approx(0.005 + 10e-6 + 30e-6, rel=1e-6)
    assert cost.seconds(StepBatch.of()) == 0.0
    assert cost.link_bytes_per_s is None


def test_a_fit_of_three_points_by_hand() -> None:
    # Seconds 1, 2, 2 at 0, 1, 2: slope = sum (x - 1)(y - 5/3) / sum (x - 1)^2 = 1 / 2, constant = 5/3 - 1/2.
    # Residuals -1/6, 1/3, -1/6: their squares sum to 1/6, of a variation of 2/3.
    line = fit_line("points", [(0,), (1,), (2,)], [1.0, 2.0, 2.0])
    assert line.coefficients == pytest.approx((7 / 6, 1 / 2))
    assert line.r_squared == pytest.approx(1 - (1 / 6) / (2 / 3))
    assert line.worst_residual_s == pytest.approx(1 / 3)
    assert line.at(10.0) == pytest.approx(7 / 6 + 5)


def test_more_work_never_takes_less_time_even_if_the_observations_say_so() -> None:
    # Falling with x: the best line that does not fall is the mean.
    line = fit_line("points", [(0,), (1,), (2,)], [3.0, 2.0, 1.0])
    assert line.coefficients == pytest.approx((2.0, 0.0))
    assert line.r_squared == pytest.approx(0.0)
    # Through (1, 0.5) and (2, 2): the line would start at -1; from 0, slope = (0.5 + 4) / (1 + 4).
    assert fit_line("points", [(1,), (2,)], [0.5, 2.0]).coefficients == pytest.approx((0.0, 0.9))


@given(
    rows=st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=4, max_size=12, unique=True),
    noise=st.lists(st.floats(-5, 5), min_size=12, max_size=12),
    nudge=st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)),
)
def test_no_other_feasible_line_fits_better(
    rows: list[tuple[float, float]], noise: list[float], nudge: tuple[float, float, float]
) -> None:
    seconds = [10 + 2 * x + e for (x, _), e in zip(rows, noise, strict=False)]
    try:
        line = fit_line("points", rows, seconds)
    except DataError:
        assume(False)  # all rows on one line

    def squares(a: float, b: float, c: float) -> float:
        return sum((s - a - b * x - c * y) ** 2 for (x, y), s in zip(rows, seconds, strict=True))

    best = squares(*line.coefficients)
    assert min(line.coefficients) >= 0
    assert best <= squares(*(a + d for a, d in zip(line.coefficients, nudge, strict=True))) + 1e-6
    assert best <= squares(10, 2, 0) + 1e-6


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "prefill steps, by tokens and pairs: 0 observations are too few"),
        ([ObservedStep(batch, 1.0) for batch in PREFILLS], "decode steps.*0 observations are too few"),
        ([ObservedStep(PREFILLS[0], 1.0)] * 9, "prefill steps.*vary too little"),
    ],
)
def test_observations_that_decide_nothing_are_an_error(steps: list[ObservedStep], message: str) -> None:
    with pytest.raises(DataError, match=message):
        fit_step_cost(steps)


def test_transfers_that_show_no_bandwidth_are_an_error() -> None:
    with pytest.raises(DataError, match="they show no bandwidth"):
        fit_step_cost(observed(), [ObservedTransfer(n, 1.0 - n / 100) for n in (1, 2, 3)])


def test_a_fit_survives_saving(tmp_path: Path) -> None:
    # A fit through the origin explains less than the mean would.
    worse = replace(fit_step_cost(observed()).prefill, r_squared=-0.25)
    FittedStepCost(worse, worse).save(tmp_path / "fit.json")
    assert FittedStepCost.load(tmp_path / "fit.json").prefill == worse
    for transfers in ([], [ObservedTransfer(n, n / 25e9) for n in (100, 200)]):
        cost = fit_step_cost(observed(), transfers)
        cost.save(tmp_path / "fit.json")
        assert FittedStepCost.load(tmp_path / "fit.json") == cost


FIT: dict[str, Any] = {
    "coefficients": [0.1, 0.2, 0.3],
    "num_observations": 3,
    "r_squared": 1.0,
    "worst_residual_s": 0.0,
}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "is empty"),
        ({"prefill": FIT}, "is of no kind that Tenuto writes; this command reads a fit of step times"),
        (
            {"prefill": {**FIT, "coefficients": [1.0]}, "decode": FIT},
            "prefill.coefficients: must be 3 numbers, got 1",
        ),
        (
            {"prefill": {**FIT, "coefficients": [1, 1, -1]}, "decode": FIT},
            r"prefill.coefficients\[2\]: must be a number from 0",
        ),
        (
            {"prefill": FIT, "decode": {**FIT, "coefficients": [1, float("nan"), 1]}},
            r"decode.coefficients\[1\]: must be a number from 0",
        ),
        ({"prefill": {**FIT, "coefficients": "abc"}, "decode": FIT}, "prefill.coefficients: must be a list"),
        ({"prefill": {"coefficients": [1, 1, 1]}, "decode": FIT}, "prefill.num_observations: is missing"),
        (
            {"prefill": {**FIT, "coefficients": [0, 0, 0]}, "decode": FIT},
            "prefill.coefficients: must not all be 0",
        ),
        (
            {"prefill": FIT, "decode": FIT, "link": {**FIT, "coefficients": [0.001, 0]}},
            "link.coefficients: the second must be above 0",
        ),
        ({"prefill": FIT, "decode": FIT, "link": FIT}, "link.coefficients: must be 2 numbers, got 3"),
    ],
)
def test_a_file_that_is_no_fit_is_named(tmp_path: Path, values: Any, message: str) -> None:
    path = tmp_path / "fit.json"
    path.write_text(json.dumps(values))
    with pytest.raises(DataError, match=rf"fit\.json(:1|\[0\])?: {message}"):
        FittedStepCost.load(path)


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "fit.json").write_text("{")
    with pytest.raises(DataError, match=r"fit\.json:1: not valid JSON"):
        FittedStepCost.load(tmp_path / "fit.json")


def test_observations_are_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(
        '{"prefills": [[2048, 0]], "decodes": [8192, 310], "seconds": 0.0471}\n'
        "\n"
        '{"decodes": [5], "seconds": 1}\n'
        '{"num_bytes": 33554432, "seconds": 0.00068}\n'
    )
    steps, transfers = read_observations(path)
    assert steps == [
        ObservedStep(StepBatch.of([(2048, 0)], [8192, 310]), 0.0471),
        ObservedStep(StepBatch.of(decodes=[5]), 1),
    ]
    assert transfers == [ObservedTransfer(33_554_432, 0.00068)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Expecting"),
        ("[]", "must be a JSON object"),
        ('{"decodes": [5]}', "seconds: is missing"),
        ('{"decodes": [5], "seconds": 0}', "seconds: must be more than 0"),
        ('{"decodes": [5], "seconds": Infinity}', "seconds: must be a number"),
        (
            '{"decodes": [-5], "seconds": 1}',
            r"decodes\[0\]: must be a whole number, got -5",
        ),
        ('{"decodes": 5, "seconds": 1}', "decodes: must be a list of whole numbers"),
        ('{"prefills": [[5]], "seconds": 1}', "prefills: must be a list of"),
        ('{"prefills": [[5, 0.5]], "seconds": 1}', "prefills: must be a list of"),
        ('{"prefills": [[0, 5]], "seconds": 1}', "chunks need 1 token or more"),
        (f'{{"prefills": [[2, 1{"0" * 400}]], "seconds": 1}}', "prefills: must be a list of"),
        (f'{{"decodes": [1{"0" * 400}], "seconds": 1}}', "decodes: must be lengths of contexts up to"),
        ('{"seconds": 1}', "prefills: is empty, and so is decodes"),
        ('{"num_bytes": true, "seconds": 1}', "num_bytes: must be a whole number"),
    ],
)
def test_a_bad_line_is_named_with_its_field(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text('{"decodes": [5], "seconds": 1}\n' + line + "\n")
    with pytest.raises(DataError, match=rf"steps\.jsonl:2: .*{message}"):
        read_observations(path)
