"""Views, decisions and counts."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from tenuto.core.stats import Histogram
from tenuto.core.types import EngineView, Job, Keep, Lease, Turn

INF, NAN = float("inf"), float("nan")
TURN = Turn("t", Job("j", 0.0, 1), 0.0, 10)


@pytest.mark.parametrize(("until_s", "value"), [(INF, 0.0), (NAN, 0.0), (1.0, INF), (1.0, NAN), (-INF, 0.0)])
def test_a_deadline_and_a_value_are_finite(until_s: float, value: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        Keep(until_s, value=value)


@pytest.mark.parametrize("yields", ["always", None])
def test_yields_is_of_its_enum(yields: object) -> None:
    with pytest.raises(TypeError, match="yields must be a Yields"):
        Keep(1.0, yields=yields)


@pytest.mark.parametrize(
    "view",
    [
        TURN,
        TURN.job,
        Lease(TURN, 0.0, 1.0, 0.0, 1, next_turn_waiting=False),
        EngineView(0.0, 16, 10, 10, 0, 0, 1),
    ],
)
def test_a_policy_cannot_change_what_it_sees(view: object) -> None:
    name = dataclasses.fields(view)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(view, name, None)


def test_a_histogram_counts_into_the_first_bucket_whose_bound_is_not_below() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    # (…1]: 0 and 1; (1…2]: 1.5 and 2; beyond: 3.
    assert histogram.counts == [2, 2, 1]
    assert histogram.total == 7.5


def test_views_are_like_those_of_any_dataclass() -> None:
    job = Job("j", 0.0, 1)
    assert (type(job), job.tenant, repr(job)) == (
        Job,
        None,
        "Job(job_id='j', arrival_s=0.0, num_turns=1, tenant=None, kind=None, number=0)",
    )
    assert job == Job(num_turns=1, arrival_s=0.0, job_id="j") != dataclasses.replace(job, tenant="t")
    assert pickle.loads(pickle.dumps(job)) == copy.deepcopy(job) == job
    assert hash(job) == hash(Job("j", 0.0, 1))
    with pytest.raises(TypeError, match="missing 2 required positional arguments"):
        Job("j")
