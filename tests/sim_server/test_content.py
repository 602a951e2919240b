"""Token ids as content: blocks are equal exactly where tokens are, and what is forgotten is gone."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.sim.kv.pool import Path, Segment, Span
from tenuto.sim.server.tokens import ContentTree, Text, make_token_ids

BLOCK = 4


def get_hashes(root: Segment, spans: list[Span], num_tokens: int) -> list[tuple[Segment, int]]:
    path = Path(root, None, spans, BLOCK)
    return [(path.get_segment(block), block) for block in range(num_tokens // BLOCK)]


def count_common(a: list[Any], b: list[Any]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.slow
@settings(max_examples=300)
@given(st.data())
def test_blocks_are_equal_exactly_where_tokens_are(data: st.DataObject) -> None:
    """Prompts of few different tokens, and prompts that quote earlier prompts and answers in part."""
    tree, root = ContentTree(), Segment(1)
    seen: list[tuple[list[int], list[tuple[Segment, int]]]] = []
    for number in range(data.draw(st.integers(2, 12))):
        quoted = data.draw(st.sampled_from(seen))[0] if seen else []
        prompt = quoted[: data.draw(st.integers(0, len(quoted)))]
        prompt = prompt + data.draw(st.lists(st.integers(0, 1), min_size=0 if prompt else 1, max_size=9))
        spans = tree.place(make_token_ids(prompt))
        assert sum(length for _, length in spans) == len(prompt)

        def generate(attempt: int, number: int = number) -> Any:
            # Answers are of tokens that no prompt makes up, so that only quotes repeat them.
            return make_token_ids([100 + 100 * number + attempt, *range(1000 * number, 1000 * number + 6)])

        answer, answer_ids = tree.place_answer(spans, generate)
        tokens = [*prompt, *answer_ids]
        hashes = get_hashes(root, [*spans, answer], len(tokens))
        for other_tokens, other_hashes in seen:
            expected = count_common(tokens, other_tokens) // BLOCK
            assert count_common(hashes, other_hashes) == min(expected, len(hashes), len(other_hashes))
        seen.append((tokens, hashes))


def test_the_same_answer_is_the_same_content_and_may_grow() -> None:
    tree, root = ContentTree(), Segment(1)
    prompt = make_token_ids(range(6))
    words = make_token_ids(range(50, 80))
    hashes = []
    for length in (10, 20, 5):
        spans = tree.place(prompt)
        answer, answer_ids = tree.place_answer(spans, lambda number, length=length: words[:length])
        assert answer_ids == words[:length]
        hashes.append(get_hashes(root, [*spans, answer], 6 + length))
        keep = spans, answer  # as the engine would
    assert count_common(hashes[0], hashes[1]) == 4
    assert count_common(hashes[1], hashes[2]) == 2
    assert keep


def test_an_answer_does_not_begin_like_what_follows_there() -> None:
    tree = ContentTree()
    whole = tree.place(make_token_ids([1, 2, 3, 4, 5, 6]))
    spans = tree.place(make_token_ids([1, 2, 3]))
    tried = []

    def generate(number: int) -> Any:
        tried.append(number)
        return make_token_ids([4 + number, 9])

    _, answer_ids = tree.place_answer(spans, generate)
    assert tried == [0, 1]
    assert list(answer_ids) == [5, 9]
    assert whole


def test_an_answer_without_a_choice_is_its_own_content() -> None:
    tree, root = ContentTree(), Segment(1)
    whole = tree.place(make_token_ids(range(12)))
    spans = tree.place(make_token_ids(range(4)))
    answer, answer_ids = tree.place_answer(spans, lambda number: make_token_ids(range(4, 12)))
    assert list(answer_ids) == list(range(4, 12))
    hashes = get_hashes(root, [*spans, answer], 12)
    assert count_common(hashes, get_hashes(root, whole, 12)) == 1


def test_what_nobody_knows_any_more_is_gone() -> None:
    tree, root = ContentTree(), Segment(1)
    kept = tree.place(make_token_ids(range(8)))
    path = Path(root, None, kept, BLOCK)
    gone = tree.place(make_token_ids([*range(8), 7, 7, 7, 7]))
    texts = [weakref.ref(text) for text, _ in gone if isinstance(text, Text)]
    segment = weakref.ref(Path(root, None, gone, BLOCK).segments[-1])
    del gone
    gc.collect()
    assert segment() is None
    assert [text() is not None for text in texts] == [True, False]
    assert path.segments


@pytest.mark.parametrize("wrong", [[-1], [2**32], ["a"], [1.5]])
def test_what_is_no_token_id_is_refused(wrong: list[Any]) -> None:
    with pytest.raises((TypeError, OverflowError)):
        make_token_ids(wrong)
