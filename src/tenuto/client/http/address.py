"""Checks of where a server is and who asks it: before anything is sent, and without showing a key."""

from __future__ import annotations

from urllib.parse import urlsplit

from tenuto.core.errors import ConfigError


def check_url(url: str, option: str = "--url") -> None:
    """Raise ConfigError for what is no server's address."""
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or none that exists
        is_one = False
    if not is_one:
        raise ConfigError(f"{option} must be an address like http://localhost:8000, got {url!r}")


def check_api_key(key: str | None) -> None:
    """Raise ConfigError for a key that no header can hold; the key itself is not shown."""
    if key is not None and not key.isprintable():
        raise ConfigError(
            "the API key (--api-key or $OPENAI_API_KEY) holds a line break or control character"
        )
