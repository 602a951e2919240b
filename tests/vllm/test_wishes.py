"""Cache wishes inside vLLM: the header, the field, what is held, and host memory and disk below it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from tenuto.core.requests import WISH_FIELD, Hints
from tenuto.core.tier_order import Use, list_wished
from tenuto.core.types import Yields
from tenuto.core.wishes import Mark, Span, Wish, write_wish
from tenuto.vllm.middleware import Middleware
from tenuto.vllm.requests import OutputReader
from tenuto.vllm.scheduler import Scheduler
from tenuto.vllm.tiers.disk import NUM_THREADS
from tests.vllm.asgi import CHAT, make_scope
from tests.vllm.conftest import Clock
from tests.vllm.test_tier_copies import (
    HEADER,
    SIZE,
    finish,
    has,
    make_context,
    make_tier,
    make_transfer,
    store,
)
from tests.vllm.tiered import BLOCK_SIZE, TieredEngine
from tests.vllm.workerless import Engine, make_config, make_request, make_scheduler

GIVING = {"policy": "tests.vllm.policies:KeepNone", "strict": True}
BODY = {"model": "m", "prompt_cache_retention": "24h", "messages": [{"role": "user", "content": "Hello."}]}
WORKER = {"spec_module_path": "tenuto.vllm.tiers.worker"}


def make_client(scheduler: Any = "tenuto.vllm.Scheduler", extra: Any = None, **tenuto: Any) -> Any:
    """An engine's client, as far as the header needs it."""
    transfer = None if extra is None else SimpleNamespace(kv_connector_extra_config=extra)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(scheduler_cls=scheduler),
        kv_transfer_config=transfer,
        additional_config={"tenuto": tenuto} if tenuto else None,
    )
    return SimpleNamespace(vllm_config=config)


def ask(middleware_of: Any, body: Any, client: Any) -> tuple[str | None, bytes]:
    """The answer's header, and the body that vLLM gets."""
    sent: list[Any] = []
    seen: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(body).encode()}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = make_scope(path=CHAT)
    scope["app"] = SimpleNamespace(state=SimpleNamespace(engine_client=client))
    asyncio.run(middleware_of(app)(scope, receive, send))
    headers = dict(sent[0]["headers"])
    said = headers.get(b"x-tenuto-wish")
    return (None if said is None else said.decode()), seen[0]


@pytest.mark.parametrize(
    ("client", "expected"),
    [
        (make_client(), "clipped; dialect=openai; asked=86400; gpu=600; below=0; reason=time-limit"),
        (make_client(extra=WORKER), "accepted; dialect=openai; asked=86400; gpu=600; below=86400"),
        (make_client(extra={"spec_module_path": "others"}), "clipped; dialect=openai; asked=86400; gpu=600"),
        (
            make_client(extra=WORKER, limits={"max_wished_share": 0}),
            "clipped; dialect=openai; asked=86400; gpu=600; below=0",
        ),
        (make_client(limits={"max_lease_s": 60}), "clipped; dialect=openai; asked=86400; gpu=60"),
        (make_client(mode="off"), "refused; dialect=openai; asked=86400; gpu=0; below=0; reason=policy-rel"),
        (make_client(policy="stock"), "refused; dialect=openai; asked=86400; gpu=0; below=0"),
        (make_client(canary={"tenants": ["ann"]}), "refused; dialect=openai; asked=86400"),
        (make_client(scheduler="another.Scheduler"), "refused; dialect=openai; asked=86400"),
        (None, "refused; dialect=openai; asked=86400"),
    ],
)
def test_the_answer_says_what_the_settings_allow(client: Any, expected: str) -> None:
    said, body = ask(Middleware, BODY, client)
    assert said is not None and said.startswith(expected)
    assert json.loads(body)["vllm_xargs"][WISH_FIELD]
    assert {**json.loads(body), "vllm_xargs": None} == {**BODY, "vllm_xargs": None}


