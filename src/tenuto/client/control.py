"""An operator's commands to a live server (`tenuto.vllm.control_http`): `tenuto control`, `tenuto ledger`."""

from __future__ import annotations

import contextlib
import getpass
import json
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from tenuto.client.address import check_api_key, check_url, get_base_url
from tenuto.core.console import count
from tenuto.core.errors import ConfigError, TenutoError
from tenuto.core.ledger import FIGURES, add_figures
from tenuto.core.requests import SESSION_HEADER, get_header_id
from tenuto.core.settings import Options, option, parse_option
from tenuto.records.text import format_count, format_table
from tenuto.wire.response import get_error_message

if TYPE_CHECKING:
    import httpx  # it takes longer to import than all else, and `--help` needs only the options

ACTIONS = ("status", "on", "off", "shadow", "set", "release")
Row = dict[str, Any]
"""`kind` (total, tenant or job), `tenant`, `job`, and the figures of one account."""


@dataclass(frozen=True, kw_only=True)
class _ServerOptions(Options):
    GROUP = "the server"

    url: str = option(MISSING, "the server, e.g. http://localhost:8000", metavar="URL")
    job: str | None = option(None, "one job, by its id; its own client needs no operator's key", metavar="ID")
    tenant: str | None = option(None, "the tenant of --job, for an operator", metavar="NAME")
    admin_key: str | None = option(
        None, "the operator's key, equal to the server's", environment="TENUTO_ADMIN_KEY", metavar="KEY"
    )
    api_key: str | None = option(
        None, "the key of a job's client", environment="OPENAI_API_KEY", metavar="KEY"
    )
    timeout_s: float = option(90.0, "longest wait for the server's answer, seconds", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_url(self.url)
        check_api_key(self.api_key)
        check_api_key(self.admin_key, "the operator's key (--admin-key or $TENUTO_ADMIN_KEY)")
        if self.tenant is not None and self.job is None:
            raise ConfigError("--tenant says whose --job it is; there is no --job")

    def require_admin_key(self) -> str:
        """The operator's key. Raises ConfigError if there is none."""
        if not self.admin_key:
            raise ConfigError(
                "--admin-key or $TENUTO_ADMIN_KEY is missing: the key that the server started with"
            )
        return self.admin_key

    def ask(
        self, client: httpx.Client | None, path: str, key: str | None, body: Any = None, **headers: str
    ) -> httpx.Response:
        """The answer to a POST; to a GET if there is no body. Raises TenutoError if there is none.

        What concerns a whole engine is not sent to a router, which would pass it on to one of its engines.
        """
        import httpx

        from tenuto.client.metrics import LIST_PATH, connect, explain, parse_engines

        base_url = get_base_url(self.url)
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        # A router passes this on to the engine that has the job, as it does the job's turns.
        headers |= {} if self.job is None else {SESSION_HEADER: get_header_id(self.job)}
        with client or connect(self.url, None, self.timeout_s) as http:
            try:
                if self.job is None:
                    answer = http.get(base_url + LIST_PATH)  # a router needs no operator's key
                    if engines := parse_engines(answer.text):
                        raise TenutoError(
                            f"{base_url} is a router; ask its engines one by one: "
                            + ", ".join(f"--url {each}" for each in engines)
                        )
                method, url = "GET" if body is None else "POST", f"{base_url}/tenuto/{path}"
                # httpx's own JSON raises at infinity, and at bytes that are not UTF-8; the server answers.
                content = None if body is None else json.dumps(body)
                return http.request(method, url, headers=headers, content=content)
            except httpx.HTTPError as error:
                raise TenutoError(explain(error)) from error

    def get_job_path(self, end: str = "") -> str:
        """Where the server answers about the job. `end`: what follows its id."""
        query = "" if self.tenant is None else f"?tenant={quote(self.tenant, safe='')}"
        return f"jobs/{quote(self.job or '', safe='')}{end}{query}"


@dataclass(frozen=True, kw_only=True)
class ControlOptions(_ServerOptions):
    """All options of `tenuto control`, checked. Raises ConfigError."""

    GROUP = "the change"

    action: str = option(
        MISSING,
        "status: show what runs; on, off, shadow: change the mode; set: change the rest; release: end a job",
        metavar="ACTION",
        is_positional=True,
        choices=ACTIONS,
    )
    policy: str | None = option(None, "set: the policy; its other options get their defaults", metavar="NAME")
    options: tuple[str, ...] = option(
        (),
        "set: an option of the policy; may be repeated",
        flag="--option",
        metavar="K=V",
        is_repeatable=True,
    )
    limits: tuple[str, ...] = option(
        (), "set: one of the limits; may be repeated", flag="--limit", metavar="K=V", is_repeatable=True
    )
    canary_share: float | None = option(
        None, "set: the policy applies to this share of jobs only", minimum=0, maximum=1, metavar="X"
    )
    canary_tenants: tuple[str, ...] = option(
        (),
        "set: … to the jobs of this tenant only; may be repeated",
        flag="--canary-tenant",
        metavar="NAME",
        is_repeatable=True,
    )
    canary_groups: tuple[str, ...] = option(
        (),
        "set: … to jobs with this value of the header X-Tenuto-Group only; may be repeated",
        flag="--canary-group",
        metavar="NAME",
        is_repeatable=True,
    )
    no_canary: bool = option(False, "set: the policy applies to all jobs again")
    operator: str | None = option(
        None, "your name in the server's log", metavar="NAME", shown_default="user@host", flag="--as"
    )
    as_json: bool = option(False, "print JSON instead of text", flag="--json")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.action == "release") != (self.job is not None):
            raise ConfigError("release needs --job, and no other action takes it")
        if self.action == "set" and not self.get_change():
            raise ConfigError("set needs something to set: --policy, --option, --limit or --canary-…")
        if self.action != "set" and self._get_settings():
            raise ConfigError(f"only set takes --policy, --option, --limit and --canary-…, not {self.action}")

    def get_change(self) -> dict[str, Any]:
        """The change, as the server expects it. Raises ConfigError for an option that is not K=V."""
        return {"mode": self.action} if self.action in ("on", "off", "shadow") else self._get_settings()

    def get_operator(self) -> str:
        """The name for the server's log, with escapes for what no header can hold."""
        name = self.operator or "somebody"
        if not self.operator:
            with contextlib.suppress(OSError, KeyError):
                name = f"{getpass.getuser()}@{socket.gethostname()}"
        return "".join(each if " " <= each <= "~" else ascii(each)[1:-1] for each in name)

    def _get_settings(self) -> dict[str, Any]:
        canary: dict[str, Any] = {} if self.canary_share is None else {"share": self.canary_share}
        groups = {"tenants": list(self.canary_tenants), "groups": list(self.canary_groups)}
        canary |= {name: values for name, values in groups.items() if values}
        if canary and self.no_canary:
            raise ConfigError("--no-canary and the other options of a canary exclude each other")
        change: dict[str, Any] = {
            "policy": self.policy,
            "options": dict(map(parse_option, self.options)),
            "limits": dict(map(parse_option, self.limits)),
            "canary": canary,
        }
        change = {name: value for name, value in change.items() if value}
        return {**change, "canary": None} if self.no_canary else change


