"""`tenuto verify`: does this server hold a job's KV cache through its tool calls?

One job of five turns runs against the server. After each turn except the last, the job is in a tool call. Its
blocks must stay leased for the whole gap, and the next turn must hit them. After the last turn, the client
says that the job is complete, and nothing may stay held for it. The check asks the server only about this
job: what is held for it, and how much its turns hit. So other work does not affect the result, and the server
need not be idle. Turn lengths follow the published functional check of the Continuum prototype, scaled to the
server's block size.

The server reports its policy. A policy may ask for no lease, or for a short one, while nothing competes for
the cache. The check distinguishes this from a server that should hold blocks but does not.
"""

from __future__ import annotations

import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, NamedTuple

import httpx

from tenuto.client.address import check_api_key, check_url, get_base_url
from tenuto.client.metrics import (
    OwnJob,
    add_jobs,
    connect,
    find_engines,
    read_cache_state,
    read_job,
)
from tenuto.core.console import count
from tenuto.core.errors import DataError, TenutoError
from tenuto.core.loader import get_policy_names, load_policy
from tenuto.core.requests import SESSION_HEADER
from tenuto.core.types import WORDS, EngineView, Job, Keep, ToolCall, Turn
from tenuto.wire.response import Usage, as_text, read_usage

PROMPT_BLOCKS = (4, 8, 17, 25, 31)
"""Blocks of the turns' prompts: 66, 131, 279, 397 and 503 tokens, in blocks of 16. Fewer where the context is
shorter."""
MIN_LAST_BLOCKS = 4
"""The least for the last prompt."""
OUTPUT_TOKENS = (7, 9, 12, 8, 7)
TOOLS = ("ls", "cat", "grep", "git", "pytest")
SPARE_BLOCKS = 4
"""Additional blocks for outputs, markers, and words with more tokens than most."""
PROBE_WORDS = 50
POLL_S = 0.1
LIMIT_S = 120.0
"""Time limit for one answer, in seconds."""
NO_SUCH_PATH = '{"detail":"Not Found"}'
"""What vLLM's API server answers, with status 404, on a path that it does not have."""

Gap = Literal["held", "expired", "not granted", "yielded", "not held", "end"]
"""What became of a turn's blocks in its gap. expired: the lease lasted until the deadline that the policy
gave it. not granted: the policy asked for no lease. yielded: other turns, or a limit, took the memory. end:
after the last turn."""

_EXPIRED = ("expired", "time-limit", "idle", "price", "not-expected-back")
"""Ends of leases (`tenuto.core.types.LeaseEnd`) at a deadline, which the policy or the longest lease set."""
_NOT_GRANTED = ("policy-released", "too-late", "idle", "price", "not-expected-back")
"""Refusals (`tenuto.core.types.LeaseRefusal`) because the policy wanted no lease."""
_YIELDED = ("over-share", "tenant-share", "tenant-leases")
"""Refusals because other leases left no room."""

Promise = Literal["never", "may", "idle"]
"""What a policy promises. never: it holds nothing, like stock vLLM. may: it may hold blocks, but perhaps not
on an idle server. idle: it also holds blocks on an idle server, unless it learned a reason against it."""

_IDLE = EngineView(
    now_s=0.0,
    block_size=16,
    num_blocks=1000,
    num_free_blocks=1000,
    num_running=0,
    num_waiting=0,
    max_num_batched_tokens=2048,
)
_TURN = Turn("turn", Job("job", 0.0, 1), 0.0, 200, 7, tool=ToolCall("ls", "ls"), is_last=False)


