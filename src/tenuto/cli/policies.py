"""`tenuto policies`, `check-policy` and `check-router`: what can be chosen, and checks of your own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any

from tenuto.cli.command import Command, Given, Part
from tenuto.core.console import Progress
from tenuto.core.errors import NotFoundError, PolicyError
from tenuto.core.settings import Options, option, parse_policy_options


@dataclass(frozen=True, kw_only=True)
class PoliciesOptions(Options):
    """All options."""

    as_json: bool = option(False, "print JSON instead of text", flag="--json")


def _run_policies(given: Given) -> int:
    from tenuto.core.loader import format_policies, list_policies

    listed = list_policies()
    print(json.dumps(listed, indent=2) if given.read(PoliciesOptions).as_json else format_policies(listed))
    return 0


POLICIES = Command(
    summary="""\
List the policies and presets, with their options, units and defaults.
`--policy` takes any of these names, file.py:Class, or my.module:Class.
""",
    examples="""\
  tenuto policies
  tenuto policies --json
""",
    options=(Part(PoliciesOptions),),
    run=_run_policies,
)


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


def _run_check(given: Given, check: Callable[[str, Mapping[str, Any]], None]) -> int:
    """Print what `check` finds. Returns the exit status."""
    options = given.read(CheckOptions)
    try:
        with Progress().keep_updating(lambda: f"{options.name}: calling each method, and running jobs"):
            check(options.name, parse_policy_options(options.options, options.name))
    except NotFoundError:
        raise
    except PolicyError as error:
        print(f"{options.name}: {error}", file=sys.stderr)
        return 1
    print(f"{options.name}: nothing is wrong")
    return 0


def _run_check_policy(given: Given) -> int:
    from tenuto.api import check_policy

    return _run_check(given, check_policy)


CHECK_POLICY = Command(
    summary="""\
Check a policy: the names, arguments and answers of its hooks on a grid of inputs, then short simulations
with little memory, each twice. Takes a few seconds and needs no vLLM.
Exit status: 0 if nothing is wrong, 1 if the policy breaks its contract, 2 if it is not found
or an option is wrong.
""",
    examples="""\
  tenuto check-policy mine.py:Mine --option ttl_s=3
  tenuto check-policy my_package.policies:Mine
  tenuto check-policy tenuto
""",
    options=(Part(CheckOptions),),
    run=_run_check_policy,
)


def _run_check_router(given: Given) -> int:
    from tenuto.core.contracts import check_router
    from tenuto.core.loader import load_router

    return _run_check(given, lambda name, options: check_router(load_router(name, options)))


CHECK_ROUTER = Command(
    summary="""\
Check a router: the names, arguments and answers of its hooks on a small fleet whose engines join, drain and
die, twice. Takes a second and needs no vLLM.
Exit status: 0 if nothing is wrong, 1 if the router breaks its contract, 2 if it is not found
or an option is wrong.
""",
    examples="""\
  tenuto check-router mine.py:Mine --option seed=3
  tenuto check-router tenuto
""",
    options=(Part(CheckOptions),),
    run=_run_check_router,
)
