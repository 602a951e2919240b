"""offload-async: stock vLLM with its native host offloading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tenuto.core.policy import Policy


@dataclass
class OffloadAsync(Policy):
    """KV is copied to host memory beside the steps; a turn waits for its load, and nobody else does.

    Source: vllm/v1/kv_offload and the offloading connector@0.32. Decides nothing else than stock: it still
    starts every turn that fits, so turns in overload evict each other and the tier fills with all of them.
    """

    wants: ClassVar[Mapping[str, Any]] = {"offload": "async"}
