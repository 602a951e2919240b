"""The options of `tenuto bench`."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tenuto.client.http.address import check_api_key, check_url
from tenuto.core.errors import ConfigError
from tenuto.workload.hints import HINTS
from tenuto.workload.load_options import DEFAULT_ARRIVAL, LoadOptions

DESCRIPTION = """\
Run agent jobs against any OpenAI-compatible server and measure them.

A job is a conversation of several turns with a tool call (a sleep, or a command) between two. Every turn is
sent when the workload says, whatever the client is doing; its latency counts from that moment. Prompts are
token ids: they have exactly the planned length, and share exactly what the workload says they share, on any
server whose /v1/completions takes ids (vLLM, SGLang, the simulated server). For others: --prompts words.

On stderr there is a view of the run; Ctrl-C ends it early and keeps what there is. Exit status: 0 if every
turn was answered, 1 if not, 2 if nothing could be run, 130 if interrupted.
"""

EPILOG = """\
examples:
  tenuto bench --url http://localhost:8000 --jps 6
      the 8-turn workload of the published sweeps, 255 jobs arriving within 45 s
  tenuto bench --url http://localhost:8000 --workload swe-bench --jps 0.5 --hints tool --out runs/swe
      with each turn's tool named to Tenuto; result.json, turns.jsonl and metrics.jsonl go to runs/swe
  tenuto bench --url http://localhost:8000 --users 32 --max-jobs 200
      32 users, each beginning a job when their last one has ended
  tenuto bench --url http://localhost:8000 --workload trace.jsonl --loop open --scale-rate 2
      a recorded trace at its own times, twice as fast
