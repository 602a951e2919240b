"""`tenuto check-policy`: whether a policy keeps its contract, in seconds and without vLLM."""

from __future__ import annotations

import sys
from dataclasses import MISSING, dataclass

from tenuto.cli.command import Command, Part
from tenuto.cli.options import Given
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
class CheckPolicyOptions(Options):
    """All options."""

    policy: str = option(
        MISSING,
        "file.py:Class, my.module:Class, or a name of `tenuto policies`",
        metavar="POLICY",
        is_positional=True,
    )
    options: tuple[str, ...] = option(
        (), "a policy's option; may be repeated", flag="--option", metavar="KEY=VALUE", is_repeatable=True
    )


def run(given: Given) -> int:
    """Check a policy."""
    from tenuto.api import check_policy

    options = given.read(CheckPolicyOptions)
    try:
        check_policy(options.policy, parse_policy_options(options.options, options.policy))
    except PolicyError as error:
        print(f"{options.policy}: {error}", file=sys.stderr)
        return 1
    print(f"{options.policy}: nothing is wrong")
    return 0


COMMAND = Command(_DESCRIPTION, _EXAMPLES, (Part(CheckPolicyOptions),), run)
