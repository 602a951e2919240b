"""Weka sessions: recorded Claude Code conversations, one JSON object each (callanjfox/kv-cache-tester).

    {"id": "trace_0010", "models": ["m"], "block_size": 64, "hash_id_scope": "local", "requests": [
      {"type": "n", "t": 0.0, "model": "m", "in": 17209, "out": 275, "hash_ids": [1, 2, …],
       "stop": "tool_use", "api_time": 8.81, "think_time": 0.0},
      {"type": "subagent", "t": 100.65, "agent_id": "agent_001", "subagent_type": "Explore", "models": ["m"],
       "status": "completed", "duration_ms": 91243, "requests": [{"type": "n", "t": 0.0, …}, …]},
      {"type": "s", "t": 107.0, "think_time": 98.0, "ttft": 1.9, …}]}

The meaning of the fields was derived from 710 published sessions (49,334 requests, 63 sub-agents):

- `hash_ids` names the full blocks of the prompt, `in // block_size` of them. Ids are only valid within the
  session. The last few tokens and the output have no id. So no later prompt shares them, even if the agent
  surely sent them again. A perfect cache must therefore prefill about a quarter more tokens.
- `t` is when a request was sent, in whole seconds. `api_time` is how long it took. `think_time` is the pause
  since the last recorded end, rounded separately. An interrupted request has no `api_time`, hence no end.
- A sub-agent's `t` is its end if its status is "completed", and its start if it is "async_launched". Its
  requests' `t` count from its start. It starts about a second after the request before it in the list.
  Several in a row start together and run in parallel. The session waits for the completed ones.
- No tool is named; `stop` tells whether there was a call.

A session becomes one job. Each sub-agent is a job of its own, connected with it by `after` events. In a
closed loop a job's requests are sent one after the other. The 4 of 49,334 that overlapped do so again only in
an open loop. An output of 0 tokens (27 of 49,334) counts as 1, the least that an engine produces.

When jobs are written, each job that no other started is one object with its sub-agents in it. `t` is then on
the workload's own clock, to the last digit; recorded sessions begin at 0 and have whole seconds. Only the
fields that other readers need are written: AIPerf 0.13 (`weka_trace_models.py`) refuses a session without
`models`, a request without `model`, a sub-agent without `subagent_type`, parts of a millisecond in
`duration_ms`, and `ttft` where the type is not "s". A session is read from a file of its own.

Fields without a place in a job are kept in the turns' `extra`: `model`, `latency_ms` (api_time) and `ttft_ms`
under the names of `tenuto record`, others under their own names, and a session's fields at its first turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import accumulate, pairwise

from tenuto.records.codec import MAX_SECONDS, Fields, is_number
from tenuto.records.metrics import group_by
from tenuto.workload.formats.rows import (
    BlockIds,
    HashedPrompt,
    get_model,
    get_sent_times,
    make_prompts,
    read_hash_ids,
    read_model,
    to_ms,
)
from tenuto.workload.schema import After, Job, Prompt, Span, TurnSpec

TOOL = "tool_use"
"""The tool of every turn that calls one, named after the value of `stop`."""
_END = "end_turn"
_TOLERANCE_S = 1e-6
_REQUEST_KEYS = ("input_types", "output_types")
_SESSION_KEYS = ("tool_tokens", "system_tokens", "totals")
_SUB_AGENT_KEYS = ("subagent_type", "total_tokens", "tool_use_count", "tool_tokens", "system_tokens")


@dataclass(frozen=True, slots=True)
class _Request:
    sent_s: float
    finished_s: float | None
    """Recorded end, if there is one."""
    think_s: float | None
    """Recorded pause before it, if there is one."""
    prompt: HashedPrompt
    num_tail_tokens: int
    """Prompt tokens after the last block that has an id."""
    num_output_tokens: int
    calls_tool: bool
    extra: dict[str, object]


@dataclass(frozen=True, slots=True)
class _SubAgent:
    job_id: str
    spawner: int
    """Index of the session's own request before it."""
    blocking: bool
    start_s: float
    requests: list[_Request]


