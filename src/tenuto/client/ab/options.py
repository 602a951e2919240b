"""The options of `tenuto ab`, what it compares, and the order in which the arms take turns."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from tenuto.client.http.address import check_url
from tenuto.client.load.options import BenchOptions
from tenuto.core.errors import ConfigError
from tenuto.core.settings import Options, option


class Slot(NamedTuple):
    """One run: one arm in one repeat."""

    repeat: int
    """Number of the repeat, counted from 0."""
    arm: str

    @property
    def name(self) -> str:
        """The name of the run's folder. Names sort by repeat."""
        return f"{self.repeat + 1:03}-{self.arm}"


def make_order(arms: Sequence[str], repeats: int) -> list[Slot]:
    """Order the runs so that each repeat reverses the order of the one before: A B, B A, A B.

    If the machine becomes slower or faster at a constant rate, two repeats affect all arms equally.
    """
    return [
        Slot(repeat, arm)
        for repeat in range(repeats)
        for arm in (arms if repeat % 2 == 0 else reversed(arms))
    ]


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
    for given in options:
        if not re.match(r"\w+=", given):
            raise ConfigError(f"--arm {name}: after the policy come key=value pairs, got {given!r}")
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


THRESHOLD_PERCENT = 1.0
"""Differences below it do not matter, unless --threshold says something else."""


def _read_arms(texts: Sequence[str]) -> tuple[Arm, ...]:
    return tuple(map(parse_arm, texts))


def _read_serve_args(text: str) -> tuple[str, ...]:
    return tuple(_split("--serve-args", text))


def _read_arm_args(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, arguments = text.partition("=")
        if not equals:
            raise ConfigError(f"--arm-args wants NAME=TEXT, got {text!r}")
        found[name] = found.get(name, ()) + tuple(_split("--arm-args", arguments))
    return found


def _read_engine_urls(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, url = text.partition("=")
        if not equals:
            raise ConfigError(f"--engine-url wants NAME=URL, got {text!r}")
        check_url(url, f"--engine-url {name}")
        found[name] = (*found.get(name, ()), url)
    return found


def _split(flag: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}: {text!r}") from error


@dataclass(frozen=True, kw_only=True)
class ArmOptions(Options):
    """What is compared: servers that are already running, and servers that are started here."""

    GROUP = "the arms"

    arms: tuple[Arm, ...] = option(
        (),
        "URL, vllm, policy:POLICY[,key=value…] or sim:POLICY[,key=value…]; twice or more. The others are "
        "compared with the first",
        flag="--arm",
        metavar="NAME=…",
        is_repeatable=True,
        read=_read_arms,
    )
    model: str | None = option(
        None,
        "what servers started here serve: a name or folder as for vllm serve, for sim: a bundled model. Of "
        "URLs: the model to ask for",
        metavar="NAME",
        shown_default="for URLs the first that /v1/models names",
    )
    serve_args: tuple[str, ...] = option(
        (),
        "more arguments for every server started here, in one text; a single one as --serve-args=--ARG",
        metavar="TEXT",
        read=_read_serve_args,
    )
    arm_args: Mapping[str, tuple[str, ...]] = option(
        dict,
        "more arguments for one arm's server",
        metavar="NAME=TEXT",
        is_repeatable=True,
        read=_read_arm_args,
    )
    engine_urls: Mapping[str, tuple[str, ...]] = option(
        dict,
        "an engine behind one arm's router, whose metrics are read. May be repeated",
        flag="--engine-url",
        metavar="NAME=URL",
        is_repeatable=True,
        read=_read_engine_urls,
        shown_default="the engines that a router names at /list_workers",
    )
    keep_up: bool = option(
        False,
        "start each server once and keep all of them up, side by side (needs memory for all); saves "
        "start-ups. Without: one at a time, fresh for each run",
    )
    port: int = option(8100, "first port for them, on 127.0.0.1", minimum=1, maximum=65535)
    start_limit_s: float = option(900.0, "give up a server that is not up after S seconds", above=0)

    def __post_init__(self) -> None:
        """Check rules that involve several options. Raises ConfigError."""
        super().__post_init__()
        names = [arm.name for arm in self.arms]
        if len(names) < 2:
            raise ConfigError("name at least two arms: --arm A=… --arm B=…")
        if len(set(names)) != len(names):
            raise ConfigError(f"two arms have one name: {', '.join(names)}")
        if unknown := self.arm_args.keys() - set(names):
            raise ConfigError(f"--arm-args: there is no arm {min(unknown)!r}")
        if unknown := self.engine_urls.keys() - set(names):
            raise ConfigError(f"--engine-url: there is no arm {min(unknown)!r}")
        if self.model is None and (local := [arm.name for arm in self.arms if arm.is_local]):
            raise ConfigError(f"--model: say which model the server of {local[0]!r} shall serve")
        if self.port > (highest := 65535 - len(names)):
            raise ConfigError(f"--port must be at most {highest}, got {self.port}: each server takes its own")


@dataclass(frozen=True, kw_only=True)
class AbOptions(ArmOptions):
    """All options of a comparison, checked. Raises ConfigError."""

    GROUP = "the comparison"

    bench: BenchOptions
    """The options of each run. The URL, label, run id and seed are set separately for each run."""
    out: Path = option(MISSING, "for runs, logs, results.jsonl, verdict.json", metavar="DIR")
    repeats: int = option(
        6,
        "runs of each arm; 6 are the least that can prove anything, and more can be added later",
        minimum=1,
    )
    warmup_jobs: int = option(
        1, "jobs that a server runs unmeasured after its start, or before its first run", minimum=0
    )
    threshold_percent: float = option(
        THRESHOLD_PERCENT,
        "differences below are not called differences, however sure",
        flag="--threshold",
        metavar="PERCENT",
        minimum=0,
        below=100,
    )
    csv: Path | None = option(None, "write the table of the verdict as CSV too", is_written=True)
    as_json: bool = option(False, "print the verdict as JSON instead of text", flag="--json")

    @property
    def threshold(self) -> float:
        """Differences below this value are not reported as differences; 0.01 is 1 %."""
        return self.threshold_percent / 100

    def get_run_options(self, arm: Arm, url: str, repeat: int, run_id: str) -> BenchOptions:
        """The options of one run. Repeats are counted from 0."""
        load = replace(self.bench.load, seed=self.bench.load.seed + repeat)
        # A server started here serves one model. --serve-args may give it any name.
        is_named = not any(each.is_local for each in self.arms)
        model = self.model if is_named else None
        engines = self.engine_urls.get(arm.name, ())
        return replace(
            self.bench,
            urls=tuple(url.split(",")),
            engine_urls=engines,
            load=load,
            model=model,
            run_id=run_id,
            policy=arm.name,
        )
