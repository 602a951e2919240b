"""`tenuto control`: its options, and its requests to a server (`tenuto.vllm.control_http`)."""

from __future__ import annotations

import getpass
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Any
from urllib.parse import quote

import httpx

from tenuto.client.address import check_api_key, check_url
from tenuto.core.errors import ConfigError, TenutoError
from tenuto.core.settings import Options, option, parse_option

ACTIONS = ("status", "on", "off", "shadow", "set", "release")


@dataclass(frozen=True, kw_only=True)
class ControlOptions(Options):
    """All options, checked. Raises ConfigError."""

    action: str = option(
        MISSING,
        "status: show what runs; on, off, shadow: change the mode; set: change the rest; release: end a job",
        metavar="ACTION",
        is_positional=True,
        choices=ACTIONS,
    )
    url: str = option(MISSING, "the server, e.g. http://localhost:8000", metavar="URL")
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
    job: str | None = option(None, "release: the job's id", metavar="ID")
    admin_key: str | None = option(
        None, "the operator's key, equal to the server's", environment="TENUTO_ADMIN_KEY", metavar="KEY"
    )
    api_key: str | None = option(
        None, "release: the client's key", environment="OPENAI_API_KEY", metavar="KEY"
    )
    operator: str | None = option(
        None, "your name in the server's log", metavar="NAME", shown_default="user@host", flag="--as"
    )
    timeout_s: float = option(90.0, "longest wait for the server's answer, seconds", above=0)
    as_json: bool = option(False, "print JSON instead of text", flag="--json")

    def __post_init__(self) -> None:
        """Check the options. Raises ConfigError."""
        super().__post_init__()
        check_url(self.url)
        check_api_key(self.api_key)
        if self.admin_key is not None and not (self.admin_key.isprintable() and self.admin_key.isascii()):
            raise ConfigError(
                "the operator's key (--admin-key or $TENUTO_ADMIN_KEY) has characters not allowed in a header"
            )
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
        """The name for the server's log."""
        if self.operator:
            return self.operator
        try:
            return f"{getpass.getuser()}@{socket.gethostname()}"
        except (OSError, KeyError):
            return "somebody"

    def _get_settings(self) -> dict[str, Any]:
        canary = {
            name: value
            for name, value in (
                ("share", self.canary_share),
                ("tenants", list(self.canary_tenants) or None),
                ("groups", list(self.canary_groups) or None),
            )
            if value is not None
        }
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
    url = options.url.rstrip("/").removesuffix("/v1")
    with client or httpx.Client(timeout=options.timeout_s, trust_env=False) as http:
        try:
            response = _send(http, url, options)
        except httpx.HTTPError as error:
            raise TenutoError(f"no answer from {url}: {error or type(error).__name__}") from error
    answer = _read(response, url)
    if response.status_code not in (200, 504):
        raise TenutoError(f"{url}: {answer.get('error') or f'status {response.status_code}'}")
    status = 0 if response.status_code == 200 else 1
    if options.as_json:
        return status, json.dumps(answer)
    return status, _format_release(answer) if options.action == "release" else format_status(answer)


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
        lines.append(f"  leases {rank['leases']}, on {rank['leased_blocks']} blocks")
        if any(rank.get("tenants", ())):
            lines.append(f"  leased blocks of tenants: {_list(rank['tenants'])}")
        if rank["canary"] is not None:
            lines.append(f"  canary: {_list(rank['canary'])}")
        lines.append(f"  limits: {_list(rank['limits'])}")
        if rank["changes"]:
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(rank["changed_unix_s"]))
            lines.append(
                f"  {rank['changes']} changes since the start, the last at {at} by {rank['changed_by']}"
            )
    if answer.get("note"):
        lines.append(str(answer["note"]))
    return "\n".join(lines)


def _send(http: httpx.Client, url: str, options: ControlOptions) -> httpx.Response:
    if options.action == "release":
        assert options.job is not None
        headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        return http.post(f"{url}/tenuto/jobs/{quote(options.job, safe='')}/release", headers=headers)
    if not options.admin_key:
        raise ConfigError("--admin-key or $TENUTO_ADMIN_KEY is missing: the operator's key")
    headers = {"Authorization": f"Bearer {options.admin_key}", "X-Tenuto-Operator": options.get_operator()}
    change = options.get_change()
    if not change:
        return http.get(f"{url}/tenuto/control", headers=headers)
    return http.post(f"{url}/tenuto/control", headers=headers, json=change)


def _read(response: httpx.Response, url: str) -> dict[str, Any]:
    try:
        answer = response.json()
    except ValueError:
        answer = None
    is_ours = isinstance(answer, dict) and ("ranks" in answer or "error" in answer or "released" in answer)
    if not is_ours:
        raise TenutoError(
            f"{url} has no /tenuto/ addresses (status {response.status_code}); is it vLLM with "
            "--middleware tenuto.vllm.Middleware?"
        )
    return dict(answer)


def _format_release(answer: Mapping[str, Any]) -> str:
    return f"job {answer['job']}: " + ("released" if answer["released"] else "nothing was kept for it")


def _list(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {json.dumps(value)}" for name, value in values.items() if value is not None)
