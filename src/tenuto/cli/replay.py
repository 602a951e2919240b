"""`tenuto replay`: run a recording again on a server, or repeat a scheduler's decisions without one."""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass
from pathlib import Path

from tenuto.cli.command import Command, Given, Part, needing
from tenuto.client.options import BenchOptions
from tenuto.core.errors import ConfigError
from tenuto.core.settings import Options, option, parse_policy_options
from tenuto.workload.load import LoadOptions

_SUMMARY = """\
Run a recording against a server again: the same jobs, arrivals, tool times and prompt lengths.
With --decisions: make the decisions of a scheduler's own trace again, without a server.
"""

_EXAMPLES = """\
examples:
  tenuto replay recorded.jsonl --url http://localhost:8000 --out runs/replayed
  tenuto replay recorded.jsonl --url http://localhost:8000 --loop open --scale-rate 2
      every turn at its recorded time, twice as fast
  tenuto replay --decisions scheduler.jsonl
  tenuto replay --decisions scheduler.jsonl --policy continuum-fixed --option ttl_s=3
      what another policy would have answered to the same questions
"""

_NOTES = """\
Against a server, this is `tenuto bench --workload TRACE` with its options.

With --decisions, TRACE comes from `tenuto serve --trace` or `tenuto simulate --trace`. A new policy gets the
same reports and questions as in the trace, and must give the same answers.
Exit status with --decisions: 0 if it does, 1 if an answer differs, 2 if the trace cannot be replayed.
"""


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
    options: tuple[str, ...] = option(
        (),
        "a policy's option; needs --policy, unless the trace does not name its policy",
        flag="--option",
        metavar="[POLICY:]KEY=VALUE",
        is_repeatable=True,
    )
    max_shown: int = option(10, "show the first N differences", minimum=0)
    as_json: bool = option(False, "print JSON instead of text", flag="--json")


def run(given: Given) -> int:
    """Replay. Status 0: success; 1: an answer differs, or a turn was not answered."""
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


COMMAND = Command(
    _SUMMARY,
    _EXAMPLES,
    (Part(ReplayOptions), Part(BenchOptions, without=("workload",), optional=("urls",))),
    run,
    notes=_NOTES,
    main=("trace", "urls", "decisions", "policy", "model", "jps", "users", "max_jobs", "out", "as_json"),
)
