"""Policies of a line or two, for tests."""

from __future__ import annotations

from dataclasses import dataclass, field

from tenuto.core.policy import Policy
from tenuto.core.types import EngineView, Keep, Lease, Release, ToolCall, Turn, Yields


@dataclass
class KeepFor(Policy):
    """Keeps every finished turn for some time, leased turns first; reconsiders as told; hears everything."""

    ttl_s: float = 10.0
    yields: Yields = Yields.ALWAYS
    renew_s: float | None = None
    """How much longer a lease lasts whose deadline has passed; None: no longer."""
    heard: list[tuple] = field(init=False, default_factory=list)

    def queue_key(self, turn: Turn, now_s: float):
        return (0 if turn.has_lease else 1, turn.arrival_s)

    def retain(self, turn: Turn, view: EngineView):
        return Keep(view.now_s + self.ttl_s, yields=self.yields)

    def reconsider(self, lease: Lease, view: EngineView):
        if self.renew_s is None:
            return Release()
        return Keep(view.now_s + self.renew_s, yields=self.yields)

    def evict_key(self, lease: Lease, view: EngineView):
        return (lease.granted_s,)

    def on_turn_arrived(self, turn: Turn, now_s: float):
        self.heard.append(("arrived", turn.turn_id))

    def on_turn_started(self, turn: Turn, now_s: float):
        self.heard.append(("started", turn.turn_id, turn.num_hit_tokens))

    def on_turn_finished(self, turn: Turn, now_s: float):
        self.heard.append(("finished", turn.turn_id, turn.tool, turn.is_last))

    def on_tool_returned(self, turn: Turn, tool: ToolCall | None, tool_s: float):
        self.heard.append(("tool returned", turn.turn_id, tool, tool_s))

    def on_job_ended(self, job, now_s: float):
        self.heard.append(("job ended", job.job_id, job.num_turns))
