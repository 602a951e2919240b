"""OpenAI-style chat logs: JSONL of requests as they were sent, or of whole conversations (fine-tuning data).

    {"messages": [{"role": "user", "content": "…"}], "tools": […], "timestamp": 1700000000.5,
     "response": {"choices": [{"message": {…}}], "usage": {"prompt_tokens": 92, "completion_tokens": 20}}}

A row that ends with an answer and says nothing else is a whole conversation: a job with one turn per answer.
Any other row is a request. Its answer is the row's `response` (or `choices` and `usage`), or is taken from
the next row of its conversation. Rows belong to one job by `session_id`, `session`, `conversation_id` or
`user_session`. Without these, a request that continues an earlier one is the next turn of that job.

`timestamp`, `created` or `created_at`, seconds, milliseconds or ISO 8601, says when a request was sent. How
long answers took is not in such logs, so the time between two requests counts as the tool's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count, filterfalse, pairwise
from typing import Any

from tenuto.records.codec import Fields
from tenuto.wire.response import as_object
from tenuto.workload.formats.conversations import JobMaker, LoggedTurn, read_choice, write_message
from tenuto.workload.formats.rounds import read_time_ns
from tenuto.workload.schema import Job

_SESSIONS = ("session_id", "session", "conversation_id", "user_session")
_TIMES = ("timestamp", "created", "created_at")
_MILLISECONDS = 1e11
"""Larger numbers are milliseconds since 1970; as seconds, it is the year 5138."""


def read_chat_logs(records: Sequence[Fields]) -> list[Job]:
    """The jobs in the order of their first rows. Raises DataError naming file, line and field."""
    maker = JobMaker()
    conversations: dict[str, _Conversation] = {}
    by_prompt: dict[bytes, str] = {}
    ids = [_find_id(record) for record in records]
    # A later row may have an id of this form.
    free_names = filterfalse(set(ids).__contains__, map("chat-{}".format, count()))
    for record, name in zip(records, ids, strict=True):
        pieces = _read_pieces(record)
        hashes = maker.hash_prompt(pieces).hashes
        messages = [message.values for message in record.records("messages")]
        sent_s = _read_time(record)
        response = record.values.get("response")
        source = response if isinstance(response, dict) else record.values
        answer, usage = read_choice(source), as_object(source.get("usage"))
        is_whole = messages[-1].get("role") == "assistant" and answer is None and name is None
        if name is None and not (is_whole and sent_s is None):
            known = (by_prompt.get(each) for each in reversed(hashes[:-1]))
            name = next((each for each in known if each is not None), None)
        if name is None:
            name = next(free_names)
        asked = LoggedTurn(record, pieces, len(pieces), answer, usage, sent_s)
        conversations.setdefault(name, _Conversation()).add_row(messages, hashes, asked)
        if not is_whole:
            by_prompt[hashes[-1]] = name
    jobs = {name: conversation.turns for name, conversation in conversations.items()}
    times = [turn.sent_s for turns in jobs.values() for turn in turns if turn.sent_s is not None]
    for turns in jobs.values():
        for index, (turn, following) in enumerate(list(pairwise(turns))):
            if turn.sent_s is not None and following.sent_s is not None:
                turns[index] = replace(turn, tool_s=max(0.0, following.sent_s - turn.sent_s))
    start_s = min(times, default=0.0)
    return [maker.make_job(name, turns, start_s) for name, turns in jobs.items() if turns]


@dataclass(slots=True)
class _Conversation:
    """The turns of the rows that belong together."""

    turns: list[LoggedTurn] = field(default_factory=list)
    _indices: dict[bytes, int] = field(default_factory=dict)
    """Of the turns, by the last hash of their prompts. To compare long prompts would take minutes."""

    def add_row(self, messages: list[dict[str, Any]], hashes: Sequence[bytes], asked: LoggedTurn) -> None:
        """Add a row's answers, except those that an earlier row contains or asked for.

        `asked` is the answer to the whole row, `hashes` are those of its prompt's pieces.
        """
        shift = asked.num_pieces - len(messages)
        for index, message in enumerate(messages):
            num_pieces = index + shift
            if message.get("role") != "assistant" or num_pieces == 0:
                continue
            known = self._indices.get(hashes[num_pieces - 1])
            if known is None:
                self._add(LoggedTurn(asked.place, asked.pieces, num_pieces, message, {}), hashes)
            elif self.turns[known].message is None:
                self.turns[known] = replace(self.turns[known], message=message)
        if messages[-1].get("role") != "assistant" or asked.message is not None:
            self._add(asked, hashes)

    def _add(self, turn: LoggedTurn, hashes: Sequence[bytes]) -> None:
        self._indices[hashes[turn.num_pieces - 1]] = len(self.turns)
        self.turns.append(turn)


def _find_id(record: Fields) -> str | None:
    ids = (str(record.values[key]) for key in _SESSIONS if key in record)
    return next(filter(None, ids), None)


def _read_pieces(record: Fields) -> tuple[str, ...]:
    messages = record.records("messages")
    if not messages:
        raise record.error("messages", "is empty")
    for message in messages:
        message.text("role")
    tools = [str(record.values["tools"])] if record.values.get("tools") else []
    return (*tools, *(write_message(message.values) for message in messages))


def _read_time(record: Fields) -> float | None:
    key = next((key for key in _TIMES if key in record), None)
    if key is None:
        return None
    if isinstance(record.values[key], str):
        return read_time_ns(record, key) / 10**9
    seconds = record.number(key, high=_MILLISECONDS * 1000)
    return seconds / 1000 if seconds > _MILLISECONDS else seconds
