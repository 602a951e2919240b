"""What a report reads: every malformed file gets an error that names file, line and field."""

from __future__ import annotations

import errno
import gzip
import json
from pathlib import Path

import pytest

from tenuto.core.errors import DataError
from tenuto.records.files import RunFiles
from tenuto.report.html.sources import read_sources
from tests.report.data import make_job, make_record, make_sample, make_turn, write_lines, write_run


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl: cannot be read: No such file"):
        read_sources([tmp_path / "nowhere.jsonl"])


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("policy", 3, "policy: must be a string, got 3"),
        ("jps", -1, "jps: must be a number from 0 to 1e[+]09, got -1"),
        ("jps", True, "jps: must be a number"),
        ("jps", "3", "jps: must be a number from 0 to 1e[+]09, got '3'"),
        ("jps", 10**400, "jps: must be a number"),
        ("seed", 1.5, "seed: must be a whole number from 0 to .*, got 1.5"),
        ("simulated", "yes", "simulated: must be true or false"),
        ("job_times_s", {"a": "x"}, "job_times_s.a: must be a number"),
        ("job_times_s", [1], "job_times_s: must be an object"),
        ("by_turn", {"0": {}}, "by_turn.0: must be the number of a turn"),
        ("by_turn", {"1": 1}, "by_turn.1: must be an object"),
        ("ttft_s", {**dict.fromkeys(("mean", "p50", "p90"), 1), "p95": "x"}, "ttft_s.p95: must be a number"),
        ("ttft_s", {"p95": 1}, "ttft_s.mean: is missing"),
        ("notes", ["a", 1], r"notes\[1\]: must be a string, got 1"),
        ("versions", 3, "versions: must be an object"),
        ("client", [1], "client: must be an object"),
    ],
)
def test_a_wrong_field_of_a_record(tmp_path: Path, field: str, value: object, said: str) -> None:
    path = write_lines(tmp_path / "results.jsonl", [make_record("a"), {**make_record("b"), field: value}])
    with pytest.raises(DataError, match=rf"results\.jsonl:2: {said}"):
        read_sources([path])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"job": None}, "job: must be a string"),
        ({"turn": 0}, "turn: must be a whole number from 1"),
        ({"due_s": None}, "due_s: must be a number"),
        ({"start_s": 1.0}, "start_s: must be no earlier than 5, what came before it, got 1"),
        ({"last_token_s": 6.5}, "last_token_s: must be no earlier than 7"),
        ({"hit_tokens": "many"}, "hit_tokens: must be a whole number"),
        ({"schema": 3}, "schema: must be 2, got 3: read it with the version"),
        ({"status": "fine"}, "status: must be one of ok, failed, cancelled, got 'fine'"),
        ({"failures": [{"kind": "reset"}]}, r"failures\[0\].detail: is missing"),
        ({"failures": [3]}, r"failures\[0\]: must be an object, got 3"),
    ],
)
def test_a_wrong_field_of_a_turn(tmp_path: Path, change: dict[str, object], said: str) -> None:
    path = write_lines(tmp_path / "turns.jsonl", [make_turn("a", 1, 0), {**make_turn("b", 1, 5), **change}])
    with pytest.raises(DataError, match=rf"turns\.jsonl:2: {said}"):
        read_sources([path])


def test_a_wrong_sample(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "occupancy.jsonl", [make_sample(0), {**make_sample(1), "now_s": "later"}])
    with pytest.raises(DataError, match=r"occupancy\.jsonl:2: now_s: must be a number"):
        read_sources([path])


