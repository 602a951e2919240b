"""Recognises a job's next turn by its content alone, so that clients need not send a job id.

A finished turn is remembered by *marks*: the hashes of the last full block of its output and of its prompt.
A new prompt that contains one of these blocks extends that turn. The prompt's mark is needed for chat
templates that drop earlier reasoning: there, the next prompt shares only the previous prompt, not its output.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

GENERATION_PROMPT_SLACK = 4
"""Tokens at a prompt's end that the next prompt may lack. Chat templates that switch reasoning off add an
empty reasoning span there (`<think>`, blank, `</think>`, blank) and drop it from the history. The slack is
so short that it never covers text of the user: end-of-message markers come before these tokens."""


_Span = tuple[int, int]
"""(end of the prompt's second-to-last full block, the prompt's length): the tokens between are compared."""
_OUTPUT: _Span = (0, 0)
"""The span of an output's mark. The mark covers the whole prompt, so no tokens are left to compare."""
_Key = tuple[Hashable, _Span, tuple[int, ...], str | None]
"""A mark, a span, the prompt's tokens there, and the tenant: a turn never joins another tenant's job."""


@dataclass(slots=True)
class _Finished:
    number: int
    """A counter; a turn that is remembered later has a larger number."""
    keys: list[_Key]


class Lineage:
    """The most recent finished turn of each job, indexed by content.

    The number of jobs is bounded; the least recent job is forgotten first.
    """

    def __init__(self, block_size: int, max_jobs: int) -> None:
        self._block_size = block_size
        self._max_jobs = max_jobs
        self._num_remembered = 0
        self._finished: OrderedDict[str, _Finished] = OrderedDict()
        self._jobs_by_key: dict[_Key, OrderedDict[str, None]] = {}
        # Many jobs may share a mark (a system prompt), but a mark has at most 2 × block_size spans.
        self._spans_by_mark: dict[Hashable, dict[_Span, int]] = {}

    def __len__(self) -> int:
        return len(self._finished)

    def set_max_jobs(self, max_jobs: int) -> None:
        """Change how many jobs are remembered. If there are more, the least recent ones are forgotten."""
        self._max_jobs = max_jobs
        while len(self._finished) > max_jobs:
            self.forget(next(iter(self._finished)))

    def remember(
        self, job_id: str, hashes: Sequence[Hashable], prompt: Sequence[int], tenant: str | None = None
    ) -> None:
        """Remember a job's finished turn.

        `hashes`: hashes of its full blocks (prompt and output). `prompt`: its prompt's token ids.
        """
        self.forget(job_id)
        if not hashes:
            return
        num_prompt_blocks = min(len(prompt) // self._block_size, len(hashes))
        span = (max(0, num_prompt_blocks - 1) * self._block_size, len(prompt))
        compared = _get_compared(span, prompt)
        numbers = [n for n in (num_prompt_blocks, num_prompt_blocks - 1) if n > 0]
        keys: list[_Key] = [(hashes[n - 1], span, compared, tenant) for n in numbers]
        if len(hashes) > num_prompt_blocks:
            keys.append((hashes[-1], _OUTPUT, (), tenant))
        self._num_remembered += 1
        turn = self._finished[job_id] = _Finished(self._num_remembered, keys)
        for key in turn.keys:
            self._jobs_by_key.setdefault(key, OrderedDict())[job_id] = None
            spans = self._spans_by_mark.setdefault(key[0], {})
            spans[key[1]] = spans.get(key[1], 0) + 1
        if len(self._finished) > self._max_jobs:
            self.forget(next(iter(self._finished)))

    def forget(self, job_id: str) -> None:
        """Forget a job, if it is remembered."""
        turn = self._finished.pop(job_id, None)
        for key in turn.keys if turn is not None else ():
            mark, span = key[:2]
            del self._jobs_by_key[key][job_id]
            if not self._jobs_by_key[key]:
                del self._jobs_by_key[key]
            spans = self._spans_by_mark[mark]
            spans[span] -= 1
            if not spans[span]:
                del spans[span]
            if not spans:
                del self._spans_by_mark[mark]

    def find(
        self,
        hashes: Sequence[Hashable],
        prompt: Sequence[int],
        tenant: str | None = None,
        preferred: str | None = None,
    ) -> str | None:
        """The tenant's job that this prompt continues, or None.

        A prompt continues a job if it extends the job's last finished turn. Of several such jobs it is the
        preferred one, else the most recent one. Jobs whose turns had the same prompt and no full block of an
        answer take turns, so that prompts which continue one of them each continue another one.

        The cost is one dict look-up per block of the prompt, from its end, in C; this is far cheaper than
        computing the block hashes.
        """
        spans_by_mark = self._spans_by_mark
        for mark in filter(spans_by_mark.__contains__, reversed(hashes)):
            spans = (each for each in spans_by_mark[mark] if each == _OUTPUT or len(prompt) > each[1])
            keys = [_get_key(mark, span, prompt, tenant) for span in spans]
            sets = [self._jobs_by_key[key] for key in keys if key in self._jobs_by_key]
            if sets:
                found = [
                    preferred if preferred is not None and preferred in jobs else next(reversed(jobs))
                    for jobs in sets
                ]
                job_id = max(found, key=lambda each: (each == preferred, self._finished[each].number))
                sets[found.index(job_id)].move_to_end(job_id, last=False)
                return job_id
        return None

    def find_repeated(
        self, hashes: Sequence[Hashable], prompt: Sequence[int], tenant: str | None = None
    ) -> str | None:
        """The tenant's job whose last finished turn had this very prompt, or None."""
        num_blocks = min(len(prompt) // self._block_size, len(hashes))
        if not num_blocks or hashes[num_blocks - 1] not in self._spans_by_mark:
            return None
        span = ((num_blocks - 1) * self._block_size, len(prompt))
        jobs = self._jobs_by_key.get(_get_key(hashes[num_blocks - 1], span, prompt, tenant))
        return next(reversed(jobs)) if jobs else None


def _get_key(mark: Hashable, span: _Span, prompt: Sequence[int], tenant: str | None) -> _Key:
    return mark, span, _get_compared(span, prompt), tenant


def _get_compared(span: _Span, prompt: Sequence[int]) -> tuple[int, ...]:
    boundary, num_prompt_tokens = span
    certain = max(boundary, num_prompt_tokens - GENERATION_PROMPT_SLACK)
    return tuple(prompt[boundary:certain])
