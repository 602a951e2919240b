"""The benchmark of shared prefixes: dense caching falls off a cliff, pins do not."""

from __future__ import annotations

import argparse

import pytest

from experiments.tables import shared_prefixes


@pytest.mark.slow
def test_pins_stay_flat_where_intervals_fall_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_prefixes, "REPORTED_TOKENS", 490_000)
    args = argparse.Namespace(tokens=28_000, rounds=2, seed=0)
    rows = {
        (num, arm): shared_prefixes.run(num, arm, args)
        for num, arm in (
            (4, "stock:None"),
            (13, "stock:None"),
            (13, "stock:0"),
            (20, "stock:0"),
            (20, "tenuto:0"),
        )
    }
    shares = {case: row["hit_share"] for case, row in rows.items()}
    assert shares[4, "stock:None"] > 0.85 and shares[13, "stock:0"] > 0.85
    assert shares[13, "stock:None"] < 0.5
    # Pins stay flat where the default interval alone falls off.
    assert shares[20, "stock:0"] < 0.95 < shares[20, "tenuto:0"]
    assert rows[20, "stock:0"]["second_use_hit_share"] == 0 < rows[20, "tenuto:0"]["second_use_hit_share"]
