"""Writing Mooncake: one request a line, in the order of their times (see `workload.mooncake`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tenuto.workload.convert.blocks import BlockIds
from tenuto.workload.convert.times import get_sent_times
from tenuto.workload.formats.tenuto_jsonl import to_ms
from tenuto.workload.schema import Job


def make_mooncake(jobs: Sequence[Job], block_size: int) -> Iterator[dict[str, object]]:
    """The rows. Ids mean the same in the whole file."""
    ids = BlockIds(block_size)
    for sent_s, job, index in sort_turns(jobs):
        turn = job.turns[index]
        yield {
            "timestamp": to_ms(sent_s),
            "input_length": turn.num_prompt_tokens,
            "output_length": turn.num_output_tokens,
            "hash_ids": ids.make(turn.prompt, with_last=True),
        }


def sort_turns(jobs: Sequence[Job]) -> list[tuple[float, Job, int]]:
    """All turns by the time of their sending: that time, the job, and the turn's index."""
    times = get_sent_times(jobs)
    turns = [(times[job.job_id][index], job, index) for job in jobs for index in range(len(job.turns))]
    return sorted(turns, key=lambda turn: turn[0])
