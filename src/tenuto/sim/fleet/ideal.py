"""The yardstick: engines of the same speed that share one queue and all KV at no cost.

No router can do better with the same engines and policy by much: a turn starts on whichever engine has room
first, and hits whatever any engine has computed. There is one scheduler with the memory of all; each engine
takes turns from its queue when its own step begins.
"""

from __future__ import annotations

import dataclasses

from tenuto.core.routing.dispatcher import Dispatcher
from tenuto.core.routing.router import EngineInfo, Router
from tenuto.sim.cost.batch import StepCost
from tenuto.sim.engine.scheduler import Scheduler
from tenuto.sim.event_loop import Listener, SteppedEngine
from tenuto.sim.fleet.front import FleetFront
from tenuto.sim.kv.request import Request
from tenuto.sim.machine import Machine
from tenuto.sim.simulation import Simulation


class Lane(SteppedEngine):
    """One of the engines. All have one scheduler; what runs here is put in its place while it steps."""

    def __init__(
        self, name: str, scheduler: Scheduler, step_cost: StepCost, listener: Listener, lanes: list[Lane]
    ) -> None:
        # Other engines take blocks meanwhile, so no stretch is known to be quiet.
        super().__init__(name, scheduler, step_cost, listener, fast_forwards=False)
        self._running: list[Request] = []
        self._lanes = lanes
        lanes.append(self)

    def add_request(self, request: Request, now_s: float) -> None:
        """A turn comes into the queue; the idle engine that runs least looks at it first."""
        super().add_request(request, now_s)
        self._rouse(now_s)

    def wake(self, horizon_s: float = 0.0, *, plans: bool = False) -> None:
        """Do what is to be done, and let the others see what has become free."""
        self.scheduler.state.running = self._running
        super().wake(horizon_s, plans=plans)
        self._running = self.scheduler.state.running
        self._rouse(self.now_s)

    def _rouse(self, now_s: float) -> None:
        for lane in sorted(self._lanes, key=lambda lane: len(lane._running)):
            lane.wake_if_idle(now_s)

    def wake_if_idle(self, now_s: float) -> None:
        """Look for work now, if there is some."""
        if len(self.scheduler.state.waiting):
            super().wake_if_idle(now_s)


def add_ideal(simulation: Simulation, machines: list[Machine], *, strict: bool) -> FleetFront:
    """So many engines like the first, with one queue and one KV cache."""
    machine = machines[0]
    kv = dataclasses.replace(
        machine.config.kv, num_blocks=(machine.config.kv.num_blocks - 1) * len(machines) + 1
    )
    whole = dataclasses.replace(machine, config=dataclasses.replace(machine.config, kv=kv))
    scheduler = whole.make_scheduler(strict=strict)
    lanes: list[Lane] = []

    def make_engine(name: str, gpu: str, now_s: float) -> tuple[SteppedEngine, EngineInfo]:
        return Lane(name, scheduler, machine.step_cost, simulation, lanes), EngineInfo(name)

    return FleetFront(simulation, lambda: Dispatcher(Router()), make_engine, [""] * len(machines))
