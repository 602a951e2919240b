"""Finds the host memory below a scheduler, without importing vLLM's offloading where nobody uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tenuto.core.policy import Policy
from tenuto.vllm.settings import Settings

if TYPE_CHECKING:
    from tenuto.vllm.tiers.host import HostTier


def find_tier(scheduler: Any, settings: Settings, policy: Policy, clock: Any) -> HostTier | None:
    """The host memory below this scheduler; None without one, or with one that is not ours.

    `clock`: the module `time`, or a test's.
    """
    if scheduler.connector is None:
        return None
    try:
        from tenuto.vllm.compat_connector import ConnectorPort, find_connector
        from tenuto.vllm.tiers.host import HostTier
    except ImportError:
        # A vLLM whose offloading differs; it cannot have loaded our spec either.
        return None
    connector = find_connector(scheduler)
    if connector is None:
        return None
    port = ConnectorPort(connector, scheduler.kv_cache_manager.block_pool)
    port.watch_loads_of_others(scheduler.connector)
    return HostTier(scheduler, port, settings, policy, clock)
