"""Mooncake rows, and block ids as spans."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.core.reuse import count_shared_tokens
from tenuto.records.files import read_objects
from tenuto.workload.formats.mooncake import read_mooncake
from tenuto.workload.formats.rows import HashedPrompt, make_prompts
from tenuto.workload.load import load_workload


def row(timestamp, num_tokens, ids, **more):
    return {"timestamp": timestamp, "input_length": num_tokens, "output_length": 7, "hash_ids": ids} | more


def test_rows_are_jobs_of_one_turn_that_share_equal_blocks(write_rows):
    path = write_rows(row(0, 1500, [1, 2, 3]), row(250, 1536, [1, 2, 4]), row(500, 600, [9, 3], type="chat"))
    workload = load_workload(path)
    assert [job.arrival_s for job in workload.jobs] == [0.0, 0.25, 0.5]
    turns = [job.turns[0] for job in workload.jobs]
    assert [turn.num_prompt_tokens for turn in turns] == [1500, 1536, 600]
    assert [turn.num_output_tokens for turn in turns] == [7, 7, 7]
    a, b, c = (turn.prompt for turn in turns)
    assert count_shared_tokens(a, b) == 1024
    assert count_shared_tokens(a, c) == 0
    assert len(b) == 2  # blocks 1 and 2 always stand together


def test_another_block_size_is_the_readers_to_say(write_rows):
    path = write_rows(row(0, 100, [1, 2]), row(1, 100, [1, 3]))
    a, b = read_mooncake(read_objects(path, exact=True), block_size=64)
    assert count_shared_tokens(a.turns[0].prompt, b.turns[0].prompt) == 64


BLOCK = 4


@st.composite
def hashed_prompts(draw):
    """Prompts out of a small tree of blocks, whose ids name block and all blocks before it."""
    paths = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=8))
    ids = {}
    prompts = []
    for path in paths:
        names = [ids.setdefault(tuple(path[: n + 1]), len(ids)) for n in range(len(path))]
        # The last block may be partly filled; another prompt may hold it whole.
        prompts.append(HashedPrompt(names, len(path) * BLOCK - draw(st.integers(0, BLOCK - 1))))
    return prompts


@pytest.mark.slow
@given(hashed_prompts())
def test_spans_share_what_the_ids_share(hashed):
    prompts = make_prompts(hashed, BLOCK, scope="s/")
    for (ids_a, tokens_a), a in zip(hashed, prompts, strict=True):
        assert sum(span.num_tokens for span in a) == tokens_a
        for (ids_b, tokens_b), b in zip(hashed, prompts, strict=True):
            common = next(
                (n for n, pair in enumerate(zip(ids_a, ids_b, strict=False)) if len(set(pair)) > 1), None
            )
            common = min(len(ids_a), len(ids_b)) if common is None else common
            assert count_shared_tokens(a, b) == min(common * BLOCK, tokens_a, tokens_b)


def test_a_long_prompt_is_few_spans():
    turns = [HashedPrompt(list(range(2000 + 10 * n)), (2000 + 10 * n) * 64) for n in range(40)]
    prompts = make_prompts(turns, 64, scope="")
    assert [len(prompt) for prompt in prompts] == [n + 1 for n in range(40)]


def test_a_repeated_id_stays_a_repeated_text():
    ((first, *rest),) = make_prompts([HashedPrompt([5, 5, 5], 12)], BLOCK, scope="")
    assert rest == [first, first]
    assert json.dumps(first) == '["5", 4]'
