"""The headers of traces: which run a file is of, and whether it goes on from an older file."""

from __future__ import annotations

from dataclasses import dataclass

from tenuto.records.fields import Fields
from tenuto.records.trace_commands import COMMANDS


@dataclass(frozen=True, slots=True)
class Part:
    """One header's run: a server from its start to its end, in one file or in several."""

    run: str | None = None
    """None for a trace of 0.1."""
    number: int = 1
    """The first is 1. Later ones go on where the file before ended."""
    commands: str = "full"
    """`none`, `hash` or `full`."""

    def follows(self, before: Part | None) -> bool:
        """Whether it goes on with what the part before says, so that nothing begins anew."""
        return (
            before is not None
            and self.run is not None
            and (self.run, self.number) == (before.run, before.number + 1)
        )


def read_part(header: Fields) -> Part:
    """What a header says of its part. Raises DataError if that is malformed."""
    if "run" not in header:
        return Part()
    commands = header.text("commands")
    if commands not in COMMANDS:
        raise header.error("commands", f"must be one of {', '.join(COMMANDS)}, got {commands!r}")
    return Part(header.text("run"), header.integer("part", 1), commands)
