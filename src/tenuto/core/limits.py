"""The driver's bounds, set by an operator."""

from __future__ import annotations

from dataclasses import dataclass

from tenuto.core.settings import setting


@dataclass(frozen=True)
class Limits:
    """Bounds on what any policy, hint or client can make the driver do."""

    max_lease_s: float = setting(600.0, "longest lease, whatever the policy or a hint says", minimum=0)
    max_leased_share: float = setting(
        1.0,
        "share of the KV cache that leases may cover; one that does not fit is not granted",
        minimum=0,
        maximum=1,
    )
    max_tenant_share: float = setting(
        1.0, "share of the KV cache that leases of one tenant may cover", minimum=0, maximum=1
    )
    max_held_back_s: float = setting(
        600.0,
        "seconds after which a turn that waits is held back no longer, neither by admission nor by leases",
        minimum=0,
    )
    max_parallel_turns: int = setting(
        8,
        "turns of one job at once that have its place among all jobs; more have that of a new job",
        minimum=1,
    )
    max_remembered_jobs: int = setting(
        10_000, "jobs remembered between turns; beyond it the longest silent is forgotten", minimum=1
    )
    always_yield: bool = setting(
        True, "leases yield before any allocation fails, even where the policy says only on a stall"
    )
    infer_jobs: bool = setting(True, "recognise turns without a job id by their content")