@pytest.mark.parametrize(("tenant", "expected"), [("ann", "clipped"), (None, "refused")])
def test_nothing_is_kept_for_a_client_without_a_tenant(
    monkeypatch: pytest.MonkeyPatch, tenant: str | None, expected: str
) -> None:
    monkeypatch.setenv("TENUTO_TENANT_HEADER", "X-Tenant")
    monkeypatch.setenv("TENUTO_SECRET", "s" * 20)
    hints = Hints(tenant=tenant, wish=Wish("openai", (Span(86_400.0),)))
    answers = Middleware(lambda *_: asyncio.sleep(0))._wishes
    _, said = answers.make_header(make_client(), hints) or ("", "")
    assert said.startswith(expected)


def test_without_a_wish_nothing_is_said() -> None:
    body = {**BODY, "prompt_cache_retention": None, "cache_control": {"type": "ephemeral"}}
    said, passed = ask(Middleware, body, make_client())
    assert said is None
    assert WISH_FIELD not in json.loads(passed)["vllm_xargs"]


def test_the_answer_follows_an_operators_changes() -> None:
    made: list[Middleware] = []

    def keep(app: Any) -> Middleware:
        if not made:
            made.append(Middleware(app))
        made[0].app = app
        return made[0]

    client = make_client()
    assert (ask(keep, BODY, client)[0] or "").startswith("clipped")
    limits = {"max_lease_s": 5.0}
    status = {"mode": "on", "policy": "tenuto", "options": {}, "limits": limits, "canary": None}
    made[0]._wishes.follow(status)
    assert "gpu=5;" in (ask(keep, BODY, client)[0] or "")
    made[0]._wishes.follow({**status, "mode": "off"})
    assert (ask(keep, BODY, client)[0] or "").startswith("refused")


def test_the_first_wish_s_answer_follows_an_earlier_change() -> None:
    middleware = Middleware(lambda *_: asyncio.sleep(0))
    status = {"mode": "off", "policy": "tenuto", "options": {}, "limits": {}, "canary": None}
    middleware._wishes.follow(status)
    wish = Hints(wish=Wish("openai", (Span(86_400.0),)))
    _, said = middleware._wishes.make_header(make_client(), wish) or ("", "")
    assert said.startswith("refused")


