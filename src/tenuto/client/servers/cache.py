"""Empties a server's prefix cache between runs."""

from __future__ import annotations

import time
from collections.abc import Sequence

import httpx

from tenuto.client.http.address import get_base_url
from tenuto.client.servers.engines import find_engines

RESET_LIMIT_S = 30.0
"""If a server still holds blocks this many seconds after a run, its cache counts as not emptied."""


def empty_cache(urls: Sequence[str], api_key: str | None, engine_urls: Sequence[str] = ()) -> bool:
    """Empty the prefix caches of servers, or those of the engines behind routers.

    False if a server does not support this or keeps holding blocks.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    emptied = []  # a list: all are emptied, even if one of them cannot be
    for url in map(get_base_url, urls):
        with httpx.Client(base_url=url, headers=headers, timeout=10) as client:
            emptied += [_empty_one(client, each) for each in find_engines(client, engine_urls) or (url,)]
    return all(emptied)


def _empty_one(client: httpx.Client, url: str) -> bool:
    end_s = time.monotonic() + RESET_LIMIT_S
    while True:
        try:
            answer = client.post(f"{url}/reset_prefix_cache")
        except httpx.HTTPError:
            return False
        if answer.status_code in (401, 403, 404, 405, 501):
            return False
        if answer.is_success and _says_success(answer):
            return True
        if time.monotonic() > end_s:
            return False
        time.sleep(0.5)


def _says_success(answer: httpx.Response) -> bool:
    # Before version 0.32, vLLM's answer is empty both on success and on failure.
    try:
        body = answer.json()
    except ValueError:
        return True
    return not isinstance(body, dict) or bool(body.get("success", True))
