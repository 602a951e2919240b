"""`dynamo.agentic_mooncake`, version 2: JSONL of requests and what each waits for (ai-dynamo/aisimulate).

    {"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 64, "hash_id_scope": "local",
     "source": {"format": "weka", "digest": "…"}}
    {"request_id": "r1", "play_id": "p", "session_id": "main", "model": "m", "input_length": 128,
     "output_length": 20, "hash_ids": [1, 2], "not_before_ms": 0.0, "dependencies": []}
    {"request_id": "r2", …, "not_before_ms": 900.0, "dependencies": [{"request_id": "r1",
     "trigger": "completion", "delay_ms": 500.0, "relation": "sequence"}]}

A play is one run of an agent with everything that it starts. Ids of blocks and sessions are valid within a
play. Rows come in any order. A request waits for all its dependencies: for "completion" or "dispatch" of
another request of its play, plus a delay.

A row that follows another row of its session in "sequence" is the next turn of that row's job. Any other row
begins a job, whose first turn has the dependencies as its `after` events. The format names no tools, so every
turn that another turn follows counts as a tool call. `not_before_ms` is the recorded time since the play
began: the arrival of its first request, and for other requests the time in an open loop. Dynamo's own replay
never sends a request earlier than recorded. Our closed loop does, because otherwise a faster engine would not
show.

When jobs are written, jobs that wait for each other, or that one job started, are one play, and every job is
a session of it. `not_before_ms` is then on the workload's own clock, so a play begins when it arrived.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tenuto.core.errors import DataError
from tenuto.records.codec import Fields
from tenuto.records.metrics import group_by
from tenuto.workload.formats.mooncake import read_hashed_prompt
from tenuto.workload.formats.rows import (
    BlockIds,
    HashedPrompt,
    get_model,
    get_sent_times,
    make_prompts,
    read_model,
    to_ms,
)
from tenuto.workload.schema import After, Event, Job, Prompt, Span, TurnSpec, find_circle

SCHEMA = "dynamo.agentic_mooncake"
VERSION = 2
TOOL = "tool_use"
"""The tool of every turn that another one follows."""

_RELATIONS = ("sequence", "spawn", "join", "replay_barrier")
_EVENTS: dict[str, Event] = {"dispatch": "sent", "completion": "finished"}


@dataclass(frozen=True, slots=True)
class _Dependency:
    record: Fields
    request_id: str
    event: Event
    delay_s: float
    relation: str


@dataclass(frozen=True, slots=True)
class _Row:
    record: Fields
    request_id: str
    play_id: str
    session_id: str
    not_before_s: float
    num_output_tokens: int
    prompt: HashedPrompt
    dependencies: list[_Dependency]


def read_agentic_mooncake(records: Sequence[Fields]) -> list[Job]:
    """The jobs of all plays, in the order of their rows. Raises DataError naming file, line and field."""
    block_size = _read_header(records[0])
    rows: dict[str, _Row] = {}
    for record in records[1:]:
        row = _read_row(record, block_size)
        if row.request_id in rows:
            place = rows[row.request_id].record.place
            raise record.error("request_id", f"{row.request_id!r} is also in {place}")
        rows[row.request_id] = row
    if not rows:
        raise DataError(f"{records[0].place}: there is a header but no request")
    _check_dependencies(rows)
    _anchor_roots(rows)
    chains = _find_chains(rows)
    jobs = _make_jobs(chains, _make_prompts_by_play(rows, block_size))
    if (stuck := find_circle(jobs)) is not None:
        job_id, index = stuck
        raise chains[job_id][index].record.error("dependencies", "requests wait for each other in a circle")
    return jobs


def _read_header(record: Fields) -> int:
    if record.text("schema") != SCHEMA:
        raise record.error("schema", f"must be {SCHEMA!r}")
    if record.integer("version", low=0) != VERSION:
        raise record.error("version", f"must be {VERSION}, the one version understood")
    if record.text("hash_id_scope") != "local":
        raise record.error("hash_id_scope", "must be 'local'")
    return record.integer("block_size", low=1)


def _read_row(record: Fields, block_size: int) -> _Row:
    request_id = record.text("request_id")
    return _Row(
        record=record,
        request_id=request_id,
        play_id=record.text("play_id"),
        session_id=record.text("session_id"),
        not_before_s=record.milliseconds("not_before_ms"),
        num_output_tokens=max(1, record.integer("output_length", low=0)),
        prompt=read_hashed_prompt(record, block_size),
        dependencies=[_read_dependency(e) for e in record.optional(record.records, "dependencies") or []],
    )


def _read_dependency(record: Fields) -> _Dependency:
    trigger, relation = record.text("trigger"), record.text("relation")
    if trigger not in _EVENTS:
        raise record.error("trigger", f"must be one of {', '.join(_EVENTS)}, got {trigger!r}")
    if relation not in _RELATIONS:
        raise record.error("relation", f"must be one of {', '.join(_RELATIONS)}, got {relation!r}")
    delay_s = record.milliseconds("delay_ms")
    return _Dependency(record, record.text("request_id"), _EVENTS[trigger], delay_s, relation)


def _check_dependencies(rows: dict[str, _Row]) -> None:
    for row in rows.values():
        for dependency in row.dependencies:
            other = rows.get(dependency.request_id)
            if other is None or other.play_id != row.play_id:
                problem = f"{dependency.request_id!r} is no request of play {row.play_id!r}"
                raise dependency.record.error("request_id", problem)


def _anchor_roots(rows: dict[str, _Row]) -> None:
    """Make requests without dependencies depend on the play's first request, to keep the play together."""
    roots: dict[str, _Row] = {}
    free = [row for row in rows.values() if not row.dependencies]
    for row in sorted(free, key=lambda row: row.not_before_s):
        root = roots.setdefault(row.play_id, row)
        if row is not root:
            delay_s = row.not_before_s - root.not_before_s
            row.dependencies.append(_Dependency(row.record, root.request_id, "sent", delay_s, "spawn"))


