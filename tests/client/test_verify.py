"""`tenuto verify` on a server that is made up: two ranks, each with a policy that does as the test says.

The server has other jobs, whose blocks, hits and leases come and go at every request.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx
import pytest

from tenuto import cli
from tenuto.client import verify as module
from tenuto.client.metrics import CacheState, read_cache_state
from tenuto.client.verify import format_verdict, get_promise, verify
from tenuto.core.errors import DataError

BLOCK_SIZE = 16
CLIENT = httpx.Client


@dataclass
class Server:
    """Holds a turn's blocks on the ranks in `holding`; on the others it says what happened to the lease."""

    policy: str
    holding: str = "01"
    news: tuple[str, str] = ("not granted", "policy-released")
    first_news: tuple[str, str] | None = None
    """For the first turn, if it is another."""
    has_jobs: bool = True
    """Whether it has the middleware's addresses."""
    says_cached: bool = True
    """Whether its answers have vLLM's details of prompts."""
    keeps_released: bool = False
    faults: int = 0
    mode: str = "on"
    engine_urls: tuple[str, ...] = ()
    """The engines that it lists as a router; the mode is that of the last one."""
    longest: int | None = None
    short: bool = False
    has_tenants: bool = False
    """Whether a client's ledger lacks all hits."""
    group: str | None = None
    """The window or state that ends the hits of a hybrid model."""
    num_short: int = 0
    held: dict[str, int] = field(default_factory=dict)
    """Blocks by job, as are the next four."""
    ranks: dict[str, str] = field(default_factory=dict)
    told: dict[str, tuple[str, str] | None] = field(default_factory=dict)
    reused: dict[str, int] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    num_answers: int = 0
    seen: set[str | None] = field(default_factory=set)
    noise: Random = field(default_factory=lambda: Random(1))

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m", "max_model_len": self.longest}]})
        if request.url.path == "/list_workers":
            return httpx.Response(200, json={"urls": self.engine_urls})
        if request.url.path == "/metrics":
            is_last = str(request.url).removesuffix("/metrics") in self.engine_urls[-1:]
            mode = "on" if self.engine_urls and not is_last else self.mode
            return httpx.Response(200, text="".join(self.show(rank, mode) for rank in "01"))
        if request.url.path.startswith("/tenuto/jobs/"):
            return self.tell(request.method, request.url.path.split("/")[3])
        return self.complete(json.loads(request.content), request.headers.get("x-data-parallel-rank"))

    def tell(self, method: str, job: str) -> httpx.Response:
        if not self.has_jobs:
            return httpx.Response(404)
        if method == "POST":
            known = self.ranks.pop(job, None) is not None and not self.keeps_released
            self.held.pop(job, None) if known else None
            return httpx.Response(200, json={"job": job, "released": known})
        news = self.told.get(job) or (None, None)
        rank = {
            "rank": 0,
            "turns": 1,
            "leased_blocks": self.held.get(job, 0),
            "lease_news": news[0],
            "reason": news[1],
            "reusable_tokens": 10**6,
            "kept_tokens": self.kept.get(job, 0),
            "ledger": {"turns": 1, "prompt_tokens": 10**6},
        }
        if not self.has_tenants:
            cached = self.reused.get(job, 0)
            rank["reused_tokens"] = 0  # what counts is the ledger
            rank["short_tokens"] = {self.group: self.num_short} if self.group and self.num_short else {}
            rank["ledger"] |= {"cached_tokens": cached - cached // 3, "loaded_tokens": cached // 3}
        return httpx.Response(200, json={"job": job, "ranks": [rank]})

    def show(self, rank: str, mode: str) -> str:
        at = f'engine="{rank}"'
        used = self.noise.random()
        short = self.noise.randrange(10**6)  # of everybody
        groups = (
            ""
            if self.group is None
            else (f'tenuto:short_hit_tokens_total{{{at},group="{self.group}"}} {short}\n')
        )
        return groups + (
            f'vllm:cache_config_info{{{at},block_size="16",num_gpu_blocks="1001"}} 1\n'
            f"vllm:kv_cache_usage_perc{{{at}}} {used}\n"
            + (f'tenuto:info{{{at},policy="{self.policy}"}} 1\n' if self.policy else "")
            + f'tenuto:info{{{at},policy="earlier"}} 0\n'
            f'tenuto:mode{{{at},mode="{mode}"}} 1\n'
            f"tenuto:retained_blocks{{{at}}} {self.noise.randrange(1000)}\n"
            f"vllm:prefix_cache_hits_total{{{at}}} {self.noise.randrange(10**6)}\n"
            f"tenuto:policy_faults_total{{{at}}} {self.faults * self.num_answers}\n"
        )

    def connect(self, **options: Any) -> httpx.Client:
        return CLIENT(**options, transport=httpx.MockTransport(self.answer))

    def complete(self, body: dict, rank: str | None) -> httpx.Response:
        self.seen.add(rank)
        job = body["vllm_xargs"]["job_id"]
        first = job not in self.ranks
        self.num_answers += 1
        rank = self.ranks[job] = rank or "0"
        num_prompt = sum(len(message["content"].split()) + 1 for message in body["messages"])
        num_output = body["max_tokens"]
        is_last = body["vllm_xargs"]["is_last_step"]
        num_blocks = (num_prompt + num_output - 1) // BLOCK_SIZE
        holds, was_held = rank in self.holding, bool(self.held.get(job))
        self.held[job] = 0 if is_last or not holds else num_blocks
        self.told[job] = None if holds else self.first_news if first and self.first_news else self.news
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_output}
        num_cached = BLOCK_SIZE if self.short else num_prompt // BLOCK_SIZE * BLOCK_SIZE
        self.num_short += 32 if self.short else 0
        self.reused[job] = self.reused.get(job, 0) + num_cached
        self.kept[job] = self.kept.get(job, 0) + was_held * num_cached
        if self.says_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": num_cached}
        if is_last:
            del self.ranks[job]
        message = {"message": {"content": " ".join("w" * num_output)}}
        return httpx.Response(200, json={"choices": [message], "usage": usage})


