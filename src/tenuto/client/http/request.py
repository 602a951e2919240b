"""Writes a turn's request: the body around its prompt, and the headers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tenuto.client.http.prompts import Form
from tenuto.core.errors import ConfigError
from tenuto.core.requests.hints import get_bounded_id, make_fields
from tenuto.workload.hints import SayHints, say_job
from tenuto.workload.schema import Job

SESSION_HEADER = "X-Session-ID"


@dataclass(frozen=True, slots=True)
class RequestWriter:
    """Writes the requests of one run.

    The output's length is fixed (`min_tokens` = `max_tokens`, `ignore_eos`) unless its format is forced.
    Decoding is greedy, so the same prompts get the same answers. The job's id goes into `X-Session-ID`, which
    every server and router accepts. All other hints about the job go into `vllm_xargs`.
    """

    model: str
    form: Form
    run_id: str
    """Prefix of every job id that is sent, so that a server distinguishes the jobs of two runs."""
    say_hints: SayHints = say_job
    """What the client says about a job."""
    quotes_answers: bool = True
    """Later prompts quote the answers, so ask for token ids. vLLM then repeats the prompt's token ids too."""
    forced_format: Mapping[str, Any] | None = None
    """vLLM's `structured_outputs`. The answer ends with its format, or at the planned length."""

    def write_headers(self, job: Job, index: int = 0) -> dict[str, str]:
        """The headers of a job's turn."""
        job_id = self.say_hints(job, index).job_id
        return {SESSION_HEADER: self._make_job_id(job_id)} if job_id is not None else {}

    def write_body(self, job: Job, index: int, prompt_field: str) -> bytes:
        """The body of a job's turn. `prompt_field` is the prompt, already written."""
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
        hints = self.say_hints(job, index)
        if hints.job_id is not None:
            hints = replace(hints, job_id=self._make_job_id(hints.job_id))
        hint_fields = make_fields(hints)
        if hint_fields.keys() - {"job_id"}:  # if there is only the id, the header is enough
            fields["vllm_xargs"] = hint_fields
        # Join the parts as text: prompts are long, and most of the text was written for an earlier turn.
        return f"{json.dumps(fields)[:-1]}, {prompt_field}}}".encode()

    def _make_job_id(self, job_id: str) -> str:
        # A trace's ids may be invalid in a header. The length limit turns those into a digest.
        return get_bounded_id(f"{self.run_id}/{job_id}") or self.run_id


REGEX = "regex:"


def read_format(text: str) -> dict[str, Any]:
    """Make the request's `structured_outputs` from an option's text. Raises ConfigError.

    `json` means any JSON object; `regex:PATTERN` is a pattern. Any other text names a JSON schema file.
    """
    if text == "json":
        return {"json_object": True}
    if text.startswith(REGEX):
        return {"regex": _check_pattern(text.removeprefix(REGEX))}
    try:
        schema = json.loads(Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--force-format wants json, regex:PATTERN or a file with a JSON schema; {text}: {error}"
        ) from error
    if not isinstance(schema, dict):
        raise ConfigError(f"--force-format: {text} holds no JSON schema: not an object")
    return {"json": schema}


def _check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"--force-format: {pattern!r} is no regular expression: {error}") from error
    if not pattern:
        raise ConfigError("--force-format: the regular expression is empty")
    return pattern
