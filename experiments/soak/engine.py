"""The engine of an episode: notices stalls, and answers with texts that hold pieces of tool calls."""

from __future__ import annotations

from typing import Any

from tests.vllm.workerless import Engine

MAX_IDLE_STEPS = 8
"""Steps in a row without a token while requests are there; more is a stall."""


class Failure(Exception):
    """An invariant did not hold, the engine stalled, or something raised."""


class SpeakingTokenizer:
    """Turns tokens into tool calls, pieces of their markers, and words; raises now and then."""

    PIECES = (
        "<tool_call>", "</tool_call>", '{"name": "bash", "arguments": {"command": "ls -l"}}', "[TOOL_CALLS]",
        "```bash\nmake test\n```", "```", "<think>", "</think>", "<|message|>", "to=functions.get ",
        "<function=run>", "</function>", "{", "}", "word ", "word ", "word ", "done.",
    )  # fmt: skip

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        """The text of these tokens."""
        if tokens and tokens[-1] % 97 == 0:
            raise RuntimeError("this tokenizer fails")
        return "".join(self.PIECES[token % len(self.PIECES)] for token in tokens)


class SoakEngine(Engine):
    """Notices a stall, and keeps no answer longer than it is needed."""

    num_steps = 0
    _num_idle = 0

    def step(self) -> Any:
        """One step; raises Failure if the engine stalls."""
        output = super().step()
        self.num_steps += 1
        idle = not output.total_num_scheduled_tokens and self.scheduler.has_unfinished_requests()
        self._num_idle = self._num_idle + 1 if idle else 0
        if self._num_idle > MAX_IDLE_STEPS:
            raise Failure(f"stalled: {self._num_idle} steps with requests and without a token")
        return output

    def forget(self, request_id: str) -> list[int]:
        """What a request was answered."""
        self._num_sampled.pop(request_id, None)
        return self.outputs.pop(request_id, [])
