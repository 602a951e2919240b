"""The options of `tenuto record`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from tenuto.core.errors import ConfigError

DESCRIPTION = """\
Write down what agents ask of a server: a proxy that everything passes through as it is.

Point the agents at the proxy instead of the server. Every answered turn becomes a line of Tenuto's JSONL:
session, arrival, tool gap, prompt and output length, the tool called, latencies, and salted hashes that say
which prompts begin alike. No text, no header and no key is written unless --keep-text asks for the text.

Prompt lengths and hashes are of the server's own tokens where it has /tokenize (vLLM, SGLang) or is sent
token ids; elsewhere of whole messages, their lengths shared out from the server's usage.
Ctrl-C or SIGTERM ends the recording; what was answered by then is in the file.
"""

EPILOG = """\
examples:
  tenuto record --url http://localhost:8000 --out trace.jsonl
      agents use http://localhost:8001/v1; then: tenuto replay trace.jsonl --url http://localhost:8000
  tenuto record --url https://api.example.com --out trace.jsonl --port 9000 --ask-usage
  tenuto record --url http://localhost:8000 --out trace.jsonl --salt "$SECRET"
      recordings with one salt have the same hashes, so that they can be compared or put together
"""

Tokens = Literal["server", "text"]


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """All options, checked. Raises ConfigError."""

    url: str
    out: Path
    host: str = "127.0.0.1"
    port: int = 8001
    salt: str | None = None
    tokens: Tokens = "server"
    keep_text: bool = False
    hide_ids: bool = False
    ask_usage: bool = False

    def __post_init__(self) -> None:
        """Check the ranges."""
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"--url must be like http://localhost:8000, got {self.url!r}")
        if parts.query or parts.fragment:
            raise ConfigError(f"--url must end before any ? or #, got {self.url!r}")
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"--port must be from 0 to 65535, got {self.port}")
        if self.salt is not None and not self.salt:
            raise ConfigError("--salt must not be empty: anyone could then check guesses against the hashes")

    @property
    def upstream(self) -> str:
        """The server's address, to which a request's path is appended."""
        return self.url.rstrip("/").removesuffix("/v1")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the command's parser."""
    parser.add_argument("--url", required=True, help="the server, e.g. http://localhost:8000")
    parser.add_argument(
        "--out",
        required=True,
        type=Path,
        metavar="FILE",
        help="the recording; a new file, readable by you alone",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine alone)"
    )
    parser.add_argument(
        "--port", type=int, default=8001, help="port to listen on (default 8001; 0: any free)"
    )
    parser.add_argument(
        "--salt",
        metavar="TEXT",
        help="secret in all hashes (default: random and forgotten, so that nobody can check guesses)",
    )
    parser.add_argument(
        "--tokens",
        choices=("server", "text"),
        default="server",
        help="server: ask its /tokenize for each prompt's tokens, after the answer (default; falls back to "
        "text where there is none). text: never ask",
    )
    parser.add_argument(
        "--keep-text", action="store_true", help="also write prompts, answers and whole commands, readable"
    )
    parser.add_argument(
        "--hide-ids",
        action="store_true",
        help="write salted hashes of session and tenant ids instead of them",
    )
    parser.add_argument(
        "--ask-usage",
        action="store_true",
        help="add stream_options.include_usage to streamed requests that lack it, and take the extra event "
        "out of the answer: exact output lengths from servers without /tokenize. The only change ever made",
    )


def read_options(parsed: argparse.Namespace) -> RecordOptions:
    """The options as parsed. Raises ConfigError."""
    return RecordOptions(**{name: vars(parsed)[name] for name in RecordOptions.__dataclass_fields__})
