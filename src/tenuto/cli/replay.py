"""`tenuto replay`: a recording against a server again, or a scheduler's decisions again without one."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tenuto.core.decision_replay import Difference, Replay
from tenuto.core.errors import ConfigError, DataError
from tenuto.core.policy import Learns, Oracle, Policy
from tenuto.core.policy_loader import load_policy
from tenuto.core.settings import parse_option
from tenuto.records.fields import Fields
from tenuto.records.files import stream_objects
from tenuto.records.trace import SCHEMA

DESCRIPTION = """\
Run a recording again.

Against a server: the jobs of a recording (or of any trace that `tenuto bench` reads) with their arrivals,
their tool times and exactly their prompt lengths; it is `tenuto bench --workload TRACE`, with its options.

With --decisions: TRACE is a scheduler's own trace, of `tenuto serve --trace` or `tenuto simulate --trace`.
Its policy is made afresh, told and asked again all that the trace says, and must answer the same each time.
Exit status: 0 if it does, 1 if an answer differs, 2 if the trace cannot be replayed.
"""

EPILOG = """\
examples:
  tenuto replay recorded.jsonl --url http://localhost:8000 --out runs/replayed
  tenuto replay recorded.jsonl --url http://localhost:8000 --loop open --scale-rate 2
      every turn at its recorded time, twice as fast
  tenuto replay --decisions scheduler.jsonl
  tenuto replay --decisions scheduler.jsonl --policy continuum-fixed --option ttl_s=3
      what another policy would have answered to the same questions
"""

_PROGRESS_S = 2.0
_SHOWN_CHARS = 300


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of bench that a replay has, and those for decisions."""
    from tenuto.client.load.options import add_options as add_bench_options

    parser.add_argument("workload", metavar="TRACE", type=str, help="the recording, or the scheduler's trace")
    add_bench_options(parser, is_replay=True)
    group = parser.add_argument_group("decisions, without a server")
    group.add_argument("--decisions", action="store_true", help="make a scheduler's decisions again")
    group.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a policy's option; with --policy, and without where the trace does not name its policy",
    )
    group.add_argument(
        "--max-shown", type=int, default=10, metavar="N", help="show the first N differences (default 10)"
    )


def run(parsed: argparse.Namespace) -> int:
    """Replay; returns the exit status."""
    if parsed.decisions:
        return replay_decisions(parsed)
    if parsed.url is None:
        raise ConfigError("name the server with --url, or say --decisions for a scheduler's trace")
    if parsed.option:
        raise ConfigError("--option is for --decisions; a server's policy is set where it is started")
    from tenuto.client.load.options import read_options

    options = read_options(parsed)
    try:
        from tenuto.client.load.run import run_bench
    except ImportError as error:
        raise ConfigError(f"{error}; install it with: pip install 'tenuto[bench]'") from error
    return run_bench(options)


@dataclass
class Verdict:
    """What a replay of decisions found."""

    path: Path
    num_runs: int = 0
    num_told: int = 0
    num_asked: int = 0
    policies: list[str] = field(default_factory=list)
    """The policy of each run, as `load_policy` takes it."""
    differences: list[tuple[str, Difference]] = field(default_factory=list)
    """With their places; the first few."""
    num_differences: int = 0
    notes: list[str] = field(default_factory=list)
    """Where the file was cut off with its writer, if it was."""

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "trace": str(self.path),
            "runs": self.num_runs,
            "policies": self.policies,
            "told": self.num_told,
            "asked": self.num_asked,
            "differences": self.num_differences,
            "notes": self.notes,
            "first": [
                {"place": place, "hook": each.hook, "inputs": each.inputs, "was": each.was, "is": each.answer}
                for place, each in self.differences
            ],
        }


def replay_decisions(parsed: argparse.Namespace) -> int:
    """Ask the trace's policy again, and print how its answers compare."""
    options = dict(map(parse_option, parsed.option))
    verdict = check_decisions(Path(parsed.workload), parsed.policy, options, parsed.max_shown)
    print(json.dumps(verdict.to_json(), indent=1) if parsed.as_json else format_verdict(verdict))
    return 1 if verdict.num_differences else 0


