"""What `tenuto record` adds to a request: time to first byte and whole time, with and without it, in turns.

    python experiments/benchmarks/proxy_delay.py [--requests 300] [--prompt-chars 20000] [--events 50]

Prints medians of both ways and of their difference, in milliseconds. Client, proxy and server are processes
of their own, and both ways are asked in turns, so that what else the machine does weighs on both alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

SERVER = """
import asyncio, json, sys
from aiohttp import web

async def answer(request):
    if request.path == "/tokenize":
        return web.Response(status=404)
    await request.read()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for n in range(int(sys.argv[1])):
        delta = {"choices": [{"index": 0, "delta": {"content": " w"}, "finish_reason": None}]}
        await response.write(b"data: " + json.dumps(delta).encode() + b"\\n\\n")
    await response.write(b'data: {"choices": [{"finish_reason": "stop"}]}\\n\\ndata: [DONE]\\n\\n')
    return response

async def main():
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def ask(session: aiohttp.ClientSession, url: str, body: bytes) -> tuple[float, float]:
    """Milliseconds to the first byte of the answer's body, and to its last."""
    started_s = time.perf_counter()
    async with session.post(f"{url}/v1/chat/completions", data=body) as response:
        await response.content.readany()
        first_s = time.perf_counter()
        await response.read()
    return (first_s - started_s) * 1000, (time.perf_counter() - started_s) * 1000


async def measure(direct: str, proxied: str, num_requests: int, body: bytes) -> None:
    """Ask both in turns and print the medians."""
    times: dict[str, list[tuple[float, float]]] = {direct: [], proxied: []}
    async with aiohttp.ClientSession() as session:
        for number in range(num_requests + 20):
            for url in (direct, proxied) if number % 2 else (proxied, direct):
                taken = await ask(session, url, body)
                if number >= 20:  # the first ones open connections
                    times[url].append(taken)
    for index, what in enumerate(("first byte", "whole answer")):
        a, b = ([each[index] for each in times[url]] for url in (direct, proxied))
        added = statistics.median(y - x for x, y in zip(a, b, strict=True))
        print(f"{what}: direct {show(a)}, recorded {show(b)}, added {added:.2f} ms (median)")


def show(times_ms: list[float]) -> str:
    """Median and 95th percentile."""
    return f"{statistics.median(times_ms):.2f} ms (p95 {statistics.quantiles(times_ms, n=20)[-1]:.2f})"


def main() -> None:
    """Start all three, and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--prompt-chars", type=int, default=20_000)
    parser.add_argument("--events", type=int, default=50)
    parsed = parser.parse_args()
    body = json.dumps(
        {"stream": True, "messages": [{"role": "user", "content": "x " * (parsed.prompt_chars // 2)}]}
    )
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(parsed.events)], stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        direct = f"http://127.0.0.1:{int(server.stdout.readline())}"
        out = str(Path(folder) / "trace.jsonl")
        command = [sys.executable, "-m", "tenuto.cli", "record", "--url", direct, "--out", out, "--port", "0"]
        proxy = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert proxy.stderr is not None
            proxied = proxy.stderr.readline().split()[1]
            asyncio.run(measure(direct, proxied, parsed.requests, body.encode()))
        finally:
            proxy.kill()
            server.kill()
            proxy.communicate()
            server.communicate()


if __name__ == "__main__":
    main()
