"""Weka sessions: recorded Claude Code conversations, one JSON object each (callanjfox/kv-cache-tester).

    {"id": "trace_0010", "block_size": 64, "hash_id_scope": "local", "requests": [
      {"type": "n", "t": 0.0, "in": 17209, "out": 275, "hash_ids": [1, 2, …], "stop": "tool_use",
       "api_time": 8.81, "think_time": 0.0},
      {"type": "subagent", "t": 100.65, "agent_id": "agent_001", "status": "completed",
       "duration_ms": 91243, "requests": [{"type": "n", "t": 0.0, …}, …]},
      {"type": "n", "t": 107.0, "think_time": 98.0, …}]}

What the fields mean was read off 710 published sessions (49,334 requests, 63 sub-agents):

- `hash_ids` names the full blocks of the prompt, `in // block_size` of them; ids mean something within the
  session alone. The last few tokens have no id, nor has an output, so neither is shared with a later prompt
  even where the agent surely sent it again: about a quarter more tokens for a perfect cache to prefill.
- `t` is when a request was sent, in whole seconds; `api_time` how long it took; `think_time` the pause since
  the last end on record, rounded by itself. An interrupted request has no `api_time`, so no end on record.
- A sub-agent's `t` is when it ended if its status is "completed", when it started if it is "async_launched";
  its requests' `t` count from its start. It starts about a second after the request before it in the list;
  several in a row start together and run in parallel. The session waits for the completed ones.
- No tool is named; `stop` says whether there was a call.

A session becomes one job, each sub-agent a job of its own, tied to it by `after` events. In a closed loop a
job's requests go one after the other; the 4 of 49,334 that overlapped do so again in an open loop only.
An output of 0 tokens (27 of 49,334) counts as 1, the least an engine produces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from tenuto.records.fields import Fields
from tenuto.workload.formats.hash_ids import HashedPrompt, make_prompts, read_hash_ids
from tenuto.workload.schema import After, Job, Prompt, Span, TurnSpec

TOOL = "tool_use"
"""The tool of every turn that calls one, named after the `stop` that tells so."""


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
    # Without an end on record, think_time reaches back to an earlier request.
    if request.finished_s is not None and following.think_s is not None:
        return following.think_s
    return max(0.0, following.sent_s - _end_s(request))


def _end_s(request: _Request) -> float:
    return request.sent_s if request.finished_s is None else request.finished_s
