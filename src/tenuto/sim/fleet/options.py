"""The options of a simulated fleet, the same in every command that simulates one, and its faults."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from tenuto.core.errors import ConfigError
from tenuto.core.settings import Options, get_flag, option, parse_policy_options
from tenuto.sim.hardware.gpus import get_gpu

IDEAL = "ideal"
"""In place of a router's name: the yardstick (`tenuto.sim.fleet.ideal`)."""
MAX_SERVERS = 4096


def read_servers(text: str) -> tuple[str, ...]:
    """The GPU of each engine, "" for that of --gpu: from `4`, or from `H100:2,L40S`. Raises ConfigError."""
    gpus: list[str] = []
    for part in text.split(","):
        name, colon, count = part.strip().rpartition(":")
        if not colon:
            name, count = ("", part) if part.strip().isdecimal() else (part, "1" if part.strip() else "")
        if not count.strip().isdecimal() or not 1 <= int(count) <= MAX_SERVERS:
            raise ConfigError(
                f"--servers wants a number of engines (1 to {MAX_SERVERS}), or GPU:NUMBER,…, for example "
                f"H100:2,L40S:4; got {text!r}"
            )
        gpus += [get_gpu(name.strip()).name if name.strip() else ""] * int(count)
    if len(gpus) > MAX_SERVERS:
        raise ConfigError(f"--servers: at most {MAX_SERVERS} engines, got {len(gpus)}")
    return tuple(gpus)


Kind = Literal["die", "drain", "join", "rejoin", "restart"]
_OF_AN_ENGINE = ("die", "drain", "rejoin")
_FORM = re.compile(r"(?P<kind>[a-z]+)(?::(?P<what>[^@]*))?@(?P<at_s>[0-9.eE+-]+)")


@dataclass(frozen=True, slots=True)
class Fault:
    """One event."""

    at_s: float
    kind: Kind
    what: str = ""
    """die, drain and rejoin: the engine's name; join: its GPU, or empty for the first engine's."""

    def __str__(self) -> str:
        """As the command line gives it."""
        return f"{self.kind}{':' + self.what if self.what else ''}@{self.at_s:g}"


def read_fault(text: str) -> Fault:
    """A fault from its text, such as `die:2@30`. Raises ConfigError."""
    match = _FORM.fullmatch(text)
    if match is None or match["kind"] not in get_args(Kind):
        raise ConfigError(
            "--fault wants die:ENGINE@S, drain:ENGINE@S, rejoin:ENGINE@S, join@S, join:GPU@S or restart@S, "
            f"got {text!r}"
        )
    kind, what = match["kind"], match["what"] or ""
    if (kind in _OF_AN_ENGINE) != bool(what) and kind != "join":
        raise ConfigError(
            f"--fault {text}: die, drain and rejoin name an engine (0, 1, …), restart names none"
        )
    try:
        at_s = float(match["at_s"])
    except ValueError:
        raise ConfigError(f"--fault {text}: {match['at_s']!r} is no time in seconds") from None
    if not 0 <= at_s < float("inf"):
        raise ConfigError(f"--fault {text}: the time must be 0 or more")
    return Fault(at_s, kind, what)  # type: ignore[arg-type]  # checked above


def _read_faults(texts: list[str]) -> tuple[Fault, ...]:
    return tuple(read_fault(text) for text in texts)


@dataclass(frozen=True, kw_only=True)
class FleetOptions(Options):
    """Several engines behind a router, checked. Raises ConfigError."""

    GROUP = "the fleet"

    servers: tuple[str, ...] = option(
        (),
        "several engines behind a router: how many, or unlike ones, for example H100:2,L40S:4; each with its "
        "own scheduler, policy and KV cache",
        metavar="N|GPU:N,…",
        read=read_servers,
        shown_default="one engine, no router",
    )
    router: str = option(
        "tenuto",
        "where turns go: a router's name (see docs/fleet.md), or file.py:Class; ideal: the yardstick, "
        "engines that share one queue and all KV at no cost. compare takes several, with commas",
        metavar="NAME",
    )
    router_options: tuple[str, ...] = option(
        (),
        "a router's option; may be repeated, and be for one router alone",
        flag="--router-option",
        metavar="[ROUTER:]KEY=VALUE",
        is_repeatable=True,
    )
    metrics_s: float = option(
        1.0, "the router reads the engines' metrics every S seconds", flag="--metrics-every", above=0
    )
    copy_gb_s: float | None = option(
        None,
        "bandwidth between two engines, 1e9 bytes a second, for KV of jobs that move",
        flag="--copy-gb-s",
        metavar="GB/S",
        above=0,
        shown_default="KV is not copied, but computed again",
    )
    faults: tuple[Fault, ...] = option(
        (),
        "what goes wrong after S seconds; may be repeated: die:ENGINE@S, drain:ENGINE@S (by number, from 0), "
        "rejoin:ENGINE@S (after either), join@S or join:GPU@S (one more), restart@S (the router loses its "
        "memory)",
        flag="--fault",
        metavar="WHAT@S",
        is_repeatable=True,
        read=_read_faults,
    )

    def make_fleets(self) -> list[Fleet | None]:
        """A fleet for each router; only None without --servers. Raises ConfigError."""
        if not self.servers:
            self._check_no_fleet()
            return [None]
        faults = tuple(str(fault) for fault in self.faults)
        names = [name.strip() for name in self.router.split(",") if name.strip()]
        if not names:
            raise ConfigError("--router is empty")
        return [
            Fleet(
                servers=self.servers,
                router=name,
                router_options=parse_policy_options(self.router_options, name),
                metrics_s=self.metrics_s,
                copy_gb_s=self.copy_gb_s,
                faults=faults,
            )
            for name in names
        ]

    def make_fleet(self) -> Fleet | None:
        """The one fleet; None without --servers. Raises ConfigError, for several routers too."""
        fleets = self.make_fleets()
        if len(fleets) > 1:
            raise ConfigError("--router: one, please; `tenuto compare` takes several")
        return fleets[0]

    def _check_no_fleet(self) -> None:
        for each in dataclasses.fields(self):
            if getattr(self, each.name) != each.default:
                raise ConfigError(f"{get_flag(each)} is for several engines: say --servers too")


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The part of a setup that several engines have: see `FleetOptions`."""

    servers: tuple[str, ...]
    router: str = "tenuto"
    router_options: Mapping[str, Any] = field(default_factory=dict)
    metrics_s: float = 1.0
    copy_gb_s: float | None = None
    faults: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check what goes together."""
        if not self.servers:
            raise ConfigError("a fleet needs an engine")
        if self.router == IDEAL and (self.faults or len(set(self.servers)) > 1 or self.router_options):
            raise ConfigError("--router ideal: for engines of one kind that do not fail, and without options")
