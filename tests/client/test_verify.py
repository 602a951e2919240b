"""`tenuto verify` on a server that is made up: two ranks, each with a policy that does as the test says."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field

import httpx
import pytest

from tenuto.client import promise
from tenuto.client import verify as module
from tenuto.client.promise import get_promise
from tenuto.client.verify import verify
from tenuto.client.verify_text import format_verdict
from tenuto.core.errors import DataError

BLOCK_SIZE = 16


@dataclass
class Server:
    """Holds a turn's blocks on the ranks in `holding`, and counts leases on those in `granting`."""

    policy: str
    holding: str = "01"
    granting: str = "01"
    faults: int = 0
    mode: str = "on"
    short: bool = False
    """Whether a window ends the hits of a hybrid model."""
    group: str | None = None
    num_short: int = 0
    held: dict[str, int] = field(default_factory=dict)
    granted: dict[str, int] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    seen: set[str | None] = field(default_factory=set)

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        if request.url.path == "/list_workers":
            return httpx.Response(404)
        if request.url.path == "/metrics":
            return httpx.Response(200, text="".join(map(self.show, "01")))
        return self.complete(json.loads(request.content), request.headers.get("x-data-parallel-rank"))

    def show(self, rank: str) -> str:
        at = f'engine="{rank}"'
        used = self.held.get(rank, 0) / 1000
        groups = (
            ""
            if self.group is None
            else (f'tenuto:short_hit_tokens_total{{{at},group="{self.group}"}} {self.num_short}\n')
        )
        return groups + (
            f'vllm:cache_config_info{{{at},block_size="16",num_gpu_blocks="1001"}} 1\n'
            f"vllm:kv_cache_usage_perc{{{at}}} {used}\n"
            f'tenuto:info{{{at},policy="{self.policy}"}} 1\n'
            f'tenuto:info{{{at},policy="earlier"}} 0\n'
            f'tenuto:mode{{{at},mode="{self.mode}"}} 1\n'
            f"tenuto:leases_granted_total{{{at}}} {self.granted.get(rank, 0)}\n"
            f"tenuto:policy_faults_total{{{at}}} {self.faults * sum(self.granted.values())}\n"
        )

    def complete(self, body: dict, rank: str | None) -> httpx.Response:
        self.seen.add(rank)
        rank = rank or "0"
        num_prompt = sum(len(message["content"].split()) + 1 for message in body["messages"])
        num_output = body["max_tokens"]
        is_last = body["vllm_xargs"]["is_last_step"]
        num_blocks = (num_prompt + num_output - 1) // BLOCK_SIZE
        self.held[rank] = 0 if is_last or rank not in self.holding else num_blocks
        self.granted[rank] = self.granted.get(rank, 0) + (not is_last and rank in self.granting)
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_output}
        num_cached = BLOCK_SIZE if self.short else num_prompt // BLOCK_SIZE * BLOCK_SIZE
        self.num_short += 32 if self.short else 0
        usage["prompt_tokens_details"] = {"cached_tokens": num_cached}
        message = {"message": {"content": " ".join("w" * num_output)}}
        return httpx.Response(200, json={"choices": [message], "usage": usage})


def check(server: Server, monkeypatch: pytest.MonkeyPatch) -> tuple[bool, str]:
    client = functools.partial(httpx.Client, transport=httpx.MockTransport(server.answer))
    monkeypatch.setattr(module.httpx, "Client", client)
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
    found, said = check(Server(policy, holding="0", granting="0"), monkeypatch)
    assert (found, words in said) == (is_ok, True), said


@pytest.mark.parametrize("mode", ["off", "shadow"])
def test_a_server_that_its_operator_switched_off_is_named(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=f"an operator set its mode to {mode}"):
        check(Server("tenuto", mode=mode), monkeypatch)


def test_a_lease_that_was_granted_and_does_not_hold_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not check(Server("continuum", holding="0"), monkeypatch)[0]


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


def test_promises() -> None:
    assert get_promise(None) == get_promise("stock") == get_promise("concur") == "never"
    assert get_promise("tenuto") == get_promise("continuum-fixed") == "idle"
    assert get_promise("continuum") == "may"


def test_a_server_s_word_runs_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promise, "load_policy", lambda name: pytest.fail(f"loaded {name}"))
    assert get_promise("evil.py:Policy") == get_promise("os:system") == "may"
