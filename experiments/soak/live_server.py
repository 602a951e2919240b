"""One life of a server under soak: its command, its state file before, its log and its trace afterwards."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from experiments.routers.processes import CPU_ENV, ON_CPU, Running, get_free_port
from experiments.soak.book import Book
from tenuto.client.ab import run_server
from tenuto.core.control import ADMIN_VARIABLE
from tenuto.report.analyze import analyze
from tenuto.vllm.launch import find_vllm

STOCK = "stock"
"""The name of lives without Tenuto."""
MAX_IDLE_S = 12.0
"""The longest lease, so that a rest of the clients ends soon."""
KEY = "the soak's own key"
SHAPE = (
    *("--served-model-name", "soak", *ON_CPU),
    *("--num-gpu-blocks-override", "97", "--max-num-seqs", "8"),
)
"""What both servers are given: a small cache, so that memory is always short."""


def get_command(model: str, folder: Path, policy: str, host_gb: float) -> list[str]:
    """`tenuto serve` with a trace, a state file and host memory, or the same server without Tenuto."""
    if policy == STOCK:
        return [find_vllm(), "serve", model, *SHAPE]
    config = {
        "tenuto": {
            "policy": policy,
            "limits": {"max_lease_s": MAX_IDLE_S},
            "trace": str(folder / "trace.jsonl"),
            "trace_max_mb": 8,
            "state": str(folder / "state.json"),
            "save_every_s": 10,
        }
    }
    command = [sys.executable, "-m", "tenuto.cli", "serve", model, *SHAPE]
    tier = ["--host-gb", str(host_gb)] if host_gb else []
    return [*command, *tier, "--additional-config", json.dumps(config)]


def start_server(command: list[str], log: Path, num_threads: int | None, limit_s: float) -> Running:
    """Start it on a free port. `num_threads`: threads that compute; None for vLLM's own choice.

    Raises ServerError if it is not up after `limit_s`.
    """
    port = get_free_port()
    # Resets of the cache are among vLLM's calls for development.
    env = {**CPU_ENV, "VLLM_SERVER_DEV_MODE": "1", ADMIN_VARIABLE: KEY}
    if num_threads is not None:
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(num_threads)}
    return run_server([*command, "--port", str(port)], port, log, env=env, limit_s=limit_s)


def prepare_state(state: Path, book: Book, rng: random.Random) -> str:
    """Damage the state file now and then; what the server must say about it at its start."""
    if not state.exists():
        return ""
    if rng.random() < 0.6:
        return "continues with the state in"
    book.counts["damaged states"] += 1
    state.write_bytes(state.read_bytes()[:-20])
    return "is ignored"


def check_log(log: Path, book: Book) -> None:
    """Errors of the engine's process, and of Tenuto's addresses, that no fault explains."""
    known = ("metrics are not updated", "cannot be written", "is not saved in", "is ignored, policy")
    for line in log.read_text(errors="replace").splitlines():
        # An API server complains of its dead engine, which was killed on purpose.
        is_ours = line.startswith("(EngineCore") or "control: a request failed" in line
        if is_ours and " ERROR " in line and not any(each in line for each in known):
            book.fail("log", line)


def check_trace(trace: Path, book: Book) -> None:
    """The trace is readable, wherever the server was killed or its disk was full."""
    try:
        report = analyze(trace, say=lambda text: None)
    except Exception as error:
        book.fail("trace", repr(error))
    else:
        book.counts["turns in the trace"] = sum(report["turns"].values()) if "turns" in report else 0
