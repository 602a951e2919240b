"""Replays a scheduler's decisions from its trace, without a server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tenuto.core.console import Progress, count
from tenuto.core.errors import ConfigError, DataError, TenutoError
from tenuto.core.loader import find_file_options, load_policy
from tenuto.core.policy import Learns, Oracle, Policy
from tenuto.core.policy_caller import Difference, Replay
from tenuto.records.codec import Fields, show
from tenuto.records.files import stream_objects
from tenuto.records.load import TRACE, UNKNOWN, identify, make_error
from tenuto.records.trace import SCHEMA, Part, read_part

_SHOWN_CHARS = 300


@dataclass
class DecisionVerdict:
    """The result of a replay of decisions."""

    path: Path
    num_told: int = 0
    num_asked: int = 0
    policies: list[str] = field(default_factory=list)
    """The policy of each run, in the form that `load_policy` accepts."""
    differences: list[tuple[str, Difference]] = field(default_factory=list)
    """The first few differences, with their places in the trace."""
    num_differences: int = 0
    notes: list[str] = field(default_factory=list)
    """Remarks, such as where the file was truncated because its writer was killed."""

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "trace": str(self.path),
            "runs": len(self.policies),
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


def check_decisions(
    path: Path, policy: str | None = None, options: Mapping[str, Any] | None = None, max_shown: int = 10
) -> DecisionVerdict:
    """Replay the decisions of a scheduler's trace, with its own policy or the one given.

    Raises DataError with file and line if the file is not a trace of this version. Raises ConfigError or
    PolicyError if the policy is unknown.
    """
    if (found := identify(path)) not in (TRACE, UNKNOWN):
        raise make_error(path, found, "a scheduler's trace")
    verdict = DecisionVerdict(path)
    replay: Replay | None = None
    part: Part | None = None
    with Progress("replay").cleared() as progress:
        for record in stream_objects(path, verdict.notes.append, keeps_infinity=True):
            kind = record.values.get("kind")
            if kind == "header":
                before, part = part, read_part(record)
                if not part.follows(before):
                    replay = _start_run(record, verdict, policy, options or {})
                    _note_gaps(part, replay.policy, record, verdict)
                continue
            if replay is None:
                raise record.error(
                    "kind",
                    "a scheduler's trace must begin with its header: this file is not such a trace, or its "
                    "beginning is lost, and with it what the policy was told",
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
            progress.tell(lambda: f"{count(verdict.num_asked, 'decision')} asked again")
    if not verdict.num_asked:
        raise DataError(f"{path}: nothing was asked in this trace, so there is nothing to ask again")
    return verdict


def _start_run(
    record: Fields, verdict: DecisionVerdict, policy: str | None, options: Mapping[str, Any]
) -> Replay:
    """Start a run at its header. A restarted server continues the same file with a new header and policy."""
    if record.values.get("schema") != SCHEMA:
        raise record.error(
            "schema", f"must be {SCHEMA}, got {record.values.get('schema')!r}: another version's"
        )
    said_name = record.optional(record.text, "policy") or ""
    name = policy or said_name
    if not name:
        raise record.error("policy", "the trace does not name its policy; say --policy and --option")
    # To name the trace's own policy from outside Tenuto only allows it to run. It changes nothing else.
    is_own = policy is None or (":" in policy and policy == said_name)
    is_from_trace = is_own and not options
    if is_from_trace:
        given = record.values.get("options")
        options = given if isinstance(given, dict) else {}
    if policy is None and ":" in name:
        raise record.error(
            "policy",
            f"{show(name)} is code from outside Tenuto, which a trace alone must not run; to run it, say "
            "--policy with this name",
        )
    try:
        files = find_file_options(name) if is_from_trace else []
        if named := [each for each in files if options.get(each)]:
            raise ConfigError(
                f"options: {named[0]} names a file, which a trace alone must not open; to open it, give the "
                "policy's options with --option"
            )
        made = load_policy(name, options)
    except TenutoError as error:
        raise type(error)(f"{record.place}: {error}") from None
    if isinstance(made, Oracle):
        raise ConfigError(f"policy {name} is told the whole workload beforehand, which no trace holds")
    state: Any = record.values.get("state")
    if is_own and state is not None and isinstance(made, Learns):
        try:
            made.set_state(state)
        except Exception as error:  # a policy is external code, and the trace may contain anything
            raise record.error(
                "state",
                f"cannot be loaded by this policy ({error!r}): another version of the policy wrote the "
                "trace, or the file is damaged",
            ) from None
    verdict.policies.append(name)
    return Replay(made)


def _note_gaps(part: Part, policy: Policy, record: Fields, verdict: DecisionVerdict) -> None:
    """Note the data that this part of a trace lacks. Raises DataError if nothing can be replayed."""
    if part.commands != "full":
        if policy.needs.commands:
            raise record.error(
                "commands",
                f"{verdict.policies[-1]} decides by the text of commands, and this trace does not have it "
                f'({part.commands}); record one with "trace_commands": "full"',
            )
        lacking = (
            f": commands are not in this trace ({part.commands}); a policy that reads them may answer "
            "differently"
        )
        if not any(note.endswith(lacking) for note in verdict.notes):  # once, not for each live change
            verdict.notes.append(f"{record.place}{lacking}")
    if part.number > 1:
        verdict.notes.append(
            f"{record.place}: this is part {part.number} of a run. What the policy was told in earlier "
            "parts is not replayed, so its answers may differ. If the earlier part still exists, put it in "
            f"front: cat {verdict.path.name}.1 {verdict.path.name}"
        )


def format_verdict(verdict: DecisionVerdict) -> str:
    """Format the result as text."""
    runs = verdict.policies
    lines = [
        f"{count(verdict.num_asked, 'decision')} of {', '.join(dict.fromkeys(runs))} asked again, "
        f"{count(verdict.num_told, 'telling')}, {count(len(runs), 'run')}"
    ]
    for place, each in verdict.differences:
        lines.append(f"{place}: {each.hook} was {_show(each.was)}, is {_show(each.answer)}")
        lines.append(f"    asked with {_show(each.inputs)}")
    if hidden := verdict.num_differences - len(verdict.differences):
        lines.append(f"… and {hidden:,} more")
    differ = count(verdict.num_differences, "different answer")
    return "\n".join(
        [*lines, *verdict.notes, differ if verdict.num_differences else "every answer is the same"]
    )


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