def read_weka(records: Iterable[Fields]) -> list[Job]:
    """The sessions' jobs, each session's followed by its sub-agents', with recorded times for an open loop.

    Every session begins at its own time 0. Raises DataError naming file, JSON path and field.
    """
    places: dict[str, str] = {}
    jobs: list[Job] = []
    for record in records:
        trace_id = record.text("id")
        if trace_id in places:
            raise record.error("id", f"{trace_id!r} is also the id of {places[trace_id]}")
        places[trace_id] = record.place
        jobs += _read_session(record, trace_id)
    return jobs


def _read_session(record: Fields, trace_id: str) -> list[Job]:
    if record.text("hash_id_scope") != "local":
        raise record.error("hash_id_scope", "only ids local to the session are understood")
    block_size = record.integer("block_size", low=1)
    own: list[_Request] = []
    sub_agents: dict[str, _SubAgent] = {}
    for entry in record.records("requests"):
        if entry.text("type") != "subagent":
            own.append(_read_request(entry, block_size, own, start_s=0.0))
        elif own:
            agent = _read_sub_agent(entry, block_size, trace_id, spawner=len(own) - 1)
            if agent.job_id in sub_agents:
                raise entry.error("agent_id", "is also another sub-agent's of the session")
            sub_agents[agent.job_id] = agent
        else:
            raise entry.error("type", "a sub-agent comes before the session's first request")
    if not own:
        raise record.error("requests", "the session has no request of its own")
    own[0].extra.update(_pick(record, _SESSION_KEYS))
    return _make_jobs(trace_id, own, [agent for agent in sub_agents.values() if agent.requests], block_size)


def _read_sub_agent(entry: Fields, block_size: int, trace_id: str, spawner: int) -> _SubAgent:
    status = entry.text("status")
    if status not in ("completed", "async_launched"):
        raise entry.error("status", f"must be completed or async_launched, got {status!r}")
    blocking = status == "completed"
    start_s = entry.number("t")
    if blocking:
        start_s = max(0.0, start_s - entry.milliseconds("duration_ms"))
    job_id = f"{trace_id}/{entry.text('agent_id')}"
    requests: list[_Request] = []
    for inner in entry.records("requests"):
        requests.append(_read_request(inner, block_size, requests, start_s))
    if requests:
        requests[0].extra.update(_pick(entry, ("duration_ms", *_SUB_AGENT_KEYS)))
    return _SubAgent(job_id, spawner, blocking, start_s, requests)


def _read_request(entry: Fields, block_size: int, before: list[_Request], start_s: float) -> _Request:
    if entry.text("type") not in ("n", "s"):
        raise entry.error("type", "must be n, s or subagent, the last not within a sub-agent")
    sent_s = start_s + entry.number("t")
    if before and sent_s < before[-1].sent_s:
        raise entry.error("t", "is earlier than the request before it")
    num_tokens = entry.integer("in", low=1)
    num_blocks, num_tail_tokens = divmod(num_tokens, block_size)
    return _Request(
        sent_s=sent_s,
        finished_s=sent_s + entry.number("api_time") if "api_time" in entry else None,
        think_s=entry.number("think_time") if "think_time" in entry else None,
        prompt=HashedPrompt(read_hash_ids(entry, num_blocks), num_tokens - num_tail_tokens),
        num_tail_tokens=num_tail_tokens,
        num_output_tokens=max(1, entry.integer("out", low=0)),
        calls_tool=entry.values.get("stop") == TOOL,
        extra=_read_extra(entry),
    )


def _read_extra(entry: Fields) -> dict[str, object]:
    extra = read_model(entry) | _pick(entry, _REQUEST_KEYS)
    if entry.values["type"] == "s":
        extra["streamed"] = True
    if entry.values.get("stop") not in (TOOL, _END):
        extra |= _pick(entry, ("stop",))
    for field, key in (("api_time", "latency_ms"), ("ttft", "ttft_ms")):
        seconds = entry.optional(entry.number, field)
        if seconds:
            extra[key] = float(to_ms(seconds))
    return extra


