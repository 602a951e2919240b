"""The driver's metrics on `/metrics`, both of vLLM with Tenuto and of the simulated server.

Each row has a metric's name, kind, help, labels, and a function that reads its value. Each exporter makes the
lines of its page from the rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tenuto.core import __version__
from tenuto.core.control import CHANGEABLE, MODES
from tenuto.core.driver import Driver
from tenuto.core.jobs import NOBODY, UNVERIFIED
from tenuto.core.ledger import OTHER_TENANTS, PLACES, TOKENS, Ledger, add_figures
from tenuto.core.stats import DECISION_BUCKETS_S, PARTED_BUCKETS, QUEUE_BUCKETS_S, TOOL_BUCKETS_S, DriverStats
from tenuto.core.types import EngineView
from tenuto.core.wish_dialects import DIALECTS
from tenuto.core.wishes import RESULTS

ENGINE_LABELS = ("model_name", "engine")
"""Labels of every metric, before its own."""
NO_TENANT = "(none)"
"""The label of turns without a tenant."""

NUM_TENANTS = 10
"""Most tenants with a time series of their own."""
OWN_NAMES = {NOBODY, UNVERIFIED}
"""Tenant names that Tenuto itself gives, not a client."""

Value = float | Mapping[Any, float]
"""A number. A metric with labels has one for each value of its label, or for each tuple of labels."""


class Metric(NamedTuple):
    """One metric. `read` takes its table's source object, and returns the current value."""

    kind: Literal["gauge", "counter"]
    name: str
    text: str
    read: Callable[[Any], Value]
    labels: tuple[str, ...] = ()


class Leases(NamedTuple):
    """The source object of `LEASES`. In shadow mode, these leases are not held."""

    stats: DriverStats
    num_jobs: int
    num_blocks: int
    num_parked: int


_NO_WISHES = dict.fromkeys(itertools.product(DIALECTS, RESULTS), 0)
LEASES = (
    Metric("gauge", "retained_jobs", "Jobs whose KV cache is leased now{}.", lambda of: of.num_jobs),
    Metric("gauge", "retained_blocks", "KV cache blocks of leases and pinned prefixes now{}.",
           lambda of: of.num_blocks),
    Metric("counter", "leases_granted", "Leases granted{}.", lambda of: of.stats.num_leases_granted),
    Metric("counter", "leases_ended", "Leases ended{}, by reason (hit: the next turn took the blocks over).",
           lambda of: _by_value(of.stats.num_leases_ended), ("reason",)),
    Metric("counter", "lease_refusals", "Finished turns that got no lease{}, by reason.",
           lambda of: _by_value(of.stats.num_lease_refusals), ("reason",)),
    Metric("counter", "lease_reclaims", "Times a lease lost blocks before its end{}, by reason.",
           lambda of: _by_value(of.stats.num_takes), ("reason",)),
    Metric("counter", "wishes",
           "Cache wishes of finished turns{}, by dialect and result (clipped: for less time than was asked).",
           lambda of: {**_NO_WISHES, **of.stats.num_wishes}, ("dialect", "result")),
    Metric("counter", "malformed_wishes", "Malformed cache wishes, which were ignored{}, by dialect.",
           lambda of: {**dict.fromkeys(DIALECTS, 0), **of.stats.num_malformed_wishes}, ("dialect",)),
    Metric("counter", "revoked_blocks", "Blocks reclaimed from leases under pressure{}.",
           lambda of: of.stats.num_revoked_blocks),
    Metric("gauge", "parked_jobs", "Jobs that wait because the policy admits none now{}.",
           lambda of: of.num_parked),
    Metric("counter", "admission_waits", "Times a new job was not admitted yet{}.",
           lambda of: of.stats.num_admission_waits),
    Metric("counter", "overdue_turns",
           "Turns moved to the front because they had waited too long compared with stock vLLM{}.",
           lambda of: of.stats.num_overdue_turns),
)  # fmt: skip
"""What becomes of leases. An exporter may put a note in place of `{}` in the help."""


