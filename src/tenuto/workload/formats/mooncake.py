"""Mooncake traces: JSONL of single requests (Mooncake paper, FAST '25; kvcache-ai/Mooncake).

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

`timestamp` is in milliseconds. `hash_ids` names every block of the prompt, the last one even if it is not
full; equal ids are equal blocks anywhere in the file. The trace tells neither sessions nor tools: each row is
a job of one turn. Other keys are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence

from tenuto.records.fields import Fields
from tenuto.workload.formats.hash_ids import HashedPrompt, make_prompts, read_hash_ids
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
