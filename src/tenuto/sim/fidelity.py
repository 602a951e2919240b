"""How far predictions were off: on each kind of machine, against what was measured there.

docs/fidelity.md has the cells. `python -m experiments.tables.fidelity` makes them and their summary, and a
test compares these figures with the page. An error is the simulated mean job time over the real one, less 1.
Below 0, the simulator is too fast.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import Any

from tenuto.records.text import comes_from
from tenuto.sim.machine import build
from tenuto.sim.setup import Setup

LEAST_MARGIN = 0.05
"""Smallest margin. The known errors are of means. P95s differ more, and were not published."""


@dataclass(frozen=True)
class KnownError:
    """Errors of predictions of one kind."""

    source: str
    """What the predictions were compared with."""
    num_cells: int
    median: float
    """Median of the absolute errors."""
    low: float
    high: float

    def __str__(self) -> str:
        span = f"{self.low:+.0%} to {self.high:+.0%}"
        return f"{self.median:.0%} in the median, {span} ({self.num_cells} {self.source})"

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


STOCK = {
    "H200": KnownError("published means of stock on an H200", 5, 0.017, -0.017, 0.028),
    "H100": KnownError("published means of stock on an H100", 5, 0.030, -0.030, 0.047),
}
OTHERS = {
    "H200": KnownError("published means of other systems on an H200", 10, 0.118, -0.130, 0.344),
    "H100": KnownError("published means of other systems on an H100", 10, 0.027, -0.147, 0.069),
}
TABLES_ONLY = KnownError("published means of stock on an L40S, tables only", 5, 0.11, -0.22, -0.10)
"""On a machine on which nothing was tuned, from a check outside the repository. On an A100 it was 2 to 11
%."""
ROOFLINE = KnownError("published means of stock on an A100-40, a roofline", 3, 0.107, -0.107, 1.540)
FITTED = KnownError("runs on vLLM's CPU build, step times fitted to its own", 7, 0.050, 0.005, 0.202)


def get_error(gpu: str, policy: str | None, step_cost: str | None) -> KnownError:
    """How far predictions like this one were off; for several GPUs, on the one with the largest error.

    `gpu`: as in a run's record, `H100` or `2xH100+2xL40S`. `policy`: the same, also with its router or its
    step size, `stock@random` or `stock @512`. `step_cost`: where step times came from.
    """
    if comes_from(step_cost, "roofline"):
        return ROOFLINE
    if not comes_from(step_cost, "tables"):
        return FITTED
    known = STOCK if re.split("[ @]", policy or "")[0] == "stock" else OTHERS
    gpus = re.findall(r"(?:\d+x)?([^+]+)", gpu)
    return max((known.get(each, TABLES_ONLY) for each in gpus), key=lambda error: -error.low)


def get_margin(setup: Setup) -> float:
    """The share of a target to leave as a margin: the most by which predictions of stock were too fast.

    For a roofline it is at least that of tables which were never compared with their GPU, because a roofline
    was compared in three cells only.
    """
    margins = [LEAST_MARGIN]
    for gpu in set(setup.engine_gpus):
        step_cost = build(replace(setup, gpu=gpu, fleet=None)).step_cost_name
        error = get_error(gpu, "stock", step_cost)
        margins += [-error.low, -TABLES_ONLY.low if error is ROOFLINE else 0.0]
    return max(margins)
