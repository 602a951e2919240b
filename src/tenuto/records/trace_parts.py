"""The headers of traces: the run that a file belongs to, and whether it continues an older file."""

from __future__ import annotations

from dataclasses import dataclass

from tenuto.records.fields import Fields
from tenuto.records.trace_commands import COMMANDS


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a run that one header begins. A run is a server's life, in one file or several."""

    run: str | None = None
    """None if the header does not say it."""
    number: int = 1
    """Number of the part, from 1. A later part continues where the previous file ended."""
    commands: str = "full"
    """`none`, `hash` or `full`."""

    def follows(self, before: Part | None) -> bool:
        """Whether this part continues the previous part, so that no state is reset."""
        return (
            before is not None
            and self.run is not None
            and (self.run, self.number) == (before.run, before.number + 1)
        )


def read_part(header: Fields) -> Part:
    """Read the part from a header. Raises DataError if the header is malformed."""
    if "run" not in header:
        return Part()
    commands = header.text("commands")
    if commands not in COMMANDS:
        raise header.error("commands", f"must be one of {', '.join(COMMANDS)}, got {commands!r}")
    return Part(header.text("run"), header.integer("part", 1), commands)
