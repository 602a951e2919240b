"""Shared by commands on simulated GPUs: the choice of policies, the folder of --out, notes."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, replace
from pathlib import Path

from tenuto.cli.command import Given
from tenuto.core.settings import Options, option, parse_policy_options
from tenuto.records.files import writing
from tenuto.sim.hardware.gpus import GPUS, get_gpu
from tenuto.sim.setup import FleetOptions, Setup


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
