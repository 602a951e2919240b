"""Times a live server's steps from outside.

A prefill step is a prompt whose answer is one token. Its time is the time to first token, including the cost
of the request itself. The context before the timed chunk is in the prefix cache, because an earlier prompt
contained it. A decode step is timed with several answers at once: it is the time per token of the answer that
began last, because all the others were running during that time.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import statistics
import sys
from pathlib import Path
from typing import Any

import httpx

from tenuto.client.http.client import Client, RequestFailed
from tenuto.client.http.probe import ServerError, probe_server
from tenuto.client.http.prompts import Conversation, TokenIds
from tenuto.client.http.request import RequestWriter
from tenuto.client.http.stream import Answer
from tenuto.client.profile.copies import choose_lengths, time_copies
from tenuto.client.profile.options import ProfileOptions
from tenuto.client.profile.plan import (
    OUTPUT_TOKENS,
    Decode,
    Prefill,
    ProfilePlan,
    TimedStep,
    get_max_context,
    make_plan,
)
from tenuto.client.servers.scrape import Totals, get_growth, parse_totals
from tenuto.client.servers.server_metrics import read_cache_state
from tenuto.core.errors import ConfigError, DataError
from tenuto.workload.schema import Job, Prompt, Span, TurnSpec

LIMIT_S = 600.0
"""Time limit for one answer, in seconds."""
SHOW_EVERY = 10
"""Number of timed steps between two lines of progress."""
_HITS = "vllm:prefix_cache_hits_total"

Observation = dict[str, Any]
"""One line of the observations file."""
Times = dict[TimedStep, list[float]]
"""By step, the times of its repeats in seconds."""


def run_profile(options: ProfileOptions, path: Path) -> None:
    """Time the server's steps and write them to a file, one per line.

    Raises ServerError for a server that cannot be timed, and ConfigError if the file cannot be written.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}")
    observations = asyncio.run(measure(options, _try_get_kv_tokens(options)))
    try:
        path.write_text("".join(json.dumps(each) + "\n" for each in observations), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    say(f"the steps are in {path}")


def say(text: str) -> None:
    """Print a message for the user, separate from the result."""
    print(f"[profile] {text}", file=sys.stderr, flush=True)


async def measure(options: ProfileOptions, num_kv_tokens: int | None) -> list[Observation]:
    """Time the steps of `make_plan`. Each observation is the median of its repeats."""
    async with Client(options.url, api_key=options.api_key, timeout_s=LIMIT_S) as client:
        server = await probe_server(client, TokenIds(), options.model, f"probe-{secrets.token_hex(4)}")
        max_context = get_max_context(options.max_context, server.max_model_len, num_kv_tokens)
        plan = make_plan(options.step_tokens, max_context, options.max_batch, num_kv_tokens)
        if len(plan.prefills) < 4 or len(plan.decodes) < 4:
            raise ServerError(
                f"{client.url} leaves room for contexts of {max_context} tokens, which is too little to fit"
            )
        say(
            f"{server.model}: {options.repeats} x {len(plan.prefills)} prefills and {len(plan.decodes)} "
            f"batches of decodes, contexts up to {max_context} tokens"
        )
        # Ask for token ids, because a single token may have no text.
        writer = RequestWriter(server.model, TokenIds(), f"profile-{secrets.token_hex(4)}")
        try:
            asker = Asker(client, writer)
            observations = await _time_plan(asker, plan, options.repeats)
            await _check_hits(client, server.totals)

            async def read_totals() -> Totals:
                return parse_totals(await client.get_text("/metrics"))

            lengths = choose_lengths(max_context, num_kv_tokens)
            copies = await time_copies(asker, read_totals, lengths, num_kv_tokens, options.repeats, say)
            return [*observations, *copies]
        except RequestFailed as error:
            raise ServerError(f"{client.url} failed: {error.kind}: {error}") from error


class Asker:
    """Sends prompts of random tokens and times the answers."""

    def __init__(self, client: Client, writer: RequestWriter) -> None:
        self._client = client
        self._writer = writer
        self.num_unlike = 0
        """Prefills whose prefix hit was not the context that had been put into the cache."""

    async def ask(self, name: str, prompt: Prompt, num_tokens: int) -> tuple[float, Answer]:
        """Send a prompt; return when it was sent and its answer of `num_tokens`. Raises RequestFailed."""
        turn = TurnSpec(prompt, Span(f"{name}/out", num_tokens))
        job = Job(name, 0.0, (turn,))
        writer = self._writer
        text = Conversation(job, writer.form, writer.run_id, {}).write_prompt(turn)
        body, headers = writer.write_body(job, 0, text), writer.write_headers(job)
        sent_s = asyncio.get_running_loop().time()
        return sent_s, await self._client.stream_answer(writer.form.path, body, headers)

    async def time(self, step: TimedStep, repeat: int) -> float | None:
        """Time one step in seconds. None if the server did something else. Raises RequestFailed."""
        if isinstance(step, Prefill):
            return await self._time_prefill(step, repeat)
        return await self._time_decode(step, repeat)

    async def _time_prefill(self, prefill: Prefill, repeat: int) -> float | None:
        """Seconds to the first token of a chunk after its context. None if the context was not cached."""
        name = f"prefill{repeat}"
        context = (Span(f"{name}/context", prefill.num_context_tokens),) if prefill.num_context_tokens else ()
        chunk = Span(f"{name}/{prefill.num_context_tokens}+{prefill.num_tokens}", prefill.num_tokens)
        if context:
            # Longer contexts begin with the shorter ones, so only the new part is computed.
            await self.ask(name, context, 1)
        sent_s, answer = await self.ask(name, (*context, chunk), 1)
        cached = answer.usage.cached_tokens
        if cached is not None and cached != prefill.num_context_tokens:
            self.num_unlike += 1
            return None
        return answer.first_token_s - sent_s

    async def _time_decode(self, decode: Decode, repeat: int) -> float | None:
        """Seconds per token of conversations that decode together. None if they did not all run at once."""
        names = [f"decode{repeat}/{number}" for number in range(decode.num_decodes)]
        prompts = [(Span(f"{name}/context", decode.num_context_tokens),) for name in names]
        for name, prompt in zip(names, prompts, strict=True):
            await self.ask(name, prompt, 1)
        asked = [self.ask(name, prompt, OUTPUT_TOKENS) for name, prompt in zip(names, prompts, strict=True)]
        answers = [answer for _, answer in await asyncio.gather(*asked)]
        latest = max(answers, key=lambda answer: answer.first_token_s)
        num_tokens = latest.num_tokens or OUTPUT_TOKENS
        if num_tokens < 2 or latest.first_token_s > min(answer.last_token_s for answer in answers):
            return None
        return (latest.last_token_s - latest.first_token_s) / (num_tokens - 1)


async def _time_plan(asker: Asker, plan: ProfilePlan, repeats: int) -> list[Observation]:
    """Time the whole plan `repeats` times, so that a slow minute affects all steps in the same way."""
    times: Times = {}
    num_steps = repeats * len(plan.steps)
    num_done = 0
    for repeat in range(repeats):
        for step in plan.steps:
            seconds = await asker.time(step, repeat)
            if seconds is not None:
                times.setdefault(step, []).append(seconds)
            num_done += 1
            if num_done % SHOW_EVERY == 0 or num_done == num_steps:
                say(f"{num_done} of {num_steps} timed")
    _say_what_is_missing(asker, plan, times)
    return [step.describe(statistics.median(seconds)) for step, seconds in times.items()]


def _say_what_is_missing(asker: Asker, plan: ProfilePlan, times: Times) -> None:
    if asker.num_unlike:
        say(
            f"{asker.num_unlike} prefills found something else in the prefix cache than was put there; they "
            "are left out. Is the server idle, and its cache on?"
        )
    if missing := [step.num_decodes for step in plan.decodes if step not in times]:
        say(
            f"{len(missing)} batches of up to {max(missing)} decodes did not all run at once; they are left "
            "out. Set --max-batch to the server's --max-num-seqs"
        )


async def _check_hits(client: Client, before: Totals | None) -> None:
    """Raise ServerError if the metrics show that no context was read from the prefix cache."""
    if before is None or _HITS not in before:
        return
    growth = get_growth(before, parse_totals(await client.get_text("/metrics")))
    if growth[_HITS] == 0:
        raise ServerError(
            f"{client.url} never hit its prefix cache, so what comes before a chunk was computed with it; "
            "start it with its prefix cache on"
        )


def _try_get_kv_tokens(options: ProfileOptions) -> int | None:
    """The size of the server's KV cache in tokens, if its metrics report it."""
    url = options.url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=10) as client:
            state = read_cache_state(client)
    except (httpx.HTTPError, DataError):
        return None
    return state.num_blocks * state.block_size