"""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """All options, checked. Raises ConfigError."""

    url: str
    load: LoadOptions = field(default_factory=LoadOptions)
    model: str | None = None
    api_key: str | None = None
    prompts: Literal["ids", "words"] = "ids"
    answers: Literal["server", "workload"] = "server"
    run_commands: bool = False
    command_limit_s: float = 60.0
    force_format: str | None = None
    metrics_interval_s: float = 2.0
    timeout_s: float = 3600.0
    retries: int = 0
    run_id: str | None = None
    policy: str | None = None
    gpu: str | None = None
    out: Path | None = None
    as_json: bool = False

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_url(self.url)
        check_api_key(self.api_key)
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"--timeout must be a finite number of seconds above 0, got {self.timeout_s}")
        if not 0 < self.command_limit_s < math.inf:
            raise ConfigError(
                f"--command-limit must be a finite number of seconds above 0, got {self.command_limit_s}"
            )
        if not 0 <= self.metrics_interval_s < math.inf:
            raise ConfigError(
                f"--metrics-interval must be a finite number of seconds, or 0, got {self.metrics_interval_s}"
            )
        if self.retries < 0:
            raise ConfigError(f"--retries must be 0 or more, got {self.retries}")


def add_options(parser: argparse.ArgumentParser, *, is_replay: bool = False) -> None:
    """Add the options to the command's parser, whose `description` and `epilog` should be those above.

    `tenuto replay` is given its workload, and a server only if it needs one.
    """
    add_load_options(parser.add_argument_group("the load"), is_replay=is_replay)
    requests = parser.add_argument_group("the requests")
    _add_server_options(requests, needs_url=not is_replay)
    add_request_options(requests)
    _add_result_options(parser.add_argument_group("the result"))


def read_options(parsed: argparse.Namespace) -> BenchOptions:
    """The options as parsed. Raises ConfigError."""
    values = vars(parsed)
    names = [name for name in BenchOptions.__dataclass_fields__ if name != "load"]
    return BenchOptions(load=read_load_options(parsed), **{name: values[name] for name in names})


def read_load_options(parsed: argparse.Namespace) -> LoadOptions:
    """Those of `add_load_options`."""
    return LoadOptions(**{name: getattr(parsed, name) for name in LoadOptions.__slots__})


def add_load_options(group: Any, *, is_replay: bool = False) -> None:
    """Which workload, and how it is driven."""
    if not is_replay:
        _add_workload_option(group)
    group.add_argument(
        "--jps", type=float, help="jobs arriving per second; a trace has its own times without"
    )
    group.add_argument(
        "--arrival",
        default=DEFAULT_ARRIVAL,
        metavar="PROCESS",
        help="poisson, gamma:CV (CV above 1 is burstier than Poisson) or fixed; for --jps (default poisson)",
    )
    group.add_argument(
        "--window",
        dest="window_s",
        type=float,
        metavar="S",
        help="jobs arrive for S seconds (generators: 45)",
    )
    group.add_argument("--seed", type=int, default=42, help="of arrivals and of generated jobs (default 42)")
    group.add_argument(
        "--users",
        type=int,
        metavar="N",
        help="instead of --jps: N users, who begin 10 ms apart, each with one job at a time",
    )
    group.add_argument(
        "--loop",
        choices=("closed", "open"),
        default="closed",
        help="closed: a turn follows its tool call, which follows the answer (default). open: every turn at "
        "its recorded time, whatever the server has answered by then",
    )
    group.add_argument(
        "--scale-lengths",
        type=float,
        default=1.0,
        metavar="X",
        help="multiply the length of every text (default 1)",
    )
    group.add_argument(
        "--scale-rate",
        type=float,
        default=1.0,
        metavar="X",
        help="let jobs arrive X times as fast (default 1)",
    )
    group.add_argument("--max-jobs", type=int, metavar="N", help="only the first N jobs and what they start")
    group.add_argument(
        "--hints",
        choices=tuple(HINTS),
        default="last",
        help="what clients say about a job: nothing, its id (in X-Session-ID), also whether a turn is its "
        "last (in vllm_xargs; default), also the tool's name, also how long the tool takes, or a wrong time",
    )


def _add_workload_option(group: Any) -> None:
    group.add_argument(
        "--workload",
        default="ab8",
        metavar="NAME|FILE",
        help="ab8 (default), swe-bench, bfcl, or a trace: Tenuto's JSONL, Mooncake, agentic Mooncake, Weka",
    )


def _add_server_options(group: Any, *, needs_url: bool) -> None:
    group.add_argument("--url", required=needs_url, help="the server, e.g. http://localhost:8000")
    group.add_argument("--model", help="default: the first that /v1/models names")
    group.add_argument(
        "--run-id",
        metavar="TEXT",
        help="goes into all content and job ids, so that no run hits another's cache (default: random)",
    )


def add_request_options(group: Any) -> None:
    """How turns are sent, whatever the server and the run."""
    group.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: $OPENAI_API_KEY")
    group.add_argument(
        "--prompts",
        choices=("ids", "words"),
        default="ids",
        help="ids: token ids to /v1/completions, exact (default). words: chat messages of common words, one "
        "token each in most vocabularies, plus what the chat template adds; records show the server's count",
    )
    group.add_argument(
        "--answers",
        choices=("server", "workload"),
        default="server",
        help="what later prompts quote as the model's words: what the server really answered (default), or "
        "the workload's own text, which makes prompts independent of the server",
    )
    group.add_argument(
        "--run-commands",
        action="store_true",
        help="run the command lines that a trace holds, instead of sleeping as long as they took: as you, "
        "with your files and network in reach, so only from traces you trust. Each job has a temporary "
        "folder, an environment without your variables, and no input; commands.jsonl says how each one ended",
    )
    group.add_argument(
        "--command-limit",
        dest="command_limit_s",
        type=float,
        default=60.0,
        metavar="S",
        help="end a command, and all it started, after S seconds (default 60) or 1 MiB of output",
    )
    group.add_argument(
        "--force-format",
        metavar="FORMAT",
        help="force the answers' format by vLLM's structured output: json, regex:PATTERN, or a file with a "
        "JSON schema. Answers may then be shorter than planned, and prompts quote the workload's own text",
    )
    group.add_argument(
        "--metrics-interval",
        dest="metrics_interval_s",
        type=float,
        default=2.0,
        metavar="S",
        help="read the server's /metrics every S seconds (default 2) for metrics.jsonl; 0: only before and "
        "after, as writing the page costs a server that is short of processor time",
    )
    group.add_argument(
        "--timeout",
        dest="timeout_s",
        type=float,
        default=3600.0,
        metavar="S",
        help="give up a request that is not answered whole within S seconds (default 3600)",
    )
    group.add_argument(
        "--retries",
        type=int,
        default=0,
        metavar="N",
        help="repeat a failed request up to N times, after a pause; latencies go on counting (default 0). A "
        "turn that fails for good ends its job, and what waits for it is not sent",
    )


def _add_result_options(group: Any) -> None:
    group.add_argument("--policy", metavar="NAME", help="label in the result: the server's policy")
    group.add_argument("--gpu", metavar="NAME", help="label in the result")
    group.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write result.json, turns.jsonl (a line per turn, as it ends) and the server's metrics.jsonl",
    )
    group.add_argument(
        "--json", dest="as_json", action="store_true", help="print the result as JSON instead of text"
    )
