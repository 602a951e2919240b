"""Which jobs are of one kind, whatever chat template and system prompt they begin with."""

from __future__ import annotations

import itertools
import random

import pytest

from tenuto.core.jobs import KIND_TOKENS, Arrival, JobTable
from tenuto.core.requests import Hints
from tenuto.core.turn_work import MAX_NAMES

BLOCK_TOKENS = 16
NUMBERS = itertools.count()


def hash_blocks(*texts: tuple[str, int], block_tokens: int = BLOCK_TOKENS) -> list[bytes]:
    """The chained hashes of the full blocks of a prompt of these texts, each with its number of tokens."""
    tokens = [f"{text}{index}" for text, num_tokens in texts for index in range(num_tokens)]
    num_blocks = len(tokens) // block_tokens
    ends = range(block_tokens, block_tokens * num_blocks + 1, block_tokens)
    return [random.Random("/".join(tokens[:end])).randbytes(32) for end in ends]


def make_table(block_tokens: int = BLOCK_TOKENS) -> JobTable:
    return JobTable(1000, block_tokens, infers=False)


def find_kind(table: JobTable, hashes: list[bytes], tenant: str | None = None) -> str | None:
    number = next(NUMBERS)
    hints = Hints(job_id=f"job-{number}", tenant=tenant)
    arrival = Arrival(hints, BLOCK_TOKENS * len(hashes), hashes=hashes)
    return table.find(f"turn-{number}", arrival, 0.0).kind


def find_kinds(table: JobTable, count: int, *texts: tuple[str, int]) -> list[str | None]:
    """The kinds of so many jobs that begin with these texts, each followed by a task of its own."""
    return [find_kind(table, hash_blocks(*texts, (f"task{next(NUMBERS)} ", 300))) for _ in range(count)]


@pytest.mark.parametrize("template_tokens", [0, 30, 90])
def test_applications_are_told_apart_behind_the_chat_template(template_tokens: int) -> None:
    table = make_table()
    template = ("template", template_tokens)
    kinds = {}
    for _ in range(3):
        for name in ("coder", "browser"):
            kinds[name] = find_kinds(table, 2, template, (name, 500))[-1]
        kinds["plain"] = find_kinds(table, 2, template)[-1]
    assert len(set(kinds.values())) == 3
    for name in ("coder", "browser"):
        assert find_kinds(table, 5, template, (name, 500)) == [kinds[name]] * 5


@pytest.mark.parametrize("system_tokens", [16, 40, 100, 127, 128, 5000])
def test_jobs_with_one_system_prompt_are_of_one_kind_however_short_it_is(system_tokens: int) -> None:
    kinds = find_kinds(make_table(), 10, ("system", system_tokens))
    assert len(set(kinds[1:])) == 1


@pytest.mark.parametrize("shared_tokens", [16, 32, 64])
def test_applications_are_told_apart_by_what_comes_after_their_common_beginning(shared_tokens: int) -> None:
    table, common = make_table(), ("common", shared_tokens)
    kinds = [find_kinds(table, 3, common, (name, shared_tokens))[-1] for name in "ab"]
    assert kinds[0] != kinds[1]


def test_the_first_128_tokens_count_and_no_more() -> None:
    table = make_table()
    kinds = [find_kind(table, hash_blocks(("system", KIND_TOKENS), (f"task{n}", 16))) for n in range(3)]
    assert len(set(kinds)) == 1
    exactly = [find_kind(table, hash_blocks(("other", KIND_TOKENS))) for _ in range(2)]
    assert exactly[0] == exactly[1] != kinds[0]
    late = [find_kind(table, hash_blocks(("late", KIND_TOKENS - 1), (f"task{n}", 17))) for n in range(9)]
    assert len(set(late[1:])) == 1
    assert late[1] != find_kind(table, hash_blocks(("late", KIND_TOKENS // 2 - 1), ("task", 99)))


@pytest.mark.parametrize("num_tries", [2, 8])
def test_several_tries_of_a_task_leave_the_kind_of_a_short_system_prompt_alone(num_tries: int) -> None:
    table = make_table()
    first = []
    for number in range(20):
        tries = [find_kind(table, hash_blocks(("system", 40), (f"t{number}", 99))) for _ in range(num_tries)]
        first.append(tries[0])
    assert len(set(first[1:])) == 1


def test_prompts_that_begin_like_none_before_are_of_their_own_kind() -> None:
    kinds = find_kinds(make_table(), 10)
    assert len(set(kinds)) == 10


def test_tenants_have_their_own_kinds() -> None:
    table = make_table()
    known = [find_kind(table, hash_blocks(("system", 64), (f"task{n}", 99)), "a") for n in range(3)]
    new = find_kind(table, hash_blocks(("system", 64), ("task", 99)), "b")
    assert known[1] == known[2] != new


def test_a_prompt_without_a_full_block_has_no_kind() -> None:
    assert find_kind(make_table(), []) is None


def test_large_blocks_name_a_kind_by_the_first() -> None:
    table = make_table(4 * KIND_TOKENS)
    prompts = [
        hash_blocks(("system", 600), (f"task{n}", 2000), block_tokens=4 * KIND_TOKENS) for n in range(3)
    ]
    assert len({find_kind(table, hashes) for hashes in prompts}) == 1


def test_who_invents_prompts_makes_no_kind_forgotten_and_memory_is_bounded() -> None:
    table = make_table()
    (kind,) = set(find_kinds(table, 50, ("system", 40))[1:])
    find_kinds(table, 3 * MAX_NAMES // 4)
    assert len(table._kinds._beginnings) <= MAX_NAMES
    assert find_kinds(table, 3, ("system", 40)) == [kind] * 3


def test_another_policy_knows_the_same_kinds() -> None:
    table, other = make_table(), make_table()
    kinds = find_kinds(table, 2, ("template", 30), ("coder", 500))
    other.take_over(table)
    assert find_kinds(other, 1, ("template", 30), ("coder", 500)) == kinds[1:]
