"""The driver's bounds, set by an operator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tenuto.core.errors import ConfigError
from tenuto.core.settings import setting


@dataclass(frozen=True)
class Limits:
    """Bounds on what any policy, hint or client can make the driver do."""

    max_lease_s: float = setting(600.0, "longest lease, whatever the policy or a hint says", minimum=0)
    max_leased_share: float = setting(
        0.95,
        "share of the KV cache that leases may cover; leases that yield earlier make room for a new one",
        minimum=0,
        maximum=1,
    )
    max_pinned_share: float = setting(
        0.5,
        "share of the KV cache that pinned prefixes may hold, on models with sliding windows or states: "
        "prefixes that several jobs use, given up before any lease; 0: pin nothing",
        minimum=0,
        maximum=1,
    )
    max_tenant_share: float = setting(
        0.8,
        "share of the KV cache that leases of one tenant may cover while another tenant is active",
        minimum=0,
        maximum=1,
    )
    max_tenant_leases: int = setting(
        1000, "leases that one tenant may hold while another tenant is active", minimum=0
    )
    fair_tenants: bool = setting(
        True, "while turns of several tenants wait, the tenant that received the least service goes first"
    )
    tenant_weights: dict[str, Any] | None = setting(  # noqa: RUF009 - the default is None
        None, "weights of tenants by name, for fair shares of the order and of leased memory; 1 for others"
    )
    max_held_back_s: float = setting(
        600.0,
        "longest time, in seconds, that order, admission or leases may hold a waiting turn back",
        minimum=0,
    )
    max_wait_over_stock: float | None = setting(
        0.1,
        "how much longer than in stock a turn may wait for its start: a share of that wait, beside one turn "
        "of service; an agent's turn may wait as long as all turns that it still sends; null: as long as the "
        "policy wants",
        minimum=0,
    )
    max_parallel_turns: int = setting(
        1,
        "turns of one job that may use its place in the queue at once; further turns queue as new jobs",
        minimum=1,
    )
    max_remembered_jobs: int = setting(
        10_000,
        "jobs remembered between turns; when there are more, the one idle for longest is forgotten",
        minimum=1,
    )
    always_yield: bool = setting(
        True,
        "leases yield before any allocation fails, even if the policy lets them yield only on a deadlock",
    )
    infer_jobs: bool = setting(True, "recognise turns without a job id by their content")

    def __post_init__(self) -> None:
        """Check the weights. Raises ConfigError naming the tenant."""
        for tenant, weight in (self.tenant_weights or {}).items():
            is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not (is_number and 0 < weight < math.inf):
                raise ConfigError(f"tenant_weights: the weight of {tenant!r} must be above 0, got {weight!r}")
