"""Recognising a job's next turn by its content."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tenuto.core import jobs
from tenuto.core.jobs import GENERATION_PROMPT_SLACK, Lineage
from tests.support.prefix import hash_blocks

BLOCK_SIZE = 16


def hashes_of(tokens: list[int]) -> list[bytes]:
    return hash_blocks(tokens, BLOCK_SIZE)


def tokens(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


class Memory(Lineage):
    """A lineage that is told whole texts."""

    def __init__(self, max_jobs: int = 100) -> None:
        super().__init__(BLOCK_SIZE, max_jobs)

    def finish(self, job_id: str, prompt: list[int], output: list[int]) -> None:
        self.remember(job_id, hashes_of(prompt + output), prompt)

    def recognise(self, prompt: list[int]) -> str | None:
        return self.find(hashes_of(prompt), prompt)

    def is_empty(self) -> bool:
        return not len(self) and not any(value for value in vars(self).values() if not isinstance(value, int))


SYSTEM = tokens(0, 64)
TASK = tokens(1000, 40)
ANSWER = tokens(2000, 50)
RESULT = tokens(3000, 20)


def test_a_prompt_that_runs_through_the_output_is_the_next_turn() -> None:
    memory = Memory()
    memory.finish("job", SYSTEM + TASK, ANSWER)
    assert memory.recognise(SYSTEM + TASK + ANSWER + RESULT) == "job"


def test_an_empty_memory_recognises_nothing() -> None:
    assert Memory().recognise(SYSTEM + TASK) is None


def test_a_template_that_drops_the_reasoning_is_recognised_by_the_prompt() -> None:
    memory = Memory()
    reasoning, answer = ANSWER[:30], ANSWER[30:]
    memory.finish("job", SYSTEM + TASK, reasoning + answer)
    assert memory.recognise(SYSTEM + TASK + answer + RESULT) == "job"


def test_the_next_prompt_may_lack_the_end_of_the_generation_prompt() -> None:
    memory = Memory()
    closing = tokens(9000, GENERATION_PROMPT_SLACK)  # an empty reasoning span that the history drops
    memory.finish("job", SYSTEM + TASK + closing, ANSWER)
    assert memory.recognise(SYSTEM + TASK + ANSWER + RESULT) == "job"


def test_one_token_more_than_the_slack_and_it_is_another_text() -> None:
    memory = Memory()
    closing = tokens(9000, GENERATION_PROMPT_SLACK + 1)
    memory.finish("job", SYSTEM + TASK + closing, ANSWER)
    assert memory.recognise(SYSTEM + TASK + ANSWER + RESULT) is None


def test_the_generation_prompt_may_fill_the_last_block_alone() -> None:
    # 64 + 14 + 4 tokens: the last full block, 64 to 80, holds 2 of the 4 that the next prompt lacks.
    memory = Memory()
    task = TASK[:14]
    memory.finish("job", SYSTEM + task + tokens(9000, 4), ANSWER)
    assert memory.recognise(SYSTEM + task + ANSWER + RESULT) == "job"


def test_two_jobs_with_one_system_prompt_are_kept_apart() -> None:
    memory = Memory()
    other_task = tokens(5000, 40)
    memory.finish("one", SYSTEM + TASK, ANSWER)
    assert memory.recognise(SYSTEM + other_task) is None
    memory.finish("two", SYSTEM + other_task, ANSWER)
    assert memory.recognise(SYSTEM + TASK + ANSWER + RESULT) == "one"
    assert memory.recognise(SYSTEM + other_task + ANSWER + RESULT) == "two"


def test_short_tasks_after_one_system_prompt_are_told_apart_by_their_tokens() -> None:
    # The tasks are shorter than a block, so every full block is the system prompt's.
    memory = Memory()
    memory.finish("one", [*SYSTEM, *tokens(1000, 10)], [1])
    assert memory.recognise(SYSTEM + tokens(5000, 30)) is None
    assert memory.recognise(SYSTEM + tokens(1000, 10) + RESULT) == "one"


def test_the_slack_never_reaches_back_to_what_the_user_wrote() -> None:
    # A template ends a message with markers at least as long as the slack; only they are uncertain.
    memory = Memory()
    markers = tokens(9000, GENERATION_PROMPT_SLACK)
    memory.finish("one", [*SYSTEM, 1, *markers], ANSWER)
    assert memory.recognise([*SYSTEM, 2, *markers, *ANSWER, *RESULT]) is None


def test_of_jobs_with_identical_prompts_the_most_recent_is_found() -> None:
    memory = Memory()
    memory.finish("first", SYSTEM + TASK, [1, 2])
    memory.finish("second", SYSTEM + TASK, [1, 3])
    assert memory.recognise(SYSTEM + TASK + RESULT) == "second"
    memory.finish("first", SYSTEM + TASK, [1, 2])
    assert memory.recognise(SYSTEM + TASK + RESULT) == "first"


def test_of_prompts_of_which_one_begins_the_other_the_most_recent_is_found() -> None:
    # Both run through the system prompt's last block and differ only in length.
    for order in (["short", "long"], ["long", "short"]):
        memory = Memory()
        for job_id in order:
            memory.finish(job_id, SYSTEM + TASK[: {"short": 6, "long": 10}[job_id]], [1])
        assert memory.recognise(SYSTEM + TASK[:10] + RESULT) == order[-1]


def test_identical_prompts_with_different_outputs_are_told_apart_by_the_output() -> None:
    memory = Memory()
    other_answer = tokens(6000, 50)
    memory.finish("first", SYSTEM + TASK, ANSWER)
    memory.finish("second", SYSTEM + TASK, other_answer)
    assert memory.recognise(SYSTEM + TASK + ANSWER + RESULT) == "first"
    assert memory.recognise(SYSTEM + TASK + other_answer + RESULT) == "second"


def test_a_prompt_that_is_not_longer_is_no_next_turn() -> None:
    memory = Memory()
    memory.finish("job", SYSTEM + TASK, ANSWER)
    assert memory.recognise(SYSTEM + TASK) is None  # the same again
    assert memory.recognise((SYSTEM + TASK)[:-1]) is None
    assert memory.recognise(SYSTEM) is None


def test_a_rewritten_prompt_is_no_next_turn() -> None:
    memory = Memory()
    memory.finish("job", SYSTEM + TASK, ANSWER)
    rewritten = SYSTEM + tokens(7000, 20) + TASK[20:] + ANSWER + RESULT
    assert memory.recognise(rewritten) is None


def test_only_the_last_turn_of_a_job_counts() -> None:
    memory = Memory()
    memory.finish("job", SYSTEM + TASK, ANSWER)
    longer = SYSTEM + TASK + ANSWER + tokens(4000, 60)
    memory.finish("job", longer, tokens(8000, 40))
    assert memory.recognise(longer + tokens(8000, 40) + RESULT) == "job"
    assert memory.recognise(SYSTEM + TASK + tokens(7000, 80)) is None
    assert len(memory) == 1


def test_a_prompt_shorter_than_a_block_is_found_by_its_output() -> None:
    memory = Memory()
    memory.finish("job", TASK[:10], ANSWER)
    assert memory.recognise(TASK[:10] + ANSWER + RESULT) == "job"
    assert memory.recognise(TASK[:10] + RESULT) is None


def test_jobs_with_the_same_text_take_turns() -> None:
    """Attempts at one task: their answers fill no block, so the prompts that follow may be of any of them."""
    memory = Memory()
    for job_id in "abc":
        memory.finish(job_id, SYSTEM + TASK, ANSWER[:3])
    assert [memory.recognise(SYSTEM + TASK + ANSWER[:3] + RESULT) for _ in range(4)] == ["c", "b", "a", "c"]
    memory.finish("c", SYSTEM + TASK + ANSWER[:3] + RESULT, ANSWER)
    assert {memory.recognise(SYSTEM + TASK + ANSWER[:3] + RESULT) for _ in range(2)} == {"a", "b"}


def test_a_turn_without_a_full_block_is_not_remembered() -> None:
    memory = Memory()
    memory.finish("job", [1, 2], [3])
    assert memory.is_empty()


def test_memory_is_bounded_and_the_least_recent_goes_first() -> None:
    memory = Memory(max_jobs=3)
    for number in range(10):
        memory.finish(f"job-{number}", tokens(100 * number, 32), tokens(50_000, 16))
    memory.finish("job-8", tokens(800, 32), tokens(50_000, 16))
    memory.finish("job-10", tokens(1000, 32), tokens(50_000, 16))
    assert len(memory) == 3
    found = [memory.recognise(tokens(100 * number, 32) + RESULT) for number in range(11)]
    assert found == [None] * 8 + ["job-8", "job-9", "job-10"]


def test_forgetting_an_unknown_job_is_no_error() -> None:
    memory = Memory()
    memory.forget("nobody")
    assert memory.is_empty()


# Two letters and few lengths, so that jobs often share marks.
parts = st.lists(st.sampled_from([[0] * 9, [1] * 9]), max_size=4)
texts = parts.map(lambda parts: [token for part in parts for token in part])
turns = st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), texts, texts), max_size=8)


def count_keys(spans: tuple[int, int] | dict[tuple[int, int], int]) -> int:
    return 1 if isinstance(spans, tuple) else sum(spans.values())


@given(turns)
def test_forgetting_leaves_nothing_behind(turns: list[tuple[str, list[int], list[int]]]) -> None:
    memory = Memory(max_jobs=2)
    for job_id, prompt, output in turns:
        memory.finish(job_id, prompt, output)
        assert len(memory) <= 2
        # Three marks a job at most: the output's last block, the prompt's last two.
        assert sum(len(jobs) for jobs in memory._jobs_by_key.values()) <= 3 * len(memory)
        assert sum(map(count_keys, memory._spans_by_mark.values())) <= 3 * len(memory)
    for job_id in "abc":
        memory.forget(job_id)
    assert memory.is_empty()


@given(turns, texts)
def test_whatever_is_found_shares_its_prompt_with_the_new_one(turns, added) -> None:
    memory, last = Memory(), {}
    for job_id, prompt, output in turns:
        memory.finish(job_id, prompt, output)
        last[job_id] = (prompt, output)
    for prompt, output in last.values():
        new = prompt + output + added
        found = memory.recognise(new)
        if found is not None:
            its_prompt = last[found][0]
            assert len(new) > len(its_prompt)
            certain = max(0, len(its_prompt) - GENERATION_PROMPT_SLACK)
            assert new[:certain] == its_prompt[:certain]


def test_jobs_that_end_at_each_block_of_a_text_make_no_other_prompt_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, text, num_tried = Memory(max_jobs=1000), tokens(0, 1000 * BLOCK_SIZE), 0
    for number in range(1, 1000):
        memory.finish(f"job{number}", text[: number * BLOCK_SIZE] + tokens(20_000, 11), [])
    mine = text + tokens(30_000, 40)
    memory.finish("mine", mine, ANSWER)
    get_key = jobs._get_key

    def count(*inputs: Any) -> Any:
        nonlocal num_tried
        num_tried += 1
        return get_key(*inputs)

    monkeypatch.setattr(jobs, "_get_key", count)
    assert memory.recognise(text) is None
    assert num_tried <= jobs.MAX_TRIED + 2 * BLOCK_SIZE
    assert memory.recognise(mine + ANSWER + RESULT) == "mine"
