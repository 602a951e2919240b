"""Builds a fleet from a setup: an engine for each server, the router, and what the operator tells it."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Sequence

from tenuto.core.errors import ConfigError
from tenuto.core.policy import Oracle, Policy
from tenuto.core.routing.dispatcher import Dispatcher
from tenuto.core.routing.router import EngineInfo, Router, load_router
from tenuto.sim.cost.batch import StepBatch, StepCost
from tenuto.sim.event_loop import SteppedEngine
from tenuto.sim.fleet.front import FleetFront, Links
from tenuto.sim.fleet.ideal import add_ideal
from tenuto.sim.fleet.options import IDEAL, read_fault
from tenuto.sim.machine import Machine, build
from tenuto.sim.setup import Setup
from tenuto.sim.simulation import Simulation
from tenuto.workload.schema import Job

SPEED_PROMPT, SPEED_DECODES, SPEED_CONTEXT = 4096, 16, 4096
"""An engine's speed is told as its time for such a prompt, and for as many steps that decode for so many
requests as bring each of them 128 tokens, with so much context each."""


def build_servers(setup: Setup, policy: Policy | None = None) -> list[Machine]:
    """The machine of each server. Raises ConfigError or PolicyError."""
    assert setup.fleet is not None
    return [_build_one(setup, gpu, policy) for gpu in setup.fleet.servers]


def _build_one(setup: Setup, gpu: str, policy: Policy | None) -> Machine:
    own = dataclasses.replace(setup, gpu=gpu or setup.gpu, fleet=None)
    return build(own, copy.deepcopy(policy))


def add_fleet(
    simulation: Simulation,
    setup: Setup,
    machines: list[Machine],
    *,
    policy: Policy | None = None,
    oracle: Sequence[Job] = (),
    strict: bool = False,
) -> FleetFront:
    """Give a simulation the engines and the router of a setup. `machines`: what `build_servers` made.

    `oracle`: the jobs that policies which know the future are told. Raises ConfigError, PolicyError.
    """
    fleet, first = setup.fleet, machines[0]
    assert fleet is not None
    if fleet.router == IDEAL:
        simulation.front = front = add_ideal(simulation, machines, strict=strict)
        return front
    copy_token_s = _get_copy_token_s(setup, first)
    unused = list(machines)

    def make_engine(name: str, gpu: str, now_s: float) -> tuple[SteppedEngine, EngineInfo]:
        machine = unused.pop(0) if unused else _build_one(setup, gpu, policy)
        if isinstance(machine.policy, Oracle):
            machine.policy.set_oracle(oracle)
        scheduler = machine.make_scheduler(strict=strict)
        info = EngineInfo(name, get_speed(machine.step_cost) / get_speed(first.step_cost), count_kv(machine))
        return SteppedEngine(name, scheduler, machine.step_cost, simulation, now_s=now_s), info

    simulation.front = front = FleetFront(
        simulation,
        lambda: Dispatcher(make_router(setup), copy_token_s=copy_token_s, strict=strict),
        make_engine,
        fleet.servers,
        links=Links(fleet.metrics_s, copy_token_s),
        faults=[read_fault(text) for text in fleet.faults],
    )
    return front


def check_fleet(setup: Setup, policy: Policy | None = None) -> list[str]:
    """Build a fleet's servers and its router once. Returns the machines' notes. Raises as `make_fleet`."""
    assert setup.fleet is not None
    if setup.fleet.router != IDEAL:
        make_router(setup)
    return [note for machine in build_servers(setup, policy) for note in machine.notes]


def make_router(setup: Setup) -> Router:
    """The router that a setup names. Raises PolicyError or ConfigError."""
    assert setup.fleet is not None
    return load_router(setup.fleet.router, setup.fleet.router_options)


def count_kv(machine: Machine) -> int:
    """Tokens that a machine's KV cache holds, as vLLM logs them at start."""
    kv = machine.config.kv
    return kv.num_blocks // len(kv.windows) * kv.block_size


def get_speed(cost: StepCost) -> float:
    """Work per second: what an operator would measure of an engine once."""
    prefill_s = cost.seconds(StepBatch.of(prefills=[(SPEED_PROMPT, 0)]))
    decode_s = cost.seconds(StepBatch.of(decodes=[SPEED_CONTEXT] * SPEED_DECODES))
    return 1 / (SPEED_DECODES * prefill_s + 128 * decode_s)


def _get_copy_token_s(setup: Setup, machine: Machine) -> float | None:
    assert setup.fleet is not None
    if setup.fleet.copy_gb_s is None:
        return None
    if not machine.config.kv.windows == (None,):
        raise ConfigError("--copy-gb-s is simulated for models with full attention only")
    model = machine.model
    token_bytes = model.kv_groups()[0].num_layers * model.kv_bytes_per_token_per_layer(setup.tp) * setup.tp
    return token_bytes / (setup.fleet.copy_gb_s * 1e9)


def name_gpus(setup: Setup, gpu: str) -> str:
    """The GPUs of a setup: `H100`, or `4xH100`, or `2xH100+4xL40S`."""
    if setup.fleet is None:
        return gpu
    counts = Counter(each or setup.gpu for each in setup.fleet.servers)
    return "+".join(f"{count}x{name}" for name, count in counts.items())
