"""A rule that helps on `ab8` only, planted in the policy: the random scenarios show what it costs elsewhere.

The scenarios are of a seed that other rules were chosen on (`chosen_on.txt`), so they are never reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from experiments.random_scenarios.__main__ import read_chosen
from experiments.random_scenarios.draw import Flow
from experiments.random_scenarios.report import MEAN, compare_codes
from experiments.random_scenarios.runs import OURS, Place, run_place
from experiments.results.row import Row
from tenuto.core.engine import StepSize
from tenuto.estimators.step_size import AdaptiveSteps
from tenuto.records.metrics import get_geometric_mean
from tenuto.sim.run import run
from tenuto.sim.setup import Setup
from tenuto.workload.load import LoadOptions

SEED = 7
FLOWS = {
    2: Flow(0.04474, 40),
    6: Flow(0.1675, 40),
    9: Flow(0.1639, 40),
    15: Flow(1.085, 73),
    18: Flow(1.326, 87),
    19: Flow(0.5995, 40),
    20: Flow(0.3272, 67),
    23: Flow(3.395, 204),
}
"""Eight of the first thirty scenarios that run quickly, and what `runs.probe` found, rounded."""
AB8 = Row("ab8, one L40S", Setup(gpu="L40S"), LoadOptions(workload="ab8", jps=0.7))


def measure_ab8() -> float:
    record = run(*AB8.place(OURS.policy, 42)).record
    return float(record["job_s"]["mean"])


def run_scenarios() -> Sequence[dict[str, Any]]:
    return [run_place(Place(SEED, number, 0, OURS, flow)) for number, flow in FLOWS.items()]


@pytest.mark.slow
def test_a_rule_that_helps_on_ab8_only_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(SEED) in read_chosen()
    ab8_s, before = measure_ab8(), run_scenarios()
    # On this row of `ab8` no step is better than one of 512 tokens.
    monkeypatch.setattr(AdaptiveSteps, "choose", lambda *facts: StepSize(512))
    assert measure_ab8() < 0.95 * ab8_s
    after = run_scenarios()
    means, first_tokens = (compare_codes(after, before, metric) for metric in (MEAN, "P95 TTFT"))
    assert len(means) == len(FLOWS)
    # Elsewhere it gains nothing, and in half of them first tokens come later.
    assert get_geometric_mean(means.values()) > 0.99 and max(means.values()) > 1.05
    assert get_geometric_mean(first_tokens.values()) > 1.1
    assert sum(ratio > 1.1 for ratio in first_tokens.values()) >= len(FLOWS) / 2
