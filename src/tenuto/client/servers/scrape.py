"""Reads a server's `/metrics` repeatedly while a load runs.

The page is parsed by hand. A Prometheus parser takes tens of milliseconds for a page of vLLM, and during this
time the client could not read tokens or send turns.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable

from tenuto.client.http.client import RequestFailed

PREFIXES = ("vllm:", "sglang:", "tenuto:")
_LEFT_OUT = ("_bucket", "_created")
_COUNTERS = ("_total", "_sum", "_count")
_BLOCK_SIZE = re.compile(r'^vllm:cache_config_info\{.*\bblock_size="([1-9]\d{0,5})"', re.MULTILINE)
_SIM_SPEED = re.compile(r"^tenuto:sim_speed\b.*$", re.MULTILINE)

Totals = dict[str, float]
"""By metric, the sum over its labels (engines, models, reasons)."""


def parse_totals(text: str) -> Totals:
    """Parse the metrics of vLLM, SGLang and Tenuto in a metrics page, without histogram buckets."""
    totals: Totals = {}
    for line in text.splitlines():
        if not line.startswith(PREFIXES):
            continue
        name, value = re.split(r"[{ ]", line, maxsplit=1)[0], _get_value(line)
        if value is not None and not name.endswith(_LEFT_OUT):
            totals[name] = totals.get(name, 0.0) + value
    return totals


def try_get_block_size(text: str) -> int | None:
    """Tokens per KV block, if a metrics page reports it."""
    found = _BLOCK_SIZE.search(text)
    return int(found[1]) if found else None


def try_get_sim_speed(text: str) -> float | None:
    """Simulated seconds per real second, if a metrics page is that of a simulated server."""
    found = _SIM_SPEED.search(text)
    value = _get_value(found[0]) if found else None
    return value if value is not None and value > 0 else None


def is_counter(name: str) -> bool:
    """Whether a metric only grows, by its name."""
    return name.endswith(_COUNTERS)


def get_growth(before: Totals, after: Totals) -> Totals:
    """The increase of each counter. A counter that is missing in `before` started at 0.

    A counter that decreased is left out: its server was restarted, and the earlier count is lost.
    """
    growth = {name: after[name] - before.get(name, 0.0) for name in after if is_counter(name)}
    return {name: value for name, value in growth.items() if 0 <= value < math.inf}


async def follow(
    get_totals: Callable[[], Awaitable[Totals]],
    get_now_s: Callable[[], float],
    on_sample: Callable[[Totals], None],
    interval_s: float,
) -> None:
    """Read the metrics at a fixed interval in seconds, until cancelled. `at_s` is the time of each sample."""
    while True:
        try:
            totals = await get_totals()
        except RequestFailed:
            totals = {}  # a server under load may not answer; the sample stays in the file, empty
        on_sample({"at_s": get_now_s(), **totals})
        await asyncio.sleep(interval_s)


def _get_value(line: str) -> float | None:
    # A label's text may contain spaces, and a timestamp may follow the value.
    _, _, rest = line.rpartition("}") if "{" in line else line.partition(" ")
    try:
        value = float(rest.split()[0])
    except (IndexError, ValueError):
        return None
    return value if math.isfinite(value) else None
