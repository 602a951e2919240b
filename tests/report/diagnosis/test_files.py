"""Files as they come: cut, appended to, compressed, malformed, huge."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest

from tenuto.core.errors import DataError
from tenuto.records import files
from tenuto.records.files import stream_objects
from tenuto.report.analyze import analyze
from tests.report.diagnosis.conftest import HEADER, TraceFile


def refuse(path: Path, text: str | bytes, *words: str) -> None:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(DataError) as error:
        analyze(path)
    for word in (str(path), *words):
        assert word in str(error.value)


def test_a_cut_last_line_is_left_out_with_a_note(two_turns: TraceFile) -> None:
    path = two_turns.write()
    whole = analyze(path)
    with path.open("a") as file:
        file.write('{"step":7,"kind":"job","event":"arr')
    cut = analyze(path)
    assert cut["notes"] == [f"{path}:6: the last line is cut off; it was left out"]
    assert {**cut, "notes": []} == whole


def test_a_cut_line_in_the_middle_is_an_error(two_turns: TraceFile) -> None:
    two_turns.lines.insert(2, '{"step":7,"kind":"jo')
    refuse(two_turns.path, "\n".join(two_turns.lines) + "\n", ":3: not valid JSON")


def test_a_server_that_was_killed_and_started_again(two_turns: TraceFile) -> None:
    """Its trace goes on in the line that was cut."""
    header = json.dumps(HEADER, separators=(",", ":"))
    text = "\n".join(two_turns.lines) + '\n{"step":9,"kind":"jo' + header + "\n" + two_turns.lines[1] + "\n"
    two_turns.path.write_text(text)
    report = analyze(two_turns.path, jobs=["*"])
    assert [job["job"] for job in report["jobs_shown"]] == ["a", "a #2"]
    assert "cut off, as the server was killed" in report["notes"][0]


def test_a_compressed_trace_reads_the_same(two_turns: TraceFile, tmp_path: Path) -> None:
    plain = two_turns.write()
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert {**analyze(packed), "source": ""} == {**analyze(plain), "source": ""}


def test_a_compressed_trace_that_is_cut(two_turns: TraceFile, tmp_path: Path) -> None:
    for number in range(5000):
        two_turns.arrive(f"job-{number * 7919 % 5000}", 1, float(number), number)
    data = gzip.compress(two_turns.write().read_bytes())
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(data[: len(data) * 3 // 4])
    report = analyze(packed)
    assert "the compressed file is cut off after line" in report["notes"][-1]
    assert 1000 < report["jobs"]["total"] < 5000


HEAD = json.dumps(HEADER) + "\n"
ARRIVED = {
    "step": 0, "kind": "job", "event": "arrived", "job": "a", "turn": "a/1", "turn_number": 1,
    "now_s": 0.0, "num_prompt_tokens": 5, "tool_s": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("now_s", "soon"),
        ("now_s", -1),
        ("num_prompt_tokens", 1.5),
        ("num_prompt_tokens", True),
        ("turn_number", 0),
        ("tool_s", "x"),
        ("job", 7),
        ("job", ""),
        ("event", "vanished"),
        ("kind", "chapter"),
    ],
)
def test_a_malformed_field_is_named_with_file_and_line(tmp_path: Path, field: str, value: object) -> None:
    refuse(tmp_path / "t.jsonl", HEAD + json.dumps({**ARRIVED, field: value}) + "\n", ":2:", field)


@pytest.mark.parametrize(
    "field", ["now_s", "num_prompt_tokens", "turn_number", "job", "turn", "event", "kind"]
)
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    record = {name: value for name, value in ARRIVED.items() if name != field}
    refuse(tmp_path / "t.jsonl", HEAD + json.dumps(record) + "\n", ":2:", field, "is missing")


def test_what_is_no_json_value_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    refuse(path, "", "is empty")
    refuse(path, HEAD + "[1]\n", ":2:", "must be a JSON object")
    refuse(path, HEAD + '{"kind": "step", "now_s": NaN}\n', ":2:", "now_s")
    refuse(path, (HEAD + '{"kind": "\xff"}\n').encode("latin-1"), ":2:")
    refuse(path, HEAD, "no turn arrived")
    refuse(path, HEAD.replace('"schema": 1', '"schema": 2'), ":1:", "schema")
    refuse(path, '{"at_s": 1.0, "vllm:x": 2}\n{"at_s": 2.0}\n', "a file of /metrics samples", "turns.jsonl")
    refuse(path, "hello\nworld\n", "not valid JSON")
    refuse(path, '{"a": 1}', "of no kind that Tenuto writes")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.jsonl: cannot be read"):
        analyze(tmp_path / "nothing.jsonl")
    with pytest.raises(DataError, match=r": is a folder without a run; this command reads "):
        analyze(tmp_path)


def test_progress_is_said_of_what_takes_long(two_turns: TraceFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_QUIET_S", 0.0)
    monkeypatch.setattr(files, "_LINES_PER_LOOK", 2)
    said: list[str] = []
    analyze(two_turns.write(), say=said.append)
    assert len(said) == 2
    assert "2 lines" in said[0]


def test_memory_does_not_grow_with_lines(tmp_path: Path) -> None:
    line = json.dumps({"step": 0, "kind": "told", "hook": "x", "inputs": ["y" * 400]}) + "\n"
    peaks = []
    for count in (500, 10_000):
        path = tmp_path / f"{count}.jsonl"
        path.write_text(HEAD + json.dumps(ARRIVED) + "\n" + line * count)
        tracemalloc.start()
        analyze(path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 100_000  # ten thousand lines are four million bytes


def test_lines_come_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\nbroken\n')
    records = stream_objects(path, lambda text: None)
    assert [next(records).values, next(records).values] == [{"a": 1}, {"a": 2}]
    with pytest.raises(DataError, match=":4: not valid JSON"):
        next(records)
