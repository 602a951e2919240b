"""Tenuto's own traces: JSONL with Mooncake's fields plus session, tool, delay, and what else a job needs.

    {"session": "a", "timestamp": 0, "input_length": 92, "output_length": 20, "tool": "ls"}
    {"session": "a", "delay": 500, "input_length": 1840, "output_length": 20}

There is one row per turn. The rows of a session are a job's turns in order, and rows of other sessions may be
between them. `session_id`, as AIPerf and Dynamo write it, is read as `session`. Times are milliseconds.

    session         the job's id
    timestamp       when the turn is sent; needed in a session's first row, elsewhere for open loops only
    delay           from the end of the turn before until this one is sent; needed in all rows but the first
    input_length    tokens of the prompt
    output_length   tokens of the output
    tool, command   the tool this turn's output calls, and the whole command line
    prompt          exact content: [[content id, tokens], …], see `schema`; adds up to input_length
    hash_ids        or content as block ids, `block_size` tokens each (512 unless the row says otherwise)
    output          the output's content id
    after           other turns to wait for: [{"session", "turn", "event": "sent" | "finished", "delay"}, …]
    tenant, parent  in the first row: the job's owner, and the session that started this one

Rows whose `kind` is "recording" or "failed" are notes of `tenuto record` and are passed over.

A row that says nothing about its content extends the previous turn: its prompt, its output, then new text. If
the row is too short for that, the conversation was rewritten and all its text is new. Such a prompt may grow
over 2,048 turns. All other keys are kept and written again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tenuto.core.errors import DataError
from tenuto.records.codec import Fields
from tenuto.records.load import is_note
from tenuto.records.metrics import find_roots, group_by
from tenuto.workload.formats.conversations import check_growth
from tenuto.workload.formats.mooncake import BLOCK_SIZE, read_hashed_prompt
from tenuto.workload.formats.rows import dump_json, make_prompts, to_ms
from tenuto.workload.schema import After, Event, Job, Prompt, Span, TurnSpec, find_circle

_KEYS = (
    "session", "session_id", "timestamp", "delay", "input_length", "output_length", "tool", "command",
    "prompt", "hash_ids", "block_size", "output", "after", "tenant", "parent",
)  # fmt: skip
_EVENTS: dict[str, Event] = {"sent": "sent", "finished": "finished"}


def read_tenuto_jsonl(records: Sequence[Fields]) -> list[Job]:
    """One job per session, in the order of their first rows. Raises DataError naming file, line and field."""
    notes = [record for record in records if is_note(record)]
    records = [record for record in records if not is_note(record)]
    if not records:
        raise DataError(f"{notes[0].place}: the file has a recording's notes, but no turn")
    sessions = group_by(records, lambda row: row.text("session" if "session" in row else "session_id"))
    hashed = _make_hashed_prompts(records)
    jobs = [_read_job(session, rows, hashed) for session, rows in sessions.items()]
    parents = {job.job_id: job.parent for job in jobs}
    find_roots(parents, lambda session, problem: sessions[session][0].error("parent", problem))
    _check_events(jobs, sessions)
    return jobs


def _read_job(session: str, rows: list[Fields], hashed: Mapping[str, Prompt]) -> Job:
    first = rows[0]
    if "delay" in first and first.milliseconds("delay"):
        raise first.error("delay", "the first row of a session has no turn before it; use timestamp")
    turns: list[TurnSpec] = []
    for index, row in enumerate(rows):
        for field in ("tenant", "parent"):
            if field in row and row.text(field) != first.values.get(field):
                raise row.error(field, "differs from the first row of the session")
        turns.append(
            TurnSpec(
                prompt=_read_prompt(row, session, turns, hashed),
                output=Span(
                    row.optional(row.text, "output") or f"{session}/out{index}",
                    row.integer("output_length", low=1),
                ),
                tool=row.optional(row.text, "tool"),
                command=row.optional(row.text, "command"),
                tool_s=rows[index + 1].milliseconds("delay") if index + 1 < len(rows) else 0.0,
                at_s=row.milliseconds("timestamp") if index and "timestamp" in row else None,
                after=tuple(_read_event(e) for e in (row.records("after") if "after" in row else [])),
                extra={key: row.anything(key) for key in row.values if key not in _KEYS},
            )
        )
    return Job(
        session,
        first.milliseconds("timestamp"),
        tuple(turns),
        tenant=first.optional(first.text, "tenant"),
        parent=first.optional(first.text, "parent"),
    )


def _check_events(jobs: Sequence[Job], sessions: Mapping[str, list[Fields]]) -> None:
    for rows in sessions.values():
        for entry in (entry for row in rows if "after" in row for entry in row.records("after")):
            other = entry.text("session")
            if other not in sessions:
                raise entry.error("session", f"{other!r} is no session of the file")
            entry.integer("turn", low=0, high=len(sessions[other]) - 1)
    if (stuck := find_circle(jobs)) is not None:
        session, index = stuck
        raise sessions[session][index].error("after", "turns wait for each other in a circle")


def _read_prompt(row: Fields, session: str, before: list[TurnSpec], hashed: Mapping[str, Prompt]) -> Prompt:
    num_tokens = row.integer("input_length", low=1)
    if "prompt" in row:
        return _read_spans(row, num_tokens)
    if row.place in hashed:
        return hashed[row.place]
    text_id = f"{session}/text{len(before)}"
    if before:
        num_new = num_tokens - before[-1].num_prompt_tokens - before[-1].num_output_tokens
        if num_new > 0:
            prompt = before[-1].followed_by(Span(text_id, num_new))
            check_growth(prompt, row)
            return prompt
    return (Span(text_id, num_tokens),)


def _read_spans(row: Fields, num_tokens: int) -> Prompt:
    if "hash_ids" in row:
        raise row.error("prompt", "is given beside hash_ids; only one of them can say what the prompt holds")
    spans = [Span(*pair) for pair in row.contents("prompt")]
    if sum(span.num_tokens for span in spans) != num_tokens:
        raise row.error("prompt", f"does not add up to the input_length of {num_tokens}")
    return tuple(spans)


def _make_hashed_prompts(records: Sequence[Fields]) -> dict[str, Prompt]:
    """The prompts that are given as block ids, by the row's place. An id means one text per block size."""
    by_size = group_by(
        (row for row in records if "hash_ids" in row),
        lambda row: row.integer("block_size", low=1) if "block_size" in row else BLOCK_SIZE,
    )
    made: dict[str, Prompt] = {}
    for block_size, rows in by_size.items():
        hashed = [read_hashed_prompt(row, block_size) for row in rows]
        prompts = make_prompts(hashed, block_size, scope=f"block{block_size}/")
        made.update(zip((row.place for row in rows), prompts, strict=True))
    return made


