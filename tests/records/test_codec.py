"""Whatever a record holds is written and read again; what is wrong is named."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenuto.core.errors import DataError, clean
from tenuto.records import codec
from tenuto.records.codec import MAX_VALUES, Fields, LeftOut, Range, is_deep
from tenuto.records.load import read_run, read_sample, read_turn
from tenuto.records.schema import (
    Failure,
    Goodput,
    RunRecord,
    Sample,
    Stats,
    TurnCounts,
    TurnMeans,
    TurnRecord,
)
from tenuto.sim.run import run
from tenuto.sim.setup import Setup
from tenuto.workload.formats.rows import read_hash_ids
from tenuto.workload.load import LoadOptions
from tests.support.records import get_full_value, objects_of

LEFT_OUT = {"engine", "fleet", "root"}
"""Written only if they are known."""


@pytest.mark.parametrize("cls", [RunRecord, TurnRecord, Sample])
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_nothing_is_lost_between_writing_and_reading(cls: Any, data: st.DataObject) -> None:
    check(cls, data.draw(objects_of(cls)))


def check(cls: Any, given: dict[str, Any]) -> None:
    """Read an object, write it, and read that: nothing is lost."""
    record = codec.read(cls, Fields("f:1", json.loads(json.dumps(given))))
    written = json.loads(json.dumps(record.to_json()))
    expected = {name: value for name, value in given.items() if value is not None or name not in LEFT_OUT}
    assert to_text({name: written.get(name, "is lost") for name in expected}) == to_text(expected)
    again = codec.read(cls, Fields("f:1", written))
    assert to_text(codec.write(again)) == to_text(codec.write(record))


@pytest.mark.parametrize("planted", ["_get_readers", "_get_names"])
@pytest.mark.parametrize(
    ("cls", "owner"),
    [
        *((RunRecord, owner) for owner in (RunRecord, Stats, Goodput, TurnCounts, TurnMeans)),
        *((TurnRecord, owner) for owner in (TurnRecord, Failure)),
        (Sample, Sample),
    ],
)
def test_a_field_that_is_not_read_or_not_written_is_told(
    cls: Any, owner: Any, planted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = get_full_value(cls)
    check(cls, given)
    whole = getattr(codec, planted)
    for field in dataclasses.fields(owner):

        def drop(each: Any, name: str = field.name) -> list[Any]:
            return [one for one in whole(each) if each is not owner or one[0] != name]

        monkeypatch.setattr(codec, planted, drop)
        with pytest.raises((AssertionError, TypeError)):
            check(cls, given)


def to_text(values: Any) -> str:
    """Equal for equal values; NaN too."""
    return json.dumps(values, sort_keys=True)


def test_a_simulated_run_is_read_as_it_was_made() -> None:
    outcome = run(Setup(gpu="H100", step_cost="roofline"), LoadOptions(jps=1, window_s=5))
    made = json.loads(json.dumps(outcome.record))
    assert read_run(Fields("result.json", made)).to_json() == made
    for turn in outcome.turns:
        assert read_turn(Fields("turns.jsonl:1", json.loads(json.dumps(turn.to_json())))) == turn


@dataclass(frozen=True)
class Inner:
    name: str
    share: float | None = None


@dataclass(frozen=True)
class Outer:
    count: int
    kind: Literal["a", "b"] = "a"
    small: Annotated[int, Range(1, 3)] = 2
    inner: Inner | None = None
    several: tuple[Inner, ...] = ()
    by_name: Annotated[Mapping[str, Any] | None, LeftOut] = None


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "count: is missing"),
        ({"count": None}, "count: must be a whole number from 0 to 9007199254740992, got None"),
        ({"count": float("nan")}, "count: must be a whole number .* got nan"),
        ({"count": True}, "count: must be a whole number .* got True"),
        ({"count": 1, "kind": "c"}, "kind: must be one of a, b, got 'c'"),
        ({"count": 1, "small": 4}, "small: must be a whole number from 1 to 3, got 4"),
        ({"count": 1, "inner": []}, r"inner: must be an object, got \[\]"),
        ({"count": 1, "inner": {}}, "inner.name: is missing"),
        ({"count": 1, "inner": {"name": "x", "share": -1}}, "inner.share: must be a number from 0"),
        ({"count": 1, "several": {}}, "several: must be a list, got {}"),
        ({"count": 1, "several": [{"name": "x"}, {"name": 1}]}, r"several\[1\].name: must be a string"),
        ({"count": 1, "kind": "\x1b" + 1000 * "x"}, r"kind: must be one of a, b, got '\\x1bx{30,60}\.\.\.$"),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=f"^f:3: {said}"):
        codec.read(Outer, Fields("f:3", values))


def test_what_may_be_missing() -> None:
    values = {"count": 1, "kind": None, "small": float("inf"), "new": 1}
    assert codec.read(Outer, Fields("f", values)) == Outer(1)
    assert "by_name" not in codec.write(Outer(1)) and codec.write(Outer(1))["inner"] is None


@pytest.mark.parametrize("read", [read_run, read_turn, read_sample])
def test_a_later_schema_is_refused(read: Callable[[Fields], Any]) -> None:
    with pytest.raises(DataError, match="f:1: schema: must be 2, got 3: read it with the version"):
        read(Fields("f:1", {"schema": 3}))


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


def test_optional_fields_may_be_missing():
    fields = Fields("f:3", {"a": None, "b": 2.5, "l": [1, None, 2], "p": {"q": "x"}})
    assert [fields.optional(fields.number, name) for name in "abz"] == [None, 2.5, None]
    assert fields.numbers("l") == (1.0, 2.0)
    assert "q" in fields.optional_part("p") and not fields.optional_part("z").values
    with pytest.raises(DataError, match=r"f:3: p\.q: must be true or false, got 'x'"):
        fields.part("p").flag("q")


def test_text_from_outside_is_printable():
    assert clean("a\x00b\n\u202ec\ud800\ufffe ") == "a b c"


def test_a_list_of_millions_of_values_counts_as_deep() -> None:
    assert not is_deep([0] * MAX_VALUES) and not is_deep([[0]] * 10)
    assert is_deep([0] * (MAX_VALUES + 1))
    assert is_deep({"a": [[[]] * (MAX_VALUES + 1), []]})
