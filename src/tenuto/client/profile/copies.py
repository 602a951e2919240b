"""Times the copies between a live server's KV cache and its host memory, from outside.

    ask a prompt                 its KV is computed, and stored in host memory
    ask it again                 found on the GPU:       first token after A
    fill the cache with others   its KV leaves the GPU
    ask it again                 comes from host memory: first token after B; the copy took B − A

So the time of a copy has all that a turn waits for: the queue, the steps between, and the bytes. How many
bytes came, vLLM's own metrics say. A server without a tier has no such metrics, and nothing is timed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from tenuto.client.http.stream import Answer
from tenuto.client.servers.scrape import Totals
from tenuto.workload.schema import Prompt, Span

STORED = "vllm:kv_offload_store_bytes_total"
LOADED = "vllm:kv_offload_load_bytes_total"
MARGIN = 1.2
"""Fill the cache so many times over: a server may hold some blocks for others."""


class Asks(Protocol):
    """Sends one prompt and waits for its answer (`tenuto.client.profile.run.Asker`)."""

    async def ask(self, name: str, prompt: Prompt, num_tokens: int) -> tuple[float, Answer]:
        """When it was sent, and its answer of so many tokens. Raises RequestFailed."""


def choose_lengths(max_context: int, num_kv_tokens: int | None) -> list[int]:
    """Prompts to time, in tokens: four, evenly up to the longest, which half of the cache can hold."""
    longest = min(max_context, (num_kv_tokens or max_context) // 2)
    return [longest * n // 4 for n in range(1, 5)]


async def time_copies(
    asker: Asks,
    read_totals: Callable[[], Awaitable[Totals]],
    lengths: Sequence[int],
    num_kv_tokens: int | None,
    repeats: int,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """The copies as lines of an observations file; none if the server has no tier, or hides its cache's size.

    Every prompt is evicted and loaded `repeats` times.
    """
    if STORED not in await read_totals() or num_kv_tokens is None:
        return []
    say(f"host memory: {repeats} x {len(lengths)} copies")
    observations: list[dict[str, Any]] = []
    for repeat in range(repeats):
        name = f"copies{repeat}"
        prompts = {n: (Span(f"{name}/{n}", n),) for n in lengths}
        hit_s: dict[int, float] = {}
        for length, prompt in prompts.items():
            await asker.ask(name, prompt, 1)
            hit_s[length] = await _time(asker, name, prompt)
        await _fill(asker, name, num_kv_tokens, max(lengths))
        for length, prompt in prompts.items():
            before = (await read_totals()).get(LOADED, 0.0)
            seconds = await _time(asker, name, prompt) - hit_s[length]
            num_bytes = int((await read_totals()).get(LOADED, 0.0) - before)
            if num_bytes > 0 and seconds > 0:
                observations.append({"num_bytes": num_bytes, "seconds": seconds})
    num_missing = repeats * len(lengths) - len(observations)
    if num_missing:
        say(
            f"{num_missing} copies are left out: the prompts were still on the GPU (does the policy hold "
            "leases?), or no more in host memory"
        )
    return observations


async def _time(asker: Asks, name: str, prompt: Prompt) -> float:
    """Seconds to the first token."""
    sent_s, answer = await asker.ask(name, prompt, 1)
    return answer.first_token_s - sent_s


async def _fill(asker: Asks, name: str, num_kv_tokens: int, length: int) -> None:
    """Ask other prompts until nothing older can be left on the GPU."""
    for number in range(int(MARGIN * num_kv_tokens / length) + 1):
        await asker.ask(f"{name}/filler{number}", (Span(f"{name}/filler{number}", length),), 1)
