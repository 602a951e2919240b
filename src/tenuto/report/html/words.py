"""Numbers, loads and names as the page writes them."""

from __future__ import annotations

MAX_NAME = 48
"""Longest name shown, in characters."""


def shorten(name: str, most: int = MAX_NAME) -> str:
    """A name short enough to show, in characters."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def count(number: int, noun: str) -> str:
    """A number and its noun: 1 run, 2 runs."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def format_load(load: float | None) -> str:
    """A load in words."""
    return "arrivals as recorded" if load is None else f"{load:g} {'job' if load == 1 else 'jobs'}/s"


def format_ratio(ratio: float) -> str:
    """A speed-up: 1.84×."""
    return f"{ratio:.2f}×" if ratio < 100 else f"{ratio:.0f}×"


def format_seconds(seconds: float | None) -> str:
    """A time with three digits."""
    if seconds is None:
        return "–"
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 or seconds == 0 else f"{seconds * 1000:.3g} ms"


def format_share(share: float) -> str:
    """A share of a whole in per cent."""
    return f"{share:.1%}" if share < 0.9995 else "100%"
