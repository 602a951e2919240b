"""The options of `tenuto analyze`."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path

from tenuto.core.settings import Options, option


@dataclass(frozen=True, kw_only=True)
class AnalyzeOptions(Options):
    """All options."""

    files: tuple[Path, ...] = option(MISSING, "a file or a run's folder", metavar="FILE", is_positional=True)
    jobs: tuple[str, ...] = option(
        (),
        "show this job turn by turn; a pattern with * and ? shows several",
        flag="--job",
        metavar="ID",
        is_repeatable=True,
    )
    timestamps: Path | None = option(
        None, "write the run as the Continuum prototype's scheduler_timestamps; of one file", metavar="OUT"
    )
    as_json: bool = option(False, "print the report as JSON instead of text", flag="--json")
