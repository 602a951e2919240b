"""Records requests of agents to a server: a proxy that passes all on, and its recorder. Options are here."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from tenuto.core.errors import ConfigError
from tenuto.core.settings import Options, option

_LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, kw_only=True)
class RecordOptions(Options):
    """All options, checked. Raises ConfigError."""

    GROUP = "the recording"

    url: str = option(MISSING, "the server, e.g. http://localhost:8000", metavar="URL")
    out: Path = option(MISSING, "the recording; a new file, readable by you alone")
    host: str = option(
        "127.0.0.1", "address to listen on; 127.0.0.1 is this machine alone", metavar="ADDRESS"
    )
    port: int = option(8001, "port to listen on; 0: any free", minimum=0, maximum=65535)
    salt: str | None = option(
        None, "secret in all hashes", shown_default="random and forgotten, so that nobody can check guesses"
    )
    tokens: Literal["server", "text"] = option(
        "server",
        "server: ask its /tokenize for each prompt's tokens, after the answer; falls back to text where "
        "there is none. text: never ask",
    )
    keep_text: bool = option(False, "also write prompts, answers and whole commands, readable")
    hide_ids: bool = option(False, "write salted hashes of session and tenant ids instead of the ids")
    ask_usage: bool = option(
        False,
        "add stream_options.include_usage to streamed requests that lack it, and take the extra event out of "
        "the answer: exact output lengths from servers without /tokenize",
    )
    name_jobs: bool = option(
        False,
        "add X-Session-ID, with the name by which Tenuto knows the job, to requests that lack it: for "
        "clients that send no id, before a router that pins sessions by header. Without this and "
        "--ask-usage, nothing is changed",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"--url must be like http://localhost:8000, got {self.url!r}")
        if parts.query or parts.fragment:
            raise ConfigError(f"--url must end before any ? or #, got {self.url!r}")
        # While the server is down, its port is free: the recorder would take it and pass requests to itself.
        is_here = parts.hostname in _LOCAL and self.host in (*_LOCAL, "0.0.0.0", "::")
        if is_here and parts.netloc.endswith(f":{self.port}"):
            raise ConfigError(f"--port {self.port} is the server's own; choose another")
        if self.salt is not None and not self.salt:
            raise ConfigError("--salt must not be empty: anyone could then check guesses against the hashes")
