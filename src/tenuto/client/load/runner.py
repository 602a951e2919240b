"""Runs a workload against a server: sends each turn when it is due and records the result.

A turn is a task only while it is in flight. A job in a tool call costs only one timer, so one process can run
thousands of jobs.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from tenuto.client.http.client import Answer, RequestFailed
from tenuto.client.http.request import Conversation, RequestWriter
from tenuto.client.load.commands import CommandRunner
from tenuto.client.load.measured import Flight, Sending, make_record
from tenuto.client.load.servers import Sender, Servers
from tenuto.records.metrics import Gaps
from tenuto.records.schema import Failure, Status, TurnRecord
from tenuto.workload.schema import Job
from tenuto.workload.turn_driver import Due, TurnDriver

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True)
class _Family:
    """A job and all the jobs that it started. They may quote each other's answers."""

    answers: dict[str, Answer] = field(default_factory=dict)
    conversations: dict[str, Conversation] = field(default_factory=dict)


class Load:
    """One run. `on_record` is called for every turn that ended, in the order in which the turns end.

    With `commands`, tool calls with a known command are executed; `turns` must be set up for this.
    """

    def __init__(
        self,
        turns: TurnDriver,
        servers: Servers,
        writer: RequestWriter,
        on_record: Callable[[TurnRecord], None],
        *,
        sending: Sending,
        commands: CommandRunner | None = None,
    ) -> None:
        self.num_in_flight = 0
        """Turns that were sent, or are about to be sent, and have not ended."""
        self.num_started_jobs = 0
        self._turns = turns
        self._servers = servers
        self._writer = writer
        self._on_record = on_record
        self._sending = sending
        self.gaps = Gaps()
        """Seconds between the tokens of each answer."""
        self._commands = commands
        self._last_finished: dict[str, int] = {}
        """By job, the index of its most recently finished turn."""
        self._families: dict[str, _Family] = {}
        self._timers: dict[tuple[str, int], asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._start_s = self._loop.time()
        self._over = asyncio.Event()

    async def run(self) -> None:
        """Run until every turn has ended or was given up, or until `stop` is called."""
        async with asyncio.TaskGroup() as self._group:
            self._start_s = self._loop.time()
            self._schedule(self._turns.start())
            await self._over.wait()

    def stop(self) -> None:
        """Send no more turns and cancel the turns in flight."""
        for timer in self._timers.values():
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        self._over.set()

    def get_now_s(self) -> float:
        """Seconds since the start of the run."""
        return self._loop.time() - self._start_s

    def _schedule(self, turns: Iterable[Due]) -> None:
        for due in turns:
            at_s = self._start_s + due.at_s
            self._timers[due.job.job_id, due.turn] = self._loop.call_at(at_s, self._begin, due)

    def _begin(self, due: Due) -> None:
        del self._timers[due.job.job_id, due.turn]
        self.num_in_flight += 1
        self.num_started_jobs += due.turn == 0
        self._start(self._run_turn(Flight(due)))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_turn(self, flight: Flight) -> None:
        job, index, _ = flight.due
        try:
            await self._fetch_answer(flight)
        except asyncio.CancelledError:
            self._record(flight, "cancelled")
            raise
        if flight.answer is None:
            self._record(flight, "failed")
            self._schedule(self._turns.on_failed(job.job_id, index, self.get_now_s()))
        else:
            self._record(flight, "ok")
            self._last_finished[job.job_id] = index
            if self._writer.quotes_answers:
                self._get_family(job).answers[job.turns[index].output.content_id] = flight.answer
            self._schedule(self._turns.on_finished(job.job_id, index, flight.answer.last_token_s))
            if self._commands is not None and job.turns[index].command is not None:
                self._start(self._run_command(self._commands, job, index))
        if self._turns.has_ended(root := self._turns.get_root(job.job_id)):
            self._families.pop(root, None)
        if self._turns.is_over():
            self._over.set()

    async def _run_command(self, commands: CommandRunner, job: Job, index: int) -> None:
        if index < len(job.turns) - 1:
            await commands.run(job, index)
            self._schedule(self._turns.on_returned(job.job_id, index, self.get_now_s()))

    async def _fetch_answer(self, flight: Flight) -> None:
        """Send the turn until it succeeds or no retry is allowed."""
        job, index, _ = flight.due
        prompt = self._get_conversation(job).write_prompt(job.turns[index])
        body, headers = self._writer.write_body(job, index, prompt), self._writer.write_headers(job, index)
        if job.job_id in self._last_finished:
            flight.before = job.turns[self._last_finished[job.job_id]]
        flight.sent_s = self.get_now_s()
        self._schedule(self._turns.on_sent(job.job_id, index, flight.sent_s))
        with self._servers.open_turn(flight.due) as sender:
            await self._try_to_send(flight, sender, body, headers)

    async def _try_to_send(
        self, flight: Flight, sender: Sender, body: bytes, headers: Mapping[str, str]
    ) -> None:
        job, index, _ = flight.due
        for attempt in count():
            sent_s = self.get_now_s()
            try:
                answer = await sender.stream_answer(self._writer.form.path, body, headers)
            except RequestFailed as error:
                flight.failures.append(Failure(error.kind, str(error), sent_s, self.get_now_s()))
                if attempt == self._sending.retries or not error.can_retry:
                    return
                await asyncio.sleep(get_pause_s(attempt, error.retry_after_s, f"{job.job_id}/{index}"))
            else:
                for gap_s in answer.gaps_s:
                    self.gaps.add(gap_s)
                # Answers that later prompts quote are kept; their gaps are counted and need not be.
                flight.answer = replace(answer.since(self._start_s), gaps_s=())
                return

    def _get_family(self, job: Job) -> _Family:
        return self._families.setdefault(self._turns.get_root(job.job_id), _Family())

    def _get_conversation(self, job: Job) -> Conversation:
        family = self._get_family(job)
        if job.job_id not in family.conversations:
            family.conversations[job.job_id] = Conversation(
                job, self._writer.form, self._writer.run_id, family.answers
            )
        return family.conversations[job.job_id]

    def _record(self, flight: Flight, status: Status) -> None:
        self.num_in_flight -= 1
        self._on_record(make_record(flight, status, self._sending))


def get_pause_s(attempt: int, retry_after_s: float | None, seed: str) -> float:
    """How many seconds to wait before a failed attempt (counted from 0) is repeated.

    The pause is what the server asks for; otherwise it doubles with each attempt. It is at most one minute.
    A random extra of up to half the pause, drawn from the seed, spreads out the repeats of requests that
    failed together.
    """
    pause_s = FIRST_PAUSE_S * 2.0**attempt if retry_after_s is None else retry_after_s
    return min(pause_s, MAX_PAUSE_S) * random.Random(seed).uniform(1.0, 1.5)
