"""Reads a request when it arrives and when it ends: its job, its tenant, and the tool that follows."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from tenuto.core.jobs import UNVERIFIED, Arrival, Finish
from tenuto.core.requests import Hints, get_bounded_id, is_conversation_id, parse_hints
from tenuto.core.tool_calls import find_tool_call, is_cut
from tenuto.core.types import ToolCall
from tenuto.core.wishes import MarkFinder, Wish
from tenuto.records.codec import MAX_DEPTH, is_deep
from tenuto.vllm.compat.scheduler import (
    get_end,
    get_prompt,
    get_session_id,
    has_release_hint,
    replace_fields,
)
from tenuto.vllm.complaints import Complaints
from tenuto.vllm.tenants import TenantVerifier

logger = logging.getLogger("vllm.tenuto")

OUTSIDE = Hints(is_last=True)
"""Hints for requests that run as in stock vLLM: their KV cache is never retained."""
TAIL_TOKENS = 96
"""Tokens that are decoded first: tool calls are at the end, and most outputs have none."""
MAX_TAIL_TOKENS = 6144
"""The most that is decoded: the tail may have only the end of a long call, such as one that writes a file."""
MAX_TAIL_CHARS = 8 * MAX_TAIL_TOKENS
"""The most that is read of it. A client can make tokens of hundreds of spaces, and the engine waits."""
MAX_STOPS = 64
"""Stop strings beyond this number are not searched for: a client may send a million. Most APIs allow four."""


def drop_deep_fields(request: Any, complaints: Complaints) -> None:
    """Remove fields that a client nested too deeply (`MAX_DEPTH`), before vLLM passes them on to its workers.

    Workers in processes of their own get them by pickle, which fails at some hundred levels. Then the engine
    stops. So one client's `kv_transfer_params` could stop it for everybody. KV connectors use two or three.
    """
    params = request.sampling_params
    fields = None if params is None else params.extra_args
    if not fields:
        return
    deep = [name for name, value in fields.items() if is_deep(value)]
    if not deep:
        return
    names = [name[:40] for name in deep[:4]]
    # The Responses API lets clients choose the id, of any length and with any characters.
    name = get_bounded_id(request.request_id)
    complaints.add(f"{name}: {names} over {MAX_DEPTH} levels deep, or with over a million values, dropped")
    replace_fields(request, {name: value for name, value in fields.items() if name not in deep})


def describe(request: Any, tenants: TenantVerifier, reader: OutputReader) -> Arrival:
    """What the driver needs to know about a request that arrived.

    `reader` finds the breakpoints of a wish in the prompt.
    """
    params, num_prompt_tokens = request.sampling_params, request.num_prompt_tokens
    fields = tenants.read(None if params is None else params.extra_args)
    # A request without a verified tenant runs as in stock: it belongs to no known job and keeps nothing.
    hints = Hints(tenant=UNVERIFIED) if fields is None else parse_hints(fields, get_session_id(request))
    if hints.job_id is not None and is_conversation_id(hints.name or ""):
        # Whoever knows how a conversation begins can compute its name, so the content decides.
        hints = dataclasses.replace(hints, job_id=None, conversation=hints.job_id)
    plain = params is not None and request.prompt_token_ids is not None
    # A request that asks for the prompt's log probabilities computes all of it, whatever is cached.
    plain = plain and not request.skip_reading_prefix_cache
    if fields is None or not plain or request.has_encoder_inputs or request.resumable:
        outside = dataclasses.replace(OUTSIDE, tenant=hints.tenant, wish=hints.wish)
        return Arrival(
            outside,
            num_prompt_tokens,
            priority=request.priority,
            is_supported=False,
            lease_job_id=hints.job_id,
        )
    if hints.is_last is None and has_release_hint(request):
        hints = dataclasses.replace(hints, is_last=True)
    if hints.wish is not None:
        hints = dataclasses.replace(hints, wish=reader.place(hints.wish, request.prompt_token_ids))
    return Arrival(
        hints=hints,
        num_prompt_tokens=num_prompt_tokens,
        prompt=get_prompt(request),
        hashes=request.block_hashes,
        priority=request.priority,
    )


class OutputReader:
    """Reads tool calls from the tail of outputs, and finds the breakpoints of wishes in prompts.

    Without a tokenizer it finds nothing.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._marks = MarkFinder(self._decode, self._encode)
        self.num_faults = 0

    def place(self, wish: Wish, prompt: Sequence[int]) -> Wish:
        """The wish with its ends in tokens, without the parts whose end is not found."""
        try:
            return wish.resolve(lambda mark: self._marks.find(mark, prompt))
        except Exception as error:
            self._count_fault(error)
            return wish.resolve(lambda mark: 0)

    def get_finish(self, request: Any, *, reads_output: bool) -> Finish:
        """How a request ended, from its final status and, with `reads_output`, from its output."""
        try:
            return self._get_finish(request, reads_output)
        except Exception as error:
            self._count_fault(error)
            return Finish(request.num_output_tokens)

    def _count_fault(self, error: Exception) -> None:
        """Tokenizers can be code from the model's repository. Their errors must not stop the engine."""
        self.num_faults += 1
        if self.num_faults == 1:
            logger.error("tokens could not be read (%r); further failures are only counted", error)

    def _get_finish(self, request: Any, reads_output: bool) -> Finish:
        num_output_tokens, end = request.num_output_tokens, get_end(request)
        if end == "aborted" and self._ends_with_stop(request):
            # The front end finds stop strings and aborts the request; to the client that is a normal end.
            tool = self._find_tool_call(request) if reads_output else None
            # Agents that send stop strings run a tool there, however they write their calls.
            return Finish(num_output_tokens, tool, is_last=None if tool is None else False)
        if end in ("aborted", "failed"):
            return Finish(num_output_tokens, aborted=True, num_computed_tokens=request.num_computed_tokens)
        if not reads_output or self._tokenizer is None:
            return Finish(num_output_tokens)
        tool = self._find_tool_call(request)
        # A stop token without a tool call: the agent is done. After a cut at the length limit, this is
        # unknown.
        ended = True if end == "stopped" else None
        return Finish(num_output_tokens, tool, is_last=ended if tool is None else False)

    def _find_tool_call(self, request: Any) -> ToolCall | None:
        tokens = request.output_token_ids
        num_tail = TAIL_TOKENS
        while True:
            text = self._decode(tokens[-num_tail:])[-MAX_TAIL_CHARS:]
            is_whole = num_tail >= min(len(tokens), MAX_TAIL_TOKENS) or len(text) == MAX_TAIL_CHARS
            if is_whole or not is_cut(text):
                return find_tool_call(text)
            num_tail *= 4

    def _ends_with_stop(self, request: Any) -> bool:
        params = request.sampling_params
        if params is None or not params.stop or request.num_output_tokens <= params.min_tokens:
            return False
        # The request may have run for another step or two before the abort arrived.
        tail = request.output_token_ids[-TAIL_TOKENS:]
        text = self._decode(tail)
        # vLLM ignores stop strings that end within the first `min_tokens`.
        num_ignored = max(0, params.min_tokens - (request.num_output_tokens - len(tail)))
        ignored = len(self._decode(tail[:num_ignored])) if num_ignored else 0
        return any(text.find(stop, max(0, ignored + 1 - len(stop))) >= 0 for stop in params.stop[:MAX_STOPS])

    def _decode(self, tokens: Sequence[int]) -> str:
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def _encode(self, text: str) -> Sequence[int]:
        if self._tokenizer is None:
            return ()
        tokens: Sequence[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens
