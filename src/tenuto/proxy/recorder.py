"""Turns the traffic of the proxy into the lines of the recording, on a separate thread.

The proxy hands over complete exchanges and continues. If an exchange cannot be read, or this code has a bug,
that exchange loses its line and is counted. The traffic is never affected.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import threading
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from tenuto.client.metrics import connect
from tenuto.core import __version__
from tenuto.core.errors import ConfigError
from tenuto.core.jobs import Lineage
from tenuto.core.requests import Hints
from tenuto.proxy import RecordOptions
from tenuto.proxy.exchange import (
    Exchange,
    RecordedRequest,
    Unreadable,
    are_ids,
    find_tool_call,
    get_pieces,
    read_request,
    read_response,
)
from tenuto.records.files import writing
from tenuto.wire.response import Response
from tenuto.workload.formats.conversations import (
    BLOCK_TOKENS,
    CHARS_PER_TOKEN,
    HASH_BYTES,
    TOKENS_START,
    Beginning,
    Contents,
    Hasher,
    Pieces,
    get_plain_tool,
)
from tenuto.workload.schema import Span

MAX_JOBS = 100_000
"""Number of jobs remembered between turns; the oldest are forgotten first."""
MAX_NAMES = 1_000_000
"""Most names of sessions that are remembered."""
MAX_HASH_BYTES = 2**27
"""Most hashes of last prompts that are remembered: those of 9,000 prompts of 30,000 tokens."""


@dataclass(slots=True, eq=False)
class Lane:
    """One job of the recording: a sequence of turns that do not overlap."""

    key: str
    """The key of its job, which other lanes may have too."""
    session: str
    tenant: str | None
    parent: str | None = None
    num_turns: int = 0
    last_arrival_s: float = 0.0
    last_end_s: float = 0.0
    last_hashes: bytes = b""
    """Of its last prompt's pieces, one after the other. Empty once they are forgotten."""
    after: tuple[str, int, float] | None = None
    """Session and index of the turn in flight when this job began, and for how many seconds it had been."""


