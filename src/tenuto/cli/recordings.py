"""`tenuto record`, `replay` and `convert`: traffic as a file, and run again."""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass
from pathlib import Path

from tenuto.cli.command import Command, Given, Part, needing, policy_options
from tenuto.client.options import BenchOptions
from tenuto.core.errors import ConfigError
from tenuto.core.settings import Options, option, parse_policy_options
from tenuto.proxy import RecordOptions
from tenuto.workload.convert import ConvertOptions
from tenuto.workload.load import LoadOptions


def _run_record(given: Given) -> int:
    options = given.read(RecordOptions)
    with needing("bench"):
        from tenuto.proxy.proxy import run_recording
    return run_recording(options)


RECORD = Command(
    summary="""\
Record the requests of agents to a server, without their text: a proxy that passes everything on unchanged.
Point the agents at the proxy instead of the server. Ctrl-C or SIGTERM ends the recording.
""",
    examples="""\
  tenuto record --url http://localhost:8000 --out trace.jsonl
      agents use http://localhost:8001/v1; then: tenuto replay trace.jsonl --url http://localhost:8000
  tenuto record --url https://api.example.com --out trace.jsonl --port 9000 --ask-usage
  tenuto record --url http://localhost:8000 --out trace.jsonl --salt "$SECRET"
      recordings with one salt have the same hashes, so that they can be compared or put together
  tenuto record --url http://router:9000 --out trace.jsonl --name-jobs
      agents that send no id, before a router that pins sessions by X-Session-ID
""",
    options=(Part(RecordOptions),),
    run=_run_record,
    notes="""\
Every answered turn becomes a line of Tenuto's JSONL: session, arrival, tool gap, prompt and output length,
the tool called, latencies, and salted hashes that say which prompts begin alike. No text, no header and no
key is written, unless --keep-text asks for the text.

Prompt lengths and hashes are of the server's own tokens if it has /tokenize (vLLM, SGLang) or gets token ids.
Otherwise they are of whole messages, with lengths estimated from the server's usage.
""",
)


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(Options):
    """The options of a replay."""

    GROUP = "decisions, without a server"

    trace: str = option(
        MISSING, "the recording, or the scheduler's trace", metavar="TRACE", is_positional=True
    )
    decisions: bool = option(False, "make a scheduler's decisions again")
    policy: str | None = option(
        None, "ask this policy instead of the trace's own; with --url: label in the result", metavar="NAME"
    )
    options: tuple[str, ...] = policy_options(
        "a policy's option; needs --policy, unless the trace does not name its policy"
    )
    max_shown: int = option(10, "show the first N differences", minimum=0)
    as_json: bool = option(False, "print JSON instead of text", flag="--json")


def _run_replay(given: Given) -> int:
    options = given.read(ReplayOptions)
    if options.decisions:
        return _replay_decisions(options)
    if not given.has("urls"):
        raise ConfigError("name the server with --url, or say --decisions for a scheduler's trace")
    if options.options:
        raise ConfigError("--option is for --decisions; a server's policy is set where it is started")
    bench = given.read(BenchOptions, load=given.read(LoadOptions, workload=options.trace))
    with needing("bench"):
        from tenuto.client.bench import run_bench
    return run_bench(bench)


def _replay_decisions(options: ReplayOptions) -> int:
    """Repeat the trace's calls on a policy, and print how its answers compare."""
    from tenuto.report.decisions import check_decisions, format_verdict

    policy_options = parse_policy_options(options.options, options.policy or "")
    verdict = check_decisions(Path(options.trace), options.policy, policy_options, options.max_shown)
    print(json.dumps(verdict.to_json(), indent=1) if options.as_json else format_verdict(verdict))
    return 1 if verdict.num_differences else 0


REPLAY = Command(
    summary="""\
Run a recording against a server again: the same jobs, arrivals, tool times and prompt lengths.
With --decisions: make the decisions of a scheduler's own trace again, without a server.
""",
    examples="""\
  tenuto replay recorded.jsonl --url http://localhost:8000 --out runs/replayed
  tenuto replay recorded.jsonl --url http://localhost:8000 --loop open --scale-rate 2
      every turn at its recorded time, twice as fast
  tenuto replay --decisions scheduler.jsonl
  tenuto replay --decisions scheduler.jsonl --policy continuum-fixed --option ttl_s=3
      what another policy would have answered to the same questions
""",
    options=(Part(ReplayOptions), Part(BenchOptions, without=("workload",), optional=("urls",))),
    run=_run_replay,
    notes="""\
Against a server, this is `tenuto bench --workload TRACE` with its options.

With --decisions, TRACE comes from `tenuto serve --trace` or `tenuto simulate --trace`. A new policy gets the
same reports and questions as in the trace, and must give the same answers.

Exit status with --decisions: 0 if it does, 1 if an answer differs, 2 if the trace cannot be replayed.
""",
    main=("trace", "urls", "decisions", "policy", "model", "jps", "users", "max_jobs", "out", "as_json"),
)


def _run_convert(given: Given) -> int:
    from tenuto.workload.convert import run_convert

    return run_convert(given.read(ConvertOptions))


CONVERT = Command(
    summary="""\
Change a trace's format, or import agents' logs as a workload.
It says on stderr what the new format cannot hold.
""",
    examples="""\
  tenuto convert recorded.jsonl sessions --to weka
      a folder with a file per session, as AIPerf reads it
  tenuto convert recorded.jsonl mooncake.jsonl --to mooncake
  tenuto convert runs/trajectories swe.jsonl
      mini-swe-agent's own logs as a workload; then: tenuto bench --workload swe.jsonl --url …
""",
    options=(Part(ConvertOptions),),
    run=_run_convert,
    notes="""\
IN is anything that --workload takes: Tenuto's JSONL (a recording, say), Mooncake, agentic Mooncake, Weka,
trajectories of mini-swe-agent (a file, or a folder of *.traj.json), OpenAI-style chat logs (JSONL of rows
with messages), ShareGPT, TraceLab's rounds, or OpenTelemetry's spans of agents (JSON). The written file is
read again and compared, to find what was lost.
""",
)
