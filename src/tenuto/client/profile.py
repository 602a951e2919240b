"""`tenuto profile`: a client times a live server's steps, and its copies to and from host memory.

A prefill step is a prompt whose answer is one token. Its time is the time to first token, including the cost
of the request itself. The context before the timed chunk is in the prefix cache, because an earlier prompt
contained it. A decode step is timed with several answers at once: it is the time per token of the answer that
began last, because all the others were running during that time.

    ask a prompt                 its KV is computed, and stored in host memory
    ask it again                 found on the GPU:       first token after A
    fill the cache with others   its KV is evicted from the GPU
    ask it again                 loaded from host memory: first token after B; the copy took B − A

So the time of a copy includes all that a turn waits for: the queue, the steps in between, and the transfer.
The number of bytes comes from vLLM's own metrics. A server without a tier has no such metrics, and no copy is
timed.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tenuto.client.address import ServerError
from tenuto.client.http import Answer, Client, RequestFailed, RequestWriter, TokenIds
from tenuto.client.metrics import Totals, connect, get_growth, parse_totals, read_cache_state
from tenuto.client.options import ProfileOptions
from tenuto.client.probe import probe_server
from tenuto.core import console
from tenuto.core.console import count
from tenuto.core.errors import ConfigError, DataError
from tenuto.records.files import writing
from tenuto.workload.schema import Prompt, Span

UNIT = 128
"""Contexts are multiples of this number of tokens, so they end at a block boundary for usual block sizes."""
FEWEST_CHUNK_TOKENS = 32
DEFAULT_MAX_CONTEXT = 16384
OUTPUT_TOKENS = 24
"""Output tokens of each timed decode. The time per step is the average over them."""
STORED = "vllm:kv_offload_store_bytes_total"
LOADED = "vllm:kv_offload_load_bytes_total"
MARGIN = 1.2
"""To evict a prompt, fill the cache this many times, because the server may hold some blocks for others."""
LIMIT_S = 600.0
"""Time limit for one answer, in seconds."""
SHOW_EVERY = 10
"""Timed steps between two lines of progress."""
_HITS = "vllm:prefix_cache_hits_total"

Observation = dict[str, Any]
"""One line of an observations file."""
say = partial(console.say, "profile")


PAUSE_S, MAX_PAUSE_S = 1.0, 10.0
"""Seconds to wait before a step that failed is timed again: by default, and at most."""


def run_profile(options: ProfileOptions, path: Path) -> None:
    """Time the server's steps and write them to a file, one per line.

    Raises ServerError for a server that cannot be timed, and ConfigError if the file cannot be written.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}")
    is_new = not path.exists()
    with writing(path, None), path.open("a"):  # before minutes of work
        pass
    try:
        observations = asyncio.run(measure(options, _try_get_kv_tokens(options)))
    except BaseException:
        if is_new:
            path.unlink(missing_ok=True)
        raise
    with writing(path, None):
        path.write_text("".join(json.dumps(each) + "\n" for each in observations), encoding="utf-8")
    say(f"the steps are in {path}")


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

        async def read_totals() -> Totals:
            return {} if num_kv_tokens is None else parse_totals(await client.get_text("/metrics"))

        try:
            asker, before = Asker(client, writer), await read_totals()
            observations = await _time_plan(asker, plan, options.repeats, options.limit_s)
            if get_growth(before, await read_totals()).get(_HITS) == 0:
                raise ServerError(
                    f"{client.url} never hit its prefix cache, so it computed the context of each chunk too; "
                    "start it with its prefix cache on"
                )
            copies = await time_copies(asker, read_totals, max_context, num_kv_tokens, options.repeats)
            return [*observations, *copies]
        except RequestFailed as error:
            raise ServerError(f"{client.url} failed: {error.kind}: {error}") from error


def _try_get_kv_tokens(options: ProfileOptions) -> int | None:
    """The size of the server's KV cache in tokens, if its metrics report it."""
    with suppress(httpx.HTTPError, DataError), connect(options.url, options.api_key) as client:
        state = read_cache_state(client)
        return state.num_blocks * state.block_size
    return None


