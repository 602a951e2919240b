"""Runs a workload against servers: sends each turn when it is due and records the result.

A turn is an asyncio task only while it is in flight. A job in a tool call costs only one timer, so one
process can run thousands of jobs. With several servers, one of Tenuto's routers in the client chooses the
server of each turn. It keeps the same records as a simulated router, and sees what any router sees: which
turn it sent where, and the answers.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

from tenuto.client.commands import CommandRunner
from tenuto.client.http import Answer, Client, Conversation, RequestFailed, RequestWriter
from tenuto.client.result import Flight, Sending, make_turn_record
from tenuto.core import console
from tenuto.core import router as routing
from tenuto.core.dispatcher import Dispatcher, FleetLimits
from tenuto.core.loader import load_router
from tenuto.core.router import EngineInfo
from tenuto.records.metrics import Gaps, get_percentile
from tenuto.records.schema import Failure, Status, TurnRecord
from tenuto.workload.hints import SayHints, get_turn_id, make_arrival
from tenuto.workload.schema import Job, Workload
from tenuto.workload.turn_driver import Due, TurnDriver

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 60.0
AWAY_S = 10.0
"""Seconds for which a server that refuses a connection, or fails often, gets no turns."""
MAX_FAILURES = 3
"""A server that fails so often in a row gets no turns for a while, if another one does."""
_NUM_RECENT = 1000
Send = Callable[[str, bytes, Mapping[str, str]], Awaitable[Answer]]
"""Sends one turn: path, body and headers. It may be called again for a retry."""
OpenTurn = Callable[[Due], AbstractContextManager[Send]]
"""Gives what sends a turn, inside its block."""


@dataclass(frozen=True, slots=True)
class _Family:
    """A job and all the jobs that it started. They may quote each other's answers."""

    answers: dict[str, Answer] = field(default_factory=dict)
    conversations: dict[str, Conversation] = field(default_factory=dict)


