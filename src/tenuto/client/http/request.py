"""What a turn's request says: the body around its prompt, and the headers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tenuto.client.http.prompts import Form
from tenuto.core.requests.hints import get_bounded_id
from tenuto.workload.schema import Job

SESSION_HEADER = "X-Session-ID"


@dataclass(frozen=True, slots=True)
class RequestWriter:
    """Writes the requests of one run.

    The output's length is fixed (`min_tokens` = `max_tokens`, `ignore_eos`) unless its format is forced, and
    its content greedy, so that the same prompts get the same answers. Every request names its job in
    `X-Session-ID`; with `hints` also in `vllm_xargs`, with its tool and whether it is the job's last turn.
    """

    model: str
    form: Form
    run_id: str
    """Begins every job id on the wire, so that a server tells the jobs of two runs apart."""
    hints: bool = False
    quotes_answers: bool = True
    """Later prompts quote the answers: ask for their token ids. vLLM then repeats the prompt's ids too."""
    forced_format: Mapping[str, Any] | None = None
    """vLLM's `structured_outputs`: the answer ends when its format does, or at the planned length."""

    def write_headers(self, job: Job) -> dict[str, str]:
        """The headers of a job's requests."""
        return {SESSION_HEADER: self._get_job_id(job)}

    def write_body(self, job: Job, index: int, prompt_field: str) -> bytes:
        """The body of a job's turn, its prompt already written."""
        turn = job.turns[index]
        fields: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": turn.num_output_tokens,
            "temperature": 0,
        }
        if self.forced_format is None:
            fields |= {"min_tokens": turn.num_output_tokens, "ignore_eos": True}
        else:
            fields["structured_outputs"] = self.forced_format
        if self.form.is_exact and self.quotes_answers:
            fields["return_token_ids"] = True
        if self.hints:
            fields["vllm_xargs"] = self._get_hints(job, index)
        # Joined as text: prompts are long, and most of a prompt was already written for the turn before.
        return f"{json.dumps(fields)[:-1]}, {prompt_field}}}".encode()

    def _get_job_id(self, job: Job) -> str:
        # A trace's ids may hold what no header can; the bound makes a digest of those.
        return get_bounded_id(f"{self.run_id}/{job.job_id}") or self.run_id

    def _get_hints(self, job: Job, index: int) -> dict[str, str | int]:
        hints: dict[str, str | int] = {
            "job_id": self._get_job_id(job),
            "is_last_step": int(index == len(job.turns) - 1),
        }
        tool = job.turns[index].tool
        return hints if tool is None else {**hints, "tool": tool}
