"""Shared by commands on simulated GPUs: the choice of policies, the folder of --out, notes, progress."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, replace
from pathlib import Path

from tenuto.cli.command import Given
from tenuto.core.settings import Options, option, parse_policy_options
from tenuto.records.files import writing
from tenuto.sim.hardware.gpus import GPUS, get_gpu
from tenuto.sim.setup import FleetOptions, Setup

QUIET_S = 2.0
"""Runs of fewer seconds show no progress."""
TERMINAL_S = 0.5
LOG_S = 10.0
_CLEAR = "\r\x1b[2K"


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(Options):
    """The options of one policy."""

    GROUP = "the policy"

    policy: str = option("tenuto", "see `tenuto policies`, or file.py:Class", metavar="NAME")
    options: tuple[str, ...] = option(
        (),
        "a policy's option; may be repeated, and be for one policy alone",
        flag="--option",
        metavar="[POLICY:]KEY=VALUE",
        is_repeatable=True,
    )

    def read_setup(self, given: Given) -> Setup:
        """The setup of the machine with this policy."""
        options = parse_policy_options(self.options, self.policy)
        fleet = given.read(FleetOptions).make_fleet()
        setup = given.read(Setup, policy=self.policy, options=options, fleet=fleet)
        return replace(setup, gpu=get_gpu(setup.gpu).name)


@dataclass(frozen=True, kw_only=True)
class GridOptions(Options):
    """The options of a grid: every kind of GPU with every policy."""

    GROUP = "what is compared"

    gpus: tuple[str, ...] = option(
        MISSING, f"the GPUs to simulate, of {', '.join(GPUS)}", flag="--gpu", metavar="A,B,…"
    )
    policies: tuple[str, ...] = option(
        MISSING, "see `tenuto policies`, or file.py:Class", metavar="A,B,…", alias="--policy"
    )
    options: tuple[str, ...] = option(
        (),
        "a policy's option; may be repeated, and be for one policy alone",
        flag="--option",
        metavar="[POLICY:]KEY=VALUE",
        is_repeatable=True,
    )

    def read_setups(self, given: Given) -> list[Setup]:
        """A machine for each GPU and policy, or a fleet for each of them with each router."""
        fleets = given.read(FleetOptions).make_fleets()
        return [replace(setup, fleet=fleet) for setup in self.make_setups(given) for fleet in fleets]

    def make_setups(self, given: Given) -> list[Setup]:
        """A machine for each GPU and policy."""
        return [
            given.read(
                Setup,
                gpu=get_gpu(gpu).name,
                policy=policy,
                options=parse_policy_options(self.options, policy),
                fleet=None,
            )
            for gpu in self.gpus
            for policy in self.policies
        ]


def say_notes(notes: Iterable[str]) -> None:
    """Print the notes about the machines, each once."""
    for note in dict.fromkeys(notes):
        print(f"note: {note}", file=sys.stderr, flush=True)


def make_folder(path: Path) -> None:
    """Make the folder of --out before anything runs. Raises ConfigError."""
    with writing(path, is_folder=True):
        path.mkdir(parents=True, exist_ok=True)


class Progress:
    """A long run's progress, as a line on stderr: overwritten on a terminal, repeated at intervals in a log.

    Reports are cheap, so every step can make one. Only some are printed.
    """

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._next_s = time.monotonic() + QUIET_S
        self._started_s = time.monotonic()
        self._is_shown = False

    def tell(self, make_text: Callable[[], str]) -> None:
        """Print the text if the interval has passed."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + (TERMINAL_S if self._is_terminal else LOG_S)
        line = f"[{format_time(now_s - self._started_s)}] {make_text()}"
        if self._is_terminal:
            line = _CLEAR + line[: shutil.get_terminal_size().columns - 1]
        print(line, end="" if self._is_terminal else "\n", file=sys.stderr, flush=True)
        self._is_shown = self._is_terminal

    @contextmanager
    def keep_updating(self, make_text: Callable[[], str]) -> Iterator[None]:
        """Report repeatedly from a thread until the context ends, for work that cannot report by itself."""
        is_over = threading.Event()

        def tell() -> None:
            while not is_over.wait(TERMINAL_S):
                self.tell(make_text)

        thread = threading.Thread(target=tell, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
            self.clear()

    @contextmanager
    def cleared(self) -> Iterator[None]:
        """Remove the line when the context ends, also after an error or Ctrl-C."""
        try:
            yield
        finally:
            self.clear()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self.clear()
        print(text, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line from the terminal."""
        if self._is_shown:
            print(_CLEAR, end="", file=sys.stderr, flush=True)
            self._is_shown = False


def format_time(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