class Letters:
    """A tokenizer: each token is two letters."""

    def decode(self, tokens: Any, skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + token % 26) + chr(97 + token // 26 % 26) for token in tokens)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [ord(one) - 97 + 26 * (ord(two) - 97) for one, two in zip(text[::2], text[1::2], strict=False)]


@pytest.mark.parametrize(
    ("span", "num_blocks"),
    [
        (Span(300.0), 6),
        (Span(300.0, 40), 2),
        (Span(300.0, None, Mark(0.6, "TAIL")), 3),
        (Span(300.0, None, Mark(0.5, "absent")), 0),
    ],
)
def test_the_scheduler_holds_the_wished_part(clock: Clock, span: Span, num_blocks: int) -> None:
    scheduler = make_scheduler(Scheduler, make_config(tenuto=GIVING))
    scheduler._reader = OutputReader(Letters())
    prompt = list(range(100, 200))
    if span.mark is not None and span.mark.tail == "TAIL":
        span = Span(300.0, None, Mark(0.6, Letters().decode(prompt[30:50])))
    wish = write_wish(Wish("anthropic", (span,)))
    scheduler.add_request(make_request("r", prompt, xargs={"job_id": "j", "tool": "x", WISH_FIELD: wish}))
    Engine(scheduler).run()
    leases = list(scheduler.driver.leases)
    assert sum(len(lease.blocks) for lease in leases) == num_blocks
    assert all(lease.terms.yields is Yields.FIRST for lease in leases)
    clock.now_s += 300.0
    scheduler.driver.expire(clock.now_s)
    assert scheduler.driver.get_num_leased_blocks() == 0


def test_a_tokenizer_that_fails_ends_nothing(clock: Clock) -> None:
    class Broken:
        def decode(self, tokens: Any, skip_special_tokens: bool = False) -> str:
            raise RuntimeError("broken")

        encode = decode

    scheduler = make_scheduler(Scheduler, make_config(tenuto=GIVING))
    scheduler._reader = OutputReader(Broken())
    wish = write_wish(Wish("anthropic", (Span(300.0, None, Mark(0.5, "tail")),)))
    scheduler.add_request(make_request("r", [5] * 64, xargs={"job_id": "j", WISH_FIELD: wish}))
    Engine(scheduler).run()
    assert scheduler._reader.num_faults >= 1
    assert not len(scheduler.driver.leases)


def test_host_memory_gives_up_last_what_was_wished() -> None:
    pytest.importorskip("vllm", "0.31.0")
    engine = TieredEngine(num_blocks=60, num_chunks=20, tenuto=GIVING)
    order = engine.host._policy.order
    assert order.kept.max_chunks == 10
    wish = write_wish(Wish("anthropic", (Span(3600.0, 4 * BLOCK_SIZE),)))
    engine.add(make_request("w", [3] * 160, max_tokens=4, xargs={"job_id": "w", WISH_FIELD: wish}))
    engine.drain()
    assert len(order.kept) == 4
    for number in range(6):
        engine.add(
            make_request(f"o{number}", [10 + number] * 160, max_tokens=4, xargs={"job_id": f"o{number}"})
        )
        engine.drain()
    assert len(order) <= 20
    assert [order._chunks[chunk].owner[0] for chunk in order if chunk in order.kept] == ["w"] * 4
    assert sum(order._chunks[chunk].owner[0] == "w" for chunk in order) == 4, "the rest of it went"
    engine.host.order.expire(1e12)
    engine.add(make_request("p", [40] * 160, max_tokens=4, xargs={"job_id": "p"}))
    engine.add(make_request("q", [41] * 160, max_tokens=4, xargs={"job_id": "q"}))
    engine.drain()
    assert not any(order._chunks[chunk].owner[0] == "w" for chunk in order)
    engine.assert_clean()


def test_an_aborted_turn_s_wish_keeps_nothing() -> None:
    pytest.importorskip("vllm", "0.31.0")
    engine = TieredEngine(num_blocks=60, num_chunks=60, tenuto=GIVING)
    wish = write_wish(Wish("openai", (Span(86_400.0, None),)))
    engine.add(make_request("w", [3] * 320, max_tokens=200, xargs={"job_id": "w", WISH_FIELD: wish}))
    for _ in range(20):
        engine.step()
    assert len(engine.host.order) >= 20
    engine.abort("w")
    engine.drain()
    assert len(engine.host.order.kept) == 0
    engine.assert_clean()


def test_the_disk_gives_up_last_what_was_wished(tmp_path: Path) -> None:
    pytest.importorskip("vllm", "0.31.0")
    import numpy as np

    view = memoryview(np.arange(4 * SIZE, dtype=np.int8).reshape(4, SIZE))
    tier = make_tier(tmp_path, view, max_bytes=4 * (HEADER.size + SIZE))
    tier.limit_kept(0.5, {})
    wish = Wish("anthropic", (Span(3600.0, 32),))
    use = Use((), "j", "", list_wished(wish, 1e9))
    store(tier, b"a", b"b", b"c")
    tier.on_request_finished(make_context([b"a", b"b", b"c"], use))
    for key in (b"d", b"e", b"f", b"g"):
        tier.submit_store(make_transfer([key], [1], is_promotion=False))
        finish(tier)
    assert [has(tier, key) for key in (b"a", b"b", b"c", b"d", b"e", b"f", b"g")] == [
        True, True, False, False, False, True, True,
    ]  # fmt: skip
    tier.drain_jobs()
    assert len(list(tmp_path.rglob("*.kv"))) == 4
    # Nor is it a pin: once all that is there was wished, it goes too.
    tier.limit_kept(1.0, {})
    tier.on_request_finished(make_context([b"f", b"g"], use))
    tier.submit_store(make_transfer([b"h"], [1], is_promotion=False))
    finish(tier)
    tier.drain_jobs()
    assert len(list(tmp_path.rglob("*.kv"))) == 4
    tier.shutdown()


def test_a_client_that_ends_its_job_ends_its_wish_on_the_disk_too(tmp_path: Path) -> None:
    pytest.importorskip("vllm", "0.31.0")
    disk = {"folder": str(tmp_path), "max_bytes": 2**20}
    engine = TieredEngine(num_blocks=60, num_chunks=40, tenuto=GIVING, disk=disk)
    wish = write_wish(Wish("anthropic", (Span(3600.0),)))
    for job in ("a", "b"):
        xargs = {"job_id": job, "tool": "ls", WISH_FIELD: wish}
        engine.add(make_request(job, [ord(job)] * 160, max_tokens=4, xargs=xargs))
        engine.drain()
    (tier,) = engine.tier._port.disks
    assert len(tier._kept) == 20
    assert engine.scheduler.release("a")
    assert len(tier._kept) == 10
    # Its lease may be over before, and its job forgotten.
    engine.scheduler.driver.drop_all(0.0)
    engine.scheduler.driver._jobs.forget(engine.scheduler.driver._jobs.jobs["b"])
    engine.scheduler.release("b")
    assert len(tier._kept) == 0
    engine.assert_clean()


def test_the_chunks_of_a_turn_are_ranked_once_on_a_slow_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that are written after the turn's end, in any order. Once for each write took seconds."""
    pytest.importorskip("vllm", "0.31.0")
    disk = {"folder": str(tmp_path), "max_bytes": 2**20}
    engine = TieredEngine(num_blocks=60, num_chunks=200, tenuto=GIVING, disk=disk, max_num_batched_tokens=32)
    (tier,) = engine.tier._port.disks
    goes_on = Event()
    for _ in range(NUM_THREADS):
        tier._writers.submit(goes_on.wait)
    wish = write_wish(Wish("anthropic", (Span(3600.0),)))
    engine.add(
        make_request("a", [1] * 320, max_tokens=4, xargs={"job_id": "a", "tool": "ls", WISH_FIELD: wish})
    )
    while engine.scheduler.requests:
        engine.step()
    num_ranked, finish = 0, tier.on_request_finished

    def count(req_context: Any) -> None:
        nonlocal num_ranked
        num_ranked += 1
        finish(req_context)

    monkeypatch.setattr(tier, "on_request_finished", count)
    goes_on.set()
    engine.drain()
    assert (len(tier._files), len(tier._kept)) == (20, 20)
    assert num_ranked <= 2
    engine.assert_clean()


@pytest.mark.parametrize("are_writing", [False, True])
def test_copies_under_way_renew_no_wish_of_a_job_that_its_client_ended(
    tmp_path: Path, *, are_writing: bool
) -> None:
    """Clients end a job just after its last answer, while that turn's KV is still copied."""
    pytest.importorskip("vllm", "0.31.0")
    disk = {"folder": str(tmp_path), "max_bytes": 2**20}
    engine = TieredEngine(num_blocks=60, num_chunks=40, tenuto=GIVING, disk=disk)
    (tier,) = engine.tier._port.disks
    goes_on = Event()
    for _ in range(NUM_THREADS):
        tier._writers.submit(goes_on.wait)
    wish = write_wish(Wish("anthropic", (Span(3600.0),)))
    xargs = {"job_id": "a", "tool": "ls", WISH_FIELD: wish}
    engine.add(make_request("a", [1] * 160, max_tokens=4, xargs=xargs))
    while engine.scheduler.requests or (are_writing and not len(tier._kept)):
        engine.step()
    assert engine.scheduler.release("a")
    goes_on.set()
    engine.drain()
    assert len(tier._files) == 10
    assert len(tier._kept) == 0
    # Its client may begin a job of this id again, and wish again.
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.add(make_request("a2", [1] * 160, max_tokens=4, xargs=xargs))
    engine.drain()
    assert len(tier._kept) == 10
    engine.assert_clean()