def _pick(entry: Fields, keys: Iterable[str]) -> dict[str, object]:
    return {key: entry.anything(key) for key in keys if entry.values.get(key) is not None}


def _make_jobs(trace_id: str, own: list[_Request], sub_agents: list[_SubAgent], block_size: int) -> list[Job]:
    streams = [own, *(agent.requests for agent in sub_agents)]
    hashed = [request.prompt for stream in streams for request in stream]
    prompts = iter(make_prompts(hashed, block_size, scope=f"{trace_id}/"))
    turns = _make_turns(trace_id, own, prompts)
    jobs = []
    for agent in sub_agents:
        first, *rest = _make_turns(agent.job_id, agent.requests, prompts)
        spawn_s = max(0.0, agent.start_s - _end_s(own[agent.spawner]))
        first = replace(first, after=(After(trace_id, agent.spawner, "finished", spawn_s),))
        jobs.append(Job(agent.job_id, agent.start_s, (first, *rest), parent=trace_id))
    awaited = (agent for agent in sub_agents if agent.blocking and agent.spawner + 1 < len(own))
    for spawner, agents in group_by(awaited, lambda agent: agent.spawner).items():
        # Their ends say when the session continues, not the recorded pause, which includes their run time.
        turns[spawner] = replace(turns[spawner], tool_s=0.0)
        turns[spawner + 1] = replace(turns[spawner + 1], after=_after_last(agents, own[spawner + 1]))
    return [Job(trace_id, own[0].sent_s, tuple(turns)), *jobs]


def _make_turns(job_id: str, requests: list[_Request], prompts: Iterator[Prompt]) -> list[TurnSpec]:
    return [
        TurnSpec(
            prompt=(*prompt, *_make_tail(f"{job_id}/tail{index}", request)),
            output=Span(f"{job_id}/out{index}", request.num_output_tokens),
            tool=TOOL if request.calls_tool else None,
            tool_s=_gap_s(request, requests[index + 1]) if index + 1 < len(requests) else 0.0,
            at_s=request.sent_s if index else None,
            extra=request.extra,
        )
        # Requests first: zip would otherwise take a prompt of the next stream.
        for index, (request, prompt) in enumerate(zip(requests, prompts, strict=False))
    ]


def _after_last(agents: list[_SubAgent], request: _Request) -> tuple[After, ...]:
    """The ends of all these sub-agents, and the recorded pause from the last of them to the request."""
    last_end_s = max(_end_s(agent.requests[-1]) for agent in agents)
    delay_s = max(0.0, request.sent_s - last_end_s)
    return tuple(After(agent.job_id, len(agent.requests) - 1, "finished", delay_s) for agent in agents)


def _make_tail(content_id: str, request: _Request) -> Prompt:
    return (Span(content_id, request.num_tail_tokens),) if request.num_tail_tokens else ()


def _gap_s(request: _Request, following: _Request) -> float:
    # If no end was recorded, think_time counts from the end of an earlier request.
    if request.finished_s is not None and following.think_s is not None:
        return following.think_s
    return max(0.0, following.sent_s - _end_s(request))


def _end_s(request: _Request) -> float:
    return request.sent_s if request.finished_s is None else request.finished_s


_Times = dict[str, list[float]]
_Ends = dict[str, list[float | None]]


def make_weka(jobs: Sequence[Job], block_size: int) -> Iterator[dict[str, object]]:
    """The sessions."""
    sub_agents = _find_sub_agents(jobs)
    started = (job for job in jobs if job.job_id in sub_agents)
    children = group_by(started, lambda job: sub_agents[job.job_id].job_id)
    # A session's requests are in the order of their times, even if a recording's clock jumped.
    times = {job_id: list(accumulate(sent, max)) for job_id, sent in get_sent_times(jobs).items()}
    ends = _find_ends(jobs, times, sub_agents)
    for job in jobs:
        if job.job_id not in sub_agents:
            yield _Session(job, block_size, times, ends).make(children.get(job.job_id, []))


