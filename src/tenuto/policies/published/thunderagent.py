"""thunderagent: the contexts of active jobs fit the KV cache; other jobs are paused between their turns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from tenuto.core.policy import Key, Needs, Policy, setting
from tenuto.core.types import EngineView, Job, Turn


@dataclass(slots=True)
class _Program:
    """A job's state, as far as pausing needs it."""

    num_tokens: int = 0
    """Length of its context: the last turn's prompt and output, or a longer prompt that came since."""
    is_active: bool = False
    """Whether its context is counted and its turns may start."""
    is_new: bool = True
    """Whether it was never active."""
    is_marked: bool = False
    """Whether it is paused when its turn ends."""
    num_live_turns: int = 0
    idle_since_s: float = 0.0
    kind: str | None = None
    """As `Job.kind`."""


@dataclass(slots=True)
class _Shared:
    """What active jobs of one kind have in common."""

    num_jobs: int = 0
    num_tokens: int = 0
    """Prompt tokens that the first turn of the latest of them hit."""


@dataclass
class Thunderagent(Policy):
    """Start jobs while all contexts fit; when they outgrow the cache, pause the smallest, tool calls first.

    Source: arXiv 2602.13692 and its router (ThunderAgent/scheduler/router.py, backend/state.py). The contexts
    of active jobs plus 256 tokens per job must fit the KV cache. Every 5 s, while they do not fit, jobs in a
    tool call are paused, smallest context first; then running jobs are paused when their turn ends. Paused
    jobs resume as soon as they fit: jobs with a waiting turn before new jobs, smallest first, and after 30
    minutes in any case. This is what best-fit placement means on a single engine.

    vLLM holds a system prompt that jobs share once. With `counts_shared_once`, this policy counts it once: of
    active jobs whose prompts begin alike, all but one count without the tokens that the first turn of the
    latest of them hit. The router's versions differ. One sets 256 tokens aside for each job, and subtracts a
    shared length that it takes from its first request. Later ones set 100 aside and subtract nothing.

    More differences from the router. It resumes jobs only every 5 s, because it polls from outside the
    engine. It lets smaller jobs pass one that does not fit yet, and resumes paused jobs in tool calls too,
    last. It can also let a context decay during a tool call, by 2^-t after t seconds, when it looks for
    room to resume jobs (off by default); here that is left out.

    It behaves the same inside vLLM. Known weakness: contexts are counted, not held. KV of a job in a tool
    call is evicted by age, before newer KV of jobs that ended. When contexts grow, the policy pauses jobs
    that it has just started, and their KV is lost.
    """

    needs: ClassVar[Needs] = Needs(admit="turns", reorder_s=5.0)

    reserve_tokens: int = setting(256, "tokens set aside for each active job's next output", minimum=0)
    counts_shared_once: bool = setting(
        False, "count a system prompt that active jobs share once, not for each"
    )
    max_wait_s: float = setting(
        1800.0, "longest wait of a turn, in seconds; then it starts in any case", minimum=0
    )
    forget_s: float = setting(60.0, "seconds in a tool call after which a job's place is free", minimum=0)
    _programs: dict[str, _Program] = field(init=False, default_factory=dict)
    _num_tokens: int = field(init=False, default=0)
    """Contexts of all active jobs, including jobs that are about to be paused."""
    _shared: dict[str, _Shared] = field(init=False, default_factory=dict)
    """By kind, those with active jobs."""

    def queue_key(self, turn: Turn, now_s: float) -> Key:
        """Turns of active jobs by arrival; then those of paused jobs, then new jobs, the smallest first."""
        program = self._programs.get(turn.job.job_id, _Program())
        if self._starts(program, turn, now_s):
            return (0, 0 if turn.num_preemptions else 1, turn.arrival_s)
        return (2 if program.is_new else 1, program.num_tokens, turn.arrival_s)

    def admit(self, turn: Turn, view: EngineView) -> bool:
        """Admit a turn of an active job, one that still fits, or one that has waited too long."""
        program = self._programs.get(turn.job.job_id, _Program())
        if self._starts(program, turn, view.now_s):
            return True
        num_tokens = self._num_tokens + self._count(program) - self._count_shared(program)
        return num_tokens <= view.num_blocks * view.block_size

    def on_turn_arrived(self, turn: Turn, now_s: float) -> None:
        """Its prompt is the job's context now."""
        program = self._programs.setdefault(turn.job.job_id, _Program(kind=turn.job.kind))
        num_tokens = max(program.num_tokens, turn.num_prompt_tokens)
        self._change(program, is_active=program.is_active, num_tokens=num_tokens)
        program.num_live_turns += 1

    def on_turn_admitted(self, turn: Turn, now_s: float) -> None:
        """Its job is active."""
        program = self._programs[turn.job.job_id]
        self._change(program, is_active=True)
        program.is_new = False

    def on_turn_started(self, turn: Turn, now_s: float) -> None:
        """What a first turn hits, other jobs have computed."""
        shared = self._shared.get(turn.job.kind or "")
        if shared is not None and turn.job.num_turns == 1:
            shared.num_tokens = turn.num_hit_tokens

    def on_turn_finished(self, turn: Turn, now_s: float) -> None:
        """Its job is in a tool call, or paused if it was marked."""
        program = self._programs[turn.job.job_id]
        num_tokens = turn.num_prompt_tokens + turn.num_output_tokens
        program.num_live_turns -= 1
        program.idle_since_s = now_s
        is_paused = program.is_marked and program.num_live_turns == 0
        self._change(program, is_active=program.is_active and not is_paused, num_tokens=num_tokens)

    def on_job_ended(self, job: Job, now_s: float) -> None:
        """Its context no longer counts."""
        self._change(self._programs.pop(job.job_id, _Program()), is_active=False)

    def on_tick(self, view: EngineView) -> None:
        """While the contexts exceed the cache, pause jobs in tool calls, then mark running ones."""
        for program in self._programs.values():
            if program.num_live_turns == 0 and view.now_s - program.idle_since_s >= self.forget_s:
                self._change(program, is_active=False)
        active = [each for each in self._programs.values() if each.is_active and not each.is_marked]
        num_over = sum(map(self._count, active)) - self._count_shared() - view.num_blocks * view.block_size
        for program in sorted(active, key=lambda each: (each.num_live_turns > 0, each.num_tokens)):
            if num_over <= 0:
                return
            num_over -= self._count(program)
            if program.num_live_turns:
                program.is_marked = True
            else:
                self._change(program, is_active=False)

    def _change(self, program: _Program, *, is_active: bool, num_tokens: int | None = None) -> None:
        before = self._count(program) if program.is_active else 0
        if is_active != program.is_active and program.kind is not None:
            shared = self._shared.setdefault(program.kind, _Shared())
            shared.num_jobs += 1 if is_active else -1
            if not shared.num_jobs:
                del self._shared[program.kind]
        program.is_active = is_active
        program.is_marked &= is_active
        program.num_tokens = program.num_tokens if num_tokens is None else num_tokens
        self._num_tokens += (self._count(program) if is_active else 0) - before

    def _starts(self, program: _Program, turn: Turn, now_s: float) -> bool:
        return program.is_active or now_s - turn.arrival_s >= self.max_wait_s

    def _count_shared(self, more: _Program | None = None) -> int:
        """Tokens that active jobs share and that count once. `more`: as if this one were active too."""
        if not self.counts_shared_once:
            return 0
        joined = None if more is None or more.is_active else self._shared.get(more.kind or "")
        num_tokens = sum((each.num_jobs - 1) * each.num_tokens for each in self._shared.values())
        return num_tokens + (0 if joined is None else joined.num_tokens)

    def _count(self, program: _Program) -> int:
        return program.num_tokens + self.reserve_tokens
