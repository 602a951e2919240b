"""Numbers, loads and settings as the page writes them."""

from __future__ import annotations

from tenuto.report.html.compare import Group, Load
from tenuto.report.html.records import NO_GPU, shorten


def format_load(load: Load) -> str:
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


def count(number: int, noun: str) -> str:
    """A number and its noun: 1 run, 2 runs."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def describe_setting(group: Group) -> str:
    """A setting in a line."""
    each = group.setting
    gpu = [] if each.gpu == NO_GPU else [each.gpu]
    names = ", ".join(map(shorten, (*gpu, each.model, each.workload)))
    return f"{names} ({each.kind}{f'; {each.variant}' if each.variant else ''})"


def describe_place(group: Group, load: Load) -> str:
    """A GPU, if it is known, and a load: where one comparison stands, and what to know of its numbers."""
    gpu = () if group.setting.gpu == NO_GPU else (shorten(group.setting.gpu),)
    return ", ".join((*gpu, format_load(load), *group.get_doubts(load)))


def describe_load(group: Group, load: Load) -> str:
    """A load, and what to know of the numbers at it."""
    doubts = group.get_doubts(load)
    return format_load(load) + (f" ({', '.join(doubts)})" if doubts else "")
