"""`tenuto replay --decisions`: a scheduler's trace is enough to make its decisions again."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tenuto.cli import main
from tenuto.core.errors import DataError, TenutoError
from tenuto.core.policy import Learns, Policy
from tenuto.core.policy_caller import PolicyCaller
from tenuto.core.types import EngineView, Job, Turn
from tenuto.records.trace import TraceOptions, TraceWriter
from tenuto.report.decisions import check_decisions

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short simulation's trace."""
    path = tmp_path_factory.mktemp("traces") / "sim.jsonl"
    run = ["simulate", "--jps", "2", "--window", "4", "--policy", "continuum-fixed", "--option", "ttl_s=1.25"]
    assert main([*run, "--trace", str(path)]) == 0
    return path


def write(path: Path, lines: list[Any]) -> Path:
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + "\n")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


VIEW: dict[str, Any] = {
    "type": "EngineView",
    "now_s": 0.0,
    **dict.fromkeys(("block_size", "num_blocks", "num_free_blocks"), 16),
    **dict.fromkeys(("num_running", "num_waiting", "max_num_batched_tokens"), 1),
}


def ask(hook: str, *inputs: Any) -> dict[str, Any]:
    return {"kind": "asked", "hook": hook, "inputs": inputs, "answer": None}


def test_every_decision_is_made_again(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--decisions", str(trace), "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    asked = [record for record in read(trace) if record["kind"] == "asked"]
    assert verdict["asked"] == len(asked) > 100
    assert {record["hook"] for record in asked} >= {"queue_key", "retain", "evict_key"}
    assert verdict["differences"] == 0
    assert verdict["policies"] == ["continuum-fixed"]


def test_another_policy_differs(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = ["replay", "--decisions", str(trace), "--policy", "continuum-fixed", "--option", "ttl_s=3"]
    assert main([*other, "--max-shown", "2"]) == 1
    said = capsys.readouterr().out
    assert said.count("retain was") == 2
    assert "more" in said
    assert main([*other[:-1], "ttl_s=1.25"]) == 0


def test_a_forged_answer_is_shown(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = read(trace)
    number = next(n for n, record in enumerate(lines) if record.get("hook") == "evict_key")
    lines[number]["answer"] = [0.0]
    assert main(["replay", "--decisions", str(write(tmp_path / "t", lines))]) == 1
    said = capsys.readouterr().out
    assert f"t:{number + 1}: evict_key was [0.0], is [" in said
    assert "1 different answer" in said


def test_a_server_that_starts_again_begins_with_a_fresh_policy(trace: Path, tmp_path: Path) -> None:
    lines = trace.read_text()
    twice = tmp_path / "t"
    twice.write_text(lines + lines)
    assert len(check_decisions(twice).policies) == 2
    # Killed in the middle of a line, it goes on in that line.
    twice.write_text(lines[:-40] + lines)
    verdict = check_decisions(twice)
    assert (len(verdict.policies), verdict.num_differences) == (2, 0)
    assert "the line is cut off" in verdict.notes[0]


@dataclass
class Counting(Policy, Learns):
    """Answers with how much it has been told, this run and before."""

    _told: int = field(init=False, default=0)

    def on_turn_arrived(self, turn: Turn, now_s: float) -> None:
        self._told += 1

    def step_budget(self, view: EngineView) -> int:
        return self._told

    def get_state(self) -> dict[str, Any]:
        return {"told": self._told}

    def set_state(self, state: dict[str, Any]) -> None:
        self._told = state["told"]


def test_a_policy_goes_on_with_what_it_had_learned(tmp_path: Path) -> None:
    policy = Counting()
    policy.set_state({"told": 40})
    path = tmp_path / "t"
    trace = TraceWriter(str(path), policy).open()
    caller = PolicyCaller(policy, trace.write)
    for number in range(3):
        caller.tell("on_turn_arrived", Turn(f"t{number}", Job("j", 0.0, 1), 0.0, 9), 0.0)
        assert caller.ask("step_budget", EngineView(0.0, 16, 9, 9, 0, 0, 99)) == 41 + number
    trace.close()
    lines = read(path)
    name = lines[0]["policy"]
    with pytest.raises(DataError, match=r":1: policy: .* is code from outside Tenuto.*--policy"):
        check_decisions(path)
    verdict = check_decisions(path, policy=name)
    assert (verdict.num_asked, verdict.num_differences) == (3, 0)
    with pytest.raises(DataError, match=":1: state: cannot be loaded by this policy"):
        check_decisions(write(path, [{**lines[0], "state": {}}, *lines[1:]]), policy=name)


@dataclass
class LastFirst(Policy):
    """Some turns go before all others, some after."""

    def queue_key(self, turn: Turn, now_s: float) -> tuple[float, ...]:
        return (math.inf if turn.num_prompt_tokens > 9 else -math.inf, turn.arrival_s)


def test_infinite_keys_are_the_same_again(tmp_path: Path) -> None:
    policy, path = LastFirst(), tmp_path / "t"
    trace = TraceWriter(str(path), policy).open()
    caller = PolicyCaller(policy, trace.write)
    for number in (9, 10):
        caller.ask("queue_key", Turn("t", Job("j", 0.0, 1), 0.0, number), 0.0)
    trace.close()
    verdict = check_decisions(path, policy=read(path)[0]["policy"])
    assert (verdict.num_asked, verdict.num_differences) == (2, 0)


def test_a_cut_last_line_is_left_out_and_told(trace: Path, tmp_path: Path, capsys: Any) -> None:
    cut = tmp_path / "t"
    cut.write_text(trace.read_text()[:-40])
    assert main(["replay", "--decisions", str(cut)]) == 0
    assert "is cut off" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda lines: lines[3:], ":1: kind: a scheduler's trace must begin with its header"),
        (lambda lines: [{**lines[0], "schema": 99}, *lines[1:]], ":1: schema: must be 1, got 99"),
        (lambda lines: [{**lines[0], "policy": None}, *lines[1:]], ":1: policy: .*--policy"),
        (lambda lines: [{**lines[0], "policy": "no.such:Policy"}], "no.such:Policy"),
        (lambda lines: [lines[0], '{"kind": "as', *lines[1:]], ":2: not valid JSON"),
        (lambda lines: [lines[0], "[]"], ":2: must be a JSON object"),
        (lambda lines: [lines[0], {"kind": "asked", "hook": "dream", "inputs": []}], ":2: .*asked 'dream'"),
        (lambda lines: [lines[0], {"kind": "told", "hook": "retain", "inputs": []}], ":2: .*told 'retain'"),
        (lambda lines: [lines[0], {"kind": "asked", "hook": "admit"}], ":2: .*admit"),
        (lambda lines: lines[:1], "nothing was asked"),
        (lambda lines: [{**lines[0], "policy": "tenutoo"}], ":1: no policy 'tenutoo'"),
        (
            lambda lines: [lines[0], ask("retain", None, None)],
            ":2: the inputs of retain are not those of this version.*Turn, EngineView",
        ),
        (lambda lines: [lines[0], ask("evict_key", *range(4))], ":2: the inputs of evict_key are not"),
        (
            lambda lines: [lines[0], ask("step_budget", VIEW | {"num_blocks": "9"})],
            ":2: .*must be int, got '9'",
        ),
        (
            lambda lines: [lines[0], ask("step_budget", VIEW | {"num_blocks": None})],
            ":2: .*must be int, got None",
        ),
        (
            lambda lines: [
                lines[0],
                ask("step_budget", VIEW) | {"answer": {"type": "Keep", "until_s": 10**400}},
            ],
            ":2: the inputs of step_budget are not",
        ),
        (lambda lines: [lines[0], ask("retain", *["\ud800" * 9999] * 2)], ":2: the inputs of retain are not"),
    ],
)
def test_what_cannot_be_replayed_is_said(trace: Path, tmp_path: Path, change: Any, words: str) -> None:
    path = write(tmp_path / "t", change(read(trace)))
    with pytest.raises(TenutoError, match=words) as error:
        check_decisions(path)
    assert len(str(error.value).encode()) < 3000


