"""`tenuto policies`: list the policies and their options."""

from __future__ import annotations

import json
from dataclasses import dataclass

from tenuto.cli.command import Command, Given, Part
from tenuto.core.settings import Options, option

_SUMMARY = """\
List the policies and presets, with their options, units and defaults.
`--policy` takes any of these names, file.py:Class, or my.module:Class.
"""

_EXAMPLES = """\
examples:
  tenuto policies
  tenuto policies --json
"""


@dataclass(frozen=True, kw_only=True)
class PoliciesOptions(Options):
    """All options."""

    as_json: bool = option(False, "print JSON instead of text", flag="--json")


def run(given: Given) -> int:
    """Print the list."""
    from tenuto.core.loader import format_policies, list_policies

    listed = list_policies()
    print(json.dumps(listed, indent=2) if given.read(PoliciesOptions).as_json else format_policies(listed))
    return 0


COMMAND = Command(_SUMMARY, _EXAMPLES, (Part(PoliciesOptions),), run)