@dataclass(frozen=True)
class Prefill:
    """A prefill step: a chunk of new tokens after a cached context."""

    num_tokens: int
    num_context_tokens: int

    def describe(self, seconds: float) -> Observation:
        """The step, which took this long."""
        return {"prefills": [[self.num_tokens, self.num_context_tokens]], "decodes": [], "seconds": seconds}

    async def time(self, asker: Asker, repeat: int) -> float | None:
        """Seconds to the first token of the chunk; None if its context was not cached."""
        name = f"prefill{repeat}"
        context = (Span(f"{name}/context", self.num_context_tokens),) if self.num_context_tokens else ()
        chunk = Span(f"{name}/{self.num_context_tokens}+{self.num_tokens}", self.num_tokens)
        if context:
            # Longer contexts begin with the shorter ones, so only the new part is computed.
            await asker.ask(name, context, 1)
        sent_s, answer = await asker.ask(name, (*context, chunk), 1)
        cached = answer.usage.cached_tokens
        if cached is not None and cached != self.num_context_tokens:
            asker.num_unlike += 1
            return None
        return answer.first_token_s - sent_s


@dataclass(frozen=True)
class Decode:
    """A decode step: conversations that decode at the same time, and the context with which each begins."""

    num_decodes: int
    num_context_tokens: int

    def describe(self, seconds: float) -> Observation:
        """The step in the middle of the answers, which took this long."""
        context = self.num_context_tokens + OUTPUT_TOKENS // 2
        return {"prefills": [], "decodes": [context] * self.num_decodes, "seconds": seconds}

    async def time(self, asker: Asker, repeat: int) -> float | None:
        """Seconds per token of the conversations; None if not all decode at once, or show no time."""
        names = [f"decode{repeat}/{number}" for number in range(self.num_decodes)]
        prompts = [(Span(f"{name}/context", self.num_context_tokens),) for name in names]
        for name, prompt in zip(names, prompts, strict=True):
            await asker.ask(name, prompt, 1)
        asked = [asker.ask(name, prompt, OUTPUT_TOKENS) for name, prompt in zip(names, prompts, strict=True)]
        answers = [answer for _, answer in await asyncio.gather(*asked)]
        latest = max(answers, key=lambda answer: answer.first_token_s)
        num_tokens = latest.num_tokens or OUTPUT_TOKENS
        if num_tokens < 2 or latest.first_token_s > min(answer.last_token_s for answer in answers):
            return None
        # 0 for an answer that came in one piece.
        return (latest.last_token_s - latest.first_token_s) / (num_tokens - 1) or None


TimedStep = Prefill | Decode


@dataclass(frozen=True)
class ProfilePlan:
    """Prefills sorted by rising context; decodes sorted by rising context and falling batch size."""

    prefills: tuple[Prefill, ...]
    decodes: tuple[Decode, ...]

    @property
    def steps(self) -> tuple[TimedStep, ...]:
        """All steps, in the order in which they are timed."""
        return (*self.prefills, *self.decodes)


