"""One field of one row that is not what it should be."""

from __future__ import annotations

import gzip
import json
import re
import tracemalloc

import pytest

from tenuto.cli import main
from tenuto.core.errors import DataError
from tenuto.records import files
from tenuto.workload.load import load_workload

MOONCAKE = {"timestamp": 5, "input_length": 700, "output_length": 3, "hash_ids": [1, 2]}
TENUTO = {"session": "a", "timestamp": 0, "input_length": 8, "output_length": 1}
REQUEST = {"t": 0, "type": "n", "in": 16, "out": 1, "hash_ids": [1]}
WEKA = {"id": "w", "block_size": 16, "hash_id_scope": "local", "requests": [REQUEST]}


@pytest.mark.parametrize(("row", "field"), [(TENUTO, "other"), (WEKA, "totals")], ids=["tenuto", "weka"])
def test_a_key_too_deep_to_be_written_again_is_refused(write_rows, tmp_path, capsys, row, field):
    def convert(depth):
        value = 1
        for _ in range(depth):
            value = [value]
        path = write_rows(row | {field: value})
        return main(["convert", str(path), str(tmp_path / f"{depth}.jsonl")])

    assert convert(32) == 0
    assert convert(480) == 2
    assert f":1: {field}: must have at most 32 levels" in capsys.readouterr().err


@pytest.mark.parametrize("row", [MOONCAKE, TENUTO], ids=["mooncake", "tenuto"])
@pytest.mark.parametrize("field", ["timestamp", "input_length", "output_length"])
@pytest.mark.parametrize("value", [None, -1, True, "1", 10**18, [], {}])
def test_one_hostile_field_refuses_the_whole_file(write_rows, row, field, value):
    first, last = (row | {"session": name} if "session" in row else row for name in ("first", "last"))
    path = write_rows(first, row | {field: value}, last)
    with pytest.raises(DataError, match=re.escape(f"{path}:2: {field}: ")):
        load_workload(path)


@pytest.mark.parametrize("kind", ["chat", "sharegpt", "mini-swe-agent"])
def test_a_long_conversation_is_in_memory_once(tmp_path, kind):
    roles = [("user", "assistant")[number % 2] for number in range(8000)]
    messages = [{"role": role, "content": "x"} for role in roles]
    rows = {
        "chat": {"messages": messages},
        "sharegpt": {
            "conversations": [{"from": {"user": "human"}.get(role, "gpt"), "value": "x"} for role in roles]
        },
        "mini-swe-agent": {"trajectory_format": "mini-swe-agent-1", "info": {}, "messages": messages},
    }
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps(rows[kind]) + "\n")
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="grows over more than 2048 turns"):
            load_workload(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Each answer with a copy of what is before it would take 128 MB.
    assert peak_bytes < 64e6


def test_lines_of_a_gzip_bomb_count_together(tmp_path, monkeypatch):
    path = tmp_path / "bomb.jsonl.gz"
    with gzip.open(path, "wb") as file:
        file.writelines([json.dumps(TENUTO).encode() + b"\n"] * 10_000)
    monkeypatch.setattr(files, "MAX_UNPACKED_BYTES", 100_000)
    monkeypatch.setattr(files, "MAX_RATIO", 2)
    for read in (load_workload, lambda path: list(files.stream_objects(path, print))):
        with pytest.raises(DataError, match=r"bomb.jsonl.gz: holds more than 100000 bytes; unpack it first"):
            read(path)
    # Those of a plain file count one by one.
    plain = tmp_path / "plain.jsonl"
    plain.write_bytes(gzip.decompress(path.read_bytes()))
    assert len(list(files.stream_objects(plain, print))) == 10_000
