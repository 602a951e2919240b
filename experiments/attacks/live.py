"""The same attacks on two live servers, stock vLLM and Tenuto, one after the other.

    python -m experiments.attacks.live --model .demo/smollm2 [--attacks none,busy] [--policy tenuto] [--json]

Starts two vLLM servers that differ only in the scheduler. Each attack runs on stock first, then on Tenuto,
with the same requests at the same times, and nothing else runs meanwhile. The scene is small enough for a
CPU: every text has a twentieth of its length, and so has the cache. A run ends when all turns have ended, or
after `--limit-s`; a probe that waits then counts with the time it waited. The servers' caches are emptied
between the runs. What a policy learned in one attack, it knows in the next, as on a real server.

Latencies are real, so on a busy machine they are noise; `--repeat` runs everything several times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path

import httpx

from experiments.attacks.options import add_options, get_attacks, get_scene
from experiments.attacks.plans import Attack, Scene, make_say, make_workload
from experiments.attacks.table import Outcome, make_outcome, show
from experiments.command_line import make_parser
from experiments.routers.processes import CPU_ENV, ON_CPU, Running, get_free_port, start_all
from tenuto.client.ab import run_server
from tenuto.client.address import ServerError
from tenuto.client.http import Client, RequestWriter, TokenIds
from tenuto.client.load import Load
from tenuto.client.result import Sending
from tenuto.records.schema import TurnRecord
from tenuto.workload.turn_driver import TurnDriver

BLOCK_SIZE = 32
"""As `ON_CPU` has it."""
MODEL_NAME = "attacked"
SCENE = Scene(
    window_s=24.0,
    probe_every_s=1.0,
    agents_per_s=0.5,
    kv_tokens=4096,
    num_seqs=16,
    lengths=0.05,
    strength=0.5,
)
"""Sizes that a CPU with two cores serves."""
ENV = {**CPU_ENV, "VLLM_SERVER_DEV_MODE": "1"}
"""With the development mode, a server has a call that empties its cache."""


def say(text: str) -> None:
    print(f"[attacks] {text}", file=sys.stderr, flush=True)


# The servers.


def start_servers(args: argparse.Namespace, scene: Scene, stack: ExitStack) -> dict[str, str]:
    """The URL of each server, by policy."""
    config = json.dumps({"tenuto": {"policy": args.policy}})
    extras = {
        "stock": [],
        args.policy: ["--scheduler-cls", "tenuto.vllm.Scheduler", "--additional-config", config],
    }

    def run(policy: str) -> Running:
        port = get_free_port()
        log = args.out / f"{policy.replace(':', '-').replace('/', '-')}.log"
        command = [
            args.vllm, "serve", args.model, "--served-model-name", MODEL_NAME, "--port", str(port),
            *ON_CPU, "--num-gpu-blocks-override", str(scene.kv_tokens // BLOCK_SIZE + 1),
            "--max-num-seqs", str(scene.num_seqs), "--max-num-batched-tokens", "512",
            "--enable-prompt-tokens-details", *extras[policy], *args.vllm_arg,
        ]  # fmt: skip
        return run_server(command, port, log, env=ENV, say=lambda text: say(f"{policy}: {text}"))

    servers = start_all(stack, map(run, extras))
    return {policy: server.url for policy, server in zip(extras, servers, strict=True)}


def reset_cache(url: str) -> None:
    httpx.post(f"{url}/reset_prefix_cache", timeout=30).raise_for_status()


# One run.


async def attack_server(url: str, attack: Attack, scene: Scene, limit_s: float) -> list[TurnRecord]:
    """Run one workload on a server; the records of all turns that were sent."""
    records: list[TurnRecord] = []
    workload = make_workload(attack, scene)
    run_id = f"run-{secrets.token_hex(4)}"
    writer = RequestWriter(MODEL_NAME, TokenIds(), run_id, make_say(attack), quotes_answers=False)
    async with Client(url, api_key=None, timeout_s=limit_s + 60) as client:
        sending = Sending(is_exact=True, block_size=BLOCK_SIZE)
        load = Load(
            TurnDriver(workload),
            lambda due: nullcontext(client.stream_answer),
            writer,
            records.append,
            sending=sending,
        )
        asyncio.get_running_loop().call_later(limit_s, load.stop)
        await load.run()
    return records


def measure(name: str, policy: str, records: list[TurnRecord], limit_s: float) -> Outcome:
    """What the probe and the agents had."""

    def get_wait_s(turn: TurnRecord) -> float:
        return (limit_s if turn.first_token_s is None else turn.first_token_s) - (turn.sent_s or 0.0)

    return make_outcome(name, policy, records, get_wait_s, lambda turn: turn.first_token_s)


def run(args: argparse.Namespace) -> Iterator[Outcome]:
    scene = get_scene(args)
    with ExitStack() as stack:
        say(f"starting two servers; their logs are in {args.out}")
        urls = start_servers(args, scene, stack)
        for url in urls.values():
            # The first forward pass of a process is slow.
            asyncio.run(attack_server(url, Attack(), Scene(window_s=2, lengths=0.05), 30.0))
        for name, attack in get_attacks(args).items():
            for _ in range(args.repeat):
                for policy, url in urls.items():
                    reset_cache(url)
                    records = asyncio.run(attack_server(url, attack, scene, args.limit_s))
                    yield measure(name, policy, records, args.limit_s)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default=".demo/smollm2", help="model folder or name")
    parser.add_argument("--policy", default="tenuto", help="Tenuto's policy (see `tenuto policies`)")
    parser.add_argument("--vllm", default=str(Path(sys.executable).parent / "vllm"), help="the vllm to run")
    parser.add_argument("--vllm-arg", action="append", default=[], help="one more argument for vLLM")
    parser.add_argument("--limit-s", type=float, default=60.0, help="end each run after so many seconds")
    parser.add_argument("--repeat", type=int, default=1, help="how often each attack runs on each server")
    parser.add_argument(
        "--out", type=Path, default=Path(".demo/attacks"), help="folder for the servers' logs"
    )
    add_options(parser, SCENE)
    args = parser.parse_args()
    get_attacks(args)
    if not os.access(args.vllm, os.X_OK):
        raise SystemExit(f"--vllm: {args.vllm} is no program")
    args.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the servers are stopped
    try:
        for line in show(run(args), as_json=args.json):
            print(line, flush=True)
    except ServerError as error:
        raise SystemExit(f"[attacks] {error}") from None
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
