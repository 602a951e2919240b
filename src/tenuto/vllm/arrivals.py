"""What the driver needs to know about a request that arrives."""

from __future__ import annotations

import dataclasses
from typing import Any

from tenuto.core.jobs import UNVERIFIED, Arrival
from tenuto.core.requests.hints import Hints, parse_hints
from tenuto.vllm import compat
from tenuto.vllm.tenants import TenantVerifier

OUTSIDE = Hints(is_last=True)
"""Hints for requests that run as in stock vLLM: their KV cache is never retained."""


def describe(request: Any, tenants: TenantVerifier) -> Arrival:
    """What the driver needs to know about a request that arrived."""
    params, num_prompt_tokens = request.sampling_params, request.num_prompt_tokens
    fields = tenants.read(None if params is None else params.extra_args)
    # What cannot be verified runs as in stock: it shares no job with anybody, and keeps nothing.
    session_id = getattr(request, "session_id", None)
    hints = Hints(tenant=UNVERIFIED) if fields is None else parse_hints(fields, session_id)
    plain = params is not None and request.prompt_token_ids is not None
    if fields is None or not plain or request.has_encoder_inputs or request.resumable:
        outside = dataclasses.replace(OUTSIDE, tenant=hints.tenant)
        return Arrival(outside, num_prompt_tokens, priority=request.priority, is_supported=False)
    if hints.is_last is None and compat.has_release_hint(request):
        hints = dataclasses.replace(hints, is_last=True)
    return Arrival(
        hints=hints,
        num_prompt_tokens=num_prompt_tokens,
        prompt=request.prompt_token_ids,
        hashes=request.block_hashes,
        priority=request.priority,
    )
