"""ShareGPT: conversations of people and models, the usual test data of serving benchmarks.

    [{"id": "abc", "conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}]

A conversation becomes a job with one turn per answer. The file has no times and no token counts: all
conversations arrive at once unless `--jps` or `--users` says otherwise, the next question follows at once,
and 4 characters count as one token. `vllm bench serve` reads the first exchange only; so does
`--max-turns 1`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tenuto.core.errors import DataError
from tenuto.records.codec import Fields
from tenuto.wire.request import Message
from tenuto.workload.formats.conversations import JobMaker, LoggedTurn, write_piece
from tenuto.workload.schema import Job

CONVERSATIONS = "conversations"
"""The key by which the format is recognised."""
_ROLES: Mapping[str, str] = {
    "human": "user",
    "user": "user",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""The roles of the asking side. All other names (gpt, chatgpt, bing, bard, …) are the model."""


def read_sharegpt(records: Sequence[Fields]) -> list[Job]:
    """The jobs in the order of the file, without conversations that have no answer. Raises DataError."""
    maker = JobMaker()
    jobs = []
    for number, record in enumerate(records):
        logged = _read_answers(record)
        if logged:
            jobs.append(maker.make_job(f"sharegpt-{number}", logged, 0.0))
    if not jobs:
        raise DataError(f"{records[0].file}: no conversation has a question and an answer")
    return jobs


def _read_answers(record: Fields) -> list[LoggedTurn]:
    """Each answer with the text before it; an answer without a question is part of that text."""
    pieces: list[str] = []
    logged: list[LoggedTurn] = []
    for part in record.records(CONVERSATIONS):
        role = _ROLES.get(part.text("from"), "assistant")
        text = part.values.get("value")
        if not isinstance(text, str):
            raise part.error("value", "must be text")
        if role == "assistant" and text and any(pieces):
            logged.append(LoggedTurn(part, pieces, len(pieces), {"content": text}, {}))
        pieces.append(write_piece(Message(role, [text])))
    return logged
