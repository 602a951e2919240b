"""The options of runs against live servers, for `bench`, `replay`, `ab`, `profile` and `validate`.

They need only the base install, so that `--help` is fast and works without the extras.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from tenuto.client.address import (
    api_key_option,
    check_api_key,
    check_url,
    engine_urls_option,
    get_base_url,
)
from tenuto.core.errors import KEY_FLAG, ConfigError, is_flag
from tenuto.core.settings import Options, option
from tenuto.workload.load import JPS_HELP, LoadOptions, seed_option

SYNTAX = "NAME=URL[,URL…], NAME=vllm, NAME=policy:POLICY[,key=value…] or NAME=sim:POLICY[,key=value…]"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")

Kind = Literal["url", "vllm", "policy", "sim"]
THRESHOLD_PERCENT = 1.0
"""Smaller differences, in percent, do not count. The default of --threshold."""


@dataclass(frozen=True, kw_only=True)
class RequestOptions(Options):
    """How turns are sent, independent of the server and the run."""

    GROUP = "the requests"

    api_key: str | None = api_key_option()
    prompts: Literal["ids", "words"] = option(
        "ids",
        "ids: token ids to /v1/completions, exact. words: chat messages of common words, one token each in "
        "most vocabularies, plus what the chat template adds; records show the server's count",
    )
    answers: Literal["server", "workload"] = option(
        "server",
        "what later prompts quote as the model's words: what the server really answered, or the workload's "
        "own text, which makes prompts independent of the server",
    )
    run_commands: bool = option(
        False,
        "run the command lines that a trace holds, instead of sleeping as long as they took. They run as "
        "you, with your files and network in reach: only for traces you trust. Each job has a temporary "
        "folder, an environment without your variables, and no input; commands.jsonl says how each ended",
    )
    command_limit_s: float = option(
        60.0, "end a command, and all it started, after S seconds or 1 MiB of output", above=0
    )
    force_format: str | None = option(
        None,
        "force the answers' format by vLLM's structured output: json, regex:PATTERN, or a file with a JSON "
        "schema. Answers may then be shorter than planned, and prompts quote the workload's own text",
        metavar="FORMAT",
    )
    metrics_interval_s: float = option(
        2.0,
        "read the server's /metrics every S seconds, for metrics.jsonl. 0: only before and after, for "
        "servers that are short of processor time",
        minimum=0,
    )
    timeout_s: float = option(3600.0, "give up a request without a complete answer after S seconds", above=0)
    retries: int = option(
        0,
        "repeat a failed request up to N times, after a pause; its latency includes all attempts. A turn "
        "that fails for good ends its job, and turns that depend on it are not sent",
        minimum=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_api_key(self.api_key)


@dataclass(frozen=True, kw_only=True)
class BenchOptions(RequestOptions):
    """All options of a run, checked. Raises ConfigError."""

    GROUP = "the run"

    urls: tuple[str, ...] = option(
        MISSING,
        "the server or router, e.g. http://localhost:8000; several, for engines without a router in front",
        flag="--url",
        metavar="URL",
        is_repeatable=True,
    )
    router: str = option(
        "tenuto",
        "with several URLs: which of them a turn goes to, a router's name (see docs/fleet.md) or "
        "file.py:Class",
        metavar="NAME",
    )
    engine_urls: tuple[str, ...] = engine_urls_option()
    load: LoadOptions = field(default_factory=LoadOptions)
    model: str | None = option(
        None, "the model to ask for", metavar="NAME", shown_default="the first that /v1/models names"
    )
    run_id: str | None = option(
        None, "part of all content and job ids, so that no run hits another's cache", shown_default="random"
    )
    policy: str | None = option(
        None,
        "label in the result: the server's policy",
        metavar="NAME",
        shown_default="the policy that /metrics names, if it is on",
    )
    gpu: str | None = option(None, "label in the result", metavar="NAME")
    out: Path | None = option(
        None,
        "write result.json, turns.jsonl (a line per turn, as it ends) and the server's metrics.jsonl",
        metavar="DIR",
    )
    csv: Path | None = option(None, "write the result as a row of CSV too", is_written=True)
    as_json: bool = option(False, "print the result as JSON instead of text", flag="--json")

    def __post_init__(self) -> None:
        for url in self.urls:
            check_url(url)
        if len({get_base_url(url) for url in self.urls}) < len(self.urls):
            raise ConfigError(f"--url names an engine twice: {', '.join(self.urls)}")
        if len(self.urls) == 1 and self.router != type(self).router:
            raise ConfigError(f"--router {self.router} is for several engines: say --url for each")
        for url in self.engine_urls:
            check_url(url, "--engine-url")
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class SweepOptions(Options):
    """The loads of a bench."""

    GROUP = "the load"

    jps: tuple[float, ...] = option(
        (), f"{JPS_HELP}. Several, as 1,2,4: one run after the other", above=0, alias="--request-rate"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # As folders, run ids and tables name them.
        names = [f"{jps:g}" for jps in self.jps]
        if len(set(names)) < len(names):
            raise ConfigError(f"--jps names a load twice: {','.join(names)}; loads must differ in six digits")


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


def _read_by_arm(
    texts: Sequence[str], *, flag: str, what: str, read: Callable[[str, str], tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{flag} wants NAME={what}, got {text!r}")
        found[name] = (*found.get(name, ()), *read(f"{flag} {name}", value))
    return found


def _read_url(flag: str, text: str) -> tuple[str, ...]:
    check_url(text, flag)
    return (text,)


def _split(flag: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}: {text!r}") from error


@dataclass(frozen=True, kw_only=True)
class StartOptions(Options):
    """How servers are started here."""

    GROUP = "the servers started here"

    serve_args: tuple[str, ...] = option(
        (),
        "more arguments for every server started here, in one text; a single one as --serve-args=--ARG",
        metavar="TEXT",
        read=partial(_split, "--serve-args"),
    )
    port: int = option(8100, "first port for them, on 127.0.0.1", minimum=1, maximum=65535)
    start_limit_s: float = option(900.0, "give up a server that is not up after S seconds", above=0)


@dataclass(frozen=True, kw_only=True)
class ArmOptions(StartOptions):
    """The arms: servers that are already running, and servers that are started here."""

    GROUP = "the arms"

    arms: tuple[Arm, ...] = option(
        (),
        "URL[,URL…], vllm, policy:POLICY[,key=value…] or sim:POLICY[,key=value…]; twice or more. The others "
        "are compared with the first",
        flag="--arm",
        metavar="NAME=…",
        is_repeatable=True,
        read=lambda texts: tuple(map(parse_arm, texts)),
    )
    model: str | None = option(
        None,
        "what servers started here serve: a name or folder as for vllm serve, for sim: a bundled model. Of "
        "URLs: the model to ask for",
        metavar="NAME",
        shown_default="for URLs the first that /v1/models names",
    )
    arm_args: Mapping[str, tuple[str, ...]] = option(
        dict,
        "more arguments for one arm's server",
        metavar="NAME=TEXT",
        is_repeatable=True,
        read=partial(_read_by_arm, flag="--arm-args", what="TEXT", read=_split),
    )
    engine_urls: Mapping[str, tuple[str, ...]] = option(
        dict,
        "an engine behind one arm's router, whose metrics are read. May be repeated",
        flag="--engine-url",
        metavar="NAME=URL",
        is_repeatable=True,
        read=partial(_read_by_arm, flag="--engine-url", what="URL", read=_read_url),
        shown_default="the engines that a router names at /list_workers",
    )
    keep_up: bool = option(
        False,
        "start each server once and keep all of them up, side by side (needs memory for all); saves "
        "start-ups. Without: one at a time, fresh for each run",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [arm.name for arm in self.arms]
        if len(names) < 2:
            raise ConfigError("name at least two arms: --arm A=… --arm B=…")
        if len(set(names)) != len(names):
            raise ConfigError(f"two arms have one name: {', '.join(names)}")
        for flag, given in (("--arm-args", self.arm_args), ("--engine-url", self.engine_urls)):
            if unknown := given.keys() - set(names):
                raise ConfigError(f"{flag}: there is no arm {min(unknown)!r}")
        if self.model is None and (local := [arm.name for arm in self.arms if arm.is_local]):
            raise ConfigError(f"--model is missing: the model that the server of {local[0]!r} serves")
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
        6, "runs of each arm. Fewer than 6 prove nothing; more can be added later", minimum=1
    )
    warmup_jobs: int = option(
        1, "jobs that a server runs unmeasured after its start, or before its first run", minimum=0
    )
    runs_per_start: int = option(
        1,
        "runs of an arm in a row on one start of its server: saves start-ups, but pairs are less independent",
        minimum=1,
    )
    threshold_percent: float = option(
        THRESHOLD_PERCENT,
        "smaller differences do not count, even if they are certain",
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
        return replace(
            self.bench,
            urls=tuple(url.split(",")),
            engine_urls=self.engine_urls.get(arm.name, ()),
            load=replace(self.bench.load, seed=self.bench.load.seed + repeat),
            # A server started here serves one model. --serve-args may give it any name.
            model=None if arm.is_local else self.model,
            run_id=run_id,
            policy=arm.name,
        )


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(Options):
    """The options for timing a live server, checked. Raises ConfigError."""

    GROUP = "the server"

    url: str = option(MISSING, "a live server, e.g. http://localhost:8000", metavar="URL")
    model: str | None = option(
        None, "the model to ask for", metavar="NAME", shown_default="the first that /v1/models names"
    )
    api_key: str | None = api_key_option()
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
    repeats: int = option(3, "time each step N times, and use the median", minimum=1)
    limit_s: float | None = option(
        None, "begin no further repeat after S seconds", above=0, shown_default="no limit"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_url(self.url)
        check_api_key(self.api_key)


@dataclass(frozen=True, kw_only=True)
class FitOptions(Options):
    """The options of a fit: its input and its output."""

    GROUP = "the fit"

    observations: tuple[Path, ...] = option(
        (), "observed steps and copies, JSONL as below; --url may be given too", is_repeatable=True
    )
    out: Path = option(Path("costs.json"), "the fit")
    save: Path | None = option(
        None,
        "what --url measured, as JSONL",
        shown_default="next to --out, with .observations.jsonl at the end of its name",
    )
    force: bool = option(False, "write even a poor fit; every simulation with it then says so")
    as_json: bool = option(False, "print JSON instead of tables", flag="--json")

    @property
    def save_path(self) -> Path:
        """The file for the measured steps."""
        return self.save or self.out.with_suffix(".observations.jsonl")


@dataclass(frozen=True, kw_only=True)
class ValidateOptions(StartOptions):
    """The options of `tenuto validate`, checked. Raises ConfigError."""

    GROUP = "the validation"

    model: str = option(
        MISSING, "model name or folder, as for vllm serve", metavar="MODEL", is_positional=True
    )
    minutes: float | None = option(
        None, "how long it may take", minimum=3, shown_default="30, or 6 with --quick"
    )
    quick: bool = option(False, "two pairs of short runs, in minutes: tries everything, proves nothing")
    workload: str = option("ab8", "the jobs: a generator, or a file of `tenuto record`", metavar="NAME|FILE")
    seed: int = seed_option(42, "seed of the first pair's jobs; each later pair has the next one")
    out: Path = option(Path("validation"), "folder for page, record, runs and logs", metavar="DIR")
    config: str | None = option(
        None,
        "the model for the simulator: a config.json, or the name of a bundled model",
        metavar="FILE|NAME",
        shown_default="the model's own config.json",
    )
    despite_noise: bool = option(False, "continue even if noise makes a verdict impossible")
    engine: Literal["vllm", "sim"] = option(
        "vllm", "sim: use simulated servers, without vLLM and a GPU, to see what the command does"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(is_flag(each, KEY_FLAG) for each in self.serve_args):
            raise ConfigError("--serve-args: leave --api-key out; the servers listen on 127.0.0.1 only")

    @property
    def limit_s(self) -> float:
        """The time limit, in seconds."""
        return 60 * (self.minutes or (6.0 if self.quick else 30.0))