def check(server: Server, monkeypatch: pytest.MonkeyPatch) -> tuple[bool, str]:
    monkeypatch.setattr(module.httpx, "Client", server.connect)
    monkeypatch.setattr(module, "POLL_S", 0.001)
    verdict = verify("http://server", gap_s=0.005)
    assert [turn.rank for turn in verdict.turns] == ["0"] * 5 + ["1"] * 5
    return verdict.ok, format_verdict(verdict)


def test_each_rank_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server("tenuto")
    is_ok, said = check(server, monkeypatch)
    assert is_ok, said
    assert server.seen >= {"0", "1"}
    assert "rank 0" in said and "rank 1" in said and "Held in every gap" in said


@pytest.mark.parametrize(
    ("policy", "is_ok", "words"),
    [
        ("continuum", True, "not shown on an idle server"),
        ("my.module:Policy", True, "not shown on an idle server"),
        ("tenuto", False, "NOT held"),
        ("stock", False, "holds nothing, by design"),
    ],
)
def test_a_rank_that_grants_no_lease(
    policy: str, is_ok: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, said = check(Server(policy, holding="0"), monkeypatch)
    assert (found, words in said) == (is_ok, True), said
    assert "not granted: the policy wanted no lease" in said


def test_a_server_that_does_not_count_cached_tokens_is_asked_for_the_job_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_ok, said = check(Server("tenuto", says_cached=False), monkeypatch)
    assert is_ok, said
    is_ok, said = check(Server("tenuto", says_cached=False, short=True), monkeypatch)
    assert not is_ok and "NOT held" in said


@pytest.mark.parametrize("short", [False, True])
def test_a_server_with_tenants_is_asked_for_hits_on_what_the_job_s_leases_held(
    short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_ok, said = check(Server("tenuto", says_cached=False, has_tenants=True, short=short), monkeypatch)
    assert is_ok is not short, said
    # A gap without a lease, by choice: it does not say whether anything was hit.
    server = Server("continuum", says_cached=False, has_tenants=True, holding="0")
    assert check(server, monkeypatch)[0]


@pytest.mark.parametrize("short", [False, True])
def test_a_busy_server_is_asked_for_the_job_s_own_ledger(
    short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that it shows of everybody is noise: only what it says of this job is right."""
    server = Server("tenuto", says_cached=False, group="state", short=short)
    is_ok, said = check(server, monkeypatch)
    assert is_ok is not short, said
    assert ("state ended the hit" in said) is short


def test_a_server_that_keeps_what_was_released_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    is_ok, said = check(Server("tenuto", keeps_released=True), monkeypatch)
    assert not is_ok and "NOT held" in said


@pytest.mark.parametrize(
    ("news", "is_disturbed"),
    [
        (("taken back", "waiting-turn"), True),
        (("not granted", "over-share"), True),
        (("not granted", "price"), True),
        (("not granted", "policy-released"), False),
        (("not granted", "not-cached"), False),
        (("ended", "switched"), False),
    ],
)
def test_memory_that_others_take_neither_fails_the_check_nor_passes_it(
    news: tuple[str, str], is_disturbed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server("tenuto", holding="0", news=news)
    is_ok, said = check(server, monkeypatch)
    assert not is_ok
    assert ("Not shown" in said, "NOT held" in said) == (is_disturbed, not is_disturbed)
    monkeypatch.setattr(module.httpx, "Client", server.connect)
    assert cli.main(["verify", "--url", "http://server", "--gap", "0.005"]) == (2 if is_disturbed else 1)


def test_stock_holds_nothing_and_tenuto_without_its_middleware_cannot_be_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_ok, said = check(Server("", has_jobs=False), monkeypatch)
    assert not is_ok and "stock vLLM" in said and "NOT held" in said
    with pytest.raises(DataError, match="Middleware"):
        check(Server("tenuto", has_jobs=False), monkeypatch)


@pytest.mark.parametrize("mode", ["off", "shadow"])
def test_a_server_that_its_operator_switched_off_is_named(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=f"an operator set its mode to {mode}"):
        check(Server("tenuto", mode=mode), monkeypatch)
    server = Server("tenuto", mode=mode, engine_urls=("http://a", "http://b"))
    with pytest.raises(DataError, match=r"^http://b holds nothing.* on --url http://b`"):
        check(server, monkeypatch)


@pytest.mark.parametrize(("num_blocks", "last"), [(8, 5), (20, 16), (34, 30)])
def test_prompts_are_as_long_as_a_small_server_s_context_allows(
    num_blocks: int, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.httpx, "Client", Server("tenuto", longest=num_blocks * BLOCK_SIZE).connect)
    verdict = verify("http://server", gap_s=0.005)
    lengths = [turn.prompt_tokens for turn in verdict.turns[:5]]
    assert verdict.ok and lengths == sorted(lengths)
    assert (last - 2) * BLOCK_SIZE < lengths[-1] < (last + 2) * BLOCK_SIZE
    assert all(turn.held_blocks for turn in verdict.turns[:4])


def test_a_server_that_is_too_small_for_the_check_names_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"\d+ tokens here; its --max-model-len is 64$"):
        check(Server("tenuto", longest=64), monkeypatch)


def test_a_model_that_generates_no_text_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server("tenuto")
    missing = httpx.Response(404, json={"detail": "Not Found"})
    monkeypatch.setattr(server, "complete", lambda body, rank: missing)
    with pytest.raises(DataError, match="no /v1/chat/completions: does this model generate text"):
        check(server, monkeypatch)


def test_a_lease_that_was_granted_and_does_not_hold_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server("continuum", holding="0", news=("ended", "reset"))
    assert not check(server, monkeypatch)[0]


def test_faults_of_the_policy_fail_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    is_ok, said = check(Server("tenuto", faults=1), monkeypatch)
    assert not is_ok
    assert "hooks of the policy FAILED" in said


def test_on_a_hybrid_model_it_names_the_group_and_what_stock_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    is_ok, said = check(Server("tenuto", group="window 1024"), monkeypatch)
    assert is_ok and "it has window 1024" in said and "stock vLLM computes them again" in said
    is_ok, said = check(Server("tenuto", group="state", short=True), monkeypatch)
    assert not is_ok and "Turn 3: state ended the hit at 16 tokens" in said
    assert "Hybrid" not in check(Server("tenuto"), monkeypatch)[1]


def test_the_state_of_several_servers_is_their_sum() -> None:
    def read(*servers: Server) -> CacheState:
        clients = [server.connect(base_url=f"http://{n}") for n, server in enumerate(servers)]
        return read_cache_state(*clients)

    ours, other = (Server(name, faults=1, num_answers=2) for name in ("tenuto", "concur"))
    assert (read(ours).num_blocks, read(ours).num_faults, read(ours).policy) == (2000, 4, "tenuto")
    assert read(ours).engines == ("0", "1")
    both = read(ours, Server("tenuto", group="state", mode="shadow"))
    assert (both.num_blocks, both.num_faults, both.policy) == (4000, 4, "tenuto")
    assert (both.groups, both.mode) == (("state",), "shadow")
    assert read(ours, other).policy in ("tenuto", "concur")
    assert read(ours, Server("")).policy is None, "stock vLLM promises nothing"


def test_promises() -> None:
    assert get_promise(None) == get_promise("stock") == get_promise("concur") == "never"
    assert get_promise("tenuto") == get_promise("continuum-fixed") == "idle"
    assert get_promise("continuum") == "may"


def test_a_server_s_word_runs_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "load_policy", lambda name: pytest.fail(f"loaded {name}"))
    assert get_promise("evil.py:Policy") == get_promise("os:system") == "may"
