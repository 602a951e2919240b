"""With leases our scheduler decides what Tenuto's plugin makes vLLM's decide: one driver, two engines."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

pytest.importorskip("vllm")

from tenuto.core.fairness import Shares
from tenuto.core.jobs import TurnState
from tenuto.core.types import LeaseEnd
from tests.differential.cases import CASES, KEEP_ALL, draw_case
from tests.differential.compare import Differs, compare


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("leases/")])
def test_same_decisions_as_the_plugin(name: str) -> None:
    case = CASES[name]
    num_ended: Counter[LeaseEnd] = Counter()
    num_pinned = num_admission_waits = 0
    for seed in (1, 2, 3):
        totals = list(compare(case, seed))[-1].totals
        assert totals is not None
        num_ended += Counter(totals["num_leases_ended"])
        num_pinned += totals["num_prefixes_pinned"]
        num_admission_waits += totals["num_admission_waits"]
    if any(case.setup.windows) or case.setup.layout:
        assert num_pinned > 0
    if case.policy == KEEP_ALL:
        num_late = num_ended[LeaseEnd.EXPIRED] + num_ended[LeaseEnd.TIME_LIMIT]
        assert num_ended[LeaseEnd.HIT] and num_ended[LeaseEnd.REVOKED] and num_late, num_ended
    elif case.policy == "continuum-fixed":
        assert num_ended[LeaseEnd.HIT] and num_ended[LeaseEnd.EXPIRED]
    else:
        assert num_admission_waits > 0


def test_the_same_decisions_for_tenants_whose_clients_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    num_charged = 0
    leave = Shares.leave

    def count(shares: Shares, turn: TurnState, num_output_tokens: int) -> None:
        nonlocal num_charged
        num_charged += not turn.started and shares._charges[turn.turn_id].has_blocked
        leave(shares, turn, num_output_tokens)

    monkeypatch.setattr(Shares, "leave", count)
    for seed in (*range(1, 9), 21, 54, 139):
        assert list(compare(draw_case("tenants", seed), seed))
    assert num_charged > 0


def test_the_comparison_can_fail() -> None:
    """Another time to live is another run."""
    case = CASES["leases/hold/1"]
    with pytest.raises(Differs):
        list(compare(case, 1, replace(case, options={"ttl_s": 1.0})))
