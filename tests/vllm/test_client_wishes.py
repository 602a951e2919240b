"""A real vLLM server and unchanged clients that say how long they would like their cache to be kept.

Its policy keeps nothing of answers without a tool call.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import httpx
import pytest

pytest.importorskip("vllm")

from openai import OpenAI

from tenuto.client.ab import LocalServer
from tenuto.client.metrics import Page
from tests.vllm.live import ADMIN_KEY, BLOCK_SIZE, MARKS, get_page, make_text, wait_until_empty

pytestmark = MARKS

HEADER = "x-tenuto-wish"
HOUR = {"type": "ephemeral", "ttl": "1h"}


def wait_for(server: LocalServer, is_true: Any, limit_s: float = 30.0) -> None:
    """Wait until something holds of the server's page of metrics; engines write it once a second."""
    end_s = time.monotonic() + limit_s
    while not is_true(get_page(server)):
        assert time.monotonic() < end_s, "it never came true"
        time.sleep(0.2)


class Sums(NamedTuple):
    """What vLLM's page and the ledger have counted so far."""

    page: Page
    total: dict[str, float]


def read_sums(server: LocalServer) -> Sums:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    (rank,) = httpx.get(f"{server.url}/tenuto/ledger", headers=headers).json()["ranks"]
    return Sums(get_page(server), rank["total"])


@pytest.fixture(scope="module", autouse=True)
def before(server: LocalServer) -> Sums:
    """What other files have left: no lease, and sums of which some turns may have been cut off."""
    wait_until_empty(server)
    return read_sums(server)


def release(server: LocalServer, job: str) -> None:
    assert httpx.post(f"{server.url}/tenuto/jobs/{job}/release").json()["released"]


def test_the_openai_package_asks_for_a_day(server: LocalServer) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
    messages: Any = [{"role": "user", "content": make_text("openai", 60)}]
    asked: Any = {"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0}
    plain = client.chat.completions.create(**asked)
    answer = client.chat.completions.with_raw_response.create(
        **asked, prompt_cache_retention="24h", prompt_cache_key="app", extra_headers={"X-Session-ID": "day"}
    )
    assert answer.headers[HEADER] == "accepted; dialect=openai; asked=86400; gpu=600; below=86400"
    read = answer.parse()
    assert read.choices[0].message == plain.choices[0].message
    usage = read.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    # The first answer's prompt is in the cache, but for the block that its end is in.
    cached = usage.prompt_tokens_details.cached_tokens
    assert cached is not None and usage.prompt_tokens - BLOCK_SIZE <= cached < usage.prompt_tokens
    wait_for(server, lambda page: page.total("tenuto:wishes_total", dialect="openai", result="accepted") == 1)
    assert (get_page(server).total("tenuto:retained_jobs") or 0) == 1
    release(server, "day")
    wait_for(server, lambda page: not page.total("tenuto:retained_blocks"))


@pytest.mark.parametrize("streams", [False, True])
def test_the_anthropic_package_marks_its_system_prompt(server: LocalServer, streams: bool) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120)
    job = f"hour{streams}"
    system = make_text(f"system{streams}", 80)
    user = make_text(f"user{streams}", 60)

    def ask(text: str, **fields: Any) -> tuple[Any, dict[str, str]]:
        asked: Any = {
            "model": "tiny",
            "max_tokens": 4,
            "system": [{"type": "text", "text": system, "cache_control": HOUR}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": text}]}],
            "extra_headers": {"X-Session-ID": job},
            **fields,
        }
        if streams:
            with client.messages.stream(**asked) as events:
                return events.get_final_message(), dict(events.response.headers)
        answer = client.messages.with_raw_response.create(**asked)
        return answer.parse(), dict(answer.headers)

    first, headers = ask(user)
    assert headers[HEADER] == "accepted; dialect=anthropic; asked=3600; gpu=600; below=3600"
    wait_for(server, lambda page: page.total("tenuto:retained_jobs") == 1)
    held = get_page(server).total("tenuto:retained_blocks")
    alone = OpenAI(base_url=f"{server.url}/v1", api_key="none").chat.completions.create(
        model="tiny", messages=[{"role": "system", "content": system}], max_tokens=1
    )
    assert alone.usage is not None
    most = alone.usage.prompt_tokens // BLOCK_SIZE
    assert held is not None and most - 1 <= held <= most, "what is before the mark, and nothing behind it"
    second, _ = ask(make_text(f"other{streams}", 60))
    for message, is_first in ((first, True), (second, False)):
        usage = message.usage
        read, written = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
        assert read is not None and written is not None
        total = usage.input_tokens + read + written
        assert (read + written) == total // BLOCK_SIZE * BLOCK_SIZE
        assert (read < 2 * BLOCK_SIZE) == is_first
        assert is_first or read >= (most - 1) * BLOCK_SIZE
    release(server, job)
    wait_for(server, lambda page: not page.total("tenuto:retained_blocks"))


def test_a_bare_mark_is_no_wish_and_a_broken_one_is_counted(server: LocalServer) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120)

    def ask(control: Any) -> Any:
        return client.messages.with_raw_response.create(
            model="tiny",
            max_tokens=2,
            system=[{"type": "text", "text": "Be brief.", "cache_control": control}],
            messages=[{"role": "user", "content": "Hello"}],
        )

    assert HEADER not in ask({"type": "ephemeral"}).headers
    broken = ask({"type": "ephemeral", "ttl": "2 weeks"})
    assert broken.status_code == 200
    assert broken.headers[HEADER] == "refused; reason=malformed; malformed=anthropic"
    wait_for(server, lambda page: page.total("tenuto:malformed_wishes_total", dialect="anthropic") == 1)
    assert not get_page(server).total("tenuto:retained_blocks")


def test_the_ledger_s_sums_are_those_of_vllm_s_page(server: LocalServer, before: Sums) -> None:
    """Of this file's turns, and of two more: one reads the GPU's cache, and one what was stored below it."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)

    def ask(seed: str) -> None:
        client.completions.create(model="tiny", prompt=make_text(seed, 60), max_tokens=4)

    def count(page: Page, metric: str, **labels: str) -> float:
        return (page.total(metric, **labels) or 0.0) - (before.page.total(metric, **labels) or 0.0)

    stored = {"metric": "tenuto:tenant_tokens_total", "kind": "stored"}
    num_stored = count(get_page(server), **stored)
    ask("ledger")
    ask("ledger")
    wait_for(server, lambda page: count(page, **stored) > num_stored)
    assert httpx.post(f"{server.url}/reset_prefix_cache").status_code == 200
    ask("ledger")
    total = {name: value - before.total[name] for name, value in read_sums(server).total.items()}
    wait_for(server, lambda page: count(page, "vllm:prompt_tokens_total") == total["prompt_tokens"])
    page = get_page(server)
    sources = {"cached": "local_cache_hit", "loaded": "external_kv_transfer"}
    for kind, source in sources.items():
        counted = count(page, "vllm:prompt_tokens_by_source_total", source=source)
        assert counted == total[f"{kind}_tokens"] > 0, kind
    rest = total["prompt_tokens"] - total["cached_tokens"] - total["loaded_tokens"]
    assert count(page, "vllm:prompt_tokens_by_source_total", source="local_compute") == rest
    assert count(page, "vllm:generation_tokens_total") == total["output_tokens"]
    assert count(page, "vllm:request_success_total") == total["turns"]
    assert total["stored_tokens"] > 0 and total["host_block_seconds"] > 0
