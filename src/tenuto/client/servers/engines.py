"""Finds the engines behind a router, because a router's own `/metrics` says nothing about its engines.

vllm-router and SGLang's router list their engines at `/list_workers`. (vllm-router answers `/metrics` with
the page of one engine, whichever it is.) For other routers the user names the engines: `--engine-url`.
"""

from __future__ import annotations

import json
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