@pytest.mark.parametrize(("policy", "option"), [("contextserve", "model"), ("continuum", "prefill_profile")])
def test_a_trace_alone_opens_no_file(policy: str, option: str, trace: Path, tmp_path: Path) -> None:
    lines = read(trace)
    path = write(
        tmp_path / "t", [{**lines[0], "policy": policy, "options": {option: "/dev/zero"}}, *lines[1:]]
    )
    with pytest.raises(TenutoError, match=f":1: options: {option} names a file.*--option"):
        check_decisions(path)
    with pytest.raises(TenutoError, match=r"no-such-file"):
        check_decisions(path, options={option: "no-such-file"})


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        check_decisions(tmp_path / "none")


def test_options_of_a_policy_are_for_decisions(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(trace), "--url", "http://127.0.0.1:9", "--option", "ttl_s=1"]) == 2
    assert "--option is for --decisions" in capsys.readouterr().err


def test_a_packed_trace_is_replayed_as_far_as_it_goes(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, cut = tmp_path / "whole.jsonl.gz", tmp_path / "cut.jsonl.gz"
    whole.write_bytes(gzip.compress(trace.read_bytes()))
    cut.write_bytes(whole.read_bytes()[:-2000])
    assert main(["replay", "--decisions", str(trace), "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main(["replay", "--decisions", str(whole), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["asked"] == plain["asked"]
    assert main(["replay", "--decisions", str(cut)]) == 0
    assert "the compressed file is cut off" in capsys.readouterr().out


def write_parts(folder: Path, num_parts: int) -> list[Path]:
    """A counting policy's trace, each part in a file of its own."""
    policy, path, parts = Counting(), folder / "t", []
    trace = TraceWriter(str(path), policy, options=TraceOptions(max_bytes=1)).open()
    caller = PolicyCaller(policy, trace.write)
    for number in range(num_parts):
        caller.tell("on_turn_arrived", Turn(f"t{number}", Job("j", 0.0, 1), 0.0, 9), 0.0)
        caller.ask("step_budget", EngineView(0.0, 16, 9, 9, 0, 0, 99))
        trace.end_step()
        parts.append(folder / f"part{number}")
        (folder / "t.1").replace(parts[-1])
    trace.close()
    return parts


def test_the_parts_of_one_run_are_replayed_as_one(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, 3)
    whole = tmp_path / "whole"
    whole.write_text("".join(part.read_text() for part in parts))
    name = read(whole)[0]["policy"]
    verdict = check_decisions(whole, name)
    assert (len(verdict.policies), verdict.num_asked, verdict.num_differences) == (1, 3, 0)
    assert not any("this is part" in note for note in verdict.notes)
    assert any("this is part 3 of a run" in note for note in check_decisions(parts[2], name).notes)


def test_a_policy_that_reads_commands_needs_a_trace_with_commands(trace: Path, tmp_path: Path) -> None:
    lines = read(trace)
    hidden = write(tmp_path / "t", [{**lines[0], "commands": "hash"}, *lines[1:]])
    assert check_decisions(trace, "contextserve").notes == []
    verdict = check_decisions(hidden)
    assert verdict.num_differences == 0
    assert "commands are not in this trace (hash)" in verdict.notes[0]
    # A trace has a head for each live change; the note is the same for all.
    twice = write(tmp_path / "twice", 2 * [{**lines[0], "commands": "hash"}, *lines[1:]])
    assert len(check_decisions(twice).notes) == 1
    with pytest.raises(DataError, match=r"contextserve decides by the text"):
        check_decisions(hidden, "contextserve")
