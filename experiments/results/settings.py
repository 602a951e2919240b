"""What is compared in a row: a policy with a step size, and the records of its runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

Step = int | str | None
"""As `Setup.step_tokens`; None is the default: what the policy wants, else the engine's whole budget."""
STEPS: tuple[Step, ...] = (None, 1024, 512, 2048)
"""The sizes at which every rival stands, in the order in which they are tried."""
SERVERS_LIMITS = "/server"
"""After a policy: it runs with the limits of `tenuto serve`, except the bound on waits."""
Record = Mapping[str, Any]


class Setting(NamedTuple):
    """One competitor of a row."""

    policy: str
    """As in the tables: POLICY or POLICY/OFFLOAD, then ?OPTION=NUMBER or /server (`SERVERS_LIMITS`)."""
    step: Step = None
    interval: int = 1
    """Of vLLM 0.33: while requests decode, prompts are computed in one of so many steps only."""

    @property
    def label(self) -> str:
        """As the tables print it: `continuum @1,024`, or `continuum` at the default."""
        policy, _, option = self.policy.rpartition(":")[2].partition("?")
        name, _, layer = policy.removesuffix(SERVERS_LIMITS).partition("/")
        name += f", {option}" if option else ""
        name += " with vLLM's host memory" if layer == "native" else ""
        name += " with the server's limits" if policy.endswith(SERVERS_LIMITS) else ""
        size = "" if self.step is None else f" @{format_step(self.step)}"
        return f"{name}{size}" + (f", prefill every {self.interval} steps" if self.interval > 1 else "")


Runs = dict[tuple[str, Setting], dict[int, Record]]
"""The records by row's title and setting, and by seed within."""

OURS = Setting("tenuto")
STOCK = "stock"
BOUND = "clairvoyant/async"
YARDSTICKS = ("unbounded", BOUND)
"""They know what no server knows, and do not compete."""


def format_step(step: Step) -> str:
    """A step size in words."""
    if step is None:
        return "default"
    return f"{step:,}" if isinstance(step, int) else step


def add(runs: Runs, record: Record) -> None:
    """Put a record in its place."""
    setting = Setting(record["policy"], record["step"])
    runs.setdefault((record["row"], setting), {})[record["seed"]] = record


def group(records: Iterable[Record]) -> Runs:
    """Records by row, setting and seed."""
    runs: Runs = {}
    for record in records:
        add(runs, record)
    return runs


def get_settings(runs: Runs, row: str) -> dict[Setting, dict[int, Record]]:
    """The settings of one row, those that do not compete included."""
    return {setting: by_seed for (title, setting), by_seed in runs.items() if title == row}