def test_a_file_of_something_else_is_refused_by_name_and_left_out_of_a_folder(tmp_path: Path) -> None:
    other = write_lines(tmp_path / "other.jsonl", [{"t": 1}])
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    with pytest.raises(
        DataError, match=r"other\.jsonl: is of no kind that Tenuto writes; this command reads a result record"
    ):
        read_sources([other])
    with pytest.raises(DataError, match="nothing found that a report can show"):
        read_sources([tmp_path])
    write_lines(tmp_path / "results.jsonl", [make_record("a")])
    sources = read_sources([tmp_path])
    assert [run.policy for run in sources.runs] == ["a"]
    broken, others = sources.notes
    assert "broken.json:1: not valid JSON: Expecting property name" in broken
    assert others.startswith("Left out, as they hold nothing that a report shows")
    assert others.endswith(": other.jsonl.")


def test_a_broken_file_of_ours_in_a_folder_is_an_error(tmp_path: Path) -> None:
    write_lines(tmp_path / "results.jsonl", [make_record("a")])
    (tmp_path / "turns.jsonl").write_text('{"job": ', encoding="utf-8")
    with pytest.raises(DataError, match=r"turns\.jsonl:1: not valid JSON"):
        read_sources([tmp_path])


def test_what_a_killed_run_leaves_in_a_folder_stops_no_report(tmp_path: Path) -> None:
    write_lines(tmp_path / "good" / "result.json", [make_record("a")])
    with RunFiles(tmp_path / "killed"):
        pass
    left = [tmp_path / "killed" / "turns.jsonl", tmp_path / "killed" / "verdict.json"]
    left[1].touch()
    sources = read_sources([tmp_path])
    assert ([run.policy for run in sources.runs], sources.details) == (["a"], [])
    assert sorted(sources.notes) == [f"{path}: is empty; it was left out." for path in left]
    for path in left:
        with pytest.raises(DataError, match=rf"{path.name}: is empty"):
            read_sources([path])


def test_a_link_that_leads_to_no_file_is_left_out_of_a_folder(tmp_path: Path) -> None:
    write_lines(tmp_path / "results.jsonl", [make_record("a")])
    for name, target in (("broken.json", "nowhere"), ("loop.json", "loop.json")):
        (tmp_path / name).symlink_to(target)
    sources = read_sources([tmp_path])
    assert [run.policy for run in sources.runs] == ["a"]
    assert [note.endswith("; it was left out.") for note in sources.notes] == [True, True]
    with pytest.raises(DataError, match=r"loop\.json: cannot be read: Too many levels"):
        read_sources([tmp_path / "loop.json"])


def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(PermissionError):
        read_sources([tmp_path])


def test_compressed_files_in_a_folder_are_read_as_others_are(tmp_path: Path) -> None:
    plain, packed = write_run(tmp_path / "plain"), tmp_path / "packed"
    write_lines(plain / "metrics.jsonl", [{"at_s": 1}])
    packed.mkdir()
    for path in plain.iterdir():
        (packed / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    sources, others = read_sources([packed]), read_sources([plain])
    assert [run.record for run in sources.runs] == [run.record for run in others.runs]
    assert (sources.details, sources.notes) == (others.details, others.notes)
    write_run(packed)  # beside its compressed copy
    assert read_sources([packed]).details == others.details
    (packed / "turns.jsonl").unlink()
    (packed / "turns.jsonl.gz").write_bytes(gzip.compress(b'{"job": '))
    with pytest.raises(DataError, match=r"turns\.jsonl\.gz:1: not valid JSON"):
        read_sources([packed])


def test_unknown_fields_are_ignored_and_copies_count_once(tmp_path: Path) -> None:
    record = make_record("a", unheard_of={"x": [1]})
    write_lines(tmp_path / "results.jsonl", [record, make_record("a", seed=2)])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "result.json").write_text(json.dumps(record), encoding="utf-8")
    write_lines(tmp_path / "run" / "turns.jsonl", make_job("j", 0))
    sources = read_sources([tmp_path, tmp_path / "results.jsonl"])
    assert [run.seed for run in sources.runs] == [1, 2]
    assert sources.notes == ["Found more than once, counted once: 1 record."]
    assert [(detail.label, len(detail.turns)) for detail in sources.details] == [
        ("a, H200, 1 job/s, seed 1 (simulated)", 3)
    ]
