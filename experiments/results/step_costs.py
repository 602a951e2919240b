"""The races again, under other assumptions on what steps cost that mix prefill with decoding.

No public measurement settles that cost, and small and adaptive steps live on it. So some rows of
each race run under both bounds (`--step-cost optimistic` and `pessimistic`), with the first seed. The
figures under the default cost are those of the races themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

from experiments.results.row import Row

COSTS = ("optimistic", "pessimistic")
"""The bounds, as `--step-cost` takes them."""
RIVALS = (
    *("stock", "stock-tuned", "contextserve/async", "infercept/asked"),
    *("autellix+", "sglang-lpm/async", "thunderagent/async", "concur/async"),
)
"""Of policies that do the same in most rows (`continuum` and `contextserve`, for example) one runs."""
FIRST = 1
EVERY = {"ab8": 2}
"""Of each race the second row counts, and every fifth from there on unless said: `ab8` is short."""
Races = Mapping[str, Callable[[], Iterable[Row]]]


def choose(race: str, rows: Iterable[Row]) -> list[Row]:
    """The rows of a race that run under both bounds."""
    return list(rows)[FIRST :: EVERY.get(race, 5)]


def make_step_costs(races: Races) -> Iterable[Row]:
    """The chosen rows of each race under both bounds."""
    for name, make_rows in races.items():
        for cost in COSTS:
            for row in choose(name, make_rows()):
                setup = dataclasses.replace(row.setup, step_cost=cost)
                yield Row(get_title(name, cost, row.title), setup, row.load)


def get_title(race: str, cost: str, row: str) -> str:
    """What a row is called in this table."""
    return f"{race}, {cost}: {row}"