@dataclass(frozen=True, slots=True)
class TurnCheck:
    """The result of one turn."""

    turn: int
    tool: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    min_cached_tokens: int
    """Tokens in full blocks of the previous prompt. A smaller hit means that blocks were lost."""
    expected_blocks: int
    """Full blocks of the prompt and output, without the last token, which is never computed; 0 after the last
    turn."""
    held_blocks: int
    """The lowest number of leased blocks in the gap. After the last turn: the number still leased when
    polling ended."""
    latency_s: float
    ok: bool
    gap: Gap = "not held"
    reason: str | None = None
    """Why it has no lease, or why its lease lost blocks, in words."""
    rank: str | None = None
    """The data-parallel rank. None if there is only one engine."""
    short_group: str | None = None
    """The layer group that ended the hit while another group had more."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of the whole check."""

    ok: bool
    model: str
    block_size: int
    num_blocks: int
    turns: list[TurnCheck]
    policy: str | None = None
    """The policy named by `tenuto:info`. None on stock vLLM."""
    num_faults: int = 0
    """Policy hooks that failed during the check."""
    engine_urls: tuple[str, ...] = ()
    """The engines behind a router. Empty if `url` is not a router."""
    is_disturbed: bool = False
    """Whether the check failed only because the server's other work used the memory, as it may."""
    groups: tuple[str, ...] = ()
    """On a hybrid model: the kinds of layer groups that can end a hit, such as `window 1024`."""

    @property
    def num_answer_tokens(self) -> int:
        """Tokens of answers that were hit: hits beyond the previous turns' prompts.

        With the default retention interval, stock vLLM computes them again on a hybrid model.
        """
        return sum(max(0, turn.cached_tokens - turn.min_cached_tokens) for turn in self.turns)


