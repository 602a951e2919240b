"""The plugin: Tenuto's driver inside stock vLLM.

    vllm serve MODEL --scheduler-cls tenuto.vllm.Scheduler --middleware tenuto.vllm.Middleware

vLLM is imported only when one of the two names is used.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {"Scheduler": "tenuto.vllm.scheduler", "Middleware": "tenuto.vllm.middleware"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
