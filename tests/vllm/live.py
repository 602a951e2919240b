"""Real vLLM servers with a small model: how they are started, and what their tests have in common.

A server takes half a minute to start, on one core. So several files share the server of `run_shared`
(`conftest.py`). The last of them, by name, ends it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tenuto.client.ab import LocalServer, run_server
from tenuto.client.metrics import Page, parse_page
from tenuto.vllm.launch import Tiers
from tests.support.processes import get_free_port

MODEL = os.environ.get("TENUTO_TEST_MODEL", "")
BLOCK_SIZE = 32
TTL_S = 3.0
ADMIN_KEY = "operator-secret"
ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "TENUTO_ADMIN_KEY": ADMIN_KEY,
    # Resets of the cache are among vLLM's calls for development.
    "VLLM_SERVER_DEV_MODE": "1",
    # Otherwise each server computes on the first core, beside others that do too.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
WORKER_INSIDE = ("--distributed-executor-backend", "uni")
"""The engine's process does the worker's work, as on one GPU. vLLM's CPU build has another process for it
otherwise, as on several GPUs, and a start takes half as long again. The shared server starts so."""
ENV_INSIDE = ENV | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Without it, vLLM's CPU build does not follow `WORKER_INSIDE`."""


MARKS = [
    pytest.mark.server,
    pytest.mark.skipif(not MODEL, reason="TENUTO_TEST_MODEL names no model folder; `make test` sets it"),
]
"""Of every test with a real server."""


def get_command(port: int, *extra: str) -> list[str]:
    return [
        str(Path(sys.executable).parent / "vllm"), "serve", MODEL, "--served-model-name", "tiny",
        "--port", str(port), "--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK_SIZE),
        "--num-gpu-blocks-override", "97", "--max-model-len", "2048", "--max-num-seqs", "8",
        "--enable-prompt-tokens-details", *extra,
    ]  # fmt: skip


@contextmanager
def run_shared(folder: Path) -> Iterator[LocalServer]:
    """Tenuto, with a cache of 96 blocks, and host memory below it."""
    config = {
        "tenuto": {
            "policy": "continuum-fixed",
            "options": {"ttl_s": TTL_S},
            "trace": str(folder / "trace.jsonl"),
        }
    }
    port = get_free_port()
    command = get_command(
        port,
        *("--scheduler-cls", "tenuto.vllm.Scheduler", "--middleware", "tenuto.vllm.Middleware"),
        *("--additional-config", json.dumps(config)),
        *("--kv-transfer-config", json.dumps(Tiers(0.25).get_transfer_config())),
    )
    with run_server(command, port, folder / "tenuto.log", env=ENV) as running:
        yield running


def make_text(seed: str, num_words: int) -> str:
    return " ".join(f"{seed}-{n * 7919 % 1000}" for n in range(num_words))


def get_page(server: LocalServer) -> Page:
    return parse_page(httpx.get(f"{server.url}/metrics").text, time.time())


def wait_until_empty(server: LocalServer, limit_s: float = 20.0) -> None:
    """No job retained and no block in use; fails if that does not come about."""
    end_s = time.monotonic() + limit_s
    while True:
        page = get_page(server)
        held = [page.total(name) for name in ("vllm:kv_cache_usage_perc", "tenuto:retained_blocks")]
        if not any(held):
            return
        assert time.monotonic() < end_s, f"still held: {held}"
        time.sleep(0.2)
