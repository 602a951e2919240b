"""Files that are not what they should be: one error, which names file, line and field."""

from __future__ import annotations

import gzip
import json
import re
from decimal import Decimal

import pytest

from tenuto.core.errors import DataError
from tenuto.records import strict_fields as records
from tenuto.records.strict_fields import Record, read_records
from tenuto.workload.load import load_workload

MOONCAKE = {"timestamp": 5, "input_length": 700, "output_length": 3, "hash_ids": [1, 2]}
TENUTO = {"session": "a", "timestamp": 0, "input_length": 8, "output_length": 1}


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
        (b"[1, 2]", r"trace.jsonl:1: must be a JSON object"),
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
        read_records(path)
    assert str(error.value).startswith(str(path))


def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MAX_FILE_BYTES", 1000)
    path = write(tmp_path, gzip.compress(b" " * 1001, mtime=0))
    with pytest.raises(DataError, match="more than 1000 bytes"):
        read_records(path)


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_lines_and_whole_objects_are_read_plain_or_packed(tmp_path, compress):
    rows = [{"a": 1}, {"a": "two\u2028lines"}]
    lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    read = read_records(write(tmp_path, compress(lines.encode())))
    assert [(record.values, record.place[-2:]) for record in read] == [(rows[0], ":1"), (rows[1], ":3")]
    pretty = json.dumps(rows[0], indent=2)
    assert [r.values for r in read_records(write(tmp_path, compress(pretty.encode())))] == [{"a": 1}]


@pytest.mark.parametrize("value", [True, -1, 1.0, 10**18, "7", None, [7]])
def test_a_length_is_a_whole_number_within_bounds(value):
    with pytest.raises(DataError, match=re.escape("f:3: n: must be a whole number from 1 to 16777216")):
        Record("f:3", {"n": value}).integer("n", low=1)


@pytest.mark.parametrize("value", [True, -0.5, 1e10, "7", None])
def test_a_time_is_a_number_within_bounds(value):
    with pytest.raises(DataError, match="f:3: t: must be a number from 0 to 1e"):
        Record("f:3", {"t": value}).number("t")


@pytest.mark.parametrize("value", ["", 7, None, ["a"]])
def test_a_name_is_a_string(value):
    with pytest.raises(DataError, match="f:3: s: must be a string"):
        Record("f:3", {"s": value}).text("s")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("1, 2", "f:3: h: must be a list"),
        ([1, True], r"f:3: h\[1\]: must be a whole number"),
        ([1, -2], r"f:3: h\[1\]"),
        ([1, 2.0], r"f:3: h\[1\]"),
        ([1], "f:3: h: 2 blocks are needed for the prompt's length, got 1"),
        ([1, 2, 3], "got 3"),
    ],
)
def test_block_ids_are_whole_numbers_one_a_block(value, words):
    with pytest.raises(DataError, match=words):
        Record("f:3", {"h": value}).hash_ids("h", 2)


def test_a_missing_field_and_a_nested_one_are_named():
    record = Record("f:3", {"requests": [{"a": 1}, 5]})
    with pytest.raises(DataError, match="f:3: t: is missing"):
        record.number("t")
    with pytest.raises(DataError, match=r"f:3: requests\[1\]: must be an object, got 5"):
        record.records("requests")
    inner = Record("f:3", {"requests": [{"deps": [{}]}]}).records("requests")[0].records("deps")[0]
    with pytest.raises(DataError, match=r"f:3: requests\[0\]\.deps\[0\]\.id: is missing"):
        inner.text("id")


@pytest.mark.parametrize("text", ["300.00000000000004", "0.1", "1e2", "1E-3", "12345678901"])
def test_milliseconds_become_the_nearest_seconds(tmp_path, text):
    (record,) = read_records(write(tmp_path, f'{{"t": {text}}}'))
    assert record.milliseconds("t") == float(Decimal(text) / 1000)


@pytest.mark.parametrize("row", [MOONCAKE, TENUTO], ids=["mooncake", "tenuto"])
@pytest.mark.parametrize("field", ["timestamp", "input_length", "output_length"])
@pytest.mark.parametrize("value", [None, -1, True, "1", 10**18, [], {}])
def test_one_hostile_field_refuses_the_whole_file(write_rows, row, field, value):
    first, last = (row | {"session": name} if "session" in row else row for name in ("first", "last"))
    path = write_rows(first, row | {field: value}, last)
    with pytest.raises(DataError, match=re.escape(f"{path}:2: {field}: ")):
        load_workload(path)
