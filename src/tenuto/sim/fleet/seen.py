"""What a router sees of a simulated fleet: requests, KV events, metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tenuto.core.requests.hints import Hints
from tenuto.core.routing.router import NO_TOKENS, Arrival, EngineMetrics, RouterNeeds
from tenuto.sim.engine.scheduler import Scheduler
from tenuto.sim.fleet.engine import FleetEngine
from tenuto.sim.kv.segments import Path
from tenuto.workload.arrival import make_arrival
from tenuto.workload.schema import TurnSpec
from tenuto.workload.turn_driver import Due


def see_arrival(due: Due, hints: Hints, engines: Sequence[FleetEngine], needs: RouterNeeds) -> Arrival:
    """A turn as its client sends it. `engines`: those that take turns."""
    cached = _find_cached(due.job.turns[due.turn], engines) if needs.kv_events else NO_TOKENS
    return make_arrival(due, hints, needs_prompt=needs.prompts, cached_tokens=cached)


def _find_cached(turn: TurnSpec, engines: Sequence[FleetEngine]) -> Mapping[str, int]:
    """What an index of the engines' KV events says. The events themselves take milliseconds at most."""
    found, spans = {}, (*turn.prompt, turn.output)
    for engine in engines:
        kv = engine.scheduler.kv
        path = Path(kv.pool.root, None, spans, kv.config.hash_block_size)
        paths = kv.get_paths(path, None, spans)
        found[engine.name] = kv.find_hit(paths, turn.num_prompt_tokens - 1).num_tokens
    return found


def read_metrics(scheduler: Scheduler, now_s: float) -> EngineMetrics:
    """An engine's own figures, now."""
    state, pool = scheduler.state, scheduler.kv.pool
    num_used = pool.num_blocks - pool.num_free_blocks - pool.num_leased_blocks
    num_waiting = len(state.waiting) + state.num_loading
    return EngineMetrics(now_s, len(state.running), num_waiting, num_used / pool.num_blocks)
