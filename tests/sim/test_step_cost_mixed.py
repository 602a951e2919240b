"""The bounds of what a mixed step may cost."""

from __future__ import annotations

import pytest

from tenuto.core.errors import ConfigError
from tenuto.sim.cost.batch import (
    PIECEWISE_S_PER_LAYER,
    MixedStepCost,
    PartedCost,
    StepBatch,
    StepParts,
    split_variant,
)
from tenuto.sim.cost.roofline import RooflineStepCost
from tenuto.sim.hardware.gpus import get_gpu
from tenuto.sim.hardware.models import load_model
from tenuto.sim.machine import build
from tenuto.sim.setup import Setup

MIXED = StepBatch.of(prefills=[(512, 4000), (100, 0)], decodes=[8000] * 20)


class ByHand(PartedCost):
    """Prefill attention 3 s, decode attention 2 s, or 1 s for each chunk's context; the rest 10 s."""

    def get_parts(self, batch: StepBatch) -> StepParts:
        if not batch.num_prefills:
            return StepParts(10.0, 0.0, 0.5 * batch.num_decodes)
        return StepParts(10.0, 3.0, 2.0 if batch.num_decodes else 0.0)


def test_the_variants_by_hand() -> None:
    assert ByHand().seconds(MIXED) == 15.0
    assert MixedStepCost(ByHand(), "optimistic", 4).seconds(MIXED) == 13.0
    # Two chunks read their contexts again, half a second each; a fixed time for each of 4 layers.
    expected = 10 + 3 + 1.0 + 1.28 * 2 + 4 * PIECEWISE_S_PER_LAYER
    assert MixedStepCost(ByHand(), "pessimistic", 4).seconds(MIXED) == pytest.approx(expected)


@pytest.mark.parametrize("batch", [StepBatch.of(), StepBatch.of(decodes=[100, 4000])])
def test_steps_without_prefill_cost_the_same_in_all(batch: StepBatch) -> None:
    cost = RooflineStepCost(get_gpu("H100"), load_model("llama-3.1-8b"))
    for variant in ("optimistic", "pessimistic"):
        assert MixedStepCost(cost, variant, 32).seconds(batch) == cost.seconds(batch)


@pytest.mark.parametrize("gpu", ["A100-40", "H100", "B200"])
def test_the_default_lies_between_the_bounds(gpu: str) -> None:
    seconds = {
        name: build(Setup(gpu=gpu, step_cost=name)).step_cost.seconds(MIXED)
        for name in ("roofline/optimistic", "roofline", "roofline/pessimistic")
    }
    assert list(seconds) == sorted(seconds, key=seconds.__getitem__)
    # The fixed time alone is 4 ms on 32 layers.
    assert seconds["roofline/pessimistic"] > seconds["roofline"] + 4e-3


def test_the_names_of_step_costs() -> None:
    assert split_variant(None) == (None, None)
    assert split_variant("tables") == ("tables", None)
    assert split_variant("pessimistic") == (None, "pessimistic")
    assert split_variant("roofline/optimistic") == ("roofline", "optimistic")
    assert split_variant("fits/optimistic") == ("fits/optimistic", None)
    assert build(Setup(gpu="A100-40", step_cost="pessimistic")).step_cost_name == "roofline/pessimistic"
    with pytest.raises(ConfigError, match="optimistic, pessimistic, or a file"):
        build(Setup(step_cost="gloomy"))
