"""The options of `tenuto ab`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from pathlib import Path

from tenuto.client.ab.arms import Arm, parse_arm
from tenuto.client.http.address import check_url
from tenuto.client.load.options import BenchOptions
from tenuto.core.errors import ConfigError
from tenuto.core.settings import Options, option

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
