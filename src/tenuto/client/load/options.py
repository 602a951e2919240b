"""The options of a measured run against a live server; `bench`, `replay` and `ab` share them."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Literal

from tenuto.client.http.address import check_api_key, check_engine_urls, check_url, get_base_url
from tenuto.core.errors import ConfigError
from tenuto.core.settings import Options, option
from tenuto.workload.load import JPS_HELP, LoadOptions


@dataclass(frozen=True, kw_only=True)
class RequestOptions(Options):
    """How turns are sent; independent of the server and the run."""

    GROUP = "the requests"

    api_key: str | None = option(None, "the key to send", environment="OPENAI_API_KEY", metavar="KEY")
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
        "read the server's /metrics every S seconds, for metrics.jsonl. 0: only before and after, because "
        "writing the page costs a server that is short of processor time",
        minimum=0,
    )
    timeout_s: float = option(3600.0, "give up a request that has no whole answer after S seconds", above=0)
    retries: int = option(
        0,
        "repeat a failed request up to N times, after a pause; its latency goes on counting. A turn that "
        "fails for good ends its job, and what waits for it is not sent",
        minimum=0,
    )

    def __post_init__(self) -> None:
        """Check the options. Raises ConfigError."""
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
        "with several --url: which of them a turn goes to, a router's name (see docs/fleet.md) or "
        "file.py:Class",
        metavar="NAME",
    )
    engine_urls: tuple[str, ...] = option(
        (),
        "an engine behind a router: metrics come from there, turns go to --url. May be repeated",
        flag="--engine-url",
        metavar="URL",
        is_repeatable=True,
        shown_default="the engines that a router names at /list_workers",
    )
    load: LoadOptions = field(default_factory=LoadOptions)
    model: str | None = option(
        None, "the model to ask for", metavar="NAME", shown_default="the first that /v1/models names"
    )
    run_id: str | None = option(
        None,
        "goes into all content and job ids, so that no run hits another's cache",
        shown_default="random",
    )
    policy: str | None = option(None, "label in the result: the server's policy", metavar="NAME")
    gpu: str | None = option(None, "label in the result", metavar="NAME")
    out: Path | None = option(
        None,
        "write result.json, turns.jsonl (a line per turn, as it ends) and the server's metrics.jsonl",
        metavar="DIR",
    )
    csv: Path | None = option(None, "write the result as a row of CSV too", is_written=True)
    as_json: bool = option(False, "print the result as JSON instead of text", flag="--json")

    def __post_init__(self) -> None:
        """Check the options. Raises ConfigError."""
        for url in self.urls:
            check_url(url)
        if len({get_base_url(url) for url in self.urls}) < len(self.urls):
            raise ConfigError(f"--url names an engine twice: {', '.join(self.urls)}")
        check_engine_urls(self.engine_urls)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class SweepOptions(Options):
    """The loads of a bench."""

    GROUP = "the load"

    jps: tuple[float, ...] = option(
        (), f"{JPS_HELP}. Several, as 1,2,4: one run after the other", above=0, alias="--request-rate"
    )

    def __post_init__(self) -> None:
        """Check the loads. Raises ConfigError."""
        super().__post_init__()
        if len(set(self.jps)) < len(self.jps):
            raise ConfigError(f"--jps names a load twice: {','.join(f'{jps:g}' for jps in self.jps)}")
