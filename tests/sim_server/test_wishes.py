"""Cache wishes on the simulated server: what is said of them, what is held, and what the page counts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import hypothesis.strategies as st
import pytest
from hypothesis import given

from tenuto.client.metrics import parse_page
from tenuto.core.types import Yields
from tenuto.core.wishes import WISH_HEADER, Mark
from tenuto.sim.server.request import count_before
from tests.sim_server.live import Live, serve

HOUR = {"type": "ephemeral", "ttl": "1h"}
SYSTEM = "You are a careful assistant. " * 40
CHAT = "/v1/chat/completions"


def make_body(**fields: Any) -> dict[str, Any]:
    blocks = [{"type": "text", "text": SYSTEM, "cache_control": HOUR}]
    messages = [{"role": "system", "content": blocks}, {"role": "user", "content": "word " * 200}]
    # It ends by itself, without a tool call: for the policy, the job is over.
    return {"messages": messages, **fields}


@pytest.fixture(scope="module")
def held() -> Iterator[Live]:
    with serve("tenuto", host_gb=0) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_the_marked_part_is_held_when_the_job_is_over(held: Live, stream: bool) -> None:
    body = make_body(job_id=f"marked{stream}", stream=stream)
    response = held.post(CHAT, body)
    assert response.status_code == 200
    said = response.headers[WISH_HEADER]
    assert said == "clipped; dialect=anthropic; asked=3600; gpu=600; below=0; reason=time-limit"
    held.wait_until(lambda: len(held.engine.scheduler.driver.leases) > 0)
    driver = held.engine.scheduler.driver
    lease = held.call(lambda: driver.leases.get(f"marked{stream}"))
    assert lease is not None and lease.terms.yields is Yields.FIRST
    # The template's words around the system prompt are tokens too.
    alone = held.chat([{"role": "system", "content": SYSTEM}], max_tokens=1)["usage"]["prompt_tokens"]
    block_size = held.engine.scheduler.config.kv.block_size
    assert (alone - 10) // block_size - 1 <= len(lease.blocks) <= alone // block_size
    released = held.post(f"/tenuto/jobs/marked{stream}/release")
    assert released.status_code == 200 and released.json()["released"]
    assert held.call(lambda: driver.leases.get(f"marked{stream}")) is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt_cache_retention": "24h"}, "clipped; dialect=openai; asked=86400; gpu=600"),
        ({"prompt_cache_options": {"ttl": "5m"}}, "accepted; dialect=openai; asked=300; gpu=300"),
        (
            {"nvext": {"cache_control": {"type": "ephemeral", "ttl": "30s"}}},
            "accepted; dialect=nvext; asked=30",
        ),
        ({"kv_hints": {"retain_full_prompt": {"ttl_seconds": 60}}}, "accepted; dialect=kv-hints; asked=60"),
        (
            {"retention_directives": [{"start": 0, "end": 64, "duration": 9}]},
            "accepted; dialect=retention-dir",
        ),
        ({"agentic_context": {"kv_retention_ttl_seconds": 9}}, "accepted; dialect=agentic-context; asked=9"),
        ({"agent_hint": {"lease_until": 1e12}}, "clipped; dialect=agent-hint; asked=86400; gpu=600"),
        ({"prompt_cache_retention": "long"}, "refused; reason=malformed; malformed=openai"),
        (
            {"prompt_cache_retention": "24h", "is_last_step": True},
            "refused; dialect=openai; asked=86400; gpu=0",
        ),
        ({"cache_control": {"type": "ephemeral"}}, None),
        ({"prompt_cache_key": "app"}, None),
        ({}, None),
    ],
)
def test_each_dialect_is_answered_and_changes_no_answer(
    held: Live, fields: dict[str, Any], said: str | None
) -> None:
    messages = [{"role": "user", "content": "How are you?"}]
    plain = {"messages": messages, "max_tokens": 8, "temperature": 0}
    response = held.post(CHAT, {**plain, **fields})
    assert response.status_code == 200, response.text
    assert (response.headers.get(WISH_HEADER) or "").startswith(said or "")
    assert (WISH_HEADER in response.headers) == (said is not None)
    assert response.json()["choices"] == held.post(CHAT, plain).json()["choices"]


def test_the_page_counts_them(held: Live) -> None:
    def count(**labels: str) -> float:
        page = parse_page(httpx.get(held.url + "/metrics").text, 0.0)
        return page.total("tenuto:wishes_total", **labels) or 0.0

    before = count(dialect="openai", result="clipped")
    long = [{"role": "user", "content": "once upon a time " * 40}]
    held.chat(long, prompt_cache_retention="24h", max_tokens=2)
    assert count(dialect="openai", result="clipped") == before + 1
    # Nothing of a prompt shorter than a block is in the cache.
    refused = count(dialect="openai", result="refused")
    held.chat([{"role": "user", "content": "Hello"}], prompt_cache_retention="24h", max_tokens=2)
    assert count(dialect="openai", result="refused") == refused + 1


def test_stock_refuses_and_says_so(live: Live) -> None:
    response = live.post(CHAT, make_body())
    assert "refused; dialect=anthropic" in response.headers[WISH_HEADER]
    assert response.headers[WISH_HEADER].endswith("reason=policy-released")
    assert not live.call(lambda: len(live.engine.scheduler.driver.leases))


def test_host_memory_holds_on_for_as_long_as_was_asked() -> None:
    with serve("tenuto", host_gb=4, kv_tokens=4096) as server:
        response = server.post(CHAT, make_body(job_id="kept"))
        assert response.headers[WISH_HEADER] == "accepted; dialect=anthropic; asked=3600; gpu=600; below=3600"
        tier = server.engine.scheduler.offloader._all_tiers[0]  # type: ignore[union-attr]
        server.wait_until(lambda: len(tier.order.kept) > 0)
        num_kept = server.call(lambda: len(tier.order.kept))
        system = server.chat([{"role": "system", "content": SYSTEM}], max_tokens=1)["usage"]["prompt_tokens"]
        assert 0 < num_kept <= system // tier.chunk_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_usage_says_what_was_read_from_the_cache_and_written_to_it(live: Live, stream: bool) -> None:
    size = live.engine.scheduler.config.kv.block_size
    fields = {"stream": stream, "stream_options": {"include_usage": True}} if stream else {}

    def ask(text: str) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2, **fields}
        response = live.post(CHAT, body)
        if not stream:
            return response.json()["usage"]  # type: ignore[no-any-return]
        events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        return json.loads(events[-1])["usage"]  # type: ignore[no-any-return]

    text = f"{stream} " + "once upon a time " * 60
    first, second = ask(text), ask(text + "and then " * 40)
    for usage, is_first in ((first, True), (second, False)):
        details, full = usage["prompt_tokens_details"], usage["prompt_tokens"] // size * size
        assert details["cached_tokens"] + details["created_cache_tokens"] == full
        assert (details["cached_tokens"] == 0) == is_first
        assert details["created_cache_tokens"] > 0


@given(
    st.lists(st.text("ab", max_size=12), min_size=1, max_size=3),
    st.text("ab", min_size=1, max_size=3),
    st.floats(0, 0.99),
)
def test_a_mark_is_where_its_tail_ends_nearest_to_its_place(
    parts: list[str], tail: str, share: float
) -> None:
    class Characters:
        def encode(self, text: str) -> list[str]:
            return list(text)

    found = count_before(Mark(share, tail), parts, Characters())  # type: ignore[arg-type]
    starts = itertools.accumulate(map(len, parts), initial=0)
    ends = [
        start + end
        for start, part in zip(starts, parts, strict=False)
        for end in range(len(tail), len(part) + 1)
        if part[:end].endswith(tail)
    ]
    place = share * sum(map(len, parts))
    if not ends:
        assert found == 0
    else:
        assert abs(found - place) == min(abs(end - place) for end in ends) and found in ends
