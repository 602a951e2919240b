"""`tenuto check-policy`: check in seconds, without vLLM, that a policy keeps its contract."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any

from tenuto.cli.command import Command, Given, Part
from tenuto.core.errors import PolicyError
from tenuto.core.settings import Options, option, parse_policy_options

_DESCRIPTION = """\
Check a policy: the names, arguments and answers of its hooks on a grid of inputs, then short simulations
with little memory, each twice. Takes a few seconds and needs no vLLM.
Exit status: 0 if nothing is wrong, 1 if the policy breaks its contract, 2 for a wrong option.
"""

_EXAMPLES = """\
examples:
  tenuto check-policy mine.py:Mine --option ttl_s=3
  tenuto check-policy my_package.policies:Mine
  tenuto check-policy tenuto
"""


@dataclass(frozen=True, kw_only=True)
class CheckOptions(Options):
    """The options of `check-policy` and `check-router`."""

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
    """Print what `check` finds. Returns the exit status."""
    options = given.read(CheckOptions)
    try:
        check(options.name, parse_policy_options(options.options, options.name))
    except PolicyError as error:
        print(f"{options.name}: {error}", file=sys.stderr)
        return 1
    print(f"{options.name}: nothing is wrong")
    return 0


def run(given: Given) -> int:
    """Check a policy."""
    from tenuto.api import check_policy

    return run_check(given, check_policy)


COMMAND = Command(_DESCRIPTION, _EXAMPLES, (Part(CheckOptions),), run)
