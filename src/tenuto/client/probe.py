"""Asks a server about itself before the load, and checks with one request that it can be measured."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from tenuto.client.address import SILENT, ServerError, advise
from tenuto.client.http import (
    Answer,
    Client,
    Form,
    RequestFailed,
    RequestWriter,
    make_printable,
)
from tenuto.client.load import get_pause_s
from tenuto.core.console import say
from tenuto.core.errors import ConfigError
from tenuto.workload.hints import SayHints, say_job
from tenuto.workload.schema import Span, Workload

PROMPT_TOKENS = 64
OUTPUT_TOKENS = 4
NUM_ATTEMPTS = 3
LIMIT_S = 120.0
"""Time limit for the probe's answer in seconds. A server's first forward pass may take a minute. A longer
time means that the server hangs."""


@dataclass(frozen=True, slots=True)
class Server:
    """What a server reports about itself. Values that it does not report are None."""

    model: str
    max_model_len: int | None
    version: str | None
    sends_ids: bool

    def also(self, other: Server) -> Server:
        """The capabilities that this server and another one have in common."""
        lengths = [each for each in (self.max_model_len, other.max_model_len) if each is not None]
        return replace(
            self, max_model_len=min(lengths, default=None), sends_ids=self.sends_ids and other.sends_ids
        )


async def probe_server(
    client: Client,
    form: Form,
    model: str | None,
    run_id: str,
    say_hints: SayHints = say_job,
    forced_format: Mapping[str, Any] | None = None,
) -> Server:
    """Ask the server about itself and request one short answer. Raises ServerError.

    The short request uses the same `say_hints` as the load. If these hints include the last turn, the request
    is marked as the last turn of its job and leaves no lease. Otherwise a busy server would count the lease
    only after its metrics were read.
    """
    model, max_model_len = await _get_model(client, model)
    writer = RequestWriter(model, form, run_id, say_hints, forced_format=forced_format)
    answer = await _get_answer(client, writer)
    if form.is_exact and answer.usage.prompt_tokens not in (None, PROMPT_TOKENS):
        raise ServerError(
            f"{client.url} counts {answer.usage.prompt_tokens} tokens in a prompt of {PROMPT_TOKENS} token "
            "ids: it does not take them as they are; try --prompts words"
        )
    found = None
    with suppress(RequestFailed):
        found = await client.get_json("/version")
    version = found.get("version") if isinstance(found, dict) else None
    return Server(
        model=model,
        max_model_len=max_model_len,
        version=version if isinstance(version, str) else None,
        sends_ids=answer.token_ids is not None,
    )


def check_lengths(workload: Workload, server: Server) -> None:
    """Raise ConfigError if a turn does not fit into the model's context length."""
    turns = ((job, number, turn) for job in workload.jobs for number, turn in enumerate(job.turns, 1))
    for job, number, turn in turns:
        num_tokens = turn.num_prompt_tokens + turn.num_output_tokens
        if server.max_model_len is not None and num_tokens > server.max_model_len:
            raise ConfigError(
                f"{workload.name}: job {job.job_id!r} turn {number} has {num_tokens} tokens, "
                f"the server takes {server.max_model_len}; shorten the texts with --scale-lengths"
            )


async def _get_model(client: Client, wanted: str | None) -> tuple[str, int | None]:
    try:
        models = (await client.get_json("/v1/models"))["data"]
        named = {str(each["id"]): _read_length(each.get("max_model_len")) for each in models}
    except (RequestFailed, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, RequestFailed) and error.kind in ("connect", "reset", "timeout"):
            raise ServerError(f"{client.url} does not answer ({error.kind}: {error}); {SILENT}") from error
        if wanted is not None:
            return wanted, None
        asked, kind = f"{client.url}/v1/models", getattr(error, "kind", "")
        if kind.startswith("http 4"):
            status = int(kind.removeprefix("http "))
            raise ServerError(f"{asked} answers with status {status}{advise(status)}") from error
        raise ServerError(f"{asked} does not name a model ({error}); give --model") from error
    model = next(iter(named), None) if wanted is None else wanted
    if model is None or model not in named:
        served = make_printable(", ".join(named)) or "none"
        raise ServerError(f"{client.url} serves no model {wanted!r}; it serves {served}")
    return model, named[model]


def _read_length(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


async def _get_answer(client: Client, writer: RequestWriter) -> Answer:
    body, headers = writer.write_alone("probe", (Span("probe", PROMPT_TOKENS),), OUTPUT_TOKENS)
    hint = ""
    for attempt in range(NUM_ATTEMPTS):
        try:
            async with asyncio.timeout(LIMIT_S):
                return await client.stream_answer(writer.form.path, body, headers)
        except TimeoutError:
            failure = f"no answer within {LIMIT_S:g} s"
        except RequestFailed as error:
            failure = f"{error.kind}: {error}"
            if not error.can_retry:
                hint = _get_hint(writer)
                break
            if attempt < NUM_ATTEMPTS - 1:
                pause_s = get_pause_s(attempt, error.retry_after_s, "probe")
                if error.retry_after_s:
                    say("probe", f"{client.url}: {failure}; it asks to wait, next attempt in {pause_s:.0f} s")
                await asyncio.sleep(pause_s)
    raise ServerError(f"{client.url}{writer.form.path} did not answer a short request: {failure}{hint}")


def _get_hint(writer: RequestWriter) -> str:
    """What a server may not know that refuses the short request."""
    hint = "; if it takes no token ids, try --prompts words" if writer.form.is_exact else ""
    if writer.forced_format is not None:
        hint += "; if it knows no structured_outputs, leave --force-format out"
    return hint
