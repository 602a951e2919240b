"""What prefetching is worth: first tokens of returning turns with it and without it, on a live server.

    python -m experiments.live.prefetch_ttft --model .demo/smollm2
    python -m experiments.live.prefetch_ttft --model .demo/smollm2 --link-gb-s 0.1     copies as slow as that

Starts `tenuto serve --host-gb` on vLLM's CPU build. A job takes a turn; others fill the cache, so that its KV
is left in host memory only; then its tool returns. The clients of half of the jobs said how long it would
take, so their KV comes back before them. Both kinds take turns. A third kind never returns: another job's new
prompt comes in its place, which shows what a wrong guess costs others. Times are from sending to the first
token.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from experiments.command_line import make_parser
from experiments.live import slow_link
from experiments.routers.processes import CPU_ENV, ON_CPU
from tenuto.client.ab import make_command, run_server
from tenuto.client.metrics import parse_totals
from tenuto.client.options import Arm
from tenuto.vllm.launch import Tiers

NUM_BLOCKS = 77
FILLER_TOKENS = 1200
NUM_FILLERS = 3
NEW_TOKENS = 40
HOST_GB = 2.0


class Server:
    """Asks a server for one token at a time."""

    def __init__(self, client: httpx.Client, model: str) -> None:
        self._client = client
        self._model = model
        self._rng = random.Random(0)
        self._jobs = itertools.count()

    def make_prompt(self, num_tokens: int) -> list[int]:
        """Tokens that no other prompt begins with."""
        return [self._rng.randrange(1000, 40_000) for _ in range(num_tokens)]

    def ask(self, prompt: list[int], job: str | None = None, tool_s: float | None = None) -> float:
        """Seconds until the first token, which is the only one."""
        hints: dict[str, Any] = {"job_id": job or f"other-{next(self._jobs)}"}
        if tool_s is not None:
            # Without a tool's name nothing is learned from the jobs before, either.
            hints |= {"tool": "ls", "expected_tool_seconds": tool_s}
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "vllm_xargs": hints}
        started_s = time.monotonic()
        self._client.post("/v1/completions", json=body).raise_for_status()
        return time.monotonic() - started_s

    def fill(self) -> float:
        """Ask others until nothing older is left on the GPU; returns the seconds that took."""
        started_s = time.monotonic()
        for _ in range(NUM_FILLERS):
            self.ask(self.make_prompt(FILLER_TOKENS))
        return time.monotonic() - started_s

    def get_totals(self) -> dict[str, float]:
        """The server's counters."""
        return parse_totals(self._client.get("/metrics").text)


def take_two_turns(server: Server, name: str, num_tokens: int, tool_s: float, kind: str) -> float:
    """The first token's time of a job's second turn; of another job's new prompt if `kind` is wrong."""
    prompt = server.make_prompt(num_tokens)
    server.ask(prompt, name, None if kind == "without" else tool_s)
    left_s = time.monotonic()
    server.fill()
    time.sleep(max(0.0, left_s + tool_s - time.monotonic()))
    if kind in ("wrong", "alone"):
        return server.ask(server.make_prompt(NEW_TOKENS))
    return server.ask(prompt + server.make_prompt(NEW_TOKENS), name)


def measure(server: Server, lengths: list[int], repeats: int) -> dict[tuple[int, str], list[float]]:
    """By the context's length and kind, the times in seconds."""
    server.fill()
    tool_s = 2 * server.fill() + 1
    found: dict[tuple[int, str], list[float]] = {}
    for repeat, length, kind in itertools.product(range(repeats), lengths, ("without", "with", "wrong")):
        name = f"{kind}-{length}-{repeat}"
        found.setdefault((length, kind), []).append(take_two_turns(server, name, length, tool_s, kind))
    # What a new prompt takes where nothing was prefetched.
    found[NEW_TOKENS, "alone"] = [server.ask(server.make_prompt(NEW_TOKENS)) for _ in range(3 * repeats)]
    return found


def make_tier_arguments(link_gb_s: float | None) -> list[str]:
    """The server's options for host memory."""
    if link_gb_s is None:
        return ["--host-gb", str(HOST_GB)]
    config = Tiers(HOST_GB).get_transfer_config()
    config["kv_connector_extra_config"]["spec_module_path"] = slow_link.__name__
    return ["--kv-transfer-config", json.dumps(config)]


def main() -> None:
    """Measure, and print a table."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default=".demo/smollm2")
    parser.add_argument("--lengths", default="512,1024", metavar="N,N,…", help="contexts, tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--link-gb-s", type=float, metavar="X", help="slow the copies down to X GB/s")
    parser.add_argument("--port", type=int, default=8390)
    parser.add_argument("--log", type=Path, default=Path("prefetch_ttft.log"))
    args = parser.parse_args()
    arguments = [
        *make_tier_arguments(args.link_gb_s),
        *(*ON_CPU, "--max-num-seqs", "8", "--num-gpu-blocks-override", str(NUM_BLOCKS)),
    ]
    # The server finds the slow link's module from the root of the project.
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    environment = {**CPU_ENV, "VLLM_CPU_KVCACHE_SPACE": "2", "PYTHONPATH": path}
    if args.link_gb_s:
        environment[slow_link.SPEED] = str(args.link_gb_s)
    # A policy without leases, so that fillers can take the cache.
    command = make_command(Arm("server", "policy", "stock"), args.model, args.port, arguments)
    print(" ".join(command), file=sys.stderr, flush=True)
    with (
        run_server(command, args.port, args.log, env=environment, limit_s=600) as running,
        httpx.Client(base_url=running.url, timeout=600) as client,
    ):
        server = Server(client, client.get("/v1/models").json()["data"][0]["id"])
        found = measure(server, [int(each) for each in args.lengths.split(",")], args.repeats)
        totals = server.get_totals()
    for (length, kind), times in found.items():
        print(
            f"{length:>6} {kind:<8} {1000 * statistics.median(times):8.0f} ms "
            f"({1000 * min(times):.0f}–{1000 * max(times):.0f}, {len(times)})"
        )
    for name, value in totals.items():
        if name.startswith(("tenuto:tier_prefetch", "vllm:kv_offload_load")):
            print(f"{name} {value:g}")


if __name__ == "__main__":
    main()
