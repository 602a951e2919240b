"""`tenuto verify`: check that a live server holds a job's KV cache."""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, dataclass

from tenuto.cli.command import Command, Given, Part
from tenuto.core.errors import TenutoError
from tenuto.core.settings import Options, option

_SUMMARY = """\
Check that a live server really holds a job's KV cache while the job's tools run.
It runs one job of five turns, and looks at what is held for this job only.
"""

_EXAMPLES = """\
examples:
  tenuto verify --url http://localhost:8000
  tenuto verify --url http://localhost:8000 --gap 5 --json
  tenuto verify --url http://router:9000 --engine-url http://a:8000 --engine-url http://b:8000
"""

_NOTES = """\
Exit status: 0 if the server is healthy: the job's KV cache was held in every tool gap as its policy promises,
hit on return and released at the end; 1 if not; 2 if that could not be checked, or if other work used the
memory that the job needed. Some policies hold only under load: then the status is 0, and the text says that
an idle server does not show it. With data parallelism, each rank is checked. Through a router, one job is
checked, which must stay with one engine; also check each engine with its own --url.
"""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(Options):
    """All options."""

    url: str = option(MISSING, "the server or router, e.g. http://localhost:8000", metavar="URL")
    engine_urls: tuple[str, ...] = option(
        (),
        "an engine behind a router, whose metrics are read. May be repeated",
        flag="--engine-url",
        metavar="URL",
        is_repeatable=True,
        shown_default="the engines that a router names at /list_workers",
    )
    gap_s: float = option(1.0, "length of each gap, seconds", minimum=0)
    api_key: str | None = option(None, "the key to send", environment="OPENAI_API_KEY", metavar="KEY")
    as_json: bool = option(False, "print JSON instead of a table", flag="--json")


def run(given: Given) -> int:
    """Check a server."""
    import httpx

    from tenuto.client.verify import format_verdict, verify

    def say(text: str) -> None:
        print(f"[verify] {text}", file=sys.stderr, flush=True)

    options = given.read(VerifyOptions)
    try:
        verdict = verify(
            options.url,
            gap_s=options.gap_s,
            api_key=options.api_key,
            engine_urls=options.engine_urls,
            say=say,
        )
    except httpx.HTTPError as error:
        raise TenutoError(f"{options.url}: {error or type(error).__name__}") from error
    print(json.dumps(verdict.to_json(), indent=2) if options.as_json else format_verdict(verdict))
    return 0 if verdict.ok else 2 if verdict.is_disturbed else 1


COMMAND = Command(_SUMMARY, _EXAMPLES, (Part(VerifyOptions),), run, notes=_NOTES)
