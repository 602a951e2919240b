"""What `check-policy` and `check-router` share: one class to check, and its options."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any

from tenuto.cli.options import Given
from tenuto.core.errors import PolicyError
from tenuto.core.settings import Options, option, parse_policy_options


@dataclass(frozen=True, kw_only=True)
class CheckOptions(Options):
    """All options."""

    name: str = option(
        MISSING,
        "file.py:Class, my.module:Class, or the name of one that ships with Tenuto",
        metavar="NAME",
        is_positional=True,
    )
    options: tuple[str, ...] = option(
        (), "one of its options; may be repeated", flag="--option", metavar="KEY=VALUE", is_repeatable=True
    )


def run_check(given: Given, check: Callable[[str, Mapping[str, Any]], None]) -> int:
    """Say what `check` finds. Returns the exit status."""
    options = given.read(CheckOptions)
    try:
        check(options.name, parse_policy_options(options.options, options.name))
    except PolicyError as error:
        print(f"{options.name}: {error}", file=sys.stderr)
        return 1
    print(f"{options.name}: nothing is wrong")
    return 0