@dataclass(frozen=True)
class Facts:
    """The source object of `DRIVER`."""

    driver: Driver
    stats: DriverStats
    view: EngineView
    policy: str
    mode: str
    num_changes: Mapping[str, int]
    """Number of live changes by an operator, by setting."""
    tenant_blocks: Mapping[str, int]
    """Leased blocks of each tenant."""
    shown_tenants: Mapping[str, int]
    """Leased blocks of the tenants that may be shown, and of all others together."""
    get_unix_time_s: Callable[[float], float]
    """Converts a time on the engine's clock to Unix time."""
    groups: tuple[str, ...] = ()
    """The kinds of layer groups that can end hits early."""
    shows_names: bool = True
    """Whether tenants' names may be shown."""

    def get_ledger(self, kinds: Iterable[str], unit: str) -> dict[tuple[str, str], float]:
        """The ledger's figures whose names end in `unit`, by tenant and kind."""
        tenants = get_shown_accounts(self.driver.ledger, self.view.now_s, shows_names=self.shows_names)
        return {
            (name, kind): figures[f"{kind}_{unit}"] for name, figures in tenants.items() for kind in kinds
        }

    def get_moment(self, at_s: float | None) -> float:
        """A time as Unix time, 0 for None. Unlike a duration, it stays correct while the engine sleeps."""
        return 0.0 if at_s is None else self.get_unix_time_s(at_s)


DRIVER = (
    Metric("gauge", "info", "Always 1; the labels say what runs.", lambda of: {(of.policy, __version__): 1},
           ("policy", "version")),
    Metric("gauge", "mode", "1 for the mode that the operator chose, 0 for the others.",
           lambda of: {name: float(name == of.mode) for name in MODES}, ("mode",)),
    Metric("counter", "control_changes", "Live changes by an operator, by what changed.",
           lambda of: {name: of.num_changes.get(name, 0) for name in CHANGEABLE}, ("what",)),
    Metric("gauge", "idle_retained_blocks",
           "Blocks under lease that no request uses; vllm:kv_cache_usage_perc counts them as free.",
           lambda of: count_free_in_effect(of.driver)),
    Metric("gauge", "pinned_blocks",
           "Blocks of pinned prefixes; those that several prefixes share count for each.",
           lambda of: of.driver.pins.num_blocks),
    Metric("counter", "prefixes_pinned", "Prefixes that several jobs share, pinned.",
           lambda of: of.stats.num_prefixes_pinned),
    Metric("counter", "prefixes_demoted", "Pinned prefixes that were unpinned again.",
           lambda of: of.stats.num_prefixes_demoted),
    Metric("gauge", "kv_blocks", "Total number of KV cache blocks.", lambda of: of.view.num_blocks),
    Metric("gauge", "next_lease_deadline_timestamp_seconds",
           "Unix time at which the next lease ends; 0 without leases.",
           lambda of: of.get_moment(None if of.driver.is_shadow else of.driver.get_next_deadline_s())),
    Metric("gauge", "policy_figure", "Figures that the policy learned, by name.",
           lambda of: of.driver.get_policy_figures(), ("figure",)),
    Metric("counter", "hit_tokens", "Prompt tokens that started turns found in cache.",
           lambda of: of.stats.num_hit_tokens),
    Metric("counter", "reusable_tokens",
           "Prompt tokens of started turns that their jobs' last turns had computed, in full blocks.",
           lambda of: of.stats.num_reusable_tokens),
    Metric("counter", "reused_tokens", "Those of tenuto:reusable_tokens that the turns found in cache.",
           lambda of: of.stats.num_reused_tokens),
    Metric("counter", "short_hit_tokens",
           "Prompt tokens that another layer group still had after a hit, by the group that ended it.",
           lambda of: {**dict.fromkeys(of.groups, 0), **of.stats.num_short_tokens}, ("group",)),
    Metric("counter", "recomputed_tokens",
           "Tokens of a job's earlier turns, or of preempted turns, computed again.",
           lambda of: of.stats.num_recomputed_tokens),
    Metric("counter", "policy_faults", "Policy hooks that failed; stock's answer was used.",
           lambda of: of.driver.num_policy_faults),
    Metric("gauge", "oldest_waiting_timestamp_seconds",
           "Unix time at which the longest-waiting turn arrived; 0 if no turn waits for its first step.",
           lambda of: of.get_moment(of.driver.get_oldest_arrival_s())),
    Metric("gauge", "active_tenants", "Tenants with a turn in the engine or a lease.",
           lambda of: len(of.driver.quota)),
    Metric("gauge", "largest_tenant_share",
           "The largest tenant's share of all leased blocks; 0 without leases.",
           lambda of: max(of.tenant_blocks.values(), default=0) / max(1, sum(of.tenant_blocks.values()))),
    Metric("gauge", "tenant_leased_blocks",
           "Leased blocks of the tenants with most of them (if names are shown), and of all others.",
           lambda of: of.shown_tenants, ("tenant",)),
    Metric("counter", "tenant_tokens",
           "Tokens of tenants, by kind: prompt, cached, loaded, computed, recomputed, output, stored.",
           lambda of: of.get_ledger(TOKENS, "tokens"), ("tenant", "kind")),
    Metric("counter", "tenant_block_seconds",
           "Blocks that were held for tenants between turns, times seconds, by place: gpu, host, disk.",
           lambda of: of.get_ledger(PLACES, "block_seconds"), ("tenant", "place")),
)  # fmt: skip
"""All other metrics of a driver."""


