"""Writing Weka sessions (see `workload.weka`): one object per job that no other started, sub-agents within.

`t` is on the workload's own clock, to the last digit; recorded sessions begin at 0 and have whole seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

from tenuto.workload.convert.blocks import BlockIds
from tenuto.workload.convert.times import get_sent_times
from tenuto.workload.formats.weka import TOOL
from tenuto.workload.schema import After, Job, TurnSpec

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
    """When each turn was answered, as far as what follows it says: no job holds it itself.

    A sub-agent starts its delay after the answer that called it, a turn that waits for it goes on a delay
    after its last answer; any other turn ends its tool time before the next is sent.
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
    """What the turn after the spawner waits for of this job, if anything."""
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
