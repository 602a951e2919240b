"""Where AIPerf's time to a first token is spent outside the server.

    export REQUEST_TIMES=times.jsonl
    tenuto serve MODEL … --middleware experiments.benchmarks.harness_delay.RequestTimes
    aiperf profile … --export-http-trace --artifact-dir out
    python -m experiments.benchmarks.harness_delay times.jsonl out/profile_export.jsonl

Start the server in a clone, with the clone in PYTHONPATH. The middleware writes down when each request came
to the server and when its first text left it. AIPerf's export has the same requests, by the id that AIPerf
sends with each, and the clocks are one machine's. vLLM's own clock starts later than the middleware's and
ends earlier (`vllm:time_to_first_token_seconds`, in the table of `harnesses`).
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.json_lines import append_lines, read_lines

Message = MutableMapping[str, Any]
COLUMNS = ("before", "connecting", "server", "after", "all")
"""Mean seconds of requests: until the server has it, opening its connection (a part of `before`), from there
until its first text leaves the server, until AIPerf has this text, and all together."""


class RequestTimes:
    """ASGI middleware that writes a line for each streamed answer, to the file that $REQUEST_TIMES names."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._file = Path(os.environ["REQUEST_TIMES"])

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[..., Awaitable[None]]
    ) -> None:
        """Handle one connection. Nothing is changed."""
        came_s, is_sent = time.time(), False
        headers = {name.lower(): value for name, value in scope.get("headers", ())}

        async def watch(message: Message) -> None:
            nonlocal is_sent
            if not is_sent and has_text(message.get("body", b"")):
                is_sent = True
                request_id = headers.get(b"x-request-id", b"").decode("latin-1")
                append_lines(self._file, {"id": request_id, "came_s": came_s, "left_s": time.time()})
            await send(message)

        await self._app(scope, receive, watch)


def has_text(body: bytes) -> bool:
    """Whether an event of a chat answer's stream has text."""
    return b'"content":"' in body and b'"content":""' not in body


def read_parts(times: Sequence[dict[str, Any]], exported: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """The number of sessions' first turns and of later turns, and the mean of each of `COLUMNS`."""
    servers = {each["id"]: each for each in times}
    rows: dict[str, list[list[float]]] = {}
    for row in exported:
        about, metrics = row["metadata"], row["metrics"]
        server = servers[about["x_request_id"]]
        start_s = about["request_start_ns"] / 1e9
        all_s = metrics["time_to_first_token"]["value"] / 1e3
        connecting_s = metrics.get("http_req_connecting", {"value": 0.0})["value"] / 1e3
        before_s, server_s = server["came_s"] - start_s, server["left_s"] - server["came_s"]
        parts = [before_s, connecting_s, server_s, all_s - before_s - server_s, all_s]
        rows.setdefault("later turns" if about["turn_index"] else "first turns", []).append(parts)
    return {name: [len(each), *map(fmean, zip(*each, strict=True))] for name, each in rows.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("times", type=Path, help="what the middleware wrote")
    parser.add_argument("export", type=Path, help="AIPerf's profile_export.jsonl")
    args = parser.parse_args()
    print(f"| requests | number | {' | '.join(COLUMNS)} |")
    print(f"|---|---|{'---|' * len(COLUMNS)}")
    for name, (number, *means) in read_parts(read_lines(args.times), read_lines(args.export)).items():
        print(f"| {name} | {number:.0f} | {' | '.join(f'{mean:.3f} s' for mean in means)} |")


if __name__ == "__main__":
    main()
