"""The options of `tenuto convert`."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

from tenuto.core.settings import Options, option

MAX_BLOCK_SIZE = 2**20


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(Options):
    """All options, checked. Raises ConfigError."""

    source: Path = option(MISSING, "the trace or log", metavar="IN", is_positional=True)
    out: Path = option(
        MISSING,
        "the new file, packed if it ends with .gz; for Weka also a folder, with a file per session",
        metavar="OUT",
        is_positional=True,
    )
    to: Literal["tenuto", "mooncake", "agentic-mooncake", "weka"] = option("tenuto", "the new format")
    block_size: int | None = option(
        None,
        "tokens per block id",
        minimum=1,
        maximum=MAX_BLOCK_SIZE,
        shown_default="512 for Mooncake, whose files do not say it, else 64",
    )
    keep_text: bool = option(
        False, "keep the commands found in trajectories and chat logs; without, only the tools' names"
    )
    as_json: bool = option(False, "print what was done as JSON", flag="--json")