def control(options: ControlOptions, client: httpx.Client | None = None) -> tuple[int, str]:
    """Send the request to the server. Returns the exit status and the text to print.

    Status 0: every rank confirmed. 1: a rank did not confirm. Raises TenutoError if the server refuses or
    does not answer.
    """
    if options.action == "release":
        # A client's own key says whose job it is. Only an operator names the tenant.
        key = options.api_key if options.tenant is None else options.admin_key or options.api_key
        response = options.ask(client, options.get_job_path("/release"), key, {})
    else:
        key, operator = options.require_admin_key(), {"X-Tenuto-Operator": options.get_operator()}
        response = options.ask(client, "control", key, options.get_change() or None, **operator)
    url = get_base_url(options.url)
    answer = _read(response, url)
    if response.status_code not in (200, 504) or not answer.keys() & {"ranks", "released"}:
        raise TenutoError(f"{url}: {get_error_message(answer) or f'status {response.status_code}'}")
    status = 0 if response.status_code == 200 else 1
    if options.as_json:
        return status, json.dumps(answer)
    try:
        if options.action == "release":
            if status:
                return status, str(answer["error"])
            what = "released" if answer["released"] else "nothing was kept for it"
            return status, f"job {answer['job']}: {what}"
        return status, format_status(answer)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
        raise TenutoError(f"{url}: this is not Tenuto's answer: {response.text[:200]!r}") from None