def _find_chains(rows: dict[str, _Row]) -> dict[str, list[_Row]]:
    """The jobs by id: rows of one session, each in sequence after the one before it."""
    next_row: dict[str, _Row] = {}
    heads = []
    for row in rows.values():
        edge = _find_sequence(row)
        if edge and rows[edge.request_id].session_id == row.session_id and edge.request_id not in next_row:
            next_row[edge.request_id] = row
        else:
            heads.append(row)
    chains: dict[str, list[_Row]] = {}
    for head in heads:
        job_id = f"{head.play_id}/{head.session_id}"
        while job_id in chains:  # a session may do several things at once
            job_id = f"{job_id}/{head.request_id}"
        chain = chains[job_id] = [head]
        while chain[-1].request_id in next_row:
            chain.append(next_row[chain[-1].request_id])
    reached = {row.request_id for chain in chains.values() for row in chain}
    for row in rows.values():
        if row.request_id not in reached:
            raise row.record.error("dependencies", "the request waits for itself")
    return chains


def _find_sequence(row: _Row) -> _Dependency | None:
    """The dependency that makes a row the next turn of a job, if it has one."""
    edges = (d for d in row.dependencies if d.relation == "sequence" and d.event == "finished")
    return next(edges, None)


def _make_prompts_by_play(rows: dict[str, _Row], block_size: int) -> dict[str, Prompt]:
    prompts: dict[str, Prompt] = {}
    for play_id, members in group_by(rows.values(), lambda row: row.play_id).items():
        made = make_prompts([row.prompt for row in members], block_size, scope=f"{play_id}/")
        prompts.update(zip((row.request_id for row in members), made, strict=True))
    return prompts


def _make_jobs(chains: dict[str, list[_Row]], prompts: dict[str, Prompt]) -> list[Job]:
    where = {row.request_id: (job_id, n) for job_id, chain in chains.items() for n, row in enumerate(chain)}
    jobs = []
    for job_id, chain in chains.items():
        head = chain[0]
        edges = [edge for edge in head.dependencies if edge.relation == "spawn"] or head.dependencies
        parent = where[edges[0].request_id][0] if edges else None
        turns = [_make_turn(chain, index, job_id, where, prompts) for index in range(len(chain))]
        jobs.append(Job(job_id, head.not_before_s, tuple(turns), parent=parent))
    return jobs