def _find_sub_agents(jobs: Sequence[Job]) -> dict[str, Job]:
    """By job id, the session of each job that can be written as a sub-agent of one."""
    by_id = {job.job_id: job for job in jobs}
    found: dict[str, Job] = {}
    for job in jobs:
        parent = by_id.get(job.parent or "")
        if parent is None or parent.parent is not None:
            continue
        is_named = job.job_id.startswith(f"{parent.job_id}/") and job.job_id != f"{parent.job_id}/"
        match job.turns[0].after:
            case [event] if is_named and event.job_id == parent.job_id and event.event == "finished":
                found[job.job_id] = parent
    return found


def _find_ends(jobs: Sequence[Job], times: _Times, sub_agents: Mapping[str, Job]) -> _Ends:
    """When each turn was answered; None if that is unknown.

    A sub-agent starts its delay after the answer that called it. A turn that waits for a sub-agent starts a
    delay after the sub-agent's last answer. Any other turn's latency may be recorded; else the turn ended its
    tool time before the next turn is sent.
    """
    by_id = {job.job_id: job for job in jobs}
    ends: _Ends = {}
    for job in jobs:
        sent = times[job.job_id]
        followed = zip(job.turns, pairwise(sent), strict=False)
        derived = [_derive_end(at_s, next_s - turn.tool_s) for turn, (at_s, next_s) in followed]
        latencies = [_try_get_seconds(turn, "latency_ms") for turn in job.turns]
        ends[job.job_id] = [
            end_s if latency_s is None else at_s + latency_s
            for at_s, end_s, latency_s in zip(sent, [*derived, None], latencies, strict=True)
        ]
    awaited: dict[tuple[str, int], dict[str, float]] = {}
    for job_id, session in sub_agents.items():
        job = by_id[job_id]
        [spawned] = job.turns[0].after
        place = ends[session.job_id]
        place[spawned.turn] = max(times[session.job_id][spawned.turn], times[job_id][0] - spawned.delay_s)
        for event in _get_joins(session, spawned.turn, job_id):
            end_s = max(times[job_id][-1], times[session.job_id][spawned.turn + 1] - event.delay_s)
            awaited.setdefault((session.job_id, spawned.turn), {})[job_id] = end_s
    for latest in awaited.values():
        for job_id, end_s in latest.items():
            known_s = ends[job_id][-1]
            ends[job_id][-1] = end_s if known_s is None else min(known_s, end_s)
        # The session continues a delay after the last of them.
        last = max(latest, key=lambda job_id: ends[job_id][-1] or 0.0)
        ends[last][-1] = latest[last]
    return ends


def _derive_end(sent_s: float, end_s: float) -> float | None:
    """The end, or None if the answer took no time: then no end was recorded, or the times are made up."""
    return None if abs(end_s - sent_s) < _TOLERANCE_S else max(sent_s, end_s)


def _get_joins(session: Job, spawner: int, job_id: str) -> list[After]:
    """What the turn after the spawner waits for in this job. Empty if it does not wait."""
    following = session.turns[spawner + 1 : spawner + 2]
    return [event for turn in following for event in turn.after if event.job_id == job_id]


def _try_get_seconds(turn: TurnSpec, key: str) -> float | None:
    """A recorded time in seconds, from a key in milliseconds."""
    value = turn.extra.get(key)
    if not is_number(value, MAX_SECONDS * 1000) or not value:
        return None
    return float(Decimal(repr(float(value))).scaleb(-3))