def _read_event(entry: Fields) -> After:
    event = entry.text("event")
    if event not in _EVENTS:
        raise entry.error("event", f"must be sent or finished, got {event!r}")
    return After(
        entry.text("session"), entry.integer("turn", low=0), _EVENTS[event], entry.milliseconds("delay")
    )


def write_tenuto_jsonl(path: Path, jobs: Sequence[Job]) -> None:
    """Write jobs so that `read_tenuto_jsonl` returns equal jobs, to the last digit of every time."""
    rows = (dump_json(row) for job in jobs for row in make_tenuto_rows(job))
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8", newline="\n")


def make_tenuto_rows(job: Job) -> Iterator[dict[str, object]]:
    """One row per turn."""
    for index, turn in enumerate(job.turns):
        sent_s = turn.at_s if index else job.arrival_s
        known = {
            "session": job.job_id,
            "timestamp": None if sent_s is None else to_ms(sent_s),
            "delay": to_ms(job.turns[index - 1].tool_s) if index else None,
            "input_length": turn.num_prompt_tokens,
            "output_length": turn.num_output_tokens,
            "tool": turn.tool,
            "command": turn.command,
            "prompt": turn.prompt,
            "output": turn.output.content_id,
            "after": [
                {"session": a.job_id, "turn": a.turn, "event": a.event, "delay": to_ms(a.delay_s)}
                for a in turn.after
            ]
            or None,
            "tenant": job.tenant,
            "parent": None if index else job.parent,
        }
        yield {**turn.extra, **{key: value for key, value in known.items() if value is not None}}