def format_status(answer: Mapping[str, Any]) -> str:
    """The status of each rank, as text."""
    lines = []
    for rank in answer.get("ranks", ()):
        head = f"rank {rank['rank']}"
        if not rank.get("ok"):
            silent = rank.get("ok") is None
            lines.append(f"{head}: {'NOT CONFIRMED: ' if silent else ''}{rank.get('error')}")
            continue
        if "mode" not in rank:
            lines.append(f"{head}: would do it, but nothing was changed")
            continue
        lines.append(f"{head}: {rank['mode']}, policy {rank['policy']} {json.dumps(rank['options'])}")
        lines.append(f"  leases {rank['leases']}, on {count(rank['leased_blocks'], 'block')}")
        if any(rank.get("tenants", ())):
            lines.append(f"  leased blocks of tenants: {_list(rank['tenants'])}")
        if rank["canary"] is not None:
            lines.append(f"  canary: {_list(rank['canary'])}")
        lines.append(f"  limits: {_list(rank['limits'])}")
        if rank["changes"]:
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(rank["changed_unix_s"]))
            lines.append(
                f"  {count(rank['changes'], 'change')} since the start, "
                f"the last at {at} by {rank['changed_by']}"
            )
    if answer.get("note"):
        lines.append(str(answer["note"]))
    return "\n".join(lines)


def _read(response: httpx.Response, url: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        answer = response.json()
        if isinstance(answer, dict) and ("ranks" in answer or "error" in answer or "released" in answer):
            return answer
    raise TenutoError(
        f"{url} has no /tenuto/ addresses (status {response.status_code}); is it vLLM with "
        "--middleware tenuto.vllm.Middleware?"
    )


def _list(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {json.dumps(value)}" for name, value in values.items() if value is not None)


@dataclass(frozen=True, kw_only=True)
class LedgerOptions(_ServerOptions):
    """All options of `tenuto ledger`, checked. Raises ConfigError."""

    GROUP = "the accounts"

    csv: Path | None = option(None, "write a row of CSV for each account; - for stdout", is_written=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.job is None:
            self.require_admin_key()


def read_ledger(options: LedgerOptions, client: httpx.Client | None = None) -> tuple[list[Row], str | None]:
    """A server's accounts, and a note on what its answer leaves out. Raises TenutoError if it has none."""
    url = get_base_url(options.url)
    if options.job is None:
        response = options.ask(client, "ledger", options.admin_key)
    else:
        response = options.ask(client, options.get_job_path(), options.admin_key or options.api_key)
    try:
        answer = response.json()
        if response.status_code != 200:
            raise TenutoError(f"{url}: {get_error_message(answer) or f'status {response.status_code}'}")
        ranks: Sequence[Mapping[str, Any]] = answer["ranks"]
        if options.job is None:
            return join_ranks(ranks)
        told = [rank["ledger"] for rank in ranks]
        return ([_make_row("job", options.tenant, options.job, told)] if told else []), answer.get("note")
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
    note = f"left out: {count(num_left_out, 'earlier job')}" if num_left_out else None
    rows = [_make_row("total", None, None, [rank["total"] for rank in ranks])]
    rows += [_make_row("tenant", name or None, None, each) for name, each in tenants.items()]
    rows += [_make_row("job", tenant, name, each) for (tenant, name), each in jobs.items()]
    return rows, note


def _make_row(kind: str, tenant: str | None, job: str | None, figures: Iterable[Mapping[str, float]]) -> Row:
    told = {name: round(figure, 3) for name, figure in add_figures(figures).items()}
    return {"kind": kind, "tenant": tenant, "job": job, **told}


def format_rows(rows: Sequence[Row], most: int = 20) -> str:
    """The accounts as a table: the total, the tenants, and the jobs that computed most."""
    jobs = sorted(
        (row for row in rows if row["kind"] == "job"),
        key=lambda row: row.get("computed_tokens", 0),
        reverse=True,
    )
    shown = [row for row in rows if row["kind"] != "job"] + jobs[:most]
    heads = ["", *(name.replace("_block_seconds", " block-s").replace("_tokens", "") for name in FIGURES)]
    cells = ([_name(row), *(format_count(row.get(name)) for name in FIGURES)] for row in shown)
    lines = format_table(heads, cells, left=(0,))
    if len(jobs) > most:
        lines.append(f"… and {count(len(jobs) - most, 'more job')}; --csv has all")
    return "\n".join(lines)


def _name(row: Row) -> str:
    if row["kind"] == "job":
        return json.dumps(row["job"])[1:-1][:40]
    return "all" if row["kind"] == "total" else f"tenant {json.dumps(row['tenant'] or '(none)')[1:-1][:40]}"