def _get_kept(turn: TurnSpec, keys: Iterable[str]) -> dict[str, object]:
    """A turn's keys that have the types of the format. Other programs may have written other types."""
    return {key: turn.extra[key] for key in keys if key in turn.extra and _KEPT_TYPES[key](turn.extra[key])}


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _are_words(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


_KEPT_TYPES: Mapping[str, Callable[[object], bool]] = {
    "input_types": _are_words,
    "output_types": _are_words,
    "stop": lambda value: isinstance(value, str) and value != TOOL,
    "subagent_type": lambda value: isinstance(value, str),
    "total_tokens": _is_count,
    "tool_use_count": _is_count,
    "tool_tokens": _is_count,
    "system_tokens": _is_count,
    "totals": lambda value: isinstance(value, dict),
}


class _Session:
    """Writes one session and its sub-agents, which share the meaning of block ids."""

    def __init__(self, job: Job, block_size: int, times: _Times, ends: _Ends) -> None:
        self._job = job
        self._block_size = block_size
        self._ids = BlockIds(block_size)
        self._times = times
        self._ends = ends

    def make(self, children: Sequence[Job]) -> dict[str, object]:
        return {
            "id": self._job.job_id,
            "models": _find_models(self._job),
            "block_size": self._block_size,
            "hash_id_scope": "local",
            "tool_tokens": 0,
            "system_tokens": 0,
            **_get_kept(self._job.turns[0], _SESSION_KEYS),
            "requests": list(self._make_entries(children)),
        }

    def _make_entries(self, children: Sequence[Job]) -> Iterator[dict[str, object]]:
        """The session's requests, each sub-agent after the one that started it."""
        spawned = group_by(children, lambda child: child.turns[0].after[0].turn)
        for index, request in enumerate(self._make_requests(self._job, 0.0)):
            yield request
            for child in spawned.get(index, []):
                yield self._make_sub_agent(child, index)

    def _make_requests(self, job: Job, start_s: float) -> Iterator[dict[str, object]]:
        sent, ends = self._times[job.job_id], self._ends[job.job_id]
        for index, turn in enumerate(job.turns):
            before = job.turns[index - 1] if index else None
            ttft_s, end_s = _try_get_seconds(turn, "ttft_ms"), ends[index]
            is_streamed = ttft_s is not None or turn.extra.get("streamed") is True
            entry: dict[str, object] = {
                "t": sent[index] - start_s,
                "type": "s" if is_streamed else "n",
                "model": get_model(turn),
                "in": turn.num_prompt_tokens,
                "out": turn.num_output_tokens,
                "hash_ids": self._ids.make(turn.prompt, with_last=False),
                "input_types": ["tool_result" if before and before.tool else "text"],
                "output_types": [TOOL if turn.tool else "text"],
                "stop": TOOL if turn.tool else _END,
                **_get_kept(turn, _REQUEST_KEYS if turn.tool else (*_REQUEST_KEYS, "stop")),
                "think_time": before.tool_s if before else 0.0,
            }
            if end_s is not None:
                latency_s = _try_get_seconds(turn, "latency_ms")
                is_recorded = latency_s is not None and sent[index] + latency_s == end_s
                # The difference would be rounded.
                entry["api_time"] = latency_s if is_recorded else end_s - sent[index]
            if ttft_s is not None:
                entry["ttft"] = ttft_s
            yield entry

    def _make_sub_agent(self, job: Job, spawner: int) -> dict[str, object]:
        start_s = self._times[job.job_id][0]
        end_s = self._ends[job.job_id][-1]
        duration_s = _try_get_seconds(job.turns[0], "duration_ms")
        if duration_s is None and end_s is not None:
            duration_s = max(0.0, end_s - start_s)
        duration_ms = None if duration_s is None else round(duration_s * 1000)
        is_awaited = bool(_get_joins(self._job, spawner, job.job_id))
        return {
            "t": start_s + (duration_ms or 0) / 1000 if is_awaited else start_s,
            "type": "subagent",
            "agent_id": job.job_id.removeprefix(f"{self._job.job_id}/"),
            "subagent_type": "unknown",
            "duration_ms": duration_ms,
            "status": "completed" if is_awaited else "async_launched",
            "models": _find_models(job),
            "tool_tokens": 0,
            "system_tokens": 0,
            **_get_kept(job.turns[0], _SUB_AGENT_KEYS),
            "requests": list(self._make_requests(job, start_s)),
        }


def _find_models(job: Job) -> list[str]:
    """The job's models, in the order of their first request. A sub-agent names its own."""
    return list(dict.fromkeys(map(get_model, job.turns)))
