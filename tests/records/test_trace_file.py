"""The file of a trace."""

from __future__ import annotations

import json
import stat
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tenuto.core.errors import ConfigError
from tenuto.core.policy import Learns, Policy
from tenuto.core.types import Job, ToolCall, Turn
from tenuto.policies.tenuto import Tenuto
from tenuto.records.trace import Commands, TraceOptions, TraceWriter


def test_a_new_trace_is_its_owner_s_alone_and_an_old_one_keeps_its_mode(tmp_path: Path) -> None:
    new, old = tmp_path / "new.jsonl", tmp_path / "old.jsonl"
    old.touch()
    old.chmod(0o640)
    for path in (new, old):
        TraceWriter(str(path)).open().close()
    assert stat.S_IMODE(new.stat().st_mode) == 0o600
    assert stat.S_IMODE(old.stat().st_mode) == 0o640


def test_a_file_with_something_else_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text('{"session": "a"}\n')
    with pytest.raises(ConfigError, match="holds something else"):
        TraceWriter(str(path)).open()
    assert path.read_text() == '{"session": "a"}\n'


CALL = {"type": "ToolCall", "name": "curl", "command": "curl -u me:hunter2 http://x"}
TOLD = {"kind": "told", "hook": "on_turn_finished", "inputs": [{"type": "Turn", "tool": CALL}, 1.0]}


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_calls(path: Path, commands: Commands) -> list[str | None]:
    """What a trace has of three calls, the first and the last of them equal."""
    with closing(TraceWriter(str(path), options=TraceOptions(commands)).open()) as trace:
        for call in (CALL, {**CALL, "command": "ls"}, CALL):
            lease = {"type": "Lease", "turn": {"type": "Turn", "tool": call}}
            trace.write({"kind": "asked", "hook": "evict_key", "inputs": [lease], "answer": []})
    return [record["inputs"][0]["turn"]["tool"]["command"] for record in read(path)[1:]]


def test_commands_are_hashed_with_a_salt_of_the_run(tmp_path: Path) -> None:
    first, other, again = write_calls(tmp_path / "t", "hash")
    assert first == again
    assert other != first
    assert str(first).startswith("hash-")
    assert "hunter2" not in (tmp_path / "t").read_text()
    assert write_calls(tmp_path / "other", "hash")[0] != first


def test_commands_are_left_out_or_kept_as_asked(tmp_path: Path) -> None:
    assert write_calls(tmp_path / "none", "none") == [None, None, None]
    assert write_calls(tmp_path / "full", "full") == [CALL["command"], "ls", CALL["command"]]


def test_the_record_that_was_given_is_left_as_it_is(tmp_path: Path) -> None:
    before = json.dumps(TOLD)
    with closing(TraceWriter(str(tmp_path / "t")).open()) as trace:
        trace.write(TOLD)
    assert json.dumps(TOLD) == before


def write_steps(path: Path, num_steps: int, max_bytes: int) -> None:
    with closing(TraceWriter(str(path), options=TraceOptions(max_bytes=max_bytes)).open()) as trace:
        for number in range(num_steps):
            trace.write({"kind": "told", "hook": "x", "inputs": [number] * 30})
            trace.end_step()


def test_a_large_trace_is_set_aside_between_steps_and_one_older_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write_steps(path, 100, 2000)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["t", "t.1"]
    older, newer = read(tmp_path / "t.1"), read(path)
    assert (tmp_path / "t.1").stat().st_size < 2300
    assert older[0]["kind"] == newer[0]["kind"] == "header"
    assert older[0]["run"] == newer[0]["run"]
    assert newer[0]["part"] == older[0]["part"] + 1 > 3
    steps = [record["step"] for record in older + newer if record["kind"] == "told"]
    assert steps == list(range(steps[0], 100))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_is_too_large_at_the_start_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write_steps(path, 10, 10**9)
    before = path.read_text()
    write_steps(path, 1, 1000)
    assert (tmp_path / "t.1").read_text() == before
    assert [record["kind"] for record in read(path)] == ["header", "told"]


def test_a_device_is_never_set_aside() -> None:
    write_steps(Path("/dev/null"), 100, 10)
    assert Path("/dev/null").is_char_device()


def test_a_trace_that_cannot_be_set_aside_ends_with_a_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "t.1").mkdir()
    write_steps(tmp_path / "t", 100, 1000)
    assert "the trace ends here" in caplog.text


NO_JSON: list[Any] = [{("bash", 1): 3.0}, {"seen": {1, 2}}, {}]
"""By a key, by a value, and by its depth."""
for _ in range(100_000):
    NO_JSON[2] = {"seen": NO_JSON[2]}


@dataclass
class Learned(Policy, Learns):
    """Learned something; a policy is code from outside, and may get it wrong."""

    state: Any = field(init=False)

    def get_state(self) -> dict[str, Any]:
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("tenant", ["acme", "Universität, Institut für Informatik", "\U0001f680" * 128])
def test_what_a_policy_learned_is_found_again_by_the_names_that_records_have(
    tenant: str, tmp_path: Path
) -> None:
    policy, path, tool = Tenuto(), tmp_path / "trace.jsonl", ToolCall("Prüfung" * 9)
    turn = Turn("turn-1", Job("job", 0.0, 1, tenant=tenant), 1.0, 100, tool=tool)
    policy.on_tool_returned(turn, tool, 40.0)
    with closing(TraceWriter(str(path), policy, "tenuto").open()) as trace:
        trace.write({"kind": "told", "inputs": [asdict(turn), asdict(tool)]})
    header, told = (json.loads(line) for line in path.read_text().splitlines())
    assert header["state"] == policy.get_state()
    assert told["inputs"][0]["job"]["tenant"] == tenant
    assert told["inputs"][1]["name"] == "Prüfung" * 9


def test_the_name_of_a_policy_s_file_is_whole_in_a_header(tmp_path: Path) -> None:
    path, name = tmp_path / "trace.jsonl", f"/{'folder/' * 30}file.py:Mine"
    TraceWriter(str(path), Policy(), name).open().close()
    assert json.loads(path.read_text())["policy"] == name


@pytest.mark.parametrize("state", NO_JSON, ids=["key", "value", "depth"])
def test_what_a_policy_learned_is_left_out_of_headers_if_it_is_no_json(tmp_path: Path, state: Any) -> None:
    policy = Learned()
    policy.state = {"seen": 1}
    options = TraceOptions(max_bytes=1000)
    with closing(TraceWriter(str(tmp_path / "t"), policy, options=options).open()) as trace:
        policy.state = state
        for _ in range(20):
            trace.write(TOLD)
            trace.end_step()
        trace.begin_run(policy, "another", {})
    headers = [each for name in ("t.1", "t") for each in read(tmp_path / name) if each["kind"] == "header"]
    assert len(headers) >= 2
    assert headers[-1]["policy"] == "another"
    assert not any("state" in header for header in headers)


@pytest.mark.parametrize("inputs", [NO_JSON[0], NO_JSON[2]], ids=["key", "depth"])
def test_a_record_that_is_no_json_ends_the_trace_with_a_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, inputs: Any
) -> None:
    with closing(TraceWriter(str(tmp_path / "t")).open()) as trace:
        trace.write({**TOLD, "inputs": [inputs]})
        trace.write(TOLD)
    assert "the trace ends here" in caplog.text
    assert [record["kind"] for record in read(tmp_path / "t")] == ["header"]
