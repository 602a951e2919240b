"""A row of a table, and a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from experiments.results.settings import Step
from tenuto.core.loader import load_policy
from tenuto.sim.hardware.gpus import GIB, get_gpu
from tenuto.sim.setup import Setup
from tenuto.workload.load import LoadOptions

OURS = ("tenuto", "experiments.ablation:")
ROOT = Path(__file__).parents[2]
OUT = ROOT / "experiments" / "out"


def get_published_gb(gpu: str) -> float:
    """Host memory of the published machine with this GPU, in GiB; 0 if none was named."""
    return (get_gpu(gpu).host_memory_bytes or 0) / GIB


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a table: a machine under a load, for every policy.

    A machine whose host memory is None has that of the published machine with its GPU.
    """

    title: str
    setup: Setup
    load: LoadOptions

    def place(
        self, policy: str, seed: int, step: Step = None, interval: int = 1
    ) -> tuple[Setup, LoadOptions]:
        """The row's run with a policy: POLICY, POLICY/OFFLOAD with that layer, POLICY?OPTION=NUMBER."""
        policy, _, option = policy.partition("?")
        name, _, offload = policy.partition("/")
        key, _, value = option.partition("=")
        # A number is written as in the records, and has the option's own type.
        options = {key: type(getattr(load_policy(name), key))(float(value))} if option else {}
        setup = dataclasses.replace(
            self.setup,
            policy=name,
            offload=offload or None,  # type: ignore[arg-type]  # `Setup` checks it
            options=options,
            host_gb=self.setup.host_gb
            if self.setup.host_gb is not None
            else get_published_gb(self.setup.gpu),
            step_tokens=step,
            prefill_schedule_interval=interval,
            # Users get `tenuto` with the plugin's limits, a bound on waits among them; its rivals have none.
            limits="plugin" if name.startswith(OURS) else self.setup.limits,
        )
        return setup, dataclasses.replace(self.load, seed=seed)


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of docs/lab.md."""

    title: str
    about: str
    policies: Sequence[str]
    make_rows: Callable[[], Iterable[Row]]
    steps: Sequence[Step] = (None,)
    """Sizes of steps for each policy. With several, the table is a race: see `race`."""
    on_screen: bool = True
    """Whether the page's first screen counts its rows."""
    notes: str = ""
    """Markdown after the table: what was published of it, what is not understood."""

    @property
    def is_race(self) -> bool:
        """Whether every rival has its best step size."""
        return len(self.steps) > 1
