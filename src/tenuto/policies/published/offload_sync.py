"""offload-sync: stock vLLM with LMCache behind it, as the published sweeps measured it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tenuto.core.policy import Policy


@dataclass
class OffloadSync(Policy):
    """Prompts are copied to host memory as they are computed; every step waits for its loads and stores.

    Source: LMCache 0.3.7 behind vLLM (`start_load_kv` and `wait_for_save` around the forward pass). Decides
    nothing else than stock. Good until the link saturates; then every step of everyone waits for it.
    """

    wants: ClassVar[Mapping[str, Any]] = {"offload": "sync"}
