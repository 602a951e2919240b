"""Tenuto's router inside Ray Serve: a local Ray, two replicas that serve OpenAI requests, and agent jobs.

    pip install 'tenuto[ray,sim,bench]'
    python -m experiments.routers.ray_fleet [--routers tenuto,power-of-two-of-ray] [--jobs 24] [--json]

Each replica starts one simulated server and passes requests on to it. The front takes HTTP requests and sends
them through Ray's deployment handle, where the request router chooses the replica. The jobs send no id, so
Ray's own router, which compares queue lengths, cannot keep them together; Tenuto's knows them by content.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from experiments.command_line import make_parser
from experiments.routers.processes import ENGINE, count_turns, get_free_port, run_engine
from tenuto.client.ab import measure_run
from tenuto.client.options import BenchOptions
from tenuto.records.files import RunFiles
from tenuto.workload.load import LoadOptions

RAYS_OWN = "power-of-two-of-ray"


class Engine:
    """One replica: a simulated server of its own, and what passes requests on to it."""

    def __init__(self, speed: float) -> None:
        self._folder = tempfile.TemporaryDirectory()
        running = run_engine(Path(self._folder.name), *ENGINE, "--policy", "tenuto", "--speed", str(speed))
        self._running = running
        self._url = running.__enter__().url
        self._client = httpx.AsyncClient(base_url=self._url, timeout=600)

    async def get_url(self) -> str:
        return self._url

    async def pass_on(
        self, request: dict[str, Any], path: str, headers: dict[str, str]
    ) -> AsyncIterator[bytes]:
        """The pieces of the answer."""
        async with self._client.stream("POST", path, json=request, headers=headers) as answer:
            async for piece in answer.aiter_raw():
                yield piece


def serve_fleet(router: str, args: argparse.Namespace, port: int) -> list[str]:
    """Start the application; returns the addresses of the replicas' servers."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse

    from tenuto.ray.router import TenutoRouter

    config: dict[str, Any] = {}
    if router != RAYS_OWN:
        config["request_router_config"] = RequestRouterConfig(
            request_router_class=TenutoRouter, request_router_kwargs={"router": router}
        )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    quiet = {"num_cpus": 0}
    engine = serve.deployment(
        Engine, num_replicas=2, max_ongoing_requests=256, ray_actor_options=quiet, **config
    ).bind(args.speed)

    @serve.deployment(max_ongoing_requests=1000, ray_actor_options=quiet)
    class Front:
        def __init__(self, engines: Any) -> None:
            self._engines = engines
            self._model = {"id": "llama-3.1-8b", "object": "model", "max_model_len": 59_984}

        async def __call__(self, request: Request) -> Response:
            if request.url.path == "/v1/models":
                return JSONResponse({"object": "list", "data": [self._model]})
            if request.url.path == "/health":
                return Response()
            if request.method != "POST":
                return Response(status_code=404)
            body, wanted = await request.json(), {"x-session-id", "x-tenuto-last-step"}
            headers = {name: value for name, value in request.headers.items() if name in wanted}
            handle = self._engines.options(stream=True, session_id=headers.get("x-session-id", ""))
            pieces = handle.pass_on.remote(body, request.url.path, headers)
            kind = "text/event-stream" if body.get("stream") else "application/json"
            return StreamingResponse(pieces, media_type=kind)

    front: Any = Front
    serve.run(front.bind(engine), name="fleet")
    found: set[str] = set()
    deployment = serve.get_deployment_handle("Engine", "fleet")
    for _ in range(200):
        found.add(deployment.get_url.remote().result())
        if len(found) == 2:
            break
    return sorted(found)


def run(router: str, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one router."""
    import ray
    from ray import serve

    port = get_free_port()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        engines = serve_fleet(router, args, port)
        load = LoadOptions(jps=args.jps, max_jobs=args.jobs, scale_lengths=0.5, hints=args.hints, seed=1)
        options = BenchOptions(
            urls=(f"http://127.0.0.1:{port}",),
            engine_urls=tuple(engines),
            load=load,
            retries=3,
            answers="server",
        )
        with RunFiles(None) as files:
            result = measure_run(options, files)
        turns = [count_turns(url) for url in engines]
    finally:
        serve.shutdown()
        ray.shutdown()
    return {
        "router": router,
        "turns": result["turns"]["planned"],
        "answered": result["turns"]["ok"],
        "kept": result["reused_tokens"] / result["reusable_tokens"],
        "fuller_replica": max(turns) / sum(turns),
    }


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--routers", default=f"tenuto,{RAYS_OWN}", help="names, separated by commas")
    parser.add_argument("--jobs", type=int, default=24)
    parser.add_argument("--jps", type=float, default=4.0)
    parser.add_argument("--hints", default="none", help="what clients say, as for tenuto bench")
    parser.add_argument("--speed", type=float, default=20.0, help="simulated seconds per second")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    figures = [run(router, args) for router in args.routers.split(",")]
    if args.json:
        print(json.dumps(figures))
        return 0
    print("| router | answered | context kept | fuller replica |\n|---|---|---|---|")
    for each in figures:
        print(
            f"| {each['router']} | {each['answered']} of {each['turns']} | {each['kept']:.1%} | "
            f"{each['fuller_replica']:.0%} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
