"""What a finished request's output says: which tool, and whether the job goes on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from tenuto.core.jobs import Finish
from tenuto.core.requests.tool_calls import find_tool_call, is_cut
from tenuto.core.types import ToolCall
from tenuto.vllm.compat import RequestStatus

logger = logging.getLogger("vllm.tenuto")

TAIL_TOKENS = 96
"""Decoded at first: tool calls stand at the end, and most outputs have none."""
MAX_TAIL_TOKENS = 6144
"""Decoded at most, when the tail shows the end of a call without its beginning (a file being written)."""


class OutputReader:
    """Reads tool calls off the tail of outputs; without a tokenizer it knows nothing."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self.num_faults = 0

    def get_finish(self, request: Any, *, reads_output: bool) -> Finish:
        """How a request ended, from its final status and, if it matters, from its output."""
        try:
            return self._get_finish(request, reads_output)
        except Exception as error:
            # Tokenizers can be code of the model's repository; what they raise must not end the engine.
            self.num_faults += 1
            if self.num_faults == 1:
                logger.error("an output could not be read (%r); further failures are only counted", error)
            return Finish(request.num_output_tokens)

    def _get_finish(self, request: Any, reads_output: bool) -> Finish:
        num_output_tokens = request.num_output_tokens
        stop_strings = (request.sampling_params.stop or ()) if request.sampling_params else ()
        if request.status == RequestStatus.FINISHED_ABORTED and self._ends_with_stop(request, stop_strings):
            # The front end finds stop strings and aborts the request; to the client that is a normal end.
            tool = self._find_tool_call(request) if reads_output else None
            return Finish(num_output_tokens, tool, is_last=tool is None if reads_output else None)
        if request.status not in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
            RequestStatus.FINISHED_REPETITION,
        ):
            return Finish(num_output_tokens, aborted=True)
        if not reads_output or self._tokenizer is None:
            return Finish(num_output_tokens)
        tool = self._find_tool_call(request)
        # No tool call and a stop token: the agent is done. Cut off by its length, nobody can tell.
        ended = True if request.status == RequestStatus.FINISHED_STOPPED else None
        return Finish(num_output_tokens, tool, is_last=ended if tool is None else False)

    def _find_tool_call(self, request: Any) -> ToolCall | None:
        tokens = request.output_token_ids
        num_tail = TAIL_TOKENS
        while True:
            text = self._decode(tokens[-num_tail:])
            if num_tail >= min(len(tokens), MAX_TAIL_TOKENS) or not is_cut(text):
                return find_tool_call(text)
            num_tail *= 4

    def _ends_with_stop(self, request: Any, stop_strings: Sequence[str]) -> bool:
        if not stop_strings or not request.num_output_tokens:
            return False
        # A step or two may have run on before the abort arrived.
        text = self._decode(request.output_token_ids[-TAIL_TOKENS:])
        return any(stop in text for stop in stop_strings)

    def _decode(self, tokens: Sequence[int]) -> str:
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))
