"""What is compared: servers that are already running, and servers that are started here."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tenuto.client.http.address import check_url
from tenuto.core.errors import ConfigError

SYNTAX = "NAME=URL[,URL…], NAME=vllm, NAME=policy:POLICY[,key=value…] or NAME=sim:POLICY[,key=value…]"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
_DETAILS = "--enable-prompt-tokens-details"
"""Makes vLLM report the number of cached tokens in each answer; the bench counts them."""
_HOST = "127.0.0.1"

Kind = Literal["url", "vllm", "policy", "sim"]


@dataclass(frozen=True, slots=True)
class Arm:
    """One side of the comparison."""

    name: str
    """Label of the results, also used in file names."""
    kind: Kind
    target: str = ""
    """The server's URL, several with commas, or the policy's name."""
    options: tuple[str, ...] = ()
    """The policy's options, as KEY=VALUE."""

    @property
    def is_local(self) -> bool:
        """Whether the arm's server is started here."""
        return self.kind != "url"

    def __str__(self) -> str:
        """The arm as written on the command line."""
        what = {"url": self.target, "vllm": "vllm"}.get(self.kind, f"{self.kind}:{self.target}")
        return f"{self.name}={','.join((what, *self.options))}"


def parse_arm(text: str) -> Arm:
    """Parse an arm as written on the command line. Raises ConfigError."""
    name, equals, what = text.partition("=")
    if not equals or not _NAME.fullmatch(name):
        raise ConfigError(f"--arm wants {SYNTAX}, the name of letters, digits, dots and dashes; got {text!r}")
    if what.startswith(("http://", "https://")):
        for url in what.split(","):
            check_url(url, f"--arm {name}")
        return Arm(name, "url", what)
    if what == "vllm":
        return Arm(name, "vllm")
    kind, _, policy = what.partition(":")
    target, *options = policy.split(",")
    if kind not in ("policy", "sim") or not target:
        raise ConfigError(f"--arm {name}: {what!r} is none of {SYNTAX}")
    for option in options:
        if not re.match(r"\w+=", option):
            raise ConfigError(f"--arm {name}: after the policy come key=value pairs, got {option!r}")
    return Arm(name, "sim" if kind == "sim" else "policy", target, tuple(options))


def make_command(arm: Arm, model: str, port: int, serve_args: Sequence[str]) -> list[str]:
    """The command that starts a local arm's server."""
    where = ["--host", _HOST, "--port", str(port), *serve_args]
    if arm.kind == "vllm":
        return [_find_vllm(), "serve", model, _DETAILS, *where]
    # Use the command line of `tenuto serve`, so that an arm is served in exactly the same way.
    serve = [sys.executable, "-m", "tenuto.cli", "serve"]
    policy = ["--policy", arm.target, *(word for each in arm.options for word in ("--option", each))]
    if arm.kind == "sim":
        return [*serve, "--engine", "sim", "--model", model, *policy, *where]
    return [*serve, model, *policy, _DETAILS, *where]


def _find_vllm() -> str:
    """The `vllm` of this environment; otherwise the one that the shell finds."""
    beside = Path(sys.executable).parent / "vllm"
    return str(beside) if beside.exists() else "vllm"
