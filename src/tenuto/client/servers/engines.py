"""Finds the engines behind a router, because a router's own `/metrics` says nothing about its engines.

vllm-router and SGLang's router list their engines at `/list_workers`. (vllm-router answers `/metrics` with
the page of one engine, whichever it is.) For other routers the user names the engines: `--engine-url`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import httpx

from tenuto.client.http.address import check_url, get_base_url
from tenuto.core.errors import ConfigError

LIST_PATH = "/list_workers"
MAX_ENGINES = 1024
"""More names than this in one answer are not read."""


def parse_engines(text: str) -> tuple[str, ...]:
    """The engines that a router's answer to `/list_workers` names; empty for any other answer."""
    try:
        found = json.loads(text)
        urls = found["urls"][:MAX_ENGINES]
        # vllm-router writes a data-parallel rank behind the address: http://host:8000@1.
        named = dict.fromkeys(get_base_url(url.rpartition("@")[0] or url) for url in urls)
        for url in named:
            check_url(url)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, ConfigError):
        return ()
    return tuple(named)


def find_engines(client: httpx.Client, given: Sequence[str] = ()) -> tuple[str, ...]:
    """The engines behind a server: those given, else those that it names; empty if it is no router."""
    if given:
        return tuple(map(get_base_url, given))
    try:
        answer = client.get(LIST_PATH)
    except httpx.HTTPError:
        return ()
    return parse_engines(answer.text) if answer.is_success else ()


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
