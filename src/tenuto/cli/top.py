"""`tenuto top`: watch a live server."""

from __future__ import annotations

from tenuto.cli.command import Command, Part, needing
from tenuto.cli.options import Given
from tenuto.report.top.options import TopOptions

_SUMMARY = """\
Watch a live server, or several together: what runs, what is leased and until when, what the cache hits.
It reads nothing but the server's /metrics. Ctrl-C ends it.
"""

_EXAMPLES = """\
examples:
  tenuto top --url http://localhost:8000
  tenuto top --url http://localhost:8000 --once            one picture, and done
  tenuto top --url http://localhost:8000 --once --json     for a script; without --once, a line per look
  tenuto top --url http://a:8000 --url http://b:8000       two engines: sums, and a line for each
  tenuto top --url http://localhost:8000 >> top.log        a plain line every two seconds
"""

_NOTES = """\
It shows requests (running, waiting, held back by admission), the KV cache split into running, leased and
free, leases with the countdown to the next deadline and how leases end, the hit ratio, latencies, tool times,
tiers below the GPU and the policy's faults. Rates and percentiles are over the window. Stock vLLM has no
leases, so there those parts are left out.

Where the output is no terminal, it prints one line per look. While a server is busy or down, the
last picture stays, with its age, and the server is tried again.
"""


def run(given: Given) -> int:
    """Watch the server until Ctrl-C."""
    options = given.read(TopOptions)
    with needing("top"):
        from tenuto.report.top.watch import watch
    return watch(options)


COMMAND = Command(_SUMMARY, _EXAMPLES, (Part(TopOptions),), run, notes=_NOTES)
