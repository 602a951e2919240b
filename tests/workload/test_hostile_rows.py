"""One field of one row that is not what it should be."""

from __future__ import annotations

import re

import pytest

from tenuto.cli import main
from tenuto.core.errors import DataError
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
