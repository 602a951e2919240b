"""autellix+: autellix with a host tier, so that a preempted turn's KV is loaded and not computed again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tenuto.estimators.attained_service import LeastAttainedService


@dataclass
class AutellixPlus(LeastAttainedService):
    """Autellix on an engine that copies KV to host memory as it is computed.

    Source: arXiv 2502.13965, section 4.2.2: its engine swaps what it preempts to the CPU, so this is the
    nearer of the two to the paper. Parameters and hooks inside vLLM as for `autellix`; the tier there is
    vLLM's own (`--kv-offloading-size`). Known weakness: it takes turns among more jobs the longer it is
    overloaded, and once their KV is more than the tier holds, all of it is computed again.
    """

    wants: ClassVar[Mapping[str, Any]] = {"offload": "async"}
