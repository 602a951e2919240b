"""`tenuto check-router`: whether a router keeps its contract, in a second and without vLLM."""

from __future__ import annotations

import sys
from dataclasses import MISSING, dataclass

from tenuto.cli.command import Command, Part
from tenuto.cli.options import Given
from tenuto.core.errors import PolicyError
from tenuto.core.settings import Options, option, parse_policy_options

_DESCRIPTION = """\
Check a router: the names, arguments and answers of its hooks on a small fleet whose engines join, drain and
die, twice. Takes a second and needs no vLLM.
Exit status: 0 if nothing is wrong, 1 if the router breaks its contract, 2 for a wrong option.
"""

_EXAMPLES = """\
examples:
  tenuto check-router mine.py:Mine --option seed=3
  tenuto check-router tenuto
"""


@dataclass(frozen=True, kw_only=True)
class CheckRouterOptions(Options):
    """All options."""

    router: str = option(
        MISSING,
        "file.py:Class, my.module:Class, or a router's name (see docs/fleet.md)",
        metavar="ROUTER",
        is_positional=True,
    )
    options: tuple[str, ...] = option(
        (), "a router's option; may be repeated", flag="--option", metavar="KEY=VALUE", is_repeatable=True
    )


def run(given: Given) -> int:
    """Check a router."""
    from tenuto.core.routing.check import check_router
    from tenuto.core.routing.loader import load_router

    options = given.read(CheckRouterOptions)
    try:
        check_router(load_router(options.router, parse_policy_options(options.options, options.router)))
    except PolicyError as error:
        print(f"{options.router}: {error}", file=sys.stderr)
        return 1
    print(f"{options.router}: nothing is wrong")
    return 0


COMMAND = Command(_DESCRIPTION, _EXAMPLES, (Part(CheckRouterOptions),), run)
