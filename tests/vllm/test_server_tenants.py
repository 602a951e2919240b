"""A real server with API keys: nobody gets out of his tenant, and what cannot be verified is kept apart."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")

from tenuto.client.ab import LocalServer, run_server
from tenuto.client.address import ServerError
from tenuto.client.metrics import parse_page
from tenuto.vllm import tenants
from tests.support.processes import get_free_port
from tests.vllm.live import ADMIN_KEY, ENV_INSIDE, MARKS, WORKER_INSIDE, get_command

pytestmark = MARKS

K1, K2 = "sk-first", "sk-second"
TENUTO = ("--scheduler-cls", "tenuto.vllm.Scheduler", "--middleware", "tenuto.vllm.Middleware")
KEYS = ("--api-key", K1, K2)
SECRET = "0123456789abcdef0123456789abcdef"

GENERATING = {
    # path: what makes it generate. `XARGS` stands for the fields that name the job.
    "/v1/chat/completions": {"messages": "TALK", "vllm_xargs": "XARGS"},
    "/v1/chat/completions/batch": {"messages": ["TALK", "TALK"], "vllm_xargs": "XARGS"},
    "/v1/completions": {"prompt": "TEXT", "vllm_xargs": "XARGS"},
    "/v1/responses": {"input": "TEXT", "max_output_tokens": 4, "vllm_xargs": "XARGS"},
    "/v1/messages": {"messages": "TALK", "vllm_xargs": "XARGS"},
    "/invocations": {"messages": "TALK", "vllm_xargs": "XARGS"},
    "/inference/v1/generate": {
        "token_ids": list(range(100, 200)),
        "sampling_params": {"max_tokens": 4, "extra_args": "XARGS"},
    },
    "/generative_scoring": None,
    "/v1/systemone": None,
    "/v1/decisions": None,
}
"""Paths that reach the scheduler. None: without anything that names a job, so nothing is kept."""
OTHER = {
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/v1/messages/render",
    "/v1/responses/render",
    "/v1/chat/completions/derender",
    "/v1/completions/derender",
    "/v1/messages/count_tokens",
    "/v1/responses/{response_id}/cancel",
    "/inference/v1/abort_requests",
    "/tokenize",
    "/detokenize",
    "/ping",
    "/collective_rpc",
    "/scale_elastic_ep",
    *("/start_profile", "/stop_profile", "/fault_tolerance/apply"),
    *("/sleep", "/wake_up", "/release_kv_cache_memory", "/pause", "/resume", "/abort_requests"),
    *("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"),
    *("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/weight_checker"),
    *("/start_weight_update", "/start_draft_weight_update", "/update_weights", "/finish_weight_update"),
    "/update_weight_version",
    "/is_scaling_elastic_ep",
}
"""Paths that compute nothing on the engine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tenants")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LocalServer]:
    """Two clients with a key each, behind a root path, with all paths that vLLM can serve for this model."""
    config = {"tenuto": {"policy": "continuum-fixed", "options": {"ttl_s": 300.0}}}
    port = get_free_port()
    command = get_command(
        port, *WORKER_INSIDE, *TENUTO, *KEYS, "--enable-scale-out", "--additional-config", json.dumps(config)
    )
    env = {**ENV_INSIDE, tenants.SECRET_VARIABLE: SECRET}
    with run_server(command, port, folder / "tenants.log", env=env) as running:
        yield running


def make_body(path: str, job_id: str, **more: Any) -> dict[str, Any]:
    text = f"{job_id}: " + " ".join(f"word-{n * 7919 % 1000}" for n in range(40))
    values = {
        "TEXT": text,
        "TALK": [{"role": "user", "content": text}],
        "XARGS": {"job_id": job_id, "tool": "ls", **more},
    }

    def fill(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: fill(each) for name, each in value.items()}
        if isinstance(value, list):
            return [fill(each) for each in value]
        return values.get(value, value) if isinstance(value, str) else value

    return {"model": "tiny", "max_tokens": 4, **fill(GENERATING[path])}


def get_headers(key: str | None, **more: str) -> dict[str, str]:
    named = {} if key is None else {"Authorization": f"Bearer {key}"}
    return {"Content-Type": "application/json", **named, **more}


def release(http: httpx.Client, job_id: str, key: str | None, query: str = "") -> httpx.Response:
    return http.post(f"/tenuto/jobs/{job_id}/release{query}", headers=get_headers(key))


def get_total(http: httpx.Client, metric: str, **labels: str) -> float:
    return parse_page(http.get("/metrics").text, 0.0).total(metric, **labels) or 0.0


def wait_for_total(http: httpx.Client, expected: float, metric: str, **labels: str) -> None:
    """The engine writes its metrics when it becomes idle, which may be after its answer."""
    end_s = time.monotonic() + 20
    while (found := get_total(http, metric, **labels)) != expected:
        assert time.monotonic() < end_s, f"{metric} is {found}, not {expected}"
        time.sleep(0.1)


def check_owner(http: httpx.Client, job_id: str, case: str) -> None:
    """The job is the first client's: nobody else can end it, and he can."""
    for key, query, expected in (
        (K2, "", (200, False)),
        (K2, f"?tenant={tenants.get_key_name(K1)}", (200, False)),
        (None, "", (401, None)),
        ("sk-third", "", (401, None)),
        (K1, "", (200, True)),
    ):
        answer = release(http, job_id, key, query)
        assert (answer.status_code, answer.json().get("released")) == expected, (case, key, query)


