"""`tenuto verify`: does this server hold a job's KV cache through its tool calls?

One job of five turns. After each turn but the last the job is in a tool call: all through the gap its
blocks must stay in use. On return they must be hit, and after the last turn nothing may be left. Turn
lengths follow the published functional check of the Continuum prototype, scaled to the server's block size.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from tenuto.client.http.address import check_api_key, check_url
from tenuto.client.servers.server_metrics import CacheState, read_cache_state
from tenuto.core.errors import DataError

PROMPT_BLOCKS = (4, 8, 17, 25, 31)
"""66, 131, 279, 397 and 503 tokens, in blocks of 16."""
OUTPUT_TOKENS = (7, 9, 12, 8, 7)
TOOLS = ("ls", "cat", "grep", "git", "pytest")
SPARE_BLOCKS = 4
"""Room for outputs, markers and words that tokenize longer than most."""
PROBE_WORDS = 50
POLL_S = 0.1
RELEASE_S = 10.0
"""How long the last turn's blocks may take to be released; metrics follow with the engine's next step."""


@dataclass(frozen=True, slots=True)
class TurnCheck:
    """What one turn showed."""

    turn: int
    tool: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    min_cached_tokens: int
    """Full blocks of the previous prompt: less than this and something was lost."""
    expected_blocks: int
    """Full blocks of prompt and output without its last token, which is never computed; 0 after the last."""
    held_blocks: int
    """Least number seen in the gap, or most seen at the end after the last turn."""
    latency_s: float
    ok: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """The whole check."""

    ok: bool
    model: str
    block_size: int
    num_blocks: int
    turns: list[TurnCheck]

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def verify(
    url: str,
    *,
    gap_s: float = 1.0,
    api_key: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """Run the check against an otherwise idle server.

    Raises DataError if the server is not one this can be checked on, httpx.HTTPError if it fails.
    """
    check_url(url)
    check_api_key(api_key)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=120) as client:
        return _Check(client, gap_s, say).run()


class _Check:
    def __init__(self, client: httpx.Client, gap_s: float, say: Callable[[str], None]) -> None:
        self._client = client
        self._gap_s = gap_s
        self._say = say
        self._job_id = f"verify-{uuid.uuid4().hex[:12]}"
        self._messages: list[dict[str, str]] = []
        models = client.get("/v1/models")
        models.raise_for_status()
        try:
            first = models.json()["data"][0]
            self._model = str(first["id"])
            longest = first.get("max_model_len")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{models.url} does not name a model; is this an OpenAI-compatible server?"
            ) from error
        # Asked first: some of vLLM's metrics appear with its first request.
        self._tokens_per_word = self._measure_tokens_per_word()
        self._before = read_cache_state(client)
        block_size = self._before.block_size
        needed = (PROMPT_BLOCKS[-1] + SPARE_BLOCKS) * block_size
        room = min(longest if type(longest) is int else needed, self._before.num_blocks * block_size)
        if needed > room:
            raise DataError(
                f"the check needs {needed // block_size} blocks of {block_size} tokens for its context, "
                f"this server has room for {room // block_size}"
            )

    def run(self) -> Verdict:
        turns: list[TurnCheck] = []
        last_prompt_tokens = 0
        for number in range(len(TOOLS)):
            is_last = number == len(TOOLS) - 1
            self._say(f"turn {number + 1}/{len(TOOLS)}")
            self._extend(PROMPT_BLOCKS[number] * self._before.block_size - self._count_so_far(turns))
            hits_before = read_cache_state(self._client).num_hit_tokens
            started_s = time.monotonic()
            answer = self._send(number, is_last)
            latency_s = time.monotonic() - started_s
            usage = answer["usage"]
            prompt_tokens, output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            expected = 0 if is_last else (prompt_tokens + output_tokens - 1) // self._before.block_size
            held = self._watch_release() if is_last else self._watch_gap(expected)
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            if cached is None:
                cached = int(read_cache_state(self._client).num_hit_tokens - hits_before)
            min_cached = last_prompt_tokens // self._before.block_size * self._before.block_size
            turns.append(
                TurnCheck(
                    turn=number + 1,
                    tool=TOOLS[number],
                    prompt_tokens=prompt_tokens,
                    output_tokens=output_tokens,
                    cached_tokens=cached,
                    min_cached_tokens=min_cached,
                    expected_blocks=expected,
                    held_blocks=held,
                    latency_s=latency_s,
                    ok=cached >= min_cached and (held <= 0 if is_last else held >= expected),
                )
            )
            last_prompt_tokens = prompt_tokens
            self._messages.append(
                {"role": "assistant", "content": answer["choices"][0]["message"].get("content") or ""}
            )
        state = self._before
        return Verdict(all(t.ok for t in turns), self._model, state.block_size, state.num_blocks, turns)

    def _measure_tokens_per_word(self) -> float:
        # Tokenizers differ; the message's own markers make this a little too large, which is the safe side.
        self._extend_words(PROBE_WORDS)
        answer = self._send(len(TOOLS) - 1, is_last=True)
        self._messages.clear()
        return float(answer["usage"]["prompt_tokens"]) / PROBE_WORDS

    def _count_so_far(self, turns: list[TurnCheck]) -> int:
        return turns[-1].prompt_tokens + turns[-1].output_tokens if turns else 0

    def _extend(self, num_tokens: int) -> None:
        self._extend_words(max(2, int(num_tokens / self._tokens_per_word)))

    def _extend_words(self, num_words: int) -> None:
        # Words that no other check has sent: nothing is cached by chance.
        words = [f"{uuid.uuid4().int % 900 + 100}" for _ in range(num_words)]
        self._messages.append({"role": "user", "content": " ".join(words)})

    def _send(self, number: int, is_last: bool) -> dict[str, Any]:
        body = {
            "model": self._model,
            "messages": self._messages,
            "max_tokens": OUTPUT_TOKENS[number],
            "min_tokens": OUTPUT_TOKENS[number],
            "temperature": 0,
            "vllm_xargs": {"job_id": self._job_id, "tool": TOOLS[number], "is_last_step": int(is_last)},
        }
        response = self._client.post("/v1/chat/completions", json=body)
        if response.is_error:
            raise DataError(f"the server answered {response.status_code}: {response.text[:500]}")
        try:
            answer: dict[str, Any] = response.json()
            _ = answer["usage"]["prompt_tokens"], answer["choices"][0]["message"]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise DataError(f"not what an OpenAI server answers: {response.text[:500]!r}") from None
        return answer

    def _watch_gap(self, expected: int) -> int:
        """The least number of blocks held at any time in the gap; the first poll may come before the news."""
        end_s = time.monotonic() + self._gap_s
        least: int | None = None
        time.sleep(POLL_S)
        while time.monotonic() < end_s:
            held = self._get_held(read_cache_state(self._client))
            least = held if least is None else min(least, held)
            time.sleep(POLL_S)
        return least or 0

    def _watch_release(self) -> int:
        """Blocks still held when they should all be released; polled until none are, or time is up."""
        end_s = time.monotonic() + RELEASE_S
        while (held := self._get_held(read_cache_state(self._client))) > 0 and time.monotonic() < end_s:
            time.sleep(POLL_S)
        return held

    def _get_held(self, state: CacheState) -> int:
        used = state.num_used_blocks - self._before.num_used_blocks
        retained = (state.num_retained_blocks or 0) - (self._before.num_retained_blocks or 0)
        return max(used, retained)


def format_verdict(verdict: Verdict) -> str:
    """The verdict as a table and a sentence."""
    lines = [
        f"{verdict.model}: {verdict.num_blocks} blocks of {verdict.block_size} tokens",
        "turn  tool    prompt  output  cached (at least)  held in the gap (expected)  latency",
    ]
    for t in verdict.turns:
        lines.append(
            f"{t.turn:>4}  {t.tool:<6}  {t.prompt_tokens:>6}  {t.output_tokens:>6}  {t.cached_tokens:>6} "
            f"({t.min_cached_tokens:>8})  {t.held_blocks:>15} ({t.expected_blocks:>8})  {t.latency_s:>6.2f} s"
            f"  {'ok' if t.ok else 'FAILED'}"
        )
    if verdict.ok:
        lines.append("Held in every gap, hit on return, released at the end.")
    else:
        lines.append(
            "NOT held: this server gives a job's KV cache away during its tool calls, or keeps it after."
        )
    return "\n".join(lines)
