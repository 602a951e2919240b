"""The options of `tenuto report`."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path

from tenuto.core.settings import Options, option


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options):
    """All options."""

    GROUP = "the page"

    records: tuple[Path, ...] = option(
        MISSING, "files, and folders that are searched", metavar="RECORDS", is_positional=True
    )
    out: Path = option(Path("report.html"), "the page")
    figures: Path | None = option(None, "write every picture there, as PNG and SVG", metavar="DIR")
    trace_events: Path | None = option(None, "write the turns as Chrome trace events, for Perfetto")
    as_json: bool = option(False, "print what came out as JSON instead of text", flag="--json")
