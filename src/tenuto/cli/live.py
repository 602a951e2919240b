"""`tenuto verify`, `top`, `ledger` and `control`: a server that runs."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass
from functools import partial

from tenuto.cli.command import Command, Given, Part, needing
from tenuto.client.address import api_key_option, check_api_key, check_url, engine_urls_option
from tenuto.client.control import ControlOptions, LedgerOptions
from tenuto.core.console import say
from tenuto.core.errors import TenutoError
from tenuto.core.settings import Options, option


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(Options):
    """All options."""

    url: str = option(MISSING, "the server or router, e.g. http://localhost:8000", metavar="URL")
    engine_urls: tuple[str, ...] = engine_urls_option()
    gap_s: float = option(1.0, "length of each gap, seconds", minimum=0)
    api_key: str | None = api_key_option()
    as_json: bool = option(False, "print JSON instead of a table", flag="--json")


def _run_verify(given: Given) -> int:
    import httpx

    from tenuto.client.metrics import explain
    from tenuto.client.verify import format_verdict, verify

    options = given.read(VerifyOptions)
    try:
        verdict = verify(
            options.url,
            gap_s=options.gap_s,
            api_key=options.api_key,
            engine_urls=options.engine_urls,
            say=partial(say, "verify"),
        )
    except httpx.HTTPError as error:
        raise TenutoError(explain(error)) from error
    print(json.dumps(asdict(verdict), indent=2) if options.as_json else format_verdict(verdict))
    return 0 if verdict.ok else 2 if verdict.is_disturbed else 1


VERIFY = Command(
    summary="""\
Check that a live server really holds a job's KV cache while the job's tools run.
It runs one job of five turns, and looks at what is held for this job only.
""",
    examples="""\
  tenuto verify --url http://localhost:8000
  tenuto verify --url http://localhost:8000 --gap 5 --json
  tenuto verify --url http://router:9000 --engine-url http://a:8000 --engine-url http://b:8000
""",
    options=(Part(VerifyOptions),),
    run=_run_verify,
    notes="""\
Exit status: 0 if the server is healthy: the job's KV cache was held in every tool gap as its policy promises,
hit on return and released at the end; 1 if not; 2 if that could not be checked, or if other work used the
memory that the job needed. Some policies hold only under load: then the status is 0, and the text says that
an idle server does not show it. With data parallelism, each rank is checked. Through a router, one job is
checked, which must stay with one engine; also check each engine with its own --url.
""",
)


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
    api_key: str | None = api_key_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        for url in self.urls:
            check_url(url)
        check_api_key(self.api_key)


def _run_top(given: Given) -> int:
    options = given.read(TopOptions)
    with needing("top"):
        from tenuto.report.top import watch
    return watch(**asdict(options))


TOP = Command(
    summary="""\
Watch a live server, or several together: what runs, what is leased and until when, and the hit ratio.
It reads only the server's /metrics. Ctrl-C ends it.
""",
    examples="""\
  tenuto top --url http://localhost:8000
  tenuto top --url http://localhost:8000 --once            print one screen and exit
  tenuto top --url http://localhost:8000 --once --json     for a script; without --once, a line per refresh
  tenuto top --url http://a:8000 --url http://b:8000       two engines: sums, and a line for each
  tenuto top --url http://localhost:8000 >> top.log        a plain line every two seconds
""",
    options=(Part(TopOptions),),
    run=_run_top,
    notes="""\
It shows requests (running, waiting, held back by admission), the KV cache split into running, leased and
free, leases with the countdown to the next deadline and how leases end, the hit ratio, latencies, tool times,
tiers below the GPU and the policy's faults. Rates and percentiles are over the window. Stock vLLM has no
leases, so those parts are missing there.

If the output is not a terminal, it prints one line per refresh. While a server is busy or down, the
last screen stays, with its age, and the server is asked again.
""",
)


def _run_ledger(given: Given) -> int:
    from tenuto.client.control import format_rows, read_ledger
    from tenuto.records.text import write_csv

    options = given.read(LedgerOptions)
    rows, note = read_ledger(options)
    if note:
        say("ledger", note)
    if options.csv is not None:
        write_csv(options.csv, rows, without=())
    elif rows:
        print(format_rows(rows))
    # Without a row, the server does not know the job.
    return 0 if rows else 1


LEDGER = Command(
    summary="""\
Show what jobs and tenants used on a live server: tokens read from the cache, loaded, computed, computed again
and stored, and block-seconds on GPU, host and disk.
""",
    examples="""\
  tenuto ledger --url http://localhost:8000
  tenuto ledger --url http://localhost:8000 --csv ledger.csv
  tenuto ledger --url http://localhost:8000 --job task-17        a client's own job
""",
    options=(Part(LedgerOptions),),
    run=_run_ledger,
    notes="""\
The figures are totals since the server started. Only jobs that it still remembers are listed. The server must
have been started with the environment variable TENUTO_ADMIN_KEY, and this command needs the same key. A
client does not need it to ask for its own job. `tenuto simulate --ledger FILE` writes the same table, so that
a price can be tried before it is charged.

Exit status: 0; 1 if the server does not know the job; 2 if it refused, or does not answer.
""",
)


def _run_control(given: Given) -> int:
    from tenuto.client.control import control

    status, text = control(given.read(ControlOptions))
    print(text)
    return status


CONTROL = Command(
    summary="""\
Show or change what a live server does, without a restart: the mode, the policy, its limits, a canary.
No request is lost. A wrong change is refused, and the server stays as it was.
""",
    examples="""\
  tenuto control status --url http://localhost:8000
  tenuto control off --url http://localhost:8000               drop all leases, serve as stock vLLM
  tenuto control on --url http://localhost:8000
  tenuto control shadow --url http://localhost:8000            decide and count, change nothing
  tenuto control set --url http://localhost:8000 --policy continuum --limit max_lease_s=60
  tenuto control set --url http://localhost:8000 --canary-share 0.1
  tenuto control release --url http://localhost:8000 --job task-17
  tenuto control release --url http://localhost:8000 --job task-17 --tenant ann     the operator, with tenants
""",
    options=(Part(ControlOptions),),
    run=_run_control,
    notes="""\
The server must have been started with the environment variable TENUTO_ADMIN_KEY, and this command needs the
same key. Only release does not need it: a client ends its own jobs, with its own API key. An operator says
with --tenant whose job it is. Behind a router, give the URL of each engine in turn; only release may go
through the router.

Exit status: 0 if every data-parallel rank confirmed; 1 if a rank did not answer in time (ask for the status,
and try again); 2 if the server refused, or does not answer.
""",
    main=(
        *("action", "url", "policy", "options", "limits"),
        *("canary_share", "no_canary", "job", "admin_key", "as_json"),
    ),
)
