"""`tenuto ledger`: a table of what jobs and tenants used on a live server. Simulations write it too."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from tenuto.client.address import check_api_key, check_url
from tenuto.core.errors import ConfigError, TenutoError
from tenuto.core.ledger import FIGURES, add_figures
from tenuto.core.settings import Options, option

Row = dict[str, Any]
"""`kind` (total, tenant or job), `tenant`, `job`, and the figures of one account."""
COLUMNS = ("kind", "tenant", "job", *FIGURES)


@dataclass(frozen=True, kw_only=True)
class LedgerOptions(Options):
    """All options, checked. Raises ConfigError."""

    url: str = option(MISSING, "the server, e.g. http://localhost:8000", metavar="URL")
    job: str | None = option(None, "one job only; its own client needs no operator's key", metavar="ID")
    csv: Path | None = option(None, "write a row of CSV for each account; - for stdout", is_written=True)
    admin_key: str | None = option(
        None, "the operator's key, equal to the server's", environment="TENUTO_ADMIN_KEY", metavar="KEY"
    )
    api_key: str | None = option(
        None, "with --job: the client's key", environment="OPENAI_API_KEY", metavar="KEY"
    )
    timeout_s: float = option(90.0, "longest wait for the server's answer, seconds", above=0)

    def __post_init__(self) -> None:
        """Check the options. Raises ConfigError."""
        super().__post_init__()
        check_url(self.url)
        check_api_key(self.api_key)
        if self.job is None and not self.admin_key:
            raise ConfigError("--admin-key or $TENUTO_ADMIN_KEY is missing: the operator's key")
        if self.admin_key and not (self.admin_key.isprintable() and self.admin_key.isascii()):
            raise ConfigError(
                "the operator's key (--admin-key or $TENUTO_ADMIN_KEY) has characters not allowed in a header"
            )


def read_ledger(options: LedgerOptions, client: httpx.Client | None = None) -> tuple[list[Row], str | None]:
    """A server's accounts, and a note on what its answer leaves out. Raises TenutoError if it has none."""
    url = options.url.rstrip("/").removesuffix("/v1")
    path = "/tenuto/ledger" if options.job is None else f"/tenuto/jobs/{quote(options.job, safe='')}"
    key = options.api_key if options.job is not None and options.api_key else options.admin_key
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with client or httpx.Client(timeout=options.timeout_s, trust_env=False) as http:
        try:
            response = http.get(url + path, headers=headers)
        except httpx.HTTPError as error:
            raise TenutoError(f"no answer from {url}: {error or type(error).__name__}") from error
    try:
        answer = response.json()
        if response.status_code != 200:
            raise TenutoError(f"{url}: {answer.get('error') or f'status {response.status_code}'}")
        ranks: Sequence[Mapping[str, Any]] = answer["ranks"]
        if options.job is None:
            return join_ranks(ranks)
        told = [rank["ledger"] for rank in ranks]
        row = {"kind": "job", "tenant": None, "job": options.job, **add_figures(told)}
        return ([row] if told else []), answer.get("note")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise TenutoError(
            f"{url} does not say what jobs used (status {response.status_code}); is it Tenuto's?"
        ) from None


def join_ranks(ranks: Sequence[Mapping[str, Any]]) -> tuple[list[Row], str | None]:
    """The sums over a server's data-parallel ranks: total, tenants, jobs; and a note on what is left out."""
    tenants: dict[str, list[Mapping[str, float]]] = {}
    jobs: dict[tuple[str | None, str], list[Mapping[str, float]]] = {}
    for rank in ranks:
        for name, figures in rank["tenants"].items():
            tenants.setdefault(name, []).append(figures)
        for job in rank["jobs"]:
            jobs.setdefault((job["tenant"], job["job"]), []).append(job)
    num_left_out = sum(int(rank["jobs_left_out"]) for rank in ranks)
    note = f"{num_left_out} earlier jobs are left out" if num_left_out else None
    return make_rows([rank["total"] for rank in ranks], tenants, jobs), note


def make_rows(
    totals: Iterable[Mapping[str, float]],
    tenants: Mapping[str, Iterable[Mapping[str, float]]],
    jobs: Mapping[tuple[str | None, str], Iterable[Mapping[str, float]]],
) -> list[Row]:
    """A row for the total, for each tenant, and for each job."""
    return [
        {"kind": "total", "tenant": None, "job": None, **add_figures(totals)},
        *(
            {"kind": "tenant", "tenant": name or None, "job": None, **add_figures(each)}
            for name, each in tenants.items()
        ),
        *(
            {"kind": "job", "tenant": tenant, "job": name, **add_figures(each)}
            for (tenant, name), each in jobs.items()
        ),
    ]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write the accounts as CSV, with `-` to standard output. Raises ConfigError if that fails."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _bound(row[name]) for name in COLUMNS} for row in rows)
    if str(path) == "-":
        sys.stdout.write(text.getvalue())
        return
    try:
        path.write_text(text.getvalue(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--csv: cannot write {path}: {error.strerror or error}") from error


def _bound(value: Any) -> Any:
    """A safe cell: names come from clients, and a spreadsheet must not read one as a formula."""
    if isinstance(value, float):
        return round(value, 3)
    is_formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if is_formula else value


def format_rows(rows: Sequence[Row], most: int = 20) -> str:
    """The accounts as a table: the total, the tenants, and the jobs that computed most."""
    jobs = sorted(
        (row for row in rows if row["kind"] == "job"), key=lambda row: row["computed_tokens"], reverse=True
    )
    shown = [row for row in rows if row["kind"] != "job"] + jobs[:most]
    heads = ["", *(name.replace("_block_seconds", " block-s").replace("_tokens", "") for name in FIGURES)]
    table = [heads] + [[_name(row), *(f"{row[name]:,.0f}" for name in FIGURES)] for row in shown]
    widths = [max(len(line[column]) for line in table) for column in range(len(heads))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    ]
    if len(jobs) > most:
        lines.append(f"… and {len(jobs) - most} more jobs; --csv has all")
    return "\n".join(lines)


def _name(row: Row) -> str:
    if row["kind"] == "job":
        return json.dumps(row["job"])[1:-1][:40]
    return "all" if row["kind"] == "total" else f"tenant {json.dumps(row['tenant'] or '(none)')[1:-1][:40]}"