@dataclass(eq=False)
class Load:
    """One run. `on_record` is called for every turn that ended, in the order in which the turns end.

    With `commands`, tool calls with a known command are executed; `turns` must be set up for this.
    """

    turns: TurnDriver
    open_turn: OpenTurn
    writer: RequestWriter
    on_record: Callable[[TurnRecord], None]
    _: KW_ONLY
    sending: Sending
    commands: CommandRunner | None = None

    def __post_init__(self) -> None:
        self.num_in_flight = 0
        """Number of turns that were sent, or are about to be sent, and have not ended."""
        self.num_started_jobs = 0
        self.gaps = Gaps()
        self._last_finished: dict[str, int] = {}
        """The index of each job's most recently finished turn."""
        self._families: dict[str, _Family] = {}
        self._timers: dict[tuple[str, int], asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()

    async def run(self) -> None:
        """Run until every turn has ended or was given up, or until `stop` is called."""
        async with asyncio.TaskGroup() as self._group:
            self._start_s = self._loop.time()
            self._schedule(self.turns.start())
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
            self._schedule(self.turns.on_failed(job.job_id, index, self.get_now_s()))
        else:
            self._record(flight, "ok")
            self._last_finished[job.job_id] = index
            if self.writer.quotes_answers:
                self._get_family(job).answers[job.turns[index].output.content_id] = flight.answer
            self._schedule(self.turns.on_finished(job.job_id, index, flight.answer.last_token_s))
            if self.commands is not None and job.turns[index].command is not None:
                self._start(self._run_command(self.commands, job, index))
        if self.turns.has_ended(root := self.turns.get_root(job.job_id)):
            self._families.pop(root, None)
        if self.turns.is_over():
            self._over.set()

    async def _run_command(self, commands: CommandRunner, job: Job, index: int) -> None:
        if index < len(job.turns) - 1:
            await commands.run(job, index)
            self._schedule(self.turns.on_returned(job.job_id, index, self.get_now_s()))

    async def _fetch_answer(self, flight: Flight) -> None:
        job, index, _ = flight.due
        family, writer = self._get_family(job), self.writer
        if job.job_id not in family.conversations:
            started = Conversation(job, writer.form, writer.run_id, family.answers)
            family.conversations[job.job_id] = started
        prompt = family.conversations[job.job_id].write_prompt(job.turns[index])
        body, headers = writer.write_body(job, index, prompt), writer.write_headers(job, index)
        if job.job_id in self._last_finished:
            flight.before = job.turns[self._last_finished[job.job_id]]
        flight.sent_s = self.get_now_s()
        self._schedule(self.turns.on_sent(job.job_id, index, flight.sent_s))
        with self.open_turn(flight.due) as send:
            await self._try_to_send(flight, send, body, headers)

    async def _try_to_send(self, flight: Flight, send: Send, body: bytes, headers: Mapping[str, str]) -> None:
        job, index, _ = flight.due
        for attempt in count():
            sent_s = self.get_now_s()
            try:
                answer = await send(self.writer.form.path, body, headers)
            except RequestFailed as error:
                flight.failures.append(Failure(error.kind, str(error), sent_s, self.get_now_s()))
                if attempt == self.sending.retries or not error.can_retry:
                    return
                await asyncio.sleep(get_pause_s(attempt, error.retry_after_s, f"{job.job_id}/{index}"))
            else:
                for gap_s in answer.gaps_s:
                    self.gaps.add(gap_s)
                # Answers that later prompts quote are kept, without their gaps, which are counted already.
                first_s, last_s = answer.first_token_s - self._start_s, answer.last_token_s - self._start_s
                flight.answer = replace(answer, first_token_s=first_s, last_token_s=last_s, gaps_s=())
                return

    def _get_family(self, job: Job) -> _Family:
        return self._families.setdefault(self.turns.get_root(job.job_id), _Family())

    def _record(self, flight: Flight, status: Status) -> None:
        self.num_in_flight -= 1
        job = flight.due.job
        root = None if job.parent is None else self.turns.get_root(job.job_id)
        self.on_record(make_turn_record(flight, status, self.sending, root))


def get_pause_s(attempt: int, retry_after_s: float | None, seed: str) -> float:
    """How many seconds to wait before a failed attempt (counted from 0) is repeated.

    The pause is what the server asks for; otherwise it doubles with each attempt. It is at most one minute.
    A random extra of up to half the pause, drawn from the seed, spreads out the repeats of requests that
    failed together.
    """
    pause_s = FIRST_PAUSE_S * 2.0**attempt if retry_after_s is None else retry_after_s
    return min(pause_s, MAX_PAUSE_S) * random.Random(seed).uniform(1.0, 1.5)


class RoutedServers:
    """Several servers. New jobs are never held back here, because the engines have their own admission."""

    def __init__(self, clients: Sequence[Client], router: str, say_hints: SayHints) -> None:
        """Raises PolicyError or ConfigError for a router that does not exist."""
        self._clients = {client.url: client for client in clients}
        self._dispatcher = Dispatcher(load_router(router), FleetLimits(max_held=0))
        self._say_hints = say_hints
        self._where: dict[str, str] = {}
        self._away: dict[str, float] = {}
        """The time until which each server that refused a connection, or failed often, gets no turns."""
        self._num_failures = dict.fromkeys(self._clients, 0)
        """How often each server failed since it last answered. Timeouts, which are slow, do not count."""
        self._num_sent = self._num_resent = 0  # The dispatcher also counts where it would send a turn again.
        for url in self._clients:
            self._dispatcher.join(EngineInfo(url), 0.0)

    @contextmanager
    def open_turn(self, due: Due) -> Iterator[Send]:
        """The router chooses a server for each attempt to send the turn."""
        try:
            yield partial(self._send, due, count())
        finally:
            self._note(self._dispatcher.abort(get_turn_id(due), _get_now_s()))
            self._where.pop(get_turn_id(due), None)

    def summarise(self) -> dict[str, Any]:
        """What the router did, as in the `fleet` of a simulated run's record."""
        stats = self._dispatcher.stats
        return {
            "sent": self._num_sent,
            "moves": stats.num_moves,
            "moved_tokens": stats.num_moved_tokens,
            "resent": self._num_resent,
            "router_faults": sum(self._dispatcher.faults.values()),
        }

    async def _send(
        self, due: Due, attempts: Iterator[int], path: str, body: bytes, headers: Mapping[str, str]
    ) -> Answer:
        client = self._choose(due)
        if client is None:
            raise RequestFailed("connect", "no server takes turns now", can_retry=True)
        self._num_sent += 1
        self._num_resent += next(attempts) > 0
        try:
            answer = await client.stream_answer(path, body, headers)
        except RequestFailed as error:
            self._fail(due, client, error)
            raise
        self._finish(due, answer)
        return answer

    def _choose(self, due: Due) -> Client | None:
        """The server for a turn; None while no server takes turns."""
        now_s, turn_id = _get_now_s(), get_turn_id(due)
        for url in [url for url, until_s in self._away.items() if until_s <= now_s]:
            del self._away[url]
            self._note(self._dispatcher.join(EngineInfo(url), now_s))
        if not self._dispatcher.is_open(turn_id):
            needs = self._dispatcher.router.needs
            hints = self._say_hints(due.job, due.turn)
            arrival = make_arrival(due, hints, needs_prompt=needs.prompts)
            self._note(self._dispatcher.arrive(arrival, now_s))
        found = self._where.get(turn_id)
        return None if found is None else self._clients[found]

    def _fail(self, due: Due, client: Client, error: RequestFailed) -> None:
        """A server did not answer a turn, so that the router chooses again for the next attempt."""
        now_s, turn_id = _get_now_s(), get_turn_id(due)
        if error.kind == "connect" and client.url not in self._away:
            self._away[client.url] = now_s + AWAY_S
            lost = [each for each, url in self._where.items() if url == client.url]
            for each in lost:
                del self._where[each]
            self._note(self._dispatcher.die(client.url, now_s))
        elif self._where.get(turn_id) == client.url:  # otherwise it was routed again when the server died
            del self._where[turn_id]
            self._note(self._dispatcher.fail(turn_id, now_s))
        self._num_failures[client.url] += error.can_retry and error.kind != "timeout"
        ready = self._dispatcher.engines.ready
        if self._num_failures[client.url] >= MAX_FAILURES and len(ready) > 1 and client.url in ready:
            # It always looks idle. What it still computes stays there.
            self._num_failures[client.url] = 0
            self._away[client.url] = now_s + AWAY_S
            self._dispatcher.drain(client.url, now_s)

    def _finish(self, due: Due, answer: Answer) -> None:
        if (url := self._where.pop(get_turn_id(due), None)) is not None:
            self._num_failures[url] = 0
        hints = self._say_hints(due.job, due.turn)
        sendings = self._dispatcher.finish(
            get_turn_id(due),
            _get_now_s(),
            answer.num_tokens or 0,
            num_hit_tokens=answer.usage.cached_tokens,
            is_last=hints.is_last,
        )
        self._note(sendings)

    def _note(self, sendings: Sequence[routing.Sending]) -> None:
        self._where.update((each.turn_id, each.engine) for each in sendings)


def _get_now_s() -> float:
    return asyncio.get_running_loop().time()


class Progress:
    """Counts of the turns that ended so far. Rates and latencies cover the latest 1,000 turns."""

    def __init__(self, workload: Workload) -> None:
        self._num_jobs = len(workload.jobs)
        self._num_turns_left = {job.job_id: len(job.turns) for job in workload.jobs}
        self._num_done_jobs = 0
        self._failed_jobs: set[str] = set()
        self._recent: deque[TurnRecord] = deque(maxlen=_NUM_RECENT)

    def add(self, record: TurnRecord) -> None:
        """Count a turn that ended."""
        if record.status != "ok":
            self._failed_jobs.add(record.job)
            return
        self._num_turns_left[record.job] -= 1
        self._num_done_jobs += self._num_turns_left[record.job] == 0
        self._recent.append(record)

    def format(self, now_s: float, num_started_jobs: int, num_in_flight: int) -> str:
        """The progress as one line of text."""
        num_running = num_started_jobs - self._num_done_jobs - len(self._failed_jobs)
        parts = [
            console.format_time(now_s),
            f"jobs: {self._num_done_jobs} of {self._num_jobs} done, {num_running} running, "
            f"{len(self._failed_jobs)} failed",
            f"turns: {num_in_flight} in flight",
        ]
        if self._recent:
            times = (self._format_times("ttft", "ttft_s"), self._format_times("turn", "latency_s"))
            parts += [self._format_rates(now_s), *times]
        return " | ".join(parts)

    def _format_rates(self, now_s: float) -> str:
        # The period starts at the end of the first of these turns. It is at least 1 s, to avoid misleading
        # rates.
        span_s = max(now_s - (self._recent[0].last_token_s or 0.0), 1.0)
        num_output_tokens = sum(record.output_tokens or 0 for record in self._recent)
        return f"{len(self._recent) / span_s:.1f} turns/s, {num_output_tokens / span_s:.0f} tok/s"

    def _format_times(self, label: str, name: str) -> str:
        values = [value for record in self._recent if (value := getattr(record, name)) is not None]
        return f"{label} p50 {get_percentile(values, 50):.2f} p95 {get_percentile(values, 95):.2f} s"


async def show(progress: Progress, load: Load, line: console.Progress) -> None:
    """Print the progress repeatedly until cancelled."""
    with line.cleared():
        while True:
            line.tell(lambda: progress.format(load.get_now_s(), load.num_started_jobs, load.num_in_flight))
            await asyncio.sleep(console.TERMINAL_S)
