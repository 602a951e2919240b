"""One field of one row that is not what it should be."""

from __future__ import annotations

import re

import pytest

from tenuto.core.errors import DataError
from tenuto.workload.load import load_workload

MOONCAKE = {"timestamp": 5, "input_length": 700, "output_length": 3, "hash_ids": [1, 2]}
TENUTO = {"session": "a", "timestamp": 0, "input_length": 8, "output_length": 1}


@pytest.mark.parametrize("row", [MOONCAKE, TENUTO], ids=["mooncake", "tenuto"])
@pytest.mark.parametrize("field", ["timestamp", "input_length", "output_length"])
@pytest.mark.parametrize("value", [None, -1, True, "1", 10**18, [], {}])
def test_one_hostile_field_refuses_the_whole_file(write_rows, row, field, value):
    first, last = (row | {"session": name} if "session" in row else row for name in ("first", "last"))
    path = write_rows(first, row | {field: value}, last)
    with pytest.raises(DataError, match=re.escape(f"{path}:2: {field}: ")):
        load_workload(path)
