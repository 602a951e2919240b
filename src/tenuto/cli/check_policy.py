"""`tenuto check-policy`: whether a policy keeps its contract, in seconds and without vLLM."""

from __future__ import annotations

from tenuto.cli.checks import CheckOptions, run_check
from tenuto.cli.command import Command, Part
from tenuto.cli.options import Given

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


def run(given: Given) -> int:
    """Check a policy."""
    from tenuto.api import check_policy

    return run_check(given, check_policy)


COMMAND = Command(_DESCRIPTION, _EXAMPLES, (Part(CheckOptions),), run)
