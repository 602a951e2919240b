"""Asks a server's control addresses (`tenuto.vllm.control_http`)."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx

from tenuto.client.control.options import ControlOptions
from tenuto.core.errors import ConfigError, TenutoError


def control(options: ControlOptions, client: httpx.Client | None = None) -> tuple[int, str]:
    """Ask the server; the exit status, and what to print.

    Status 0: done on every rank. 1: a rank did not confirm. Raises TenutoError if the server refuses, or
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
    """What runs on each rank, as text."""
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
