"""Zero configuration: recognise a job's next turn by its content alone.

A turn that finished is remembered by the hashes of the last full block of its output and of its prompt.
A new prompt that runs through one of them extends that turn. The prompt's mark is there for chat templates
that drop earlier reasoning: their next prompt matches up to the previous prompt, and no further.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

GENERATION_PROMPT_SLACK = 4
"""Tokens at a prompt's end that the next prompt may lack: templates that switch reasoning off close an
empty reasoning span there (`<think>`, blank, `</think>`, blank) and drop it from the history. Shorter
than the end-of-message markers before them, so that it never hides what the user wrote."""


@dataclass(slots=True)
class _Finished:
    num_prompt_tokens: int
    boundary: int
    """Token position of the last but one full block's end in the prompt."""
    remainder: list[int]
    """The prompt's tokens from there to its end."""
    marks: list[Hashable] = field(default_factory=list)
    output_mark: Hashable | None = None


class Lineage:
    """The most recent finished turn of each job, findable by content. Bounded, least recent out first."""

    def __init__(self, block_size: int, max_jobs: int) -> None:
        self._block_size = block_size
        self._max_jobs = max_jobs
        self._finished: OrderedDict[str, _Finished] = OrderedDict()
        self._jobs_by_mark: dict[Hashable, dict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._finished)

    def remember(self, job_id: str, hashes: Sequence[Hashable], prompt: Sequence[int]) -> None:
        """Remember a finished turn: hashes of its full blocks (prompt and output) and its prompt's tokens."""
        self.forget(job_id)
        if not hashes:
            return
        num_prompt_blocks = min(len(prompt) // self._block_size, len(hashes))
        boundary = max(0, num_prompt_blocks - 1) * self._block_size
        turn = _Finished(len(prompt), boundary, list(prompt[boundary:]))
        turn.marks = [hashes[n - 1] for n in (num_prompt_blocks, num_prompt_blocks - 1) if n > 0]
        if len(hashes) > num_prompt_blocks:
            turn.output_mark = hashes[-1]
            turn.marks.append(hashes[-1])
        self._finished[job_id] = turn
        for mark in turn.marks:
            self._jobs_by_mark.setdefault(mark, {})[job_id] = None
        if len(self._finished) > self._max_jobs:
            self.forget(next(iter(self._finished)))

    def forget(self, job_id: str) -> None:
        """Forget a job, if it is there."""
        turn = self._finished.pop(job_id, None)
        if turn is None:
            return
        for mark in turn.marks:
            jobs = self._jobs_by_mark.get(mark)
            if jobs is not None:
                jobs.pop(job_id, None)
                if not jobs:
                    del self._jobs_by_mark[mark]

    def find(self, hashes: Sequence[Hashable], prompt: Sequence[int]) -> str | None:
        """The job whose last turn this prompt extends, the most recent one if several; else None.

        One set look-up per block of the prompt, in C, from its end: far less than hashing it was.
        """
        marks = self._jobs_by_mark
        for mark in filter(marks.__contains__, reversed(hashes)):
            for job_id in reversed(marks[mark]):
                if self._extends(self._finished[job_id], mark, prompt):
                    return job_id
        return None

    @staticmethod
    def _extends(turn: _Finished, mark: Hashable, prompt: Sequence[int]) -> bool:
        if len(prompt) <= turn.num_prompt_tokens:
            return False
        if mark == turn.output_mark:
            return True
        certain = max(0, len(turn.remainder) - GENERATION_PROMPT_SLACK)
        return list(prompt[turn.boundary : turn.boundary + certain]) == turn.remainder[:certain]
