"""`tenuto top`: watch a live server."""

from __future__ import annotations

from tenuto.cli.command import Command, Part, needing
from tenuto.cli.options import Given
from tenuto.report.top.options import TopOptions

_DESCRIPTION = """\
Watch a live server: what runs, what is leased and until when, what the cache hits.

Reads nothing but the server's /metrics. Shows requests (running, waiting, held back at the door), the KV
cache split into running, leased and free, leases with the countdown to the next deadline and how they end,
the hit ratio, latencies, tool times, tiers below the GPU and the policy's faults; rates and percentiles are
over the window. On stock vLLM the parts that are Tenuto's are left out. Ctrl-C ends it.

Where the output is no terminal it prints a line per look instead. A server that is down is tried again.
"""

_EXAMPLES = """\
examples:
  tenuto top --url http://localhost:8000
  tenuto top --url http://localhost:8000 --once            one picture, and done
  tenuto top --url http://localhost:8000 --once --json     for a script; without --once, a line per look
  tenuto top --url http://localhost:8000 >> top.log        a plain line every two seconds
"""


def run(given: Given) -> int:
    """Watch until Ctrl-C."""
    options = given.read(TopOptions)
    with needing("top"):
        from tenuto.report.top.watch import watch
    return watch(options)


COMMAND = Command(_DESCRIPTION, _EXAMPLES, (Part(TopOptions),), run)
