"""Objects of quick frozen dataclasses behave as those of other frozen dataclasses."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass, replace

import pytest

from tenuto.core.types import quick


@quick
@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int = 2

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("x is negative")


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    x: int = 1
    y: int


def test_keyword_only_fields_may_have_defaults_in_any_order() -> None:
    assert (Named(y=3).x, Named(y=3).y, Named(y=3, x=2)) == (1, 3, replace(Named(y=3), x=2))
    with pytest.raises(TypeError):
        Named(1, 3)  # type: ignore[misc]
    with pytest.raises(TypeError):
        Named(x=2)  # type: ignore[call-arg]


def test_an_object_has_the_values_it_was_given() -> None:
    assert (Point(1).x, Point(1).y, Point(1, y=3).y) == (1, 2, 3)
    assert type(Point(1)) is Point and isinstance(Point(1), Point)
    assert repr(Point(1)) == "Point(x=1, y=2)"
    assert Point(1) == Point(1, 2) != Point(2)
    assert hash(Point(1)) == hash(Point(1, 2))


def test_it_cannot_be_changed() -> None:
    point = Point(1)
    with pytest.raises(FrozenInstanceError):
        point.x = 5  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        del point.y  # type: ignore[misc]
    with pytest.raises((FrozenInstanceError, AttributeError, TypeError)):
        point.z = 5  # type: ignore[attr-defined]
    assert point == Point(1)


def test_it_can_be_copied_and_pickled() -> None:
    point = Point(1, 7)
    assert pickle.loads(pickle.dumps(point)) == copy.copy(point) == copy.deepcopy(point) == point
    assert replace(point, x=4) == Point(4, 7)


def test_wrong_arguments_and_values_are_errors() -> None:
    with pytest.raises(TypeError):
        Point()  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Point(1, z=3)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="negative"):
        Point(-1)
