"""concur: a congestion window on active jobs, opened by free memory and halved when the cache thrashes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from tenuto.core.policy import Key, Needs, Policy, setting
from tenuto.core.types import EngineView, Job, Turn


@dataclass(slots=True)
class _Agent:
    """A job's state in the window."""

    is_active: bool = False
    num_live_turns: int = 0
    idle_since_s: float = 0.0


@dataclass
class Concur(Policy):
    """A window limits the active jobs; it grows by 2 and is halved, like TCP's.

    Source: arXiv 2601.22705, equation 1 with the values of section 5.1. The window grows by 2 while less than
    0.2 of the KV cache is in use. It is halved when more than 0.5 is in use and less than 0.2 of the prompt
    tokens were hits. Blocks that are only cached are not in use. Hits are those of the turns that started
    since the last update. The paper gives neither the period nor the first window: here they are 1 s, a few
    steps of a loaded engine, and 16 jobs, which keep a GPU busy while the window grows.

    A job keeps its place through its tool calls. While more jobs are active than the window allows, a job is
    paused when its turn ends. Paused and new jobs start in the order of their first arrival, so none starves.

    It behaves the same inside vLLM. Known weakness: the window also grows while there are few jobs. After an
    hour of low load it limits nothing, and each halving takes another period of thrashing.
    """

    needs: ClassVar[Needs] = Needs(admit="turns", reorder_s=1.0)

    first_window: float = setting(16.0, "jobs that may be active at first", minimum=1)
    increase: float = setting(2.0, "number of jobs that the window grows by (alpha)", minimum=0)
    decrease: float = setting(0.5, "factor by which the window shrinks (beta)", minimum=0, maximum=1)
    low_usage: float = setting(
        0.2, "share of the KV cache in use below which the window grows", minimum=0, maximum=1
    )
    high_usage: float = setting(
        0.5, "share of the KV cache in use above which the window may shrink", minimum=0, maximum=1
    )
    low_hit_rate: float = setting(
        0.2,
        "share of prompt tokens hit; above high_usage, the window shrinks only below this share",
        minimum=0,
        maximum=1,
    )
    forget_s: float = setting(60.0, "seconds in a tool call after which a job's place is free", minimum=0)
    _window: float = field(init=False)
    _agents: dict[str, _Agent] = field(init=False, default_factory=dict)
    _num_active: int = field(init=False, default=0)
    _num_hit_tokens: int = field(init=False, default=0)
    _num_prompt_tokens: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._window = self.first_window

    def queue_key(self, turn: Turn, now_s: float) -> Key:
        """Turns of active jobs by arrival, preempted ones first; then other turns by their job's arrival."""
        if self._is_active(turn):
            return (0, 0 if turn.num_preemptions else 1, turn.arrival_s)
        return (1, turn.job.arrival_s, turn.arrival_s)

    def admit(self, turn: Turn, view: EngineView) -> bool:
        """Admit a turn of an active job, or of a job for which the window has room."""
        return self._is_active(turn) or self._num_active < int(self._window)

    def on_turn_arrived(self, turn: Turn, now_s: float) -> None:
        """Its job waits or runs."""
        self._agents.setdefault(turn.job.job_id, _Agent()).num_live_turns += 1

    def on_turn_admitted(self, turn: Turn, now_s: float) -> None:
        """Its job has a place."""
        self._set_active(self._agents[turn.job.job_id], True)

    def on_turn_started(self, turn: Turn, now_s: float) -> None:
        """Count the tokens that it hit when it first started, for the hit rate."""
        if turn.num_preemptions:
            return
        self._num_hit_tokens += turn.num_hit_tokens
        self._num_prompt_tokens += turn.num_prompt_tokens

    def on_turn_finished(self, turn: Turn, now_s: float) -> None:
        """Its job keeps its place if there are not too many."""
        agent = self._agents[turn.job.job_id]
        agent.num_live_turns -= 1
        agent.idle_since_s = now_s
        if agent.num_live_turns == 0 and self._num_active > int(self._window):
            self._set_active(agent, False)

    def on_job_ended(self, job: Job, now_s: float) -> None:
        """Its place is free."""
        self._set_active(self._agents.pop(job.job_id, _Agent()), False)

    def on_tick(self, view: EngineView) -> None:
        """Move the window, and free the places of jobs that did not come back."""
        usage = (view.num_blocks - view.num_free_blocks) / view.num_blocks
        is_missing = self._num_hit_tokens < self.low_hit_rate * self._num_prompt_tokens
        if usage < self.low_usage:
            self._window += self.increase
        elif usage > self.high_usage and is_missing:
            self._window = max(1.0, self._window * self.decrease)
        self._num_hit_tokens = self._num_prompt_tokens = 0
        for agent in self._agents.values():
            if agent.num_live_turns == 0 and view.now_s - agent.idle_since_s >= self.forget_s:
                self._set_active(agent, False)

    def _is_active(self, turn: Turn) -> bool:
        agent = self._agents.get(turn.job.job_id)
        return agent is not None and agent.is_active

    def _set_active(self, agent: _Agent, is_active: bool) -> None:
        self._num_active += is_active - agent.is_active
        agent.is_active = is_active
