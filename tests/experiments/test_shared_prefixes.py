"""The benchmark of shared prefixes: dense caching falls off a cliff, the default interval does not."""

from __future__ import annotations

import argparse

import pytest

from experiments import shared_prefixes


@pytest.mark.slow
def test_the_default_interval_stays_flat_where_dense_caching_falls_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_prefixes, "REPORTED_TOKENS", 490_000)
    args = argparse.Namespace(tokens=28_000, rounds=2, seed=0)
    shares = {
        (num, interval): shared_prefixes.run(num, interval, args)["hit_share"]
        for num in (4, 13)
        for interval in (None, 0)
    }
    assert shares[4, None] > 0.85 and shares[4, 0] > 0.85 and shares[13, 0] > 0.85
    assert shares[13, None] < 0.5