def _make_turn(
    chain: list[_Row], index: int, job_id: str, where: dict[str, tuple[str, int]], prompts: dict[str, Prompt]
) -> TurnSpec:
    row = chain[index]
    following = _find_sequence(chain[index + 1]) if index + 1 < len(chain) else None
    in_job = _find_sequence(row) if index else None  # tool_s of the turn before says this one
    return TurnSpec(
        prompt=prompts[row.request_id],
        output=Span(f"{job_id}/out{index}", row.num_output_tokens),
        tool=TOOL if following else None,
        tool_s=following.delay_s if following else 0.0,
        at_s=row.not_before_s if index else None,
        after=tuple(
            After(*where[edge.request_id], edge.event, edge.delay_s)
            for edge in row.dependencies
            if edge is not in_job
        ),
        extra=read_model(row.record),
    )


MAIN = "main"
"""The session of a play's first job."""
_TRIGGERS: dict[Event, str] = {"sent": "dispatch", "finished": "completion"}


def make_agentic_mooncake(jobs: Sequence[Job], block_size: int) -> Iterator[dict[str, object]]:
    """The header, then a row per turn."""
    digest = hashlib.blake2b(repr([(job.job_id, job.arrival_s) for job in jobs]).encode(), digest_size=16)
    yield {
        "schema": SCHEMA,
        "version": VERSION,
        "block_size": block_size,
        "hash_id_scope": "local",
        "source": {"format": "tenuto", "digest": digest.hexdigest()},
    }
    times = get_sent_times(jobs)
    for members in find_plays(jobs):
        play_id, sessions = _name_play(members)
        ids = BlockIds(block_size)
        for job in members:
            for index, turn in enumerate(job.turns):
                yield {
                    "request_id": _name_request(job.job_id, index),
                    "play_id": play_id,
                    "session_id": sessions[job.job_id],
                    "model": get_model(turn),
                    "input_length": turn.num_prompt_tokens,
                    "output_length": turn.num_output_tokens,
                    "hash_ids": ids.make(turn.prompt, with_last=True),
                    "not_before_ms": to_ms(times[job.job_id][index]),
                    "dependencies": list(_make_dependencies(job, index)),
                }


def find_plays(jobs: Sequence[Job]) -> list[list[Job]]:
    """Groups of jobs that are connected by parents or by waiting; the first job of each group is first."""
    leader = {job.job_id: job.job_id for job in jobs}

    def find(job_id: str) -> str:
        while leader[job_id] != job_id:
            leader[job_id] = leader[leader[job_id]]
            job_id = leader[job_id]
        return job_id

    for job in jobs:
        others = {event.job_id for turn in job.turns for event in turn.after}
        for other in sorted(others | ({job.parent} if job.parent is not None else set())):
            leader[find(job.job_id)] = find(other)

    def waits(job: Job) -> bool:
        return job.parent is not None or bool(job.turns[0].after)

    return [sorted(play, key=waits) for play in group_by(jobs, lambda job: find(job.job_id)).values()]


def _name_play(members: Sequence[Job]) -> tuple[str, dict[str, str]]:
    """Name a play and its sessions by job. When read again, they are called PLAY/SESSION, and names stay."""
    first = members[0].job_id
    play = first.removesuffix(f"/{MAIN}") or first
    sessions = {job.job_id: job.job_id.removeprefix(f"{play}/") or job.job_id for job in members}
    sessions[first] = MAIN
    if len(set(sessions.values())) < len(members):
        return first, {**{job.job_id: f"{number}" for number, job in enumerate(members)}, first: MAIN}
    return play, sessions


def _name_request(job_id: str, index: int) -> str:
    return f"{job_id}#{index}"


def _make_dependencies(job: Job, index: int) -> Iterator[dict[str, object]]:
    turn = job.turns[index]
    if index:
        yield {
            "request_id": _name_request(job.job_id, index - 1),
            "trigger": "completion",
            "delay_ms": to_ms(job.turns[index - 1].tool_s),
            "relation": "sequence",
        }
    # The parent's event first: a reader treats a session's first dependency as the one that started it.
    for event in sorted(turn.after, key=lambda each: each.job_id != job.parent):
        yield {
            "request_id": _name_request(event.job_id, event.turn),
            "trigger": _TRIGGERS[event.event],
            "delay_ms": to_ms(event.delay_s),
            "relation": "join" if index else "spawn",
        }


def name_agentic(jobs: Sequence[Job]) -> dict[str, str]:
    """The name of each job when it is read again."""
    named = [_name_play(members) for members in find_plays(jobs)]
    return {job_id: f"{play}/{session}" for play, sessions in named for job_id, session in sessions.items()}
