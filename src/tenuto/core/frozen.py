"""Frozen dataclasses that are made nearly as fast as others."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

T = TypeVar("T")


def quick(cls: type[T]) -> type[T]:
    """Make objects of this frozen dataclass with slots in a quarter of the time, as frozen as before.

    A frozen dataclass sets each field by a call of `object.__setattr__`, and an event of a turn makes several
    objects of a dozen fields. Here a new object first belongs to a class with the same slots and no guard.
    The dataclass must have no subclass, and no field with a factory.
    """
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    unguarded = type(cls.__name__, (), {"__slots__": [each.name for each in fields]})
    scope: dict[str, Any] = {"set_any": object.__setattr__, "unguarded": unguarded, "guarded": cls}
    parameters = ["self"]
    for each in fields:
        has_default = each.default is not dataclasses.MISSING
        parameters.append(f"{each.name}=default_{each.name}" if has_default else each.name)
        scope[f"default_{each.name}"] = each.default
    lines = [f"def __init__({', '.join(parameters)}):", "set_any(self, '__class__', unguarded)"]
    lines += [f"self.{each.name} = {each.name}" for each in fields]
    lines.append("self.__class__ = guarded")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    # `dataclasses` does the same; the names are those of the fields.
    exec("\n    ".join(lines), scope)
    cls.__init__ = scope["__init__"]  # type: ignore[method-assign]
    return cls
