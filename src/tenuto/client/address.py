"""A server that a command is given: its URL and API key, checked before anything is sent, and its error."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from tenuto.core.errors import ConfigError, TenutoError
from tenuto.core.settings import option


class ServerError(TenutoError):
    """A server cannot be started, reached or measured; the message says why, and what to try."""


SILENT = "is the server up, and is this its address?"


def advise(status: int) -> str:
    """What to do about the status with which a server refuses a question; empty for its own faults."""
    if status in (401, 403):
        return "; give its key with --api-key or $OPENAI_API_KEY"
    return "; is this an OpenAI-compatible server?" if status < 500 else ""


def check_url(url: str, option: str = "--url") -> None:
    """Raise ConfigError if this is not the address of a server."""
    with suppress(ValueError):  # the port is not a number, or not a valid port number
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            if "@" in parts.netloc:
                raise ConfigError(f"{option} must not hold a user or password, which results would show")
            return
    raise ConfigError(f"{option} must be an address like http://localhost:8000, got {url!r}")


def get_base_url(url: str) -> str:
    """The address without a path, because users may give it with `/v1` or with the path of a page."""
    return url.rstrip("/").removesuffix("/metrics").removesuffix("/v1").rstrip("/")


def check_api_key(key: str | None, name: str = "the API key (--api-key or $OPENAI_API_KEY)") -> None:
    """Raise ConfigError for a key that an HTTP header cannot contain. The message does not show the key."""
    if key is not None and not (key.isprintable() and key.isascii()):
        raise ConfigError(f"{name} has characters not allowed in a header")


def api_key_option() -> Any:
    """Declare `--api-key`, of commands that send requests to a server."""
    return option(None, "the key to send", environment="OPENAI_API_KEY", metavar="KEY")


def engine_urls_option() -> Any:
    """Declare `--engine-url`, of commands that read the metrics of engines behind a router."""
    return option(
        (),
        "an engine behind a router: metrics come from there, turns go to --url. May be repeated",
        flag="--engine-url",
        metavar="URL",
        is_repeatable=True,
        shown_default="the engines that a router names at /list_workers",
    )
