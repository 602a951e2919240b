"""The engines of a fleet: which are there, which take turns, and all that ever were."""

from __future__ import annotations

from collections.abc import Callable

from tenuto.core.errors import ConfigError
from tenuto.core.routing.router import EngineInfo
from tenuto.records.gaps import Gaps
from tenuto.sim.engine.scheduler import Scheduler
from tenuto.sim.fleet.engine import FleetEngine

MakeEngine = Callable[[str, str], tuple[FleetEngine, EngineInfo]]
"""Makes an engine of this name, on this GPU ("" for the first engine's)."""


class Members:
    """Engines by name. One that died may come back under its name: it is another engine, and has nothing."""

    def __init__(self, make_engine: MakeEngine) -> None:
        """No engines yet."""
        self.there: dict[str, FleetEngine] = {}
        self.ready: list[str] = []
        """Those that take turns."""
        self.all: list[FleetEngine] = []
        """Those that died too."""
        self.infos: dict[str, EngineInfo] = {}
        self.died: set[str] = set()
        self._make_engine = make_engine
        self._gpus: dict[str, str] = {}

    def add(self, gpu: str, now_s: float) -> str:
        """One more engine. Returns its name; the first is "0", the next "1"."""
        name = str(len(self._gpus))
        self._gpus[name] = gpu
        self._start(name, now_s)
        return name

    def rejoin(self, name: str, now_s: float) -> None:
        """An engine that drained takes turns again, or one that died starts again. Raises ConfigError."""
        if name not in self._gpus or name in self.ready:
            raise ConfigError(f"--fault rejoin:{name}: no such engine has died or drained at that time")
        if name in self.there:
            self.ready.append(name)
        else:
            self._start(name, now_s)

    def drain(self, name: str) -> None:
        """It takes no more turns. Raises ConfigError if it is not there."""
        self._check_there("drain", name)
        if name in self.ready:
            self.ready.remove(name)

    def kill(self, name: str) -> FleetEngine:
        """It is gone. Raises ConfigError if it was not there."""
        self._check_there("die", name)
        self.drain(name)
        self.died.add(name)
        return self.there.pop(name)

    def get_busy_s(self, name: str) -> float:
        """Seconds in which a step ran there."""
        return sum(engine.busy_s for engine in self.all if engine.name == name)

    @property
    def schedulers(self) -> list[Scheduler]:
        """Those of all engines, each once."""
        return list({id(engine.scheduler): engine.scheduler for engine in self.all}.values())

    @property
    def gaps(self) -> Gaps:
        """Seconds between the output tokens of each answer."""
        gaps = Gaps()
        for engine in self.all:
            gaps.merge(engine.gaps)
        return gaps

    def _start(self, name: str, now_s: float) -> None:
        engine, self.infos[name] = self._make_engine(name, self._gpus[name])
        self.there[name] = engine
        self.all.append(engine)
        engine.start(now_s)
        self.ready.append(name)

    def _check_there(self, kind: str, name: str) -> None:
        if name not in self.there:
            raise ConfigError(f"--fault {kind}:{name}: no engine {name!r} is there at that time")
