"""Mooncake traces: JSONL of single requests (Mooncake paper, FAST '25; kvcache-ai/Mooncake).

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

`timestamp` is in milliseconds. `hash_ids` names every block of the prompt, the last one even if it is not
full; equal ids are equal blocks anywhere in the file. The trace tells neither sessions nor tools: each row is
a job of one turn. Other keys are ignored.

Written rows are in the order of their times; an id means the same in the whole file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tenuto.records.codec import Fields
from tenuto.workload.formats.rows import (
    BlockIds,
    HashedPrompt,
    get_sent_times,
    make_prompts,
    read_hash_ids,
    to_ms,
)
from tenuto.workload.schema import Job, Span, TurnSpec

BLOCK_SIZE = 512
"""Tokens per block in the published traces; the files do not say."""


def read_mooncake(records: Sequence[Fields], block_size: int = BLOCK_SIZE) -> list[Job]:
    """One job of one turn per row. Raises DataError naming file, line and field."""
    prompts = make_prompts([read_hashed_prompt(r, block_size) for r in records], block_size, scope="block")
    jobs = []
    for number, (record, prompt) in enumerate(zip(records, prompts, strict=True)):
        job_id = f"mooncake-{number}"
        output = Span(f"{job_id}/out0", record.integer("output_length", low=1))
        jobs.append(Job(job_id, record.milliseconds("timestamp"), (TurnSpec(prompt, output),)))
    return jobs


def read_hashed_prompt(record: Fields, block_size: int) -> HashedPrompt:
    """A row's `input_length` and `hash_ids`: an id for every block, the last block even if not full."""
    num_tokens = record.integer("input_length", low=1)
    return HashedPrompt(read_hash_ids(record, -(-num_tokens // block_size)), num_tokens)


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
