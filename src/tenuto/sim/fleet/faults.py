"""What goes wrong in a simulated fleet, and when."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from tenuto.core.errors import ConfigError

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
