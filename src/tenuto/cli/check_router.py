"""`tenuto check-router`: check in a second, without vLLM, that a router keeps its contract."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tenuto.cli.check_policy import CheckOptions, run_check
from tenuto.cli.command import Command, Given, Part

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


def run(given: Given) -> int:
    """Check a router."""
    return run_check(given, _check)


def _check(name: str, options: Mapping[str, Any]) -> None:
    from tenuto.core.contracts import check_router
    from tenuto.core.loader import load_router

    check_router(load_router(name, options))


COMMAND = Command(_DESCRIPTION, _EXAMPLES, (Part(CheckOptions),), run)