def make_plan(step_tokens: int, max_context: int, max_batch: int, num_kv_tokens: int | None) -> ProfilePlan:
    """Choose the steps: no chunk above `step_tokens`, and no decodes that do not fit into the KV cache."""
    chunks = _double(FEWEST_CHUNK_TOKENS, step_tokens)
    contexts = [0, *(_double(4 * UNIT, max_context // UNIT * UNIT))]
    prefills = tuple(Prefill(n, c) for c in contexts for n in chunks if n + c <= max_context)
    batches = _double(1, max_batch)[::-1]
    # Use half of the cache. The rest keeps the prefixes of conversations that wait for their turn.
    room = num_kv_tokens // 2 if num_kv_tokens else max_batch * max_context
    decodes = tuple(
        Decode(n, c)
        for c in [UNIT, *contexts[1:]]
        for n in batches
        if n * (c + OUTPUT_TOKENS) <= room and c + OUTPUT_TOKENS < max_context
    )
    return ProfilePlan(prefills, decodes)


def get_max_context(wanted: int | None, max_model_len: int | None, num_kv_tokens: int | None) -> int:
    """The longest prompt that can be sent and leaves room for its answer, in tokens."""
    of_model = math.inf if max_model_len is None else max_model_len - OUTPUT_TOKENS - 1
    of_cache = math.inf if num_kv_tokens is None else num_kv_tokens // 2
    return int(min(wanted or DEFAULT_MAX_CONTEXT, of_model, of_cache))


def _double(first: int, last: int) -> list[int]:
    """Numbers from first to last, each twice the one before, then last itself. Empty if last < first."""
    values = []
    while first < last:
        values.append(first)
        first *= 2
    return [*values, last] if values or first == last else []


class Asker:
    """Sends prompts of random tokens and times the answers."""

    def __init__(self, client: Client, writer: RequestWriter) -> None:
        self._client = client
        self._writer = writer
        self.num_unlike = 0
        """Number of prefills whose prefix hit was not the context that had been cached."""

    async def ask(self, name: str, prompt: Prompt, num_tokens: int) -> tuple[float, Answer]:
        """Send a prompt; return when it was sent and its answer of `num_tokens`. Raises RequestFailed."""
        body, headers = self._writer.write_alone(name, prompt, num_tokens)
        sent_s = asyncio.get_running_loop().time()
        return sent_s, await self._client.stream_answer(self._writer.form.path, body, headers)


async def _time_plan(
    asker: Asker, plan: ProfilePlan, repeats: int, limit_s: float | None
) -> list[Observation]:
    """Time the whole plan `repeats` times, so that a slow minute affects all steps in the same way."""
    end_s = math.inf if limit_s is None else time.monotonic() + limit_s
    times: dict[TimedStep, list[float]] = {}
    num_steps = repeats * len(plan.steps)
    num_done = 0
    for repeat in range(repeats):
        if repeat and time.monotonic() > end_s:
            say(f"time is up after {repeat} of {repeats} repeats")
            break
        for step in plan.steps:
            try:
                seconds = await step.time(asker, repeat)
            except RequestFailed as error:
                if not error.can_retry:
                    raise
                say(f"a step is timed again: {error.kind}: {error}")
                await asyncio.sleep(min(error.retry_after_s or PAUSE_S, MAX_PAUSE_S))
                seconds = await step.time(asker, repeat)
            if seconds is not None:
                times.setdefault(step, []).append(seconds)
            num_done += 1
            if num_done % SHOW_EVERY == 0 or num_done == num_steps:
                say(f"{num_done} of {num_steps} timed")
    _say_what_is_missing(asker, plan, times)
    return [step.describe(statistics.median(seconds)) for step, seconds in times.items()]


def _say_what_is_missing(asker: Asker, plan: ProfilePlan, times: Mapping[TimedStep, list[float]]) -> None:
    if asker.num_unlike:
        say(
            f"{asker.num_unlike} prefills found something else in the prefix cache than was put there; they "
            "are left out. Is the server idle, and its cache on?"
        )
    if missing := [step.num_decodes for step in plan.decodes if step not in times]:
        say(
            f"{len(missing)} batches of up to {max(missing)} decodes did not all run at once, or came in one "
            "piece; they are left out. Set --max-batch to the server's --max-num-seqs"
        )


async def time_copies(
    asker: Asker,
    read_totals: Callable[[], Awaitable[Totals]],
    max_context: int,
    num_kv_tokens: int | None,
    repeats: int,
) -> list[Observation]:
    """The times of copies of four prompts; empty without a tier or a known cache size.

    Every prompt is evicted and loaded `repeats` times. The longest takes half of the cache at most.
    """
    if STORED not in await read_totals() or num_kv_tokens is None:
        return []
    longest = min(max_context, num_kv_tokens // 2)
    lengths = [longest * n // 4 for n in range(1, 5)]
    say(f"host memory: {repeats} x {len(lengths)} copies")
    observations: list[Observation] = []
    for repeat in range(repeats):
        name = f"copies{repeat}"
        hits_s: dict[Prompt, float] = {}
        for length in lengths:
            prompt: Prompt = (Span(f"{name}/{length}", length),)
            await asker.ask(name, prompt, 1)
            hits_s[prompt] = await _time(asker, name, prompt)
        # Send other prompts until nothing older can be left on the GPU.
        for number in range(int(MARGIN * num_kv_tokens / longest) + 1):
            filler = f"{name}/filler{number}"
            await asker.ask(filler, (Span(filler, longest),), 1)
        for prompt, hit_s in hits_s.items():
            before = (await read_totals()).get(LOADED, 0.0)
            seconds = await _time(asker, name, prompt) - hit_s
            num_bytes = int((await read_totals()).get(LOADED, 0.0) - before)
            if num_bytes > 0 and seconds > 0:
                observations.append({"num_bytes": num_bytes, "seconds": seconds})
    num_missing = repeats * len(lengths) - len(observations)
    if num_missing:
        say(
            f"left out: {count(num_missing, 'copy')}, because the prompts were still on the GPU (does the "
            "policy hold leases?), or no longer in host memory"
        )
    return observations


async def _time(asker: Asker, name: str, prompt: Prompt) -> float:
    """Seconds to the first token."""
    sent_s, answer = await asker.ask(name, prompt, 1)
    return answer.first_token_s - sent_s