def verify(
    url: str,
    *,
    gap_s: float = 1.0,
    api_key: str | None = None,
    engine_urls: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """Run the check against a server, on each of its data-parallel ranks.

    If `url` is a router, turns go through it, and the state of the cache is read from the engines behind it:
    those in `engine_urls`, or those that the router lists. The job must stay with one engine.

    Raises DataError if the check does not support the server, and httpx.HTTPError if a request fails.
    """
    check_url(url)
    for engine_url in engine_urls:
        check_url(engine_url, "--engine-url")
    check_api_key(api_key)
    with ExitStack() as stack:
        client = stack.enter_context(connect(url, api_key, LIMIT_S))
        named = engine_urls or find_engines(client)
        engines = [stack.enter_context(connect(each, api_key, LIMIT_S)) for each in named]
        if engines:
            say(f"a router; metrics come from {', '.join(str(each.base_url) for each in engines)}")
        asked, model = engines or [client], read_model(client)
        # Send a request first: some of vLLM's metrics appear only after the first request.
        for each in (*engines, client):
            _Check(each, asked, gap_s, say, model).measure_tokens_per_word()
        for each in asked:
            mode, name = read_cache_state(each).mode, get_base_url(str(each.base_url))
            if mode != "on":
                raise DataError(
                    f"{name} holds nothing, because an operator set its mode to {mode}; "
                    f"`tenuto control on --url {name}` switches it on"
                )
        before = read_cache_state(*asked)
        ranks = before.engines if len(asked) == 1 < len(before.engines) else (None,)
        turns = [turn for rank in ranks for turn in _Check(client, asked, gap_s, say, model, rank).run()]
        num_faults = int(read_cache_state(*asked).num_faults - before.num_faults)
        ok = all(turn.ok for turn in turns) and not num_faults
        return Verdict(
            ok,
            model[0],
            before.block_size,
            before.num_blocks,
            turns,
            before.policy,
            num_faults,
            engine_urls=tuple(get_base_url(str(each.base_url)) for each in engines),
            is_disturbed=not ok and not num_faults and is_disturbed(turns),
            groups=before.groups,
        )


class _Answer(NamedTuple):
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    """None if the server does not say it."""
    text: str


@dataclass
class _Check:
    client: httpx.Client
    engines: Sequence[httpx.Client]
    gap_s: float
    say: Callable[[str], None]
    model: tuple[str, int | None]
    """Its name and its longest context."""
    rank: str | None = None

    def __post_init__(self) -> None:
        self._job_id = f"verify-{uuid.uuid4().hex[:12]}"
        self._messages: list[dict[str, str]] = []

    def run(self) -> list[TurnCheck]:
        self._tokens_per_word = self.measure_tokens_per_word()
        self._before = before = read_cache_state(*self.engines, engine=self.rank)
        last = PROMPT_BLOCKS[-1]
        room = before.num_blocks * before.block_size
        for limit, tokens in (("its KV cache has", room), ("its --max-model-len is", self.model[1])):
            if tokens is not None:
                last = min(last, tokens // before.block_size - SPARE_BLOCKS)
                if last < MIN_LAST_BLOCKS:
                    needed = (MIN_LAST_BLOCKS + SPARE_BLOCKS) * before.block_size
                    raise DataError(f"the check needs a context of {needed} tokens here; {limit} {tokens}")
        self._prompt_blocks = [math.ceil(blocks * last / PROMPT_BLOCKS[-1]) for blocks in PROMPT_BLOCKS]
        turns: list[TurnCheck] = []
        for number in range(len(TOOLS)):
            self.say(f"{'' if self.rank is None else f'rank {self.rank}, '}turn {number + 1}/{len(TOOLS)}")
            turns.append(self._run_turn(number, turns))
        promise = get_promise(before.policy)
        # A policy that promises to hold blocks may learn during the check that this job is not worth it. But
        # it must have held them in some gap.
        has_held = any(t.gap in ("held", "expired") for t in turns)
        if promise == "may" or (promise == "idle" and has_held):
            # Where it asked for no lease, no block may be lost.
            own = [t.gap == "not granted" and t.cached_tokens >= t.min_cached_tokens for t in turns]
            turns = [replace(t, ok=t.ok or is_own) for t, is_own in zip(turns, own, strict=True)]
        return turns

    def _run_turn(self, number: int, turns: list[TurnCheck]) -> TurnCheck:
        block_size = self._before.block_size
        is_last = number == len(TOOLS) - 1
        num_before = turns[-1].prompt_tokens + turns[-1].output_tokens if turns else 0
        num_new = self._prompt_blocks[number] * block_size - num_before
        self._extend(max(2, int(num_new / self._tokens_per_word)))
        job_before = self._read_job()
        started_s = time.monotonic()
        answer = self._send(number)
        latency_s = time.monotonic() - started_s
        prompt_tokens, output_tokens = answer.prompt_tokens, answer.output_tokens
        expected = 0 if is_last else (prompt_tokens + output_tokens - 1) // block_size
        least = 0 if is_last else self._watch_gap()
        job = self._read_job()
        cached = answer.cached_tokens
        min_cached = turns[-1].prompt_tokens // block_size * block_size if turns else 0
        if cached is None:
            cached = job.num_cached_tokens - job_before.num_cached_tokens
            if job.sees_leased_only and turns and turns[-1].gap != "held":
                min_cached = 0  # there was no lease whose tokens could count
        held = self._release() if is_last else least
        gap: Gap = "end" if is_last else judge_gap(job, held, expected)
        self._messages.append({"role": "assistant", "content": answer.text})
        is_fine = held <= 0 if is_last else gap in ("held", "expired")
        return TurnCheck(
            turn=number + 1,
            tool=TOOLS[number],
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            cached_tokens=cached,
            min_cached_tokens=min_cached,
            expected_blocks=expected,
            held_blocks=held,
            latency_s=latency_s,
            ok=cached >= min_cached and is_fine,
            gap=gap,
            reason=None if gap in ("held", "end") else WORDS.get(job.news or "", {}).get(job.reason or ""),
            rank=self.rank,
            short_group=find_short_group(job_before.num_short_tokens, job.num_short_tokens),
        )

    def _read_job(self) -> OwnJob:
        jobs = [read_job(engine, self._job_id) for engine in self.engines]
        if None in jobs and self._before.policy is not None:
            raise DataError(
                "the server has Tenuto's scheduler, but does not say what it holds for a job; start it with "
                "--middleware tenuto.vllm.Middleware, as `tenuto serve` does"
            )
        return add_jobs([job for job in jobs if job is not None])

    def measure_tokens_per_word(self) -> float:
        # Tokenizers differ. The chat template's tokens make the result slightly too large, which is safe.
        self._extend(PROBE_WORDS)
        answer = self._send(len(TOOLS) - 1, is_last=True)
        self._messages.clear()
        return answer.prompt_tokens / PROBE_WORDS

    def _extend(self, num_words: int) -> None:
        # Use words that no other check has sent, so that nothing is cached by chance.
        words = [f"{uuid.uuid4().int % 900 + 100}" for _ in range(num_words)]
        self._messages.append({"role": "user", "content": " ".join(words)})

    def _send(self, number: int, *, is_last: bool = False) -> _Answer:
        body = {
            "model": self.model[0],
            "messages": self._messages,
            "max_tokens": OUTPUT_TOKENS[number],
            "min_tokens": OUTPUT_TOKENS[number],
            "temperature": 0,
            "vllm_xargs": {"job_id": self._job_id, "tool": TOOLS[number], "is_last_step": int(is_last)},
        }
        # Routers pin sessions by this header. Tenuto uses `job_id`, which has the same value.
        headers = {SESSION_HEADER: self._job_id}
        if self.rank is not None:
            headers["X-data-parallel-rank"] = self.rank
        response = self.client.post("/v1/chat/completions", json=body, headers=headers)
        if response.status_code == 404 and response.text == NO_SUCH_PATH:
            path = response.request.url.path
            raise DataError(f"the server has no {path}: does this model generate text?")
        if response.is_error:
            raise DataError(f"the server answered {response.status_code}: {response.text[:500]}")
        try:
            answer = response.json()
            usage = read_usage(answer["usage"], "prompt_tokens", "completion_tokens") or Usage()
            if not usage.prompt_tokens or usage.output_tokens is None:
                raise ValueError("no usable counts")
            text = as_text(answer["choices"][0]["message"].get("content")) or ""
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise DataError(f"not what an OpenAI server answers: {response.text[:500]!r}") from None
        return _Answer(usage.prompt_tokens, usage.output_tokens, usage.cached_tokens, text)

    def _watch_gap(self) -> int:
        end_s = time.monotonic() + self.gap_s
        least = self._read_job().num_leased_blocks
        while time.monotonic() < end_s:
            time.sleep(POLL_S)
            least = min(least, self._read_job().num_leased_blocks)
        return least

    def _release(self) -> int:
        """Tell the server that the job is complete. Return the number of blocks still leased for it."""
        for engine in self.engines:
            engine.post(f"/tenuto/jobs/{self._job_id}/release")
        return self._read_job().num_leased_blocks


def read_model(client: httpx.Client) -> tuple[str, int | None]:
    """Read the model's name and its longest context. Raises DataError."""
    models = client.get("/v1/models")
    models.raise_for_status()
    try:
        first = models.json()["data"][0]
        longest = first.get("max_model_len")
        return str(first["id"]), longest if type(longest) is int else None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{models.url} does not name a model; is this an OpenAI-compatible server?"
        ) from error


def judge_gap(job: OwnJob, held: int, expected: int) -> Gap:
    """What happened to a turn's blocks in its gap. `held`: the number that were leased throughout."""
    if held >= expected:
        return "held"
    match job.news:
        case "ended" if job.reason in _EXPIRED:
            return "expired"
        case "not granted" if job.reason in _NOT_GRANTED:
            return "not granted"
        case "not granted" if job.reason in _YIELDED:
            return "yielded"
        case "taken back":
            return "yielded"
    return "not held"


def is_disturbed(turns: Sequence[TurnCheck]) -> bool:
    """Whether the server's other work explains every turn that is not ok, in its gap or in the one before.

    Other turns may take the memory, or the policy may decide by what it learned from them.
    """
    learned = [WORDS["not granted"][why] for why in ("price", "not-expected-back")]
    lost = [turn.gap == "yielded" or (turn.gap == "not granted" and turn.reason in learned) for turn in turns]
    return all(
        turn.ok or own or (before and (turn.gap in ("held", "expired") or not turn.held_blocks))
        for turn, own, before in zip(turns, lost, [False, *lost], strict=False)
    )


def find_short_group(before: Mapping[str, float], after: Mapping[str, float]) -> str | None:
    """The layer group that cut short the hit of the turn between two readings; None if none did."""
    new = {group: number - before.get(group, 0.0) for group, number in after.items()}
    group = max(new, key=lambda each: new[each], default=None)
    return group if group is not None and new[group] > 0 else None


def get_promise(policy: str | None) -> Promise:
    """The promise of the policy named by `tenuto:info`. `policy` is None if the server has no such metric.

    Only policies that ship with Tenuto are loaded, because a name from a server must not run code here.
    """
    if policy is None:
        return "never"
    if policy not in get_policy_names():
        return "may"
    try:
        made = load_policy(policy)
        if not made.overrides("retain"):
            return "never"
        return "idle" if isinstance(made.retain(_TURN, _IDLE), Keep) else "may"
    except TenutoError:
        return "may"


def format_verdict(verdict: Verdict) -> str:
    """The verdict as a table and a sentence."""
    policy = "stock vLLM" if verdict.policy is None else f"policy {verdict.policy}"
    lines = [
        f"{verdict.model}: {verdict.num_blocks} blocks of {verdict.block_size} tokens, {policy}",
        "turn  tool    prompt  output  cached (at least)  held in the gap (expected)  latency",
    ]
    for rank, turns in groupby(verdict.turns, lambda turn: turn.rank):
        lines += [] if rank is None else [f"rank {rank}"]
        lines += [
            f"{t.turn:>4}  {t.tool:<6}  {t.prompt_tokens:>6}  {t.output_tokens:>6}  {t.cached_tokens:>6} "
            f"({t.min_cached_tokens:>8})  {t.held_blocks:>15} ({t.expected_blocks:>8})  {t.latency_s:>6.2f} s"
            f"  {'ok' if t.ok else 'FAILED'}{'' if t.gap in ('held', 'end') else f', {t.gap}'}"
            f"{'' if t.reason is None else f': {t.reason}'}"
            for t in turns
        ]
    return "\n".join([*lines, *_conclude(verdict), *_describe_groups(verdict)])


def _describe_groups(verdict: Verdict) -> list[str]:
    """For a hybrid model: the layer groups that can end a hit, whether one did, and what stock would lose."""
    if not verdict.groups:
        return []
    names = ", ".join(verdict.groups)
    lines = [f"Hybrid model: beside full attention it has {names}. A hit needs all of them."]
    for turn in verdict.turns:
        if turn.short_group is not None and turn.cached_tokens < turn.min_cached_tokens:
            lines.append(
                f"Turn {turn.turn}: {turn.short_group} ended the hit at {turn.cached_tokens} tokens; its "
                "blocks before the prompt's end were not held. See docs/hybrid_models.md."
            )
    if verdict.ok and verdict.num_answer_tokens:
        lines.append(
            f"{verdict.num_answer_tokens} tokens of answers were hit too. At vLLM's default retention "
            "interval stock vLLM computes them again, and the second job on a shared prefix hits nothing."
        )
    return lines


def _conclude(verdict: Verdict) -> list[str]:
    lines = []
    if verdict.num_faults:
        lines.append(f"{verdict.num_faults} hooks of the policy FAILED; the server's log has the reason.")
    gaps = Counter(turn.gap for turn in verdict.turns)
    if verdict.is_disturbed:
        lines.append(
            "Not shown: the server's other work kept the memory from this job, as it may; the reasons are "
            "above. Run it again when the server has less to do."
        )
    elif not verdict.ok:
        if get_promise(verdict.policy) == "never" and verdict.policy is not None:
            lines.append(f"Policy {verdict.policy} holds nothing, by design.")
        lines.append(
            "NOT held: this server loses a job's KV cache during its tool calls, or keeps it afterwards."
        )
        if len(verdict.engine_urls) > 1:
            lines.append(
                "The turns went through a router, which may have sent them to different engines. Make sure "
                "that it pins sessions (X-Session-ID), and check each engine with its own --url."
            )
    elif not gaps["not granted"] and not gaps["expired"]:
        lines.append("Held in every gap, hit on return, released at the end.")
    else:
        lines.append("Healthy: hit on return, released at the end. But not shown in every gap:")
    if gaps["expired"]:
        lines.append(
            f"{count(gaps['expired'], 'lease')} ended in the gap, at the policy's own deadline; see --gap."
        )
    if verdict.ok and gaps["not granted"]:
        lines.append(
            f"In {count(gaps['not granted'], 'gap')} "
            "the policy asked for no lease. Holding is not shown on an idle "
            "server: nothing evicts the cache here, and some policies hold only under load."
        )
    return lines
