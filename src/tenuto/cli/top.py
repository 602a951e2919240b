"""`tenuto top`: watch a live server."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass

from tenuto.cli.command import Command, Given, Part, needing
from tenuto.client.address import check_api_key, check_url
from tenuto.core.settings import Options, option

_SUMMARY = """\
Watch a live server, or several together: what runs, what is leased and until when, and the hit ratio.
It reads only the server's /metrics. Ctrl-C ends it.
"""

_EXAMPLES = """\
examples:
  tenuto top --url http://localhost:8000
  tenuto top --url http://localhost:8000 --once            print one screen and exit
  tenuto top --url http://localhost:8000 --once --json     for a script; without --once, a line per refresh
  tenuto top --url http://a:8000 --url http://b:8000       two engines: sums, and a line for each
  tenuto top --url http://localhost:8000 >> top.log        a plain line every two seconds
"""

_NOTES = """\
It shows requests (running, waiting, held back by admission), the KV cache split into running, leased and
free, leases with the countdown to the next deadline and how leases end, the hit ratio, latencies, tool times,
tiers below the GPU and the policy's faults. Rates and percentiles are over the window. Stock vLLM has no
leases, so those parts are missing there.

If the output is not a terminal, it prints one line per refresh. While a server is busy or down, the
last screen stays, with its age, and the server is asked again.
"""


@dataclass(frozen=True, kw_only=True)
class TopOptions(Options):
    """All options, checked. Raises ConfigError."""

    urls: tuple[str, ...] = option(
        MISSING,
        "a server, e.g. http://localhost:8000. May be repeated. The engines of a router that names them at "
        "/list_workers are found",
        flag="--url",
        metavar="URL",
        is_repeatable=True,
    )
    interval_s: float = option(2.0, "seconds between two refreshes", minimum=0.1)
    window_s: float = option(60.0, "rates and percentiles are over the last S seconds", minimum=0.1)
    once: bool = option(False, "read twice, an interval apart, print one screen and exit")
    as_json: bool = option(False, "print JSON, one object per line for each refresh", flag="--json")
    api_key: str | None = option(None, "the key to send", environment="OPENAI_API_KEY", metavar="KEY")

    def __post_init__(self) -> None:
        super().__post_init__()
        for url in self.urls:
            check_url(url)
        check_api_key(self.api_key)


def run(given: Given) -> int:
    """Watch the server until Ctrl-C."""
    options = given.read(TopOptions)
    with needing("top"):
        from tenuto.report.top import watch
    return watch(**asdict(options))


COMMAND = Command(_SUMMARY, _EXAMPLES, (Part(TopOptions),), run, notes=_NOTES)
