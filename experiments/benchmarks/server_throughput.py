"""Request throughput of plain traffic: a Tenuto server against a stock server, in turns.

    .venv/bin/python experiments/benchmarks/server_throughput.py

Both servers run all the time, on the CPU with the demo's small model; bursts of requests without job ids go
to one and the other in turns (A B B A …), so that the machine's mood meets both. Prints the ratio of
throughputs per pair of bursts; at or above 0.99 Tenuto costs plain traffic nothing that shows.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from tenuto.client.ab import run_server

ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
ARMS: dict[str, list[str]] = {
    "stock": [],
    "tenuto": ["--scheduler-cls", "tenuto.vllm.Scheduler", "--middleware", "tenuto.vllm.Middleware"],
}


def get_command(model: str, port: int, extra: list[str]) -> list[str]:
    vllm = str(Path(sys.executable).parent / "vllm")
    return [
        vllm, "serve", model, "--served-model-name", "bench", "--port", str(port), "--dtype", "float32",
        "--enforce-eager", "--block-size", "32", "--num-gpu-blocks-override", "400",
        "--max-model-len", "2048", "--max-num-seqs", "16", *extra,
    ]  # fmt: skip


async def run_burst(client: AsyncOpenAI, num_requests: int, seed: int) -> float:
    """Seconds for one burst, all requests at once."""
    rng = random.Random(seed)

    async def send() -> None:
        text = " ".join(str(rng.randrange(1000)) for _ in range(40))
        body: dict[str, Any] = {"model": "bench", "messages": [{"role": "user", "content": text}]}
        extra = {"ignore_eos": True}
        await client.chat.completions.create(**body, max_tokens=16, temperature=0, extra_body=extra)

    started_s = time.monotonic()
    await asyncio.gather(*(send() for _ in range(num_requests)))
    return time.monotonic() - started_s


async def measure(urls: dict[str, str], rounds: int, num_requests: int) -> list[float]:
    """Ratios of throughput, Tenuto over stock, one per pair of bursts."""
    clients = {
        arm: AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) for arm, url in urls.items()
    }
    ratios = []
    for number in range(-1, rounds):
        seconds = {}
        for arm in sorted(clients, reverse=number % 2 == 0):
            seconds[arm] = await run_burst(clients[arm], num_requests, number)
        if number < 0:
            continue
        ratios.append(seconds["stock"] / seconds["tenuto"])
        print(f"pair {number + 1} of {rounds}: {ratios[-1]:.3f}", flush=True)
    for client in clients.values():
        await client.close()
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=".demo/smollm2")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--requests", type=int, default=16, help="requests in a burst")
    parser.add_argument("--port", type=int, default=8091)
    parser.add_argument("--out", type=Path, default=Path(".demo"))
    args = parser.parse_args()
    with ExitStack() as stack:
        urls = {}
        for index, (arm, extra) in enumerate(ARMS.items()):
            port = args.port + index
            print(f"{arm}: starting", flush=True)
            command = get_command(args.model, port, extra)
            server = run_server(command, port, args.out / f"throughput-{arm}.log", env=ENV, say=print)
            urls[arm] = stack.enter_context(server).url
        ratios = asyncio.run(measure(urls, args.rounds, args.requests))
    median = statistics.median(ratios)
    # Half the pairs lie between the quartiles; the median's own standard error is about 0.93 × IQR / √n.
    low, _, high = statistics.quantiles(ratios, n=4)
    print(
        f"throughput of plain requests: tenuto / stock = {median:.3f} (quartiles {low:.3f} to {high:.3f}, "
        f"{len(ratios)} pairs)"
    )


if __name__ == "__main__":
    main()
