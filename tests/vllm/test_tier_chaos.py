"""Random turns, aborts, pressure, resets, late and failed copies: no wrong token, nothing left, no stall."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", "0.31.0")

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from tests.vllm.tier_chaos import run_chaos
from tests.vllm.tiered import TieredEngine

POLICIES = ("tenuto", "stock", "infercept", "break-even")


@pytest.mark.parametrize("seed", range(4))
def test_random_events_leave_no_trace(seed: int) -> None:
    counts = run_chaos(random.Random(seed), num_events=400, policy=POLICIES[seed], depth=1 + seed % 2)
    assert counts["finished"] > 5
    assert counts["checked"] > 50


@pytest.mark.parametrize("seed", [5, 6])
def test_random_events_above_a_disk(seed: int, tmp_path: Path) -> None:
    """Copies fail, and the disk keeps nothing of what failed."""
    rng = random.Random(f"disk-{seed}")
    policy, folder = POLICIES[seed % 4], str(tmp_path)
    counts = run_chaos(rng, num_events=400, policy=policy, depth=1 + seed % 2, disk=folder)
    assert counts["finished"] > 5
    assert counts["checked"] > 50


@pytest.mark.parametrize(
    ("seed", "connectors"), list(enumerate([("other",), ("other", "ours"), ("ours", "other"), ("other",)]))
)
def test_beside_another_s_connector(seed: int, connectors: tuple[str, ...]) -> None:
    """Leases and loads of both do not take each other's blocks, and what the other loads counts as a hit."""
    rng = random.Random(seed)
    counts = run_chaos(rng, num_events=400, policy=POLICIES[seed], depth=1 + seed % 2, connectors=connectors)
    assert counts["finished"] > 5
    assert counts["loaded by the other"] > 0
    assert counts["host hits"] > 0


def test_a_copy_that_is_known_by_its_name_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients choose how a request's id begins; such a request would never be answered."""
    get_results = OffloadingConnector.get_transfer_results

    def drop(self: Any, finished_req_ids: set[str]) -> Any:
        results = get_results(self, finished_req_ids)
        results.finished_recving = {
            x for x in results.finished_recving if not x.startswith("tenuto-prefetch-")
        }
        return results

    monkeypatch.setattr(OffloadingConnector, "get_transfer_results", drop)
    # It ends within 250 steps where nothing is dropped, as the same runs above do.
    drain = TieredEngine.drain
    monkeypatch.setattr(TieredEngine, "drain", lambda self, max_steps=0: drain(self, 500))
    with pytest.raises(AssertionError, match="still busy"):
        run_chaos(random.Random(1), num_events=400, policy="stock")
