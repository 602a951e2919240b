"""What a PromQL expression uses: metrics, and the labels it matches or groups by."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import promql_parser

_VARIABLES = {
    "$__rate_interval": "5m",
    "$__range": "1h",
    "$model": "tiny",
    "$instance": "host:8000",
    "$engine": "0",
}


@dataclass
class Uses:
    """By metric the labels that selectors match, and all labels that anything groups or joins by."""

    matched: dict[str, set[str]] = field(default_factory=dict)
    grouped: set[str] = field(default_factory=set)


def find_uses(expression: str) -> Uses:
    """Parse an expression, Grafana's variables filled in. Raises ValueError if it is not PromQL."""
    for name, value in _VARIABLES.items():
        expression = expression.replace(name, value)
    if "$" in expression:
        raise ValueError(f"a variable that the dashboard does not have: {expression}")
    uses = Uses()
    _walk(promql_parser.parse(expression), uses)
    for found in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression):
        uses.grouped |= {label.strip() for label in found.split(",")}
    return uses


def _walk(node: Any, uses: Uses) -> None:
    if isinstance(node, promql_parser.VectorSelector):
        labels = uses.matched.setdefault(node.name, set())
        labels |= {matcher.name for matcher in node.matchers.matchers}
        return
    for name in ("lhs", "rhs", "expr", "args", "vector_selector", "param"):
        child = getattr(node, name, None)
        for each in child if isinstance(child, list) else [child]:
            if each is not None and not isinstance(each, str):
                _walk(each, uses)
