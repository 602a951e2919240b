"""Files that are not what they should be: one error, which names the file and the line."""

from __future__ import annotations

import gzip
import json
import os
from decimal import Decimal
from pathlib import Path

import pytest

from tenuto.core.errors import DataError
from tenuto.records import files
from tenuto.records.files import read_first, read_objects, write_whole


def write(tmp_path, data, name="trace.jsonl"):
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"\xff\xfe{}", r"trace.jsonl:1: not UTF-8"),
        (b'{"a": 1}\n{"a": "\xff"}\n', r"trace.jsonl:2: not UTF-8"),
        (b"\x1f\x8bnonsense", "cannot be read"),
        (gzip.compress(b'{"a": 1}\n' * 99, mtime=0)[:-9], "cannot be read"),
        (b"\x28\xb5\x2f\xfd\x00\x58", "compressed with zstd; unpack it"),
        (b"[1, 2]", r"trace.jsonl\[0\]: must be a JSON object, got 1"),
        (b'[{"a": 1}, 3]', r"trace.jsonl\[1\]: must be a JSON object, got 3"),
        (b"[]", "is empty"),
        (b"7", "trace.jsonl:1: must be a JSON object, got 7"),
        # From Python 3.13 on, the comma is what is wrong.
        (b'{\n"a": 1,\n}', r"trace.jsonl:[23]: not valid JSON"),
        (b"nonsense", "trace.jsonl:1: not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a": 1}\n7\n', r"trace.jsonl:2: must be a JSON object, got 7"),
        (b'{"a": 1}\n{"a": \n', r"trace.jsonl:2: not valid JSON"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": -Infinity}', "-Infinity is not JSON"),
        (b'{"a": 1e999}', "1e999 is too large"),
        (b'{"a": 1, "b": 2, "a": 3}', "key 'a' appears twice"),
        (b'{"a": ' + b"[" * 100_000, "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_a_file_that_is_no_row_of_objects_is_refused(tmp_path, data, words):
    path = write(tmp_path, data)
    with pytest.raises(DataError, match=words) as error:
        read_objects(path, exact=True)
    assert str(error.value).startswith(str(path))


def test_a_pipe_is_refused():
    output, pipe = os.pipe()
    os.write(pipe, b'{"a": 1}\n')
    os.close(pipe)
    with pytest.raises(DataError, match="is a pipe or a device; save it to a file first"):
        read_objects(Path(f"/dev/fd/{output}"))
    os.close(output)


def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 1000)
    path = write(tmp_path, gzip.compress(b" " * 1001, mtime=0))
    with pytest.raises(DataError, match="more than 1000 bytes"):
        read_objects(path, exact=True)


@pytest.mark.parametrize("bomb", [b'{"a": [' + b"[]," * 40_000 + b"[]]}", b'{"a": 1}\n' * 20_000])
def test_a_small_file_that_unpacks_to_a_large_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bomb: bytes
) -> None:
    monkeypatch.setattr(files, "MAX_UNPACKED_BYTES", 10_000)
    path = write(tmp_path, gzip.compress(bomb, mtime=0))
    with pytest.raises(DataError, match=r"holds more than \d+ bytes; unpack it first"):
        read_objects(path)
    assert len(read_objects(write(tmp_path, bomb))) in (1, 20_000)


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_lines_and_whole_objects_are_read_plain_or_packed(tmp_path, compress):
    rows = [{"a": 1}, {"a": "two\u2028lines"}]
    lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    read = read_objects(write(tmp_path, compress(lines.encode())))
    assert [(record.values, record.place[-2:]) for record in read] == [(rows[0], ":1"), (rows[1], ":3")]
    pretty = json.dumps(rows[0], indent=2)
    assert [r.values for r in read_objects(write(tmp_path, compress(pretty.encode())))] == [{"a": 1}]


@pytest.mark.parametrize("text", ["300.00000000000004", "0.1", "1e2", "1E-3", "12345678901"])
def test_milliseconds_become_the_nearest_seconds(tmp_path, text):
    (record,) = read_objects(write(tmp_path, f'{{"t": {text}}}'), exact=True)
    assert record.milliseconds("t") == float(Decimal(text) / 1000)


@pytest.mark.parametrize(
    "text", ['{"a": 1}', '[{"a": 1}]', '{"a": 1}\n', '\n{"a": 1}\n\n', '{\n "a":\n 1\n}', '\ufeff{"a": 1}']
)
def test_one_object_however_it_is_written(tmp_path, text):
    path = write(tmp_path, text)
    assert [fields.values for fields in read_objects(path)] == [{"a": 1}]
    assert read_first(path).values == {"a": 1}


def test_a_packed_file_that_is_cut_before_its_first_object(tmp_path):
    packed = gzip.compress(b"\n" * 70_000 + b'{"a": 1}\n', mtime=0)
    with pytest.raises(DataError, match="is cut off before its first object"):
        read_first(write(tmp_path, packed[:60]))


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_cut_last_line_is_left_out_with_a_note(tmp_path, is_packed):
    data = b'{"a": 1}\n{"a": 2}\n{"a": '
    path = write(tmp_path, gzip.compress(data) if is_packed else data)
    notes = []
    assert [fields.values for fields in read_objects(path, notes.append)] == [{"a": 1}, {"a": 2}]
    assert notes == [f"{path}:3: the last line is cut off; it was left out"]


def test_a_packed_file_that_is_cut_is_read_as_far_as_it_goes(tmp_path):
    path = write(tmp_path, gzip.compress(b"".join(b'{"a": %d}\n' % (n * 7919) for n in range(9999)))[:-200])
    notes = []
    read = read_objects(path, notes.append)
    assert 1000 < len(read) < 9999
    assert "the compressed file is cut off after line" in notes[0]
    with pytest.raises(DataError, match="cannot be read: Compressed file ended"):
        read_objects(path)


def test_what_is_no_number_is_null_in_a_record(tmp_path):
    (fields,) = read_objects(write(tmp_path, '{"a": NaN, "b": -Infinity, "c": 1}'))
    assert fields.values == {"a": None, "b": None, "c": 1}


def test_a_file_that_is_written_whole_leaves_others_alone(tmp_path):
    path, other = write(tmp_path, "old"), write(tmp_path, "mine", "trace.jsonl.part")
    write_whole(path, "new")
    assert (path.read_text(), other.read_text()) == ("new", "mine")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\ud800")
    assert path.read_text() == "new"
    assert sorted(tmp_path.iterdir()) == [path, other]
