"""Fields of a JSON object: an error names the place and the field, and says what is wanted."""

from __future__ import annotations

import re

import pytest

from tenuto.core.errors import DataError
from tenuto.core.messages import clean
from tenuto.records.fields import Fields
from tenuto.workload.formats.hash_ids import read_hash_ids


@pytest.mark.parametrize("value", [True, -1, 1.0, 10**18, "7", None, [7]])
def test_a_length_is_a_whole_number_within_bounds(value):
    with pytest.raises(DataError, match=re.escape("f:3: n: must be a whole number from 1 to 16777216")):
        Fields("f:3", {"n": value}).integer("n", low=1)


@pytest.mark.parametrize("value", [True, -0.5, 1e10, "7", None])
def test_a_time_is_a_number_within_bounds(value):
    with pytest.raises(DataError, match="f:3: t: must be a number from 0 to 1e"):
        Fields("f:3", {"t": value}).number("t")


@pytest.mark.parametrize("value", ["", 7, None, ["a"]])
def test_a_name_is_a_string(value):
    with pytest.raises(DataError, match="f:3: s: must be a string"):
        Fields("f:3", {"s": value}).text("s")


def test_a_missing_field_and_a_nested_one_are_named():
    record = Fields("f:3", {"requests": [{"a": 1}, 5]})
    with pytest.raises(DataError, match="f:3: t: is missing"):
        record.number("t")
    with pytest.raises(DataError, match=r"f:3: requests\[1\]: must be an object, got 5"):
        record.records("requests")
    inner = Fields("f:3", {"requests": [{"deps": [{}]}]}).records("requests")[0].records("deps")[0]
    with pytest.raises(DataError, match=r"f:3: requests\[0\]\.deps\[0\]\.id: is missing"):
        inner.text("id")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("1, 2", "f:3: hash_ids: must be a list"),
        ([1, True], r"f:3: hash_ids\[1\]: must be a whole number"),
        ([1, -2], r"f:3: hash_ids\[1\]"),
        ([1, 2.0], r"f:3: hash_ids\[1\]"),
        ([1], "f:3: hash_ids: 2 blocks are needed for the prompt's length, got 1"),
        ([1, 2, 3], "got 3"),
    ],
)
def test_block_ids_are_whole_numbers_one_a_block(value, words):
    with pytest.raises(DataError, match=words):
        read_hash_ids(Fields("f:3", {"hash_ids": value}), 2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400])
def test_a_number_is_finite(value):
    with pytest.raises(DataError, match="f:3: t: must be a number from 0 to 1e"):
        Fields("f:3", {"t": value}).number("t")


@pytest.mark.parametrize("value", [5, {"a": 1}, [1, "x"], [-1], [float("nan")]])
def test_a_list_of_numbers_is_one(value):
    with pytest.raises(DataError, match="f:3: l: must be a list of numbers"):
        Fields("f:3", {"l": value}).numbers("l")


def test_what_may_be_missing():
    fields = Fields("f:3", {"a": None, "b": 2.5, "l": [1, None, 2], "p": {"q": "x"}})
    assert [fields.optional(fields.number, name) for name in "abz"] == [None, 2.5, None]
    assert fields.numbers("l") == (1.0, 2.0)
    assert "q" in fields.optional_part("p") and not fields.optional_part("z").values
    with pytest.raises(DataError, match=r"f:3: p\.q: must be true or false, got 'x'"):
        fields.part("p").flag("q")


def test_text_from_outside_is_printable():
    assert clean("a\x00b\n\u202ec\ud800\ufffe ") == "a b c"
