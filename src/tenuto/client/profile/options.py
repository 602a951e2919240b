"""The options of `tenuto profile`."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path

from tenuto.client.http.address import check_api_key, check_url
from tenuto.core.settings import Options, option


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(Options):
    """The options for timing a live server, checked. Raises ConfigError."""

    GROUP = "the server"

    url: str = option(MISSING, "a live server, e.g. http://localhost:8000", metavar="URL")
    model: str | None = option(
        None, "the model to ask for", metavar="NAME", shown_default="the first that /v1/models names"
    )
    api_key: str | None = option(None, "the key to send", environment="OPENAI_API_KEY", metavar="KEY")
    step_tokens: int = option(
        2048,
        "longest prefill to time; no more than the server's --max-num-batched-tokens, or it takes several "
        "steps",
        minimum=512,
    )
    max_context: int | None = option(
        None,
        "longest context to time",
        minimum=1024,
        shown_default="16384, or what the model and half of the KV cache allow",
    )
    max_batch: int = option(16, "most decodes at once; no more than the server's --max-num-seqs", minimum=2)
    repeats: int = option(3, "each is timed N times, and the median counts", minimum=1)

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        check_url(self.url)
        check_api_key(self.api_key)


@dataclass(frozen=True, kw_only=True)
class FitOptions(Options):
    """What to fit, and where to write the fit."""

    GROUP = "the fit"

    observations: tuple[Path, ...] = option(
        (), "observed steps and copies, JSONL as below; --url may be given too", is_repeatable=True
    )
    out: Path = option(Path("costs.json"), "the fit")
    save: Path | None = option(
        None,
        "what --url measured, as JSONL",
        shown_default="beside --out, its name ending in .observations.jsonl",
    )
    force: bool = option(False, "write a poor fit too; every simulation with it then says that it is poor")
    as_json: bool = option(False, "print JSON instead of tables", flag="--json")

    @property
    def save_path(self) -> Path:
        """The file for the measured steps."""
        return self.save or self.out.with_suffix(".observations.jsonl")
