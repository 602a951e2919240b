"""Whatever a record holds is written and read again; what is wrong is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tenuto.core.errors import DataError
from tenuto.records import codec
from tenuto.records.codec import LeftOut, Range
from tenuto.records.fields import Fields
from tenuto.records.load import read_run, read_sample, read_turn
from tenuto.records.schema import RunRecord, Sample, TurnRecord
from tenuto.sim.run import run
from tenuto.sim.setup import Setup
from tenuto.workload.load_options import LoadOptions
from tests.support.records import objects_of

LEFT_OUT = {"engine", "fleet"}
"""Written only if they are known."""


@pytest.mark.parametrize("cls", [RunRecord, TurnRecord, Sample])
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_nothing_is_lost_between_writing_and_reading(cls: Any, data: st.DataObject) -> None:
    given = data.draw(objects_of(cls))
    record = codec.read(cls, Fields("f:1", json.loads(json.dumps(given))))
    written = record.to_json()
    expected = {name: value for name, value in given.items() if value is not None or name not in LEFT_OUT}
    assert to_text({name: written[name] for name in expected}) == to_text(expected)
    assert {name for name in given if name not in written} <= LEFT_OUT
    again = codec.read(cls, Fields("f:1", json.loads(json.dumps(written))))
    assert to_text(codec.write(again)) == to_text(codec.write(record))


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
