"""stock-tuned: stock vLLM with what a good operator sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tenuto.core.policy import Policy


@dataclass
class StockTuned(Policy):
    """A cap on each prompt's share of a step, a little memory in reserve, host offloading beside the steps.

    Source: vLLM 0.32's `--long-prefill-token-threshold`, `--watermark` and `--kv-offloading-size`; `tenuto
    serve` puts the first two on the line, the size of host memory is the operator's to choose. 512 tokens, so
    that a long prompt leaves a step's budget of 2,048 or 8,192 to others. A watermark of 0.01 was vLLM's own
    before V1; it ends nearly all preemptions. Session affinity needs no setting: Tenuto's middleware keeps a
    job on its data-parallel rank.

    Known weakness: the cap is a prompt's, not the step's. Sixteen long prompts still fill a step of 8,192,
    and each now takes sixteen times as many of them.
    """

    wants: ClassVar[Mapping[str, Any]] = {
        "long_prefill_token_threshold": 512,
        "watermark": 0.01,
        "offload": "async",
    }
