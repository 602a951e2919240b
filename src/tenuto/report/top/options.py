"""The options of `tenuto top`."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass

from tenuto.client.http.address import check_api_key, check_url
from tenuto.core.errors import ConfigError, TenutoError

DESCRIPTION = """\
Watch a live server: what runs, what is leased and until when, what the cache hits.

Reads nothing but the server's /metrics. Shows requests (running, waiting, held back at the door), the KV
cache split into running, leased and free, leases with the countdown to the next deadline and how they end,
the hit ratio, latencies, tool times, tiers below the GPU and the policy's faults; rates and percentiles are
over the window. On stock vLLM the parts that are Tenuto's are left out. Ctrl-C ends it.

Where the output is no terminal it prints a line per look instead. A server that is down is tried again.
"""

EPILOG = """\
examples:
  tenuto top --url http://localhost:8000
  tenuto top --url http://localhost:8000 --once            one picture, and done
  tenuto top --url http://localhost:8000 --once --json     for a script; without --once, a line per look
  tenuto top --url http://localhost:8000 >> top.log        a plain line every two seconds
"""


@dataclass(frozen=True, kw_only=True)
class TopOptions:
    """All options, checked. Raises ConfigError."""

    url: str
    interval_s: float = 2.0
    window_s: float = 60.0
    once: bool = False
    as_json: bool = False
    api_key: str | None = None

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_url(self.url)
        check_api_key(self.api_key)
        for name, value in (("--interval", self.interval_s), ("--window", self.window_s)):
            if not 0.1 <= value < math.inf:
                raise ConfigError(f"{name} must be a finite number of seconds from 0.1, got {value:g}")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the command's parser, whose `description` and `epilog` should be those above."""
    parser.add_argument("--url", required=True, help="the server, e.g. http://localhost:8000")
    parser.add_argument(
        "--interval",
        dest="interval_s",
        type=float,
        default=2.0,
        metavar="S",
        help="between looks (default 2)",
    )
    parser.add_argument(
        "--window",
        dest="window_s",
        type=float,
        default=60.0,
        metavar="S",
        help="rates and percentiles are over the last S seconds (default 60)",
    )
    parser.add_argument(
        "--once", action="store_true", help="look twice, an interval apart, print one picture and exit"
    )
    parser.add_argument(
        "--json", dest="as_json", action="store_true", help="print JSON, one object a line for each look"
    )
    parser.add_argument(
        "--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: $OPENAI_API_KEY"
    )


def run(parsed: argparse.Namespace) -> int:
    """Watch until Ctrl-C. Raises TenutoError."""
    options = TopOptions(**{name: getattr(parsed, name) for name in TopOptions.__dataclass_fields__})
    try:
        from tenuto.report.top.watch import watch
    except ImportError as error:
        raise TenutoError(f"{error}; install it with: pip install 'tenuto[top]'") from error
    return watch(options)
