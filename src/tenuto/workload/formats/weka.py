"""Weka sessions: recorded Claude Code conversations, one JSON object each (callanjfox/kv-cache-tester).

    {"id": "trace_0010", "block_size": 64, "hash_id_scope": "local", "requests": [
      {"type": "n", "t": 0.0, "in": 17209, "out": 275, "hash_ids": [1, 2, …], "stop": "tool_use",
       "api_time": 8.81, "think_time": 0.0},
      {"type": "subagent", "t": 100.65, "agent_id": "agent_001", "status": "completed",
       "duration_ms": 91243, "requests": [{"type": "n", "t": 0.0, …}, …]},
      {"type": "n", "t": 107.0, "think_time": 98.0, …}]}

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

A session becomes one job, each sub-agent a job of its own, tied to it by `after` events. In a closed loop a
job's requests go one after the other; the 4 of 49,334 that overlapped do so again in an open loop only.
An output of 0 tokens (27 of 49,334) counts as 1, the least an engine produces.

When jobs are written, each that no other started is one object, with its sub-agents within. `t` is then on
the workload's own clock, to the last digit; recorded sessions begin at 0 and have whole seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from tenuto.records.fields import Fields
from tenuto.workload.formats.hash_ids import BlockIds, HashedPrompt, make_prompts, read_hash_ids
from tenuto.workload.formats.rows import get_sent_times
from tenuto.workload.schema import After, Job, Prompt, Span, TurnSpec

TOOL = "tool_use"
"""The tool of every turn that calls one, named after the value of `stop`."""


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
            raise entry.error("type", "a sub-agent stands before the session's first request")
    if not own:
        raise record.error("requests", "the session has no request of its own")
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
    )


def _make_jobs(trace_id: str, own: list[_Request], sub_agents: list[_SubAgent], block_size: int) -> list[Job]:
    streams = [own, *(agent.requests for agent in sub_agents)]
    hashed = [request.prompt for stream in streams for request in stream]
    prompts = iter(make_prompts(hashed, block_size, scope=f"{trace_id}/"))
    turns = _make_turns(trace_id, own, prompts)
    jobs = []
    awaited: dict[int, list[_SubAgent]] = {}
    for agent in sub_agents:
        first, *rest = _make_turns(agent.job_id, agent.requests, prompts)
        spawn_s = max(0.0, agent.start_s - _end_s(own[agent.spawner]))
        first = replace(first, after=(After(trace_id, agent.spawner, "finished", spawn_s),))
        jobs.append(Job(agent.job_id, agent.start_s, (first, *rest), parent=trace_id))
        if agent.blocking and agent.spawner + 1 < len(own):
            awaited.setdefault(agent.spawner, []).append(agent)
    for spawner, agents in awaited.items():
        # Their ends say when the session goes on, not the recorded pause, which holds their run time.
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
        )
        # Requests first: zip would otherwise take a prompt of the next stream.
        for index, (request, prompt) in enumerate(zip(requests, prompts, strict=False))
    ]


def _make_tail(content_id: str, request: _Request) -> Prompt:
    return (Span(content_id, request.num_tail_tokens),) if request.num_tail_tokens else ()


def _after_last(agents: list[_SubAgent], request: _Request) -> tuple[After, ...]:
    """The ends of all these sub-agents, and the recorded pause from the last of them to the request."""
    last_end_s = max(_end_s(agent.requests[-1]) for agent in agents)
    delay_s = max(0.0, request.sent_s - last_end_s)
    return tuple(After(agent.job_id, len(agent.requests) - 1, "finished", delay_s) for agent in agents)


def _gap_s(request: _Request, following: _Request) -> float:
    # If no end was recorded, think_time counts from the end of an earlier request.
    if request.finished_s is not None and following.think_s is not None:
        return following.think_s
    return max(0.0, following.sent_s - _end_s(request))


def _end_s(request: _Request) -> float:
    return request.sent_s if request.finished_s is None else request.finished_s


_Times = dict[str, list[float]]


def make_weka(jobs: Sequence[Job], block_size: int) -> Iterator[dict[str, object]]:
    """The sessions."""
    sub_agents = _find_sub_agents(jobs)
    children: dict[str, list[Job]] = {}
    for job in jobs:
        if job.job_id in sub_agents:
            children.setdefault(sub_agents[job.job_id].job_id, []).append(job)
    # A session's requests stand in the order of their times, however a recording's clock went.
    times = {job_id: list(accumulate(sent, max)) for job_id, sent in get_sent_times(jobs).items()}
    ends = _find_ends(jobs, times, sub_agents)
    for job in jobs:
        if job.job_id in sub_agents:
            continue
        writer = _Session(job, block_size, times, ends)
        entries = list(writer.make_entries(children.get(job.job_id, [])))
        yield {"id": job.job_id, "block_size": block_size, "hash_id_scope": "local", "requests": entries}


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


def _find_ends(jobs: Sequence[Job], times: _Times, sub_agents: Mapping[str, Job]) -> _Times:
    """When each turn was answered, derived from the turns after it, because jobs do not store it.

    A sub-agent starts its delay after the answer that called it. A turn that waits for a sub-agent starts a
    delay after the sub-agent's last answer. Any other turn ends its tool time before the next turn is sent.
    """
    by_id = {job.job_id: job for job in jobs}
    ends: _Times = {}
    for job in jobs:
        sent = times[job.job_id]
        followed = zip(job.turns, pairwise(sent), strict=False)
        ends[job.job_id] = [max(at_s, next_s - turn.tool_s) for turn, (at_s, next_s) in followed]
        ends[job.job_id].append(sent[-1] + _get_latency_s(job.turns[-1]))
    for job_id, session in sub_agents.items():
        job = by_id[job_id]
        [spawned] = job.turns[0].after
        place = ends[session.job_id]
        place[spawned.turn] = max(times[session.job_id][spawned.turn], times[job_id][0] - spawned.delay_s)
        for event in _get_joins(session, spawned.turn, job_id):
            ends[job_id][-1] = max(times[job_id][-1], times[session.job_id][spawned.turn + 1] - event.delay_s)
    return ends


def _get_joins(session: Job, spawner: int, job_id: str) -> list[After]:
    """What the turn after the spawner waits for in this job. Empty if it does not wait."""
    following = session.turns[spawner + 1 : spawner + 2]
    return [event for turn in following for event in turn.after if event.job_id == job_id]


def _get_latency_s(turn: TurnSpec) -> float:
    value = turn.extra.get("latency_ms")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value / 1000 if is_number and 0 < value < math.inf else 0.0  # type: ignore[operator]


class _Session:
    """Writes one session and its sub-agents, whose block ids mean the same in all of it."""

    def __init__(self, job: Job, block_size: int, times: _Times, ends: _Times) -> None:
        self._job = job
        self._ids = BlockIds(block_size)
        self._times = times
        self._ends = ends

    def make_entries(self, children: Sequence[Job]) -> Iterator[dict[str, object]]:
        """The session's requests, each sub-agent after the one that started it."""
        spawned: dict[int, list[Job]] = {}
        for child in children:
            spawned.setdefault(child.turns[0].after[0].turn, []).append(child)
        for index, request in enumerate(self._make_requests(self._job, 0.0)):
            yield request
            for child in spawned.get(index, []):
                yield self._make_sub_agent(child, index)

    def _make_requests(self, job: Job, start_s: float) -> Iterator[dict[str, object]]:
        sent, ends = self._times[job.job_id], self._ends[job.job_id]
        for index, turn in enumerate(job.turns):
            yield {
                "t": sent[index] - start_s,
                "type": "n",
                "in": turn.num_prompt_tokens,
                "out": turn.num_output_tokens,
                "hash_ids": self._ids.make(turn.prompt, with_last=False),
                "stop": TOOL if turn.tool else "end_turn",
                "api_time": ends[index] - sent[index],
                "think_time": job.turns[index - 1].tool_s if index else 0.0,
            }

    def _make_sub_agent(self, job: Job, spawner: int) -> dict[str, object]:
        start_s = self._times[job.job_id][0]
        duration_s = max(0.0, self._ends[job.job_id][-1] - start_s)
        is_awaited = bool(_get_joins(self._job, spawner, job.job_id))
        return {
            "t": start_s + duration_s if is_awaited else start_s,
            "type": "subagent",
            "agent_id": job.job_id.removeprefix(f"{self._job.job_id}/"),
            "status": "completed" if is_awaited else "async_launched",
            "duration_ms": duration_s * 1000,
            "requests": list(self._make_requests(job, start_s)),
        }
