"""Tenuto holds an LLM agent's KV cache through its tool calls, inside stock vLLM.

What Python code may use is in `__all__`; every name is loaded when it is first used, so that importing this
package is instant. The scheduler that vLLM loads is `tenuto.vllm.Scheduler`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tenuto.core import __version__

if TYPE_CHECKING:
    from tenuto.api import Comparison, SimulationResult, check_policy, compare, simulate
    from tenuto.core.errors import ConfigError, DataError, PolicyError, TenutoError
    from tenuto.core.loader import PRESETS, get_policy_names, load_policy
    from tenuto.core.policy import (
        EngineSettings,
        Key,
        Learns,
        LearnsDecodes,
        Needs,
        Oracle,
        Policy,
        Reports,
    )
    from tenuto.core.settings import setting
    from tenuto.core.types import (
        Decision,
        DecodeSteps,
        EngineView,
        Job,
        Keep,
        Lease,
        LeaseRefusal,
        LoadOffer,
        Offload,
        Release,
        StepView,
        TierView,
        ToolCall,
        Turn,
        Yields,
    )
    from tenuto.workload import Workload, load_workload


__all__ = [
    "PRESETS", "Comparison", "ConfigError", "DataError", "Decision", "DecodeSteps", "EngineSettings",
    "EngineView", "Job", "Keep", "Key", "Learns", "LearnsDecodes", "Lease", "LeaseRefusal", "LoadOffer",
    "Needs", "Offload", "Oracle", "Policy", "PolicyError", "Release", "Reports", "SimulationResult",
    "StepView", "TenutoError", "TierView", "ToolCall", "Turn", "Workload", "Yields", "__version__",
    "check_policy", "compare", "get_policy_names", "load_policy", "load_workload", "setting", "simulate",
]  # fmt: skip

_MODULES = {
    "tenuto.api": ("Comparison", "SimulationResult", "check_policy", "compare", "simulate"),
    "tenuto.core.errors": ("ConfigError", "DataError", "PolicyError", "TenutoError"),
    "tenuto.core.loader": ("PRESETS", "get_policy_names", "load_policy"),
    "tenuto.core.policy": (
        *("EngineSettings", "Key", "Learns", "LearnsDecodes", "Needs", "Oracle", "Policy", "Reports"),
    ),
    "tenuto.core.settings": ("setting",),
    "tenuto.core.types": (
        *("Decision", "DecodeSteps", "EngineView", "Job", "Keep", "Lease", "LeaseRefusal", "LoadOffer"),
        *("Offload", "Release", "StepView", "TierView", "ToolCall", "Turn", "Yields"),
    ),
    "tenuto.workload": ("Workload", "load_workload"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load a public name from the module that has it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'tenuto' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
