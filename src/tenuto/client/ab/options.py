"""The options of `tenuto ab`."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tenuto.client.ab.arms import Arm, parse_arm
from tenuto.client.load.options import BenchOptions, add_load_options, add_request_options, read_load_options
from tenuto.core.errors import ConfigError, TenutoError

DESCRIPTION = """\
Compare servers or policies under the same load, and say in words what came out.

Every repeat runs the same jobs, from the same seed, once on each arm: that makes a pair. The order turns
around from repeat to repeat (A B, B A, …), so that a machine that slows down meets all arms alike; the seed
changes. Each pair gives one ratio per measure (job time, time to first token, turn time, throughput); their
geometric mean has a bootstrap interval. Fewer than 6 pairs prove nothing, and the verdict says so. More than
two arms are each compared with the first.

An arm is NAME=URL, a server that runs already; NAME=vllm, NAME=policy:POLICY or NAME=sim:POLICY, a server
that is started here before each of its runs and stopped afterwards: plain vLLM, vLLM with Tenuto's scheduler,
or a simulated GPU. The prefix cache is emptied before each run where the server allows it (vLLM: those with
VLLM_SERVER_DEV_MODE=1, which servers started here have); it is said where it could not be.

Each run is kept when it ends (DIR/runs), and the same command again goes on where it was left. Ctrl-C gives
the verdict of the pairs so far. `tenuto report DIR/results.jsonl` draws the rest. Exit status: 0 if every
turn was answered, 1 if not, 2 if an arm could not be run, 130 if interrupted.
"""

EPILOG = """\
examples:
  tenuto ab --arm stock=vllm --arm hold=policy:continuum-fixed --model Qwen/Qwen3-8B --jps 6 --out ab1
  tenuto ab --arm a=http://10.0.0.1:8000 --arm b=http://10.0.0.2:8000 --workload swe-bench --jps 0.5 --out ab2
  tenuto ab --arm short=policy:continuum-fixed,ttl_s=1 --arm long=policy:continuum-fixed,ttl_s=10 \\
      --model Qwen/Qwen3-8B --serve-args "--max-model-len 32768 --max-num-seqs 64" --hints tool --out ab3
  tenuto ab --arm stock=sim:stock --arm hold=sim:continuum-fixed --model llama-3.1-8b --max-jobs 20 --out ab4
"""


@dataclass(frozen=True, kw_only=True)
class AbOptions:
    """All options, checked. Raises ConfigError."""

    arms: tuple[Arm, ...]
    bench: BenchOptions
    """Each run's options; its URL, label, run id and seed are the run's own."""
    out: Path
    model: str | None = None
    serve_args: tuple[str, ...] = ()
    arm_args: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By arm, more arguments for its server."""
    repeats: int = 6
    warmup_jobs: int = 1
    threshold: float = 0.01
    """Differences below it are not called differences, however sure."""
    keep_up: bool = False
    port: int = 8100
    start_limit_s: float = 900.0
    as_json: bool = False

    def __post_init__(self) -> None:
        """Check what the parser cannot."""
        names = [arm.name for arm in self.arms]
        if len(names) < 2:
            raise ConfigError("name at least two arms: --arm A=… --arm B=…")
        if len(set(names)) != len(names):
            raise ConfigError(f"two arms have one name: {', '.join(names)}")
        if unknown := self.arm_args.keys() - set(names):
            raise ConfigError(f"--arm-args: there is no arm {min(unknown)!r}")
        if self.model is None and (local := [arm.name for arm in self.arms if arm.is_local]):
            raise ConfigError(f"--model: say which model the server of {local[0]!r} shall serve")
        if self.repeats < 1:
            raise ConfigError(f"--repeats must be 1 or more, got {self.repeats}")
        if self.warmup_jobs < 0:
            raise ConfigError(f"--warmup-jobs must be 0 or more, got {self.warmup_jobs}")
        if not 0 <= self.threshold < 1:
            raise ConfigError(f"--threshold must be 0 to 99 per cent, got {100 * self.threshold:g}")
        if not 1 <= self.port <= 65535 - len(names):
            raise ConfigError(f"--port must be 1 to {65535 - len(names)}, got {self.port}")
        if not 0 < self.start_limit_s < math.inf:
            raise ConfigError(f"--start-limit must be a finite number of seconds, got {self.start_limit_s}")

    def get_run_options(self, arm: Arm, url: str, repeat: int, run_id: str) -> BenchOptions:
        """The options of one run; repeats count from 0."""
        load = replace(self.bench.load, seed=self.bench.load.seed + repeat)
        # A server started here serves one model, under whatever name --serve-args gives it.
        is_named = not any(each.is_local for each in self.arms)
        model = self.model if is_named else None
        return replace(self.bench, url=url, load=load, model=model, run_id=run_id, policy=arm.name)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the command's parser, whose `description` and `epilog` should be those above."""
    _add_arm_options(parser.add_argument_group("the arms"))
    _add_comparison_options(parser.add_argument_group("the comparison"))
    add_load_options(parser.add_argument_group("the load, as for tenuto bench"))
    add_request_options(parser.add_argument_group("the requests, as for tenuto bench"))