def test_every_path_is_known(server: LocalServer) -> None:
    """A release of vLLM with a new path needs a look: does it reach the scheduler?"""
    with httpx.Client(base_url=server.url, timeout=120) as http:
        paths = http.get("/openapi.json").json()["paths"]
    posted = {path for path, methods in paths.items() if "post" in methods}
    assert posted - GENERATING.keys() - OTHER == set()


FORMS: dict[str, tuple[Any, dict[str, str]]] = {
    "plain": (lambda text: text.encode(), {}),
    "identity": (lambda text: text.encode(), {"Content-Encoding": "identity"}),
    "gzip, which it is not": (lambda text: text.encode(), {"Content-Encoding": "gzip"}),
    "a byte order mark": (lambda text: text.encode("utf-8-sig"), {}),
    "UTF-16": (lambda text: text.encode("utf-16"), {}),
    "UTF-32": (lambda text: text.encode("utf-32-be"), {}),
    "blanks": (lambda text: b" " * (9 << 20) + text.encode(), {}),
    "a member twice": (
        lambda text: text[:-1].encode() + b', "vllm_xargs": {"tool": "x"}, "model": "tiny"}',
        {},
    ),
}


def test_no_path_and_no_body_leads_out_of_the_tenant(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tenants.SECRET_VARIABLE, SECRET)
    cases = [(path, "plain") for path, body in GENERATING.items() if body is not None]
    cases += [("/v1/chat/completions", form) for form in FORMS if form not in ("plain", "a member twice")]
    cases += [("/invocations", "UTF-16")]
    forged = {"tenant": "ann", tenants.FIELD: "00:ann"}
    with httpx.Client(base_url=server.url, timeout=120) as http:
        for number, (path, form) in enumerate(cases):
            job_id, (encode, headers) = f"job-{number}", FORMS[form]
            for more in ({}, forged):
                body = encode(json.dumps(make_body(path, job_id, **more)))
                answer = http.post(path, content=body, headers=get_headers(K1, **headers))
                assert answer.status_code == 200, (path, form, answer.text)
                check_owner(http, job_id, f"{path}, {form}, {more}")
        assert get_total(http, "tenuto:unverified_requests_total") == 0
        assert get_total(http, "tenuto:tenant_leased_blocks", tenant="(none)") == 0
        # The operator may end any job.
        path = "/v1/completions"
        http.post(path, json=make_body(path, "job"), headers=get_headers(K1)).raise_for_status()
        name = tenants.get_key_name(K1)
        status = http.get("/tenuto/control", headers=get_headers(ADMIN_KEY)).json()
        assert list(status["ranks"][0]["tenants"]) == [name]
        assert release(http, "job", ADMIN_KEY).status_code == 400
        assert release(http, "job", ADMIN_KEY, f"?tenant={name}").json()["released"] is True


def test_who_has_no_valid_key_keeps_nothing(server: LocalServer) -> None:
    """VLLM checks no key on this path."""
    path = "/invocations"
    with httpx.Client(base_url=server.url, timeout=120) as http:
        before = get_total(http, "tenuto:unverified_requests_total")
        for key in (None, "sk-third", f"{K1}x"):
            answer = http.post(path, json=make_body(path, "free"), headers=get_headers(key))
            assert answer.status_code == 200
        wait_for_total(http, before + 3, "tenuto:unverified_requests_total")
        assert get_total(http, "tenuto:retained_blocks") == 0
        assert release(http, "free", K1).json()["released"] is False
    assert "the tenant cannot be verified" in server.log.read_text()


def test_no_page_names_a_tenant_unless_it_is_set(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tenants.SECRET_VARIABLE, SECRET)
    path = "/v1/completions"
    with httpx.Client(base_url=server.url, timeout=120) as http:
        http.post(path, json=make_body(path, "shown"), headers=get_headers(K1)).raise_for_status()
        wait_for_total(http, 1, "tenuto:retained_jobs")
        assert get_total(http, "tenuto:tenant_leased_blocks", tenant="(others)") > 0
        page = http.get("/metrics").text
        assert "key-" not in page
        assert release(http, "shown", K1).json()["released"] is True
    # The test itself asks for it in addresses, which vLLM logs.
    log = [line for line in server.log.read_text().splitlines() if "HTTP/1.1" not in line]
    assert not [line for line in log if tenants.get_key_name(K1) in line]


def test_a_server_with_keys_and_without_the_plug_in_does_not_start(folder: Path) -> None:
    """Nor without the middleware: the engine itself finds the keys, here in a file."""
    file, log, port = folder / "keys.yaml", folder / "alone.log", get_free_port()
    file.write_text(f"api-key:\n  - {K1}\n  - {K2}\n")
    env = {**ENV_INSIDE, "VLLM_PLUGINS": "", tenants.SECRET_VARIABLE: ""}
    command = get_command(port, *WORKER_INSIDE, *TENUTO[:2], "--config", str(file))
    with pytest.raises(ServerError), run_server(command, port, log, env=env):
        pytest.fail("it started")
    assert "add `tenuto` to VLLM_PLUGINS" in log.read_text()
