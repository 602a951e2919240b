"""Keeps a router's books and asks it where turns go: the same for a simulated fleet and for a real one.

    arrive ──► route? ──► send ──► first_token ──► finish ──► (the job's next turn) arrive
                 │          │
                hold      fail, or the engine dies: the turn is routed again

Whoever carries the turns tells what happened, and gets back which turns to send where. A turn is sent to one
engine at a time and ends once. `RouterCaller` sees to it that there is an answer whatever the router does. No
clock here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from tenuto.core.policy import Key
from tenuto.core.policy_caller import DecisionLog
from tenuto.core.routing.books import (
    Contents,
    DispatchStats,
    Engines,
    FleetLimits,
    HeldTurns,
    JobBook,
    Jobs,
)
from tenuto.core.routing.router import Router
from tenuto.core.routing.router_caller import RouterCaller
from tenuto.core.routing.types import (
    NO_TOKENS,
    AnsweredTurn,
    Arrival,
    EngineInfo,
    EngineMetrics,
    FleetView,
    Hold,
    RoutedTurn,
    Send,
    Sending,
)

TICK_S = 1.0
"""How often held turns are asked about if nothing else happens, in seconds."""


@dataclass(slots=True)
class _Open:
    turn: RoutedTurn
    engine: str | None = None
    """None while it is held."""
    sent_s: float = 0.0
    first_token_s: float | None = None


class Dispatcher:
    """One router and its books."""

    def __init__(
        self,
        router: Router,
        limits: FleetLimits | None = None,
        *,
        copy_token_s: float | None = None,
        log: DecisionLog | None = None,
        strict: bool = False,
    ) -> None:
        """`copy_token_s`: see `FleetView`. With `strict`, a fault of the router raises PolicyError."""
        self.router = router
        self.limits = limits or FleetLimits()
        self.stats = DispatchStats()
        self.engines = Engines()
        self._caller = RouterCaller(router, log, strict=strict)
        self.faults = self._caller.faults
        """How often each hook failed."""
        self._copy_token_s = copy_token_s
        self._jobs = Jobs(self.limits.max_idle_jobs)
        self._contents = Contents()
        self._turns: dict[str, _Open] = {}
        self._held = HeldTurns()
        self._num_unnamed = 0
        self._ticked_s = 0.0

    @property
    def num_held(self) -> int:
        """Turns that are held back now."""
        return len(self._held)

    def is_open(self, turn_id: str) -> bool:
        """Whether a turn came and has not ended."""
        return turn_id in self._turns

    # Engines.

    def join(self, info: EngineInfo, now_s: float) -> list[Sending]:
        """An engine takes turns from now on."""
        seen = self.engines.join(info)
        self._caller.tell("on_engine_joined", seen, now_s)
        return self._send_held(now_s)

    def drain(self, name: str, now_s: float) -> None:
        """An engine takes no more turns; those that are open there go on."""
        self.engines.drain(name)
        self._caller.tell("on_engine_left", name, now_s)

    def die(self, name: str, now_s: float) -> list[Sending]:
        """An engine is gone: the turns that were open there are sent elsewhere, each once."""
        if name not in self.engines:
            return []
        was_ready = name in self.engines.ready
        self.engines.remove(name)
        self._jobs.leave(name)
        if was_ready:
            self._caller.tell("on_engine_left", name, now_s)
        lost = [turn_id for turn_id, one in self._turns.items() if one.engine == name]
        return [sending for turn_id in lost for sending in self.fail(turn_id, now_s)]

    def report(self, name: str, metrics: EngineMetrics) -> None:
        """An engine's metrics were read."""
        self.engines.report(name, metrics)

    # Turns.

    def arrive(self, arrival: Arrival, now_s: float) -> list[Sending]:
        """A turn came in. Returns it if it goes to an engine now."""
        if arrival.turn_id in self._turns:
            raise ValueError(f"turn {arrival.turn_id!r} is open already")
        job_id = arrival.job_id or self._contents.find(arrival.parts, arrival.tenant) or self._name_job()
        job = self._jobs.open_turn(job_id, arrival.tenant)
        if arrival.job_id is None:
            self._contents.remember(job_id, job, arrival.parts)
        turn = RoutedTurn(
            turn_id=arrival.turn_id,
            job_id=job_id,
            arrival_s=now_s,
            num_prompt_tokens=arrival.num_prompt_tokens,
            parts=arrival.parts,
            parent=arrival.parent,
            tenant=arrival.tenant,
            num_turns=job.num_turns,
            engine=self._get_engine(job),
            num_context_tokens=job.num_context_tokens,
            num_open=job.num_open - 1,
            cached_tokens=arrival.cached_tokens,
        )
        self._turns[turn.turn_id] = _Open(turn)
        sending = self._route(turn, now_s)
        return [] if sending is None else [sending]

    def first_token(self, turn_id: str, now_s: float) -> None:
        """The first token of a turn's answer came."""
        one = self._turns.get(turn_id)
        if one is None or one.engine is None or one.first_token_s is not None:
            return
        one.first_token_s = now_s
        self.engines.add(one.engine, 0, -1, -one.turn.num_prompt_tokens)
        self._caller.tell("on_first_token", one.turn, one.engine, now_s)

    def finish(
        self,
        turn_id: str,
        now_s: float,
        num_output_tokens: int,
        *,
        num_hit_tokens: int | None = None,
        is_last: bool | None = None,
    ) -> list[Sending]:
        """A turn's answer is complete. Returns held turns that go now. A turn that is not open is ignored."""
        one = self._turns.get(turn_id)
        if one is None or one.engine is None:
            return []
        del self._turns[turn_id]
        turn, engine = one.turn, one.engine
        self._leave_engine(one)
        job = self._jobs.get(turn.job_id)
        if job is not None:
            job.num_context_tokens = turn.num_prompt_tokens + num_output_tokens
        self._caller.tell(
            "on_turn_answered",
            AnsweredTurn(
                turn, engine, one.sent_s, one.first_token_s, num_output_tokens, num_hit_tokens, is_last
            ),
            now_s,
        )
        self._close(turn.job_id, now_s, ended=bool(is_last))
        return self._send_held(now_s)

    def fail(self, turn_id: str, now_s: float) -> list[Sending]:
        """An attempt got no answer: the turn is routed again."""
        one = self._turns.get(turn_id)
        if one is None or one.engine is None:
            return []
        engine, was = one.engine, one.turn
        self._leave_engine(one)
        self._caller.tell("on_turn_failed", was, engine, now_s)
        job = self._jobs.get(was.job_id)
        one.engine, one.first_token_s = None, None
        one.turn = dataclasses.replace(
            was, engine=self._get_engine(job), num_attempts=was.num_attempts + 1, cached_tokens=NO_TOKENS
        )
        self.stats.num_resent += 1
        sending = self._route(one.turn, now_s)
        return [] if sending is None else [sending]

    def abort(self, turn_id: str, now_s: float) -> list[Sending]:
        """The client of a turn left. Nothing happens if the turn is not open."""
        one = self._turns.pop(turn_id, None)
        if one is None:
            return []
        self._held.remove(turn_id)
        if one.engine is not None:
            self._leave_engine(one)
            self._caller.tell("on_turn_failed", one.turn, one.engine, now_s)
        self._close(one.turn.job_id, now_s, ended=False)
        return self._send_held(now_s)

    def tick(self, now_s: float) -> list[Sending]:
        """Ask about held turns again. To be called at `get_next_tick_s`, or every second or so."""
        self._ticked_s = now_s
        self._caller.tell("on_tick", now_s)
        return self._send_held(now_s)

    def get_next_tick_s(self) -> float | None:
        """When held turns are asked about again if nothing happens before; None if none is held."""
        oldest = self._held.get_oldest()
        if oldest is None:
            return None
        again_s = max(oldest.arrival_s, self._ticked_s) + TICK_S
        overdue_s = oldest.arrival_s + self.limits.max_held_s
        return again_s if overdue_s <= self._ticked_s else min(again_s, overdue_s)

    # Inside.

    def _name_job(self) -> str:
        self._num_unnamed += 1
        return f"unnamed-{self._num_unnamed}"

    def _get_engine(self, job: JobBook | None) -> str | None:
        return job.engine if job is not None and job.engine in self.engines.ready else None

    def _route(self, turn: RoutedTurn, now_s: float) -> Sending | None:
        """Ask where a turn goes, and note it. None if it is held."""
        if not self.engines.ready:
            self._hold(turn, (now_s,))
            return None
        overdue = now_s >= turn.arrival_s + self.limits.max_held_s
        is_held = turn.turn_id in self._held
        if overdue or turn.num_turns > 1 or (len(self._held) >= self.limits.max_held and not is_held):
            turn = dataclasses.replace(turn, must_go=True)
        engine = self._get_engine(self._jobs.get(turn.job_id))
        if engine != turn.engine:  # it changed while the turn was held
            turn = dataclasses.replace(turn, engine=engine)
        fleet = FleetView(now_s, self.engines.ready, self._copy_token_s)
        answer = self._caller.ask_route(turn, fleet)
        if isinstance(answer, Hold):
            if not is_held:
                self._hold(turn, self._caller.ask_held_key(turn, now_s))
            return None
        return self._send(turn, answer, now_s)

    def _hold(self, turn: RoutedTurn, key: Key) -> None:
        self.stats.num_held += turn.turn_id not in self._held
        self._held.add(turn, key)

    def _send(self, turn: RoutedTurn, answer: Send, now_s: float) -> Sending:
        one, name = self._turns[turn.turn_id], answer.engine
        self._held.remove(turn.turn_id)
        one.turn, one.engine, one.sent_s = turn, name, now_s
        self.engines.add(name, 1, 1, turn.num_prompt_tokens)
        self._held.count_open(turn.tenant, 1)
        job = self._jobs.get(turn.job_id)
        if job is not None:
            job.engine = name
        self.stats.num_sent += 1
        copy_from, num_copied = None, 0
        if turn.engine is not None and turn.engine != name:
            self.stats.num_moves += 1
            self.stats.num_moved_tokens += turn.num_context_tokens
            if answer.copy_from is not None and self._copy_token_s is not None:
                copy_from, num_copied = answer.copy_from, turn.num_context_tokens
                self.stats.num_copied_tokens += num_copied
        self._caller.tell("on_turn_sent", turn, name, now_s)
        return Sending(turn.turn_id, name, copy_from, num_copied)

    def _send_held(self, now_s: float) -> list[Sending]:
        """Ask about held turns, in order, until one stays held; then about those that waited too long."""
        sendings = []
        while self.engines.ready and (turn := self._held.get_first()) is not None:
            sending = self._route(turn, now_s)
            if sending is None:
                break
            sendings.append(sending)
        while self.engines.ready and (turn := self._held.get_oldest()) is not None:
            if now_s < turn.arrival_s + self.limits.max_held_s:
                break
            sending = self._route(turn, now_s)
            assert sending is not None, "a turn that must go is sent"
            sendings.append(sending)
        return sendings

    def _leave_engine(self, one: _Open) -> None:
        assert one.engine is not None
        is_unstarted = one.first_token_s is None
        tokens = one.turn.num_prompt_tokens if is_unstarted else 0
        self.engines.add(one.engine, -1, -int(is_unstarted), -tokens)
        self._held.count_open(one.turn.tenant, -1)

    def _close(self, job_id: str, now_s: float, *, ended: bool) -> None:
        """A turn of a job ended, and the job with it if `ended` and no other turn of it is open."""
        forgotten = self._jobs.close_turn(job_id)
        job = self._jobs.get(job_id)
        if ended and job is not None and job.num_open == 0:
            self._forget(job_id, now_s)
        if forgotten is not None and forgotten != job_id:
            self._forget(forgotten, now_s)

    def _forget(self, job_id: str, now_s: float) -> None:
        job = self._jobs.forget(job_id)
        if job is not None:
            self._contents.forget(job_id, job)
            self._caller.tell("on_job_ended", job_id, now_s)
