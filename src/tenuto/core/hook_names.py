"""Whether a hook that someone wrote can be called as it will be."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tenuto.core.errors import PolicyError


def check_arguments(cls: type, name: str, hook: Callable[..., Any]) -> None:
    """Refuse a class's own version of a hook that cannot be called with the hook's arguments.

    Raises PolicyError.
    """
    wanted = list(inspect.signature(hook).parameters)
    try:
        inspect.signature(vars(cls)[name]).bind(*wanted)
    except (TypeError, ValueError):
        raise PolicyError(f"{cls.__qualname__}.{name} must be a method {name}({', '.join(wanted)})") from None
