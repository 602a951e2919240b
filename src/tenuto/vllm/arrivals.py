"""What the driver needs to know about a request that arrives."""

from __future__ import annotations

import dataclasses
from typing import Any

from tenuto.core.jobs import Arrival
from tenuto.core.requests.hints import Hints, parse_hints
from tenuto.vllm import compat
from tenuto.vllm.tenants import take_tenant

OUTSIDE = Hints(is_last=True)
"""Hints for requests that run as in stock vLLM: their KV cache is never retained."""


def describe(request: Any, *, trusts_clients: bool) -> Arrival:
    """What the driver needs to know about a request that arrived."""
    num_prompt_tokens = request.num_prompt_tokens
    plain = request.sampling_params is not None and request.prompt_token_ids is not None
    if not plain or request.has_encoder_inputs or request.resumable:
        return Arrival(OUTSIDE, num_prompt_tokens, priority=request.priority, is_supported=False)
    fields = request.sampling_params.extra_args
    fields = fields if trusts_clients else take_tenant(fields)
    hints = parse_hints(fields, getattr(request, "session_id", None))
    if hints.is_last is None and compat.has_release_hint(request):
        hints = dataclasses.replace(hints, is_last=True)
    return Arrival(
        hints=hints,
        num_prompt_tokens=num_prompt_tokens,
        prompt=request.prompt_token_ids,
        hashes=request.block_hashes,
        priority=request.priority,
    )