class Sessions:
    """All jobs of a recording: which one a turn belongs to, and which turn of it came before.

    A job is recognised by the id that the client sends, and without an id by its content, as in
    `tenuto.core.driver`. The turns of a job in a recording must not overlap in time. Overlapping turns become
    separate jobs. Their names end with ~2, ~3, … and their parent is the job that they are part of.
    """

    def __init__(self) -> None:
        self._lanes: OrderedDict[str, list[Lane]] = OrderedDict()
        self._num_lanes = 0
        self._hashed: OrderedDict[str, Lane] = OrderedDict()
        """The lanes that have their last hashes, by session, in the order of their last turns."""
        self._num_hash_bytes = 0
        self._names: dict[str, int] = {}
        """The names of sessions, each with the number of the next one of this name."""
        self._num_unnamed = MAX_NAMES
        self._num_inferred = 0
        self._by_tokens = Lineage(BLOCK_TOKENS, MAX_JOBS)
        self._by_texts: OrderedDict[tuple[str | None, bytes], str] = OrderedDict()
        """By tenant and the last hash of an answered prompt, without and with its answer: the job's key."""

    def find(
        self,
        job: tuple[str | None, str | None],
        arrival_s: float,
        pieces: Pieces,
        token_ids: Sequence[int] | None,
    ) -> Lane:
        """The sequence of turns that a turn joins. `job` is the tenant and the job id."""
        tenant, job_id = job
        key = self._recognise(tenant, pieces, token_ids) if job_id is None else f"{tenant or ''}\t{job_id}"
        if key is None:
            self._num_inferred += 1
            job_id = f"job-{self._num_inferred}"
            # No id contains a tab, because ids are printable.
            key = f"\t\t{job_id}"
        lanes = self._lanes.setdefault(key, [])
        self._lanes.move_to_end(key)
        idle = [lane for lane in lanes if lane.last_end_s <= arrival_s]
        if idle:
            return max(idle, key=lambda lane: _count_common(lane.last_hashes, pieces.hashes))
        lanes.append(self._make_lane(key, lanes, job_id or "job", tenant, arrival_s))
        self._num_lanes += 1
        while self._num_lanes > MAX_JOBS and len(self._lanes) > 1:
            for lane in self._lanes.popitem(last=False)[1]:
                self._num_lanes -= 1
                self._forget_hashes(lane)
        return lanes[-1]

    def end_turn(self, lane: Lane, exchange: Exchange, hashes: Sequence[bytes]) -> None:
        """Note a lane's newest turn, and the hashes of its prompt's pieces."""
        lane.num_turns += 1
        lane.last_arrival_s, lane.last_end_s = exchange.arrival_s, exchange.end_s
        self._forget_hashes(lane)
        lane.last_hashes = b"".join(hashes)
        self._num_hash_bytes += len(lane.last_hashes)
        self._hashed[lane.session] = lane
        # A lane without them stays a job. Its next turn is only written with all of its hashes.
        while self._num_hash_bytes > MAX_HASH_BYTES:
            self._forget_hashes(next(iter(self._hashed.values())))

    def _forget_hashes(self, lane: Lane) -> None:
        self._hashed.pop(lane.session, None)
        self._num_hash_bytes -= len(lane.last_hashes)
        lane.last_hashes = b""

    def remember(
        self, lane: Lane, pieces: Pieces, token_ids: Sequence[int] | None, output: Sequence[bytes]
    ) -> None:
        """Remember an answered turn: the job's next turn begins with its prompt, and mostly its answer.

        `output`: hashes of the answer's pieces or full blocks.
        """
        if token_ids is not None:
            full = pieces.hashes[: len(token_ids) // BLOCK_TOKENS]
            self._by_tokens.remember(lane.key, [*full, *output], token_ids, lane.tenant)
            return
        for mark in (pieces.hashes[-1], *output[-1:]):
            self._by_texts[lane.tenant, mark] = lane.key
            self._by_texts.move_to_end((lane.tenant, mark))
        while len(self._by_texts) > 2 * MAX_JOBS:
            self._by_texts.popitem(last=False)

    def _recognise(self, tenant: str | None, pieces: Pieces, token_ids: Sequence[int] | None) -> str | None:
        if token_ids is not None:
            full = pieces.hashes[: len(token_ids) // BLOCK_TOKENS]
            return self._by_tokens.find(full, token_ids, tenant)
        known = (self._by_texts.get((tenant, each)) for each in reversed(pieces.hashes[:-1]))
        return next((key for key in known if key is not None), None)

    def _make_lane(
        self, key: str, lanes: list[Lane], job_id: str, tenant: str | None, arrival_s: float
    ) -> Lane:
        name = base = lanes[0].session if lanes else job_id
        if len(self._names) >= MAX_NAMES:
            # No more are remembered, and no other name has such a number.
            self._num_unnamed += 1
            name = f"{base}~{self._num_unnamed}"
        else:
            number = max(2, len(lanes) + 1, self._names.get(base, 2))
            while name in self._names:
                name, number = f"{base}~{number}", number + 1
            self._names[base] = number
            self._names.setdefault(name, 2)
        if not lanes:
            return Lane(key, name, tenant)
        first = lanes[0]
        lane = Lane(key, name, first.tenant, parent=first.session)
        if first.last_arrival_s <= arrival_s:
            lane.after = (first.session, first.num_turns - 1, arrival_s - first.last_arrival_s)
        return lane


def _count_common(last: bytes, hashes: Sequence[bytes]) -> int:
    """How many pieces two prompts share. A hash covers all pieces before it, so bisection finds it."""

    def differs(at: int) -> bool:
        return last[at * HASH_BYTES : (at + 1) * HASH_BYTES] != hashes[at]

    return bisect_left(range(min(len(last) // HASH_BYTES, len(hashes))), True, key=differs)


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
        salt = None if options.salt is None else options.salt.encode(errors="surrogateescape")
        self._hasher = Hasher(secrets.token_bytes(32) if salt is None else salt)
        self._tokenizer = Tokenizer(options.url, say)
        self._tokenizer.is_there = options.tokens == "server"
        self._turns = TurnWriter(self._hasher, self._tokenizer, options.keep_text)
        self._queue: queue.SimpleQueue[Exchange | None] = queue.SimpleQueue()
        self._num_waiting_bytes = 0
        self._lock = threading.Lock()
        self._file.write(
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
        size = exchange.num_kept_bytes
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
                self._num_waiting_bytes -= exchange.num_kept_bytes

    def _lose(self, why: str) -> None:
        self.num_lost += 1
        if self.num_lost == 1:
            self._say(f"{why}; traffic goes on, further ones are only counted")

    def _record(self, exchange: Exchange) -> None:
        request = why = None
        try:
            request = read_request(exchange)
        except Unreadable as error:
            why = str(error)
        try:
            # Read the answer first: if the server refuses the request, its message explains more.
            response = read_response(exchange)
        except Unreadable as error:
            why = str(error)
        if request is None or why is not None:
            self.num_failed += 1
            self._file.write(self._make_failed(exchange, request, why))
            return
        row = self._turns.make_row(exchange, request, response, self._get_job(request.hints))
        if self._file.write({"timestamp": exchange.timestamp_ms, **row}):
            self.num_turns += 1

    def _make_failed(
        self, exchange: Exchange, request: RecordedRequest | None, why: str | None
    ) -> dict[str, Any]:
        """Make the line of a request without a complete answer. Readers of workloads skip such lines."""
        tenant, job_id = (None, None) if request is None else self._get_job(request.hints)
        row = {
            "kind": "failed",
            "timestamp": exchange.timestamp_ms,
            "why": why,
            "status": exchange.status,
            "session": job_id,
            "tenant": tenant,
            "model": None if request is None else request.model,
            "path": exchange.endpoint,
            "latency_ms": exchange.latency_ms,
        }
        return {key: value for key, value in row.items() if value is not None}

    def _get_job(self, hints: Hints) -> tuple[str | None, str | None]:
        """Tenant and job id, hashed if the options ask for it."""
        tenant, job_id = hints.tenant, hints.job_id
        if job_id is not None and tenant is not None:
            job_id = job_id.removeprefix(f"{tenant}\t")
        if not self._options.hide_ids:
            return tenant, job_id
        hide = self._hasher.hash_id
        return None if tenant is None else hide(tenant), None if job_id is None else hide(job_id)


class TurnWriter:
    """Makes the lines of one recording's turns, in the order in which the turns ended."""

    def __init__(self, hasher: Hasher, tokenizer: Tokenizer, keep_text: bool) -> None:
        self._hasher = hasher
        self._contents = Contents()
        self._sessions = Sessions()
        self._tokenizer = tokenizer
        self._keep_text = keep_text
        self._numbers = count(1)

    def make_row(
        self,
        exchange: Exchange,
        request: RecordedRequest,
        response: Response,
        job: tuple[str | None, str | None],
    ) -> dict[str, Any]:
        """Make the line, without its timestamp, and remember the turn."""
        complaints: list[str] = []
        token_ids = self._find_ids(exchange, request, response, complaints)
        output_ids = self._find_output_ids(exchange, request, response, has_ids=token_ids is not None)
        if token_ids is None:
            pieces = self._hasher.hash_texts(request.pieces)
            num_prompt = _count_prompt(request, response, complaints)
        else:
            pieces, num_prompt = self._hasher.hash_tokens(token_ids), len(token_ids)
        lane = self._sessions.find(job, exchange.arrival_s, pieces, token_ids)
        output = Span(f"out{next(self._numbers)}", _count_output(exchange, response, output_ids))
        beginning = self._contents.resolve(pieces, num_prompt)
        if token_ids is None:
            after = self._hasher.hash_texts(get_pieces(response, exchange.path), pieces.hashes[-1])
            # Clients do not send reasoning again, and KV of what comes behind it is of no use without it.
            if not (response.reasoning or response.usage.reasoning_tokens):
                self._contents.remember(beginning.followed_by(output), after, 0, num_prompt)
            self._sessions.remember(lane, pieces, None, after.hashes)
        else:
            self._remember_tokens(lane, pieces, token_ids, beginning, output, output_ids or [])
        tool, usage = find_tool_call(response), response.usage
        if response.token_ids is not None and usage.output_tokens not in (None, output.num_tokens):
            complaints.append(f"output count: {output.num_tokens} tokens came, {usage.output_tokens} counted")
        cached = usage.cached_tokens
        if cached is not None and cached > num_prompt:
            complaints.append(f"cached count: {cached} tokens of a prompt of {num_prompt}")
            cached = None
        first_s = response.first_token_s if request.is_stream else None
        num_same = _count_common(lane.last_hashes, pieces.hashes)
        row = {
            **_describe_job(lane, exchange),
            "input_length": num_prompt,
            "output_length": output.num_tokens,
            "tool": None if tool is None else get_plain_tool(tool),
            "command": tool.command or None if tool is not None and self._keep_text else None,
            "prompt": beginning.prompt,
            "output": output.content_id,
            "model": request.model,
            "path": exchange.endpoint,
            "status": exchange.status,
            "ttft_ms": None if first_s is None else round((first_s - exchange.arrival_s) * 1000, 3),
            "latency_ms": exchange.latency_ms,
            "cached_tokens": cached,
            "is_last_step": request.hints.is_last,
            "complaints": complaints or None,
            "blocks_of": "messages" if token_ids is None else f"{BLOCK_TOKENS} tokens",
            # The salted hashes that come after those shared with the session's previous turn.
            "num_same_blocks": num_same,
            "block_hashes": [each.hex() for each in pieces.hashes[num_same:]],
            "prompt_text": request.pieces or None if self._keep_text else None,
            "answer_text": response.text if self._keep_text else None,
        }
        self._sessions.end_turn(lane, exchange, pieces.hashes)
        return {name: value for name, value in row.items() if value is not None}

    def _find_ids(
        self, exchange: Exchange, request: RecordedRequest, response: Response, complaints: list[str]
    ) -> list[int] | None:
        """The prompt's token ids: as sent by the client, repeated in the answer, or from /tokenize."""
        known = request.token_ids or response.prompt_ids or None
        counted = response.usage.prompt_tokens
        if known is not None:
            if counted not in (None, len(known)):
                complaints.append(f"prompt count: {len(known)} tokens sent, {counted} counted")
            return known
        if request.tokenize is None:
            return None
        made = self._tokenizer.try_tokenize(request.tokenize, exchange.headers)
        if made is not None and counted not in (None, len(made)):
            # The prompt contains images, or its template has settings that /tokenize is not told about. These
            # are not the prompt's token ids.
            complaints.append(f"prompt count: /tokenize makes {len(made)} tokens, {counted} counted")
            return None
        return made

    def _find_output_ids(
        self, exchange: Exchange, request: RecordedRequest, response: Response, *, has_ids: bool
    ) -> list[int] | None:
        if response.token_ids is not None:
            return response.token_ids
        if not has_ids or response.calls or response.reasoning or not response.text:
            return None
        ask = {"prompt": response.text, "add_special_tokens": False}
        if request.model is not None:
            ask["model"] = request.model
        return self._tokenizer.try_tokenize(ask, exchange.headers)

    def _remember_tokens(
        self,
        lane: Lane,
        pieces: Pieces,
        token_ids: list[int],
        prompt: Beginning,
        output: Span,
        output_ids: list[int],
    ) -> None:
        """Remember a prompt and its answer by their blocks."""
        held = output_ids[: output.num_tokens]
        start = len(token_ids) // BLOCK_TOKENS * BLOCK_TOKENS
        last_full = pieces.hashes[start // BLOCK_TOKENS - 1 : start // BLOCK_TOKENS] or [TOKENS_START]
        after = self._hasher.hash_tokens([*token_ids[start:], *held], last_full[0])
        whole = prompt.followed_by(Span(output.content_id, len(held)))
        self._contents.remember(whole, after, 0, start)
        full = [each for each, size in zip(after.hashes, after.weights, strict=True) if size == BLOCK_TOKENS]
        self._sessions.remember(lane, pieces, token_ids, full)


def _count_prompt(request: RecordedRequest, response: Response, complaints: list[str]) -> int:
    """The server's count if there is one, but at least the number of pieces."""
    if response.usage.prompt_tokens is not None:
        return max(len(request.pieces), response.usage.prompt_tokens)
    complaints.append("no usage: the prompt's length is a guess from its text")
    return max(len(request.pieces), sum(map(len, request.pieces)) // CHARS_PER_TOKEN)


def _count_output(exchange: Exchange, response: Response, output_ids: list[int] | None) -> int:
    """The number of ids received; otherwise the count of the server, its tokenizer or its events."""
    if response.token_ids is not None:
        return len(response.token_ids)
    num_pieces = response.num_pieces if exchange.is_stream else 0
    known = response.usage.output_tokens or (len(output_ids) if output_ids else 0) or num_pieces
    return known or max(1, len(response.text) // CHARS_PER_TOKEN)


def _describe_job(lane: Lane, exchange: Exchange) -> dict[str, Any]:
    row: dict[str, Any] = {"session": lane.session, "tenant": lane.tenant}
    if lane.num_turns:
        row["delay"] = round(max(0.0, exchange.arrival_s - lane.last_end_s) * 1000, 3)
        return row
    row["parent"] = lane.parent
    if lane.after is not None:
        session, turn, delay_s = lane.after
        row["after"] = [
            {"session": session, "turn": turn, "event": "sent", "delay": round(delay_s * 1000, 3)}
        ]
    return row


class RecordingFile:
    """A new JSONL file that only its owner can read. If the disk fails, only the file ends.

    Raises ConfigError if the file cannot be opened or is not empty.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.num_lost = 0
        """Number of lines that are not in the file because it ended early."""
        self._say = say
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        if os.fstat(self._file).st_size:
            os.close(self._file)
            raise ConfigError(f"--out {path} holds something already; name a new file")

    def write(self, row: Mapping[str, Any]) -> bool:
        """Add a line. Return whether it is in the file."""
        if self.num_lost:
            self.num_lost += 1
            return False
        line = json.dumps(row, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        start = 0
        try:
            # Write each line with one call, so that killing this process cannot leave half a line.
            while start < len(line):
                start += os.write(self._file, line[start:])
        except OSError as error:
            self.num_lost = 1
            why = error.strerror or error
            self._say(f"the recording ends here, it cannot be written: {why}; traffic goes on")
            # Where this fails too, an incomplete line stays in the file; readers report it.
            with contextlib.suppress(OSError):
                if start:
                    os.ftruncate(self._file, os.fstat(self._file).st_size - start)
        return not self.num_lost

    def empty(self) -> None:
        """Take back what was written, so that the name can be used again."""
        with contextlib.suppress(OSError):  # a device
            os.ftruncate(self._file, 0)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


TOKENIZE_LIMIT_S = 30.0
_CREDENTIALS = ("authorization", "api-key", "x-api-key")
"""Headers of the client's request that this request needs too. They are not stored."""
_MISSING = frozenset({404, 405, 501})


class Tokenizer:
    """Asks one server for token ids. Stops asking when it is clear that the server does not support this."""

    def __init__(self, url: str, say: Callable[[str], None]) -> None:
        self.is_there = True
        self._say = say
        self._client = connect(url, None, TOKENIZE_LIMIT_S)
        self._has_complained = False

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def try_tokenize(self, ask: Mapping[str, Any], headers: Mapping[str, str]) -> list[int] | None:
        """The token ids of a prompt or a text. None if the server does not provide them."""
        if not self.is_there:
            return None
        credentials = {name: headers[name] for name in _CREDENTIALS if name in headers}
        try:
            answer = self._client.post("/tokenize", json=dict(ask), headers=credentials)
            if answer.status_code in _MISSING:
                self.is_there = False
                self._say("the server has no /tokenize: prompts are told apart by messages, not by tokens")
                return None
            tokens = answer.json().get("tokens") if answer.status_code == 200 else None
            problem = f"http {answer.status_code}"
        except httpx.TimeoutException:
            # Give up: every later prompt would wait just as long.
            self.is_there = False
            self._say("/tokenize hangs: from here on prompts are told apart by messages, not by tokens")
            return None
        except (httpx.HTTPError, ValueError, AttributeError) as error:
            tokens, problem = None, type(error).__name__
        if tokens and are_ids(tokens):
            return list(tokens)
        if not self._has_complained:
            self._has_complained = True
            self._say(f"/tokenize fails ({problem}): such prompts are told apart by messages, not by tokens")
        return None
