"""A canary: some jobs under the policy, the others as in stock."""

from __future__ import annotations

import pytest

from tenuto.core.errors import ConfigError
from tenuto.core.limits import Canary, get_place, read_canary


def test_without_settings_every_job_is_under_the_policy() -> None:
    assert not Canary().is_on
    assert Canary().selects("a", None, None)
    assert read_canary(None) == read_canary({}) == Canary()


def test_a_share_is_stable_and_about_as_large_as_said() -> None:
    canary = Canary(share=0.2)
    chosen = [canary.selects(f"job{n}", None, None) for n in range(5000)]
    assert 0.17 < sum(chosen) / 5000 < 0.23
    assert chosen == [canary.selects(f"job{n}", None, None) for n in range(5000)]
    # A larger share contains the smaller one, so an operator can raise it step by step.
    larger = Canary(share=0.5)
    assert all(larger.selects(f"job{n}", None, None) for n in range(5000) if chosen[n])
    assert not any(Canary(share=0).selects(f"job{n}", None, None) for n in range(100))
    assert all(Canary(share=1.0).selects(f"job{n}", None, None) for n in range(100))
    assert get_place("job7") == pytest.approx(get_place("job7"))


def test_tenants_and_groups_are_chosen_by_name() -> None:
    canary = Canary(tenants=["ann"], groups=["beta"])
    assert canary.selects("j", "ann", None)
    assert canary.selects("j", "bob", "beta")
    assert not canary.selects("j", "bob", "alpha")
    assert not canary.selects("j", None, None)


@pytest.mark.parametrize(
    "given",
    [{"share": 2}, {"share": "1"}, {"tenants": "ann"}, {"groups": [1]}, {"groups": [""]}, {"x": 1}, 3],
)
def test_a_bad_canary_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match=r"tenuto\.canary"):
        read_canary(given)