def read_options(parsed: argparse.Namespace) -> AbOptions:
    """The options as parsed. Raises ConfigError."""
    arms = tuple(parse_arm(text) for text in parsed.arm)
    url = next((arm.target for arm in arms if not arm.is_local), "http://127.0.0.1")
    names = BenchOptions.__dataclass_fields__.keys() & vars(parsed).keys() - {"model", "out", "as_json"}
    shared = {name: getattr(parsed, name) for name in names}
    own = ("model", "out", "repeats", "warmup_jobs", "keep_up", "port", "start_limit_s", "as_json")
    return AbOptions(
        arms=arms,
        bench=BenchOptions(url=url, load=read_load_options(parsed), **shared),
        serve_args=tuple(_split("--serve-args", parsed.serve_args)),
        arm_args=_read_arm_args(parsed.arm_args),
        threshold=parsed.threshold_percent / 100,
        **{name: getattr(parsed, name) for name in own},
    )


def run(parsed: argparse.Namespace) -> int:
    """Compare; the command's exit status. Raises TenutoError."""
    options = read_options(parsed)
    try:
        from tenuto.client.ab.run import run_ab
    except ImportError as error:
        raise TenutoError(f"{error}; install it with: pip install 'tenuto[bench]'") from error
    return run_ab(options)


def _add_arm_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--arm",
        action="append",
        default=[],
        metavar="NAME=…",
        help="URL, vllm, policy:POLICY[,key=value…] or sim:POLICY[,key=value…]; twice or more. The first is "
        "what the others are compared with",
    )
    group.add_argument(
        "--model",
        help="what servers started here serve: a name or folder as for vllm serve, for sim: a bundled model. "
        "Of URLs: the model to ask for (default: the first that /v1/models names)",
    )
    group.add_argument(
        "--serve-args",
        default="",
        metavar="TEXT",
        help="more arguments for every server started here, in one text; a single one as --serve-args=--ARG",
    )
    group.add_argument(
        "--arm-args",
        action="append",
        default=[],
        metavar="NAME=TEXT",
        help="more arguments for one arm's server; may be repeated",
    )
    group.add_argument(
        "--keep-up",
        action="store_true",
        help="start each server once and keep all of them up, side by side (needs memory for all); saves "
        "start-ups. Default: one at a time, fresh for each run",
    )
    group.add_argument(
        "--port", type=int, default=8100, metavar="N", help="first port for them, on 127.0.0.1 (default 8100)"
    )
    group.add_argument(
        "--start-limit",
        dest="start_limit_s",
        type=float,
        default=900.0,
        metavar="S",
        help="give up a server that is not up after S seconds (default 900)",
    )


def _add_comparison_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="for runs, logs, results.jsonl, verdict.json"
    )
    group.add_argument(
        "--repeats",
        type=int,
        default=6,
        metavar="N",
        help="runs of each arm (default 6, the least that can prove anything); more can be added later",
    )
    group.add_argument(
        "--warmup-jobs",
        type=int,
        default=1,
        metavar="N",
        help="jobs that a server runs unmeasured after its start, or before its first run (default 1)",
    )
    group.add_argument(
        "--threshold",
        dest="threshold_percent",
        type=float,
        default=1.0,
        metavar="PERCENT",
        help="differences below are not called differences, however sure (default 1)",
    )
    group.add_argument("--gpu", metavar="NAME", help="label in the results")
    group.add_argument(
        "--json", dest="as_json", action="store_true", help="print the verdict as JSON instead of text"
    )


def _read_arm_args(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, arguments = text.partition("=")
        if not equals:
            raise ConfigError(f"--arm-args wants NAME=TEXT, got {text!r}")
        found[name] = found.get(name, ()) + tuple(_split("--arm-args", arguments))
    return found


def _split(option: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}: {text!r}") from error
