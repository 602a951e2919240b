"""Turns that are too long for a machine: a server would refuse them, so their job ends before them."""

from __future__ import annotations

from dataclasses import replace

from tenuto.sim.kv.kv_cache import KvCache
from tenuto.workload import Job, Workload


def truncate_to_fit(workload: Workload, kv: KvCache) -> tuple[Workload, int]:
    """The workload without the turns that are too long, and how many turns were left out.

    A job ends before its first turn that is longer than the model's context or the whole KV cache. Turns of
    other jobs no longer wait for turns that were left out.
    """
    lengths = {job.job_id: _count_fitting(job, kv) for job in workload.jobs}
    num_cut = sum(len(job.turns) - lengths[job.job_id] for job in workload.jobs)
    if num_cut == 0:
        return workload, 0
    jobs = tuple(_cut(job, lengths) for job in workload.jobs if lengths[job.job_id])
    return replace(workload, jobs=jobs), num_cut


def _count_fitting(job: Job, kv: KvCache) -> int:
    for index, turn in enumerate(job.turns):
        num_tokens = turn.num_prompt_tokens + turn.num_output_tokens
        if num_tokens >= kv.config.max_model_len or kv.count_most_blocks(num_tokens) > kv.pool.num_blocks:
            return index
    return len(job.turns)


def _cut(job: Job, lengths: dict[str, int]) -> Job:
    turns = [
        replace(turn, after=tuple(each for each in turn.after if each.turn < lengths[each.job_id]))
        for turn in job.turns[: lengths[job.job_id]]
    ]
    if len(turns) < len(job.turns):
        turns[-1] = replace(turns[-1], tool=None, command=None, tool_s=0.0)
    parent = job.parent if job.parent is None or lengths.get(job.parent) else None
    return replace(job, turns=tuple(turns), parent=parent)
