"""Starts vllm-router and servers as processes of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import httpx

from tenuto.client.ab import LocalServer, run_server
from tenuto.client.metrics import parse_totals

ENGINE = (
    *("--gpu", "H100", "--model", "llama-3.1-8b", "--step-cost", "roofline"),
    # As in the plugin, all leases yield, and usage leaves out what only leases hold.
    *("--limits", "plugin", "--kv-tokens", "60000", "--host-gb", "400"),
)
"""One small engine. Each has room for about six whole jobs of ab8."""
WATCH = ("--health-check-interval-secs", "5", "--health-failure-threshold", "2")
"""By default vllm-router looks every 60 s and gives up an engine after three failed looks."""
ON_CPU = ("--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", "2048")
"""A small vLLM server on CPUs, with the smallest blocks that it has there."""
CPU_ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
Running = AbstractContextManager[LocalServer]
"""A server that runs inside the context. It is entered when the server answers."""


def find_router() -> str | None:
    """The `vllm-router` command: $VLLM_ROUTER, beside this Python, or on the PATH."""
    beside = Path(sys.executable).parent / "vllm-router"
    return os.environ.get("VLLM_ROUTER") or (str(beside) if beside.exists() else shutil.which("vllm-router"))


def start_all(stack: ExitStack, servers: Iterable[Running]) -> list[LocalServer]:
    """Start servers side by side, because a start is mostly imports."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(stack.enter_context, servers))


def run_engine(folder: Path, *arguments: str) -> Running:
    """Run one simulated server; the arguments are those of `tenuto serve --engine sim`."""
    port = get_free_port()
    command = [
        *(sys.executable, "-m", "tenuto.cli", "serve", "--engine", "sim", "--port", str(port), *arguments)
    ]
    return run_server(command, port, folder / f"engine-{port}.log")


def run_vllm(folder: Path, model: str, *arguments: str) -> Running:
    """Run a real vLLM server with a small cache; the arguments are those of `tenuto serve`."""
    port = get_free_port()
    command = [
        *(sys.executable, "-m", "tenuto.cli", "serve", model, "--port", str(port), *arguments),
        *(*ON_CPU, "--num-gpu-blocks-override", "200", "--max-num-seqs", "8"),
        "--enable-prompt-tokens-details",
    ]
    env = {**CPU_ENV, "OMP_NUM_THREADS": "1"}
    return run_server(command, port, folder / f"vllm-{port}.log", env=env, limit_s=600)


def run_router(folder: Path, engines: Sequence[str], *arguments: str) -> Running:
    """Run vllm-router in front of the engines. Raises FileNotFoundError where it is not installed."""
    router = find_router()
    if router is None:
        raise FileNotFoundError("there is no vllm-router here; install it with: pip install 'tenuto[router]'")
    port, metrics_port = get_free_port(), get_free_port()
    command = [
        *(router, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)),
        *("--worker-startup-check-interval", "1", *arguments, "--worker-urls", *engines),
    ]
    return run_server(command, port, folder / f"router-{port}.log")


def run_naming(folder: Path, url: str) -> Running:
    """Run `tenuto record --name-jobs` before a router, for clients that send no id."""
    port = get_free_port()
    command = [
        *(sys.executable, "-m", "tenuto.cli", "record", "--name-jobs", "--url", url, "--port", str(port)),
        *("--tokens", "text", "--out", str(folder / f"recorded-{port}.jsonl")),
    ]
    return run_server(command, port, folder / f"naming-{port}.log")


def kill(server: LocalServer) -> None:
    """End a server and all its processes at once, as a power cut would."""
    with contextlib.suppress(ProcessLookupError):
        server.signal(9)


def count_turns(url: str) -> float:
    """Requests that an engine finished."""
    return parse_totals(httpx.get(f"{url}/metrics").text).get("vllm:request_success_total", 0.0)


def get_free_port() -> int:
    """A port that nothing uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