def check_decisions(
    path: Path, policy: str | None = None, options: Mapping[str, Any] | None = None, max_shown: int = 10
) -> Verdict:
    """Make the decisions of a scheduler's trace again, with its own policy or the one named.

    Raises DataError for what is no trace of this version, naming file and line; ConfigError or PolicyError
    where the policy is unknown.
    """
    verdict = Verdict(path)
    replay: Replay | None = None
    next_report_s = time.monotonic() + _PROGRESS_S
    for record in stream_objects(path, verdict.notes.append):
        kind = record.values.get("kind")
        if kind == "header":
            replay = _start_run(record, verdict, policy, options or {})
            continue
        if replay is None:
            raise record.error(
                "kind",
                "a scheduler's trace begins with its header, and this is none: it is no such trace, or its "
                "beginning is lost, and with it what the policy had been told",
            )
        try:
            difference = replay.feed(record.values)
        except DataError as error:
            raise DataError(f"{record.place}: {error}") from None
        verdict.num_told += kind == "told"
        verdict.num_asked += kind == "asked"
        if difference is not None:
            verdict.num_differences += 1
            if len(verdict.differences) < max_shown:
                verdict.differences.append((record.place, difference))
        if time.monotonic() > next_report_s:
            next_report_s += _PROGRESS_S
            print(f"[replay] {verdict.num_asked:,} decisions asked again", file=sys.stderr, flush=True)
    if not verdict.num_asked:
        raise DataError(f"{path}: nothing was asked in this trace, so there is nothing to ask again")
    return verdict


def _start_run(record: Fields, verdict: Verdict, policy: str | None, options: Mapping[str, Any]) -> Replay:
    """A server that starts again goes on in the same file, with a header and a policy of its own."""
    if record.values.get("schema") != SCHEMA:
        raise record.error(
            "schema", f"must be {SCHEMA}, got {record.values.get('schema')!r}: another version's"
        )
    name = policy or record.optional(record.text, "policy")
    if name is None:
        raise record.error("policy", "the trace does not name its policy; say --policy and --option")
    if policy is None and not options:
        said = record.values.get("options")
        options = said if isinstance(said, dict) else {}
    made = load_policy(name, options)
    if isinstance(made, Oracle):
        raise ConfigError(f"policy {name} is told the whole workload beforehand, which no trace holds")
    state = record.values.get("state")
    if policy is None and state is not None:
        _restore(made, state, record)
    verdict.num_runs += 1
    verdict.policies.append(name)
    return Replay(made)


def _restore(policy: Policy, state: Any, record: Fields) -> None:
    """Let the policy go on with what it had learned when the trace began."""
    try:
        if isinstance(policy, Learns):
            policy.set_state(state)
    except Exception as error:  # policies are code from outside, and the trace may hold anything
        raise record.error(
            "state",
            f"is none that this policy goes on with ({error!r}): another version of it wrote the trace, or "
            "its file is damaged",
        ) from None


def format_verdict(verdict: Verdict) -> str:
    """The verdict in words."""
    lines = [
        f"{verdict.num_asked:,} decisions of {', '.join(dict.fromkeys(verdict.policies))} asked again, "
        f"{verdict.num_told:,} tellings, {verdict.num_runs} run{'s' if verdict.num_runs != 1 else ''}"
    ]
    for place, each in verdict.differences:
        lines.append(f"{place}: {each.hook} was {_show(each.was)}, is {_show(each.answer)}")
        lines.append(f"    asked with {_show(each.inputs)}")
    hidden = verdict.num_differences - len(verdict.differences)
    if hidden:
        lines.append(f"… and {hidden:,} more")
    lines += verdict.notes
    lines.append(
        f"{verdict.num_differences:,} answers differ"
        if verdict.num_differences
        else "every answer is the same"
    )
    return "\n".join(lines)


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
