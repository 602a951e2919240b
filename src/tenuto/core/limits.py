"""The operator's settings for the driver: its bounds, and the jobs to which the policy applies."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from tenuto.core.errors import ConfigError
from tenuto.core.settings import check_settings, setting


@dataclass(frozen=True)
class Limits:
    """Bounds on what any policy, hint or client can make the driver do."""

    max_lease_s: float = setting(600.0, "longest lease, whatever the policy or a hint says", minimum=0)
    max_leased_share: float = setting(
        0.95,
        "share of the KV cache that leases may cover; at this limit, the oldest make room for a new one",
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
    max_wished_share: float = setting(
        0.5,
        "share of host memory, and of the disk, that is evicted last because of cache wishes; at this limit, "
        "the tenant that has the most for its weight loses first",
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
        "longest time, in seconds, that order, admission or leases may hold a waiting turn back after stock "
        "vLLM would have started it",
        minimum=0,
    )
    max_wait_over_stock: float | None = setting(
        0.1,
        "how much longer than in stock a turn may wait for its start, as a share of its wait in stock; "
        "one turn of service is added; the waits of all coming turns of an agent count together, and agents "
        "may wait twice as long once such starts took 5 % of the work; null: no bound",
        minimum=0,
    )
    max_parallel_turns: int = setting(
        1,
        "turns of one job that may use its place in the queue at once; further turns queue as new jobs",
        minimum=1,
    )
    max_remembered_jobs: int = setting(
        10_000,
        "jobs remembered between turns; beyond that, the longest idle one is forgotten",
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
            # With these bounds, sums of weights and shares stay exact enough.
            if not (is_number and 1e-6 <= weight <= 1e6):
                raise ConfigError(f"tenant_weights: {tenant!r} must have from 1e-6 to 1e6, got {weight!r}")

    def get_longest_s(self, retain_s: float | None) -> float:
        """The longest lease on a turn whose client allows `retain_s` seconds; None: any."""
        return self.max_lease_s if retain_s is None else min(self.max_lease_s, retain_s)


MAX_NAMES = 1000
"""Most tenants, and most groups, in one canary."""


@dataclass(frozen=True)
class Canary:
    """The jobs to which the policy applies: those that any field selects, or all if no field is set.

    The others run as in stock vLLM. A job stays in its group for as long as it is known. With `share`, a job
    id always falls into the same group.
    """

    share: float | None = setting(
        None, "share of jobs under the policy, chosen by a hash of the job's id", minimum=0, maximum=1
    )
    tenants: list[str] | None = None
    """Tenants whose jobs are under the policy."""
    groups: list[str] | None = None
    """Values of the header `X-Tenuto-Group` whose jobs are under the policy."""

    def __post_init__(self) -> None:
        for name in ("tenants", "groups"):
            names = getattr(self, name) or []
            if len(names) > MAX_NAMES or not all(isinstance(each, str) and each for each in names):
                raise ConfigError(f"tenuto.canary: {name!r} must be a list of at most {MAX_NAMES} names")

    @property
    def is_on(self) -> bool:
        """Whether any field is set, so that some jobs may run as in stock."""
        return (self.share, self.tenants, self.groups) != (None, None, None)

    def selects(self, job_id: str, tenant: str | None, group: str | None) -> bool:
        """Whether the policy applies to this job."""
        if not self.is_on:
            return True
        if tenant is not None and tenant in (self.tenants or ()):
            return True
        if group is not None and group in (self.groups or ()):
            return True
        return self.share is not None and get_place(job_id) < self.share


def get_place(job_id: str) -> float:
    """A number in [0, 1) that depends only on the job's id: the same in every process and after a restart."""
    digest = hashlib.blake2b(job_id.encode(errors="replace"), digest_size=7, person=b"tenuto-canary").digest()
    return int.from_bytes(digest, "big") / 2**56


def read_canary(given: Any) -> Canary:
    """The canary of an operator's settings; None stands for no canary. Raises ConfigError naming the key."""
    return Canary(**check_settings(Canary, {} if given is None else given, "tenuto.canary"))