class HistogramMetric(NamedTuple):
    """One histogram. `field`: its field in `DriverStats`."""

    field: str
    name: str
    text: str
    buckets: tuple[float, ...]


HISTOGRAMS = (
    HistogramMetric("parted_at", "prompt_parted_at_tokens",
        "Turns whose prompt changes text of the job's last prompt, by the first token that differs.",
        PARTED_BUCKETS),
    HistogramMetric("tool_s", "tool_time_seconds", "From a turn's finish to its job's next arrival.",
        TOOL_BUCKETS_S),
    HistogramMetric("queue_s", "queue_delay_seconds", "From a turn's arrival to its first step.",
        QUEUE_BUCKETS_S),
    HistogramMetric("decision_s", "decision_time_seconds", "Time in Tenuto per turn arrival or finish.",
        DECISION_BUCKETS_S),
)  # fmt: skip


def count_free_in_effect(driver: Driver) -> int:
    """Leased blocks that no request uses, if leases always yield. The reported usage leaves them out then."""
    return driver.get_num_idle_leased_blocks() if driver.limits.always_yield else 0


def has_label(tenant: str, *, shows_names: bool) -> bool:
    """Whether a tenant may have series of its own. A client's name may equal a label that has a meaning."""
    return tenant in OWN_NAMES or (shows_names and tenant not in (NO_TENANT, OTHER_TENANTS))


def get_shown_accounts(ledger: Ledger, now_s: float, *, shows_names: bool) -> dict[str, dict[str, float]]:
    """The figures of the tenants that arrived first, and of all others together; none ever decreases."""
    named = [name for name in ledger.tenants if has_label(name, shows_names=shows_names)][:NUM_TENANTS]
    shown = {name or NO_TENANT: ledger.tenants[name].get_figures(now_s) for name in named}
    others = [each for name, each in ledger.tenants.items() if name not in named]
    if others:
        shown[OTHER_TENANTS] = add_figures(each.get_figures(now_s) for each in others)
    return shown


def _by_value(totals: Mapping[Any, int]) -> dict[str, int]:
    return {each.value: number for each, number in totals.items()}
