"""Turns the traffic of the proxy into the lines of the recording, on a separate thread.

The proxy hands over complete exchanges and continues. If an exchange cannot be read, or this code has a bug,
that exchange loses its line and is counted. The traffic is never affected.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tenuto.core.requests.hints import Hints
from tenuto.core.version import __version__
from tenuto.proxy.answered import Answered, UnreadableAnswer, read_answered
from tenuto.proxy.asked import Asked, UnreadableRequest, read_asked
from tenuto.proxy.exchange import Exchange
from tenuto.proxy.file import RecordingFile
from tenuto.proxy.options import RecordOptions
from tenuto.proxy.sessions import Sessions
from tenuto.proxy.tokens import Tokenizer
from tenuto.proxy.turn import TurnWriter
from tenuto.workload.formats.conversations import Contents, Hasher

MAX_WAITING_BYTES = 2**29
"""Largest size of the exchanges that wait to be written. Exchanges above this limit are lost and counted."""


class Recorder:
    """Writes one recording. `submit` may be called from any thread and returns immediately."""

    def __init__(self, options: RecordOptions, file: RecordingFile, say: Callable[[str], None]) -> None:
        self.num_turns = 0
        self.num_failed = 0
        """Requests without a complete answer. They have a line in the recording too."""
        self.num_lost = 0
        """Exchanges that have no line in the recording."""
        self._options = options
        self._file = file
        self._say = say
        salt = (
            secrets.token_bytes(32) if options.salt is None else options.salt.encode(errors="surrogateescape")
        )
        self._hasher = Hasher(salt)
        self._tokenizer = Tokenizer(options.upstream, say)
        self._tokenizer.is_there = options.tokens == "server"
        self._turns = TurnWriter(self._hasher, Contents(), Sessions(), self._tokenizer, options.keep_text)
        self._queue: queue.SimpleQueue[Exchange | None] = queue.SimpleQueue()
        self._num_waiting_bytes = 0
        self._lock = threading.Lock()
        self._write(
            {
                "kind": "recording",
                "tenuto": __version__,
                "wall_s": round(time.time(), 3),
                "text": options.keep_text,
                "salt": "random" if options.salt is None else "given",
            }
        )
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def submit(self, exchange: Exchange) -> None:
        """Queue an exchange that has ended."""
        size = len(exchange.body) + exchange.num_answer_bytes
        with self._lock:
            if self._num_waiting_bytes + size > MAX_WAITING_BYTES:
                self._lose("the recording cannot keep up")
                return
            self._num_waiting_bytes += size
        self._queue.put(exchange)

    def close(self) -> None:
        """Write all submitted exchanges, then end."""
        self._queue.put(None)
        self._thread.join()
        self._tokenizer.close()

    def _run(self) -> None:
        while (exchange := self._queue.get()) is not None:
            try:
                self._record(exchange)
            except Exception as error:  # catch everything, because the next exchange may be valid
                # Report only the error's type: its message may quote the traffic.
                self._lose(f"a turn could not be written down ({type(error).__name__})")
            with self._lock:
                self._num_waiting_bytes -= len(exchange.body) + exchange.num_answer_bytes

    def _write(self, row: Mapping[str, Any]) -> None:
        had_problem = self._file.problem is not None
        self._file.write(row)
        if self._file.problem is not None and not had_problem:
            self._say(f"the recording ends here, it cannot be written: {self._file.problem}; traffic goes on")

    def _lose(self, why: str) -> None:
        self.num_lost += 1
        if self.num_lost == 1:
            self._say(f"{why}; traffic goes on, further ones are only counted")

    def _record(self, exchange: Exchange) -> None:
        asked: Asked | None = None
        why: str | None = None
        try:
            asked = read_asked(exchange)
        except UnreadableRequest as error:
            why = str(error)
        try:
            # Read the answer first: if the server refuses the request, its message explains more.
            answered = read_answered(exchange)
        except UnreadableAnswer as error:
            why = str(error)
        if asked is not None and why is None:
            self._write_turn(exchange, asked, answered)
        else:
            self.num_failed += 1
            self._write(self._make_failed(exchange, asked, why))

    def _write_turn(self, exchange: Exchange, asked: Asked, answered: Answered) -> None:
        job = self._get_job(asked.hints)
        row = self._turns.make_row(exchange, asked, answered, job)
        self.num_turns += 1
        self._write({"timestamp": _get_timestamp_ms(exchange), **row})

    def _make_failed(self, exchange: Exchange, asked: Asked | None, why: str | None) -> dict[str, Any]:
        """Make the line of a request without a complete answer. Readers of workloads skip such lines."""
        tenant, job_id = (None, None) if asked is None else self._get_job(asked.hints)
        row = {
            "kind": "failed",
            "timestamp": _get_timestamp_ms(exchange),
            "why": why,
            "status": exchange.status,
            "session": job_id,
            "tenant": tenant,
            "model": None if asked is None else asked.model,
            "path": exchange.endpoint,
            "latency_ms": round((exchange.end_s - exchange.arrival_s) * 1000, 3),
        }
        return {key: value for key, value in row.items() if value is not None}

    def _get_job(self, hints: Hints) -> tuple[str | None, str | None]:
        """Tenant and job id, hashed if the options ask for it."""
        tenant = hints.tenant
        job_id = hints.job_id
        if job_id is not None and tenant is not None:
            job_id = job_id.removeprefix(f"{tenant}\t")
        if not self._options.hide_ids:
            return tenant, job_id
        hide = self._hasher.hash_id
        return None if tenant is None else hide(tenant), None if job_id is None else hide(job_id)


def _get_timestamp_ms(exchange: Exchange) -> float:
    return round((exchange.arrival_s - exchange.start_s) * 1000, 3)
