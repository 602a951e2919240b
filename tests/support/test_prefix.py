"""Chained hashes and the longest cached prefix, against naive versions."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.support.prefix import count_common, get_hit_blocks, hash_block, hash_blocks

# Two letters and short texts, so that texts often share a prefix.
texts = st.lists(st.integers(0, 1), max_size=20)
block_sizes = st.integers(1, 4)


def count_common_prefix(a: list, b: list) -> int:
    for number, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return number
    return min(len(a), len(b))


@given(texts, block_sizes)
def test_each_full_block_has_one_hash(text: list[int], block_size: int) -> None:
    hashes = hash_blocks(text, block_size)
    assert len(hashes) == len(text) // block_size
    assert len(set(hashes)) == len(hashes)


@given(texts, texts, block_sizes)
def test_hashes_are_equal_as_far_as_whole_blocks_of_the_texts_are(a, b, block_size) -> None:
    expected = count_common_prefix(a, b) // block_size
    hashes_a, hashes_b = hash_blocks(a, block_size), hash_blocks(b, block_size)
    assert count_common_prefix(hashes_a, hashes_b) == expected
    # Once they differ they stay different, even where the tokens are the same again.
    assert not set(hashes_a[expected:]) & set(hashes_b[expected:])
    assert count_common(hashes_a, hashes_b) == expected
    assert count_common(hashes_b, hashes_a) == expected


def test_a_hash_depends_on_parent_tokens_and_extra() -> None:
    parent = hash_block(None, [1])
    variants = [
        hash_block(None, [1, 2]),
        hash_block(parent, [1, 2]),
        hash_block(None, [2, 1]),
        hash_block(None, [12]),
        hash_block(None, [1, 2], ("salt",)),
        hash_block(None, [1, 2], ("salt", "lora")),
    ]
    assert len(set(variants)) == len(variants)
    assert hash_block(None, (1, 2)) == hash_block(None, [1, 2])


def test_a_cache_salt_is_in_every_block() -> None:
    assert not set(hash_blocks([1] * 8, 2)) & set(hash_blocks([1] * 8, 2, ("salt",)))


def test_hashes_do_not_depend_on_the_process() -> None:
    # printf '((1, 2), ())' | b2sum -l 128
    assert hash_block(None, [1, 2]).hex() == "9ddc95e6ac14800064dc54691cd68294"


@given(st.lists(st.integers(0, 9), max_size=10), st.sets(st.integers(0, 9)), st.integers(0, 12))
def test_the_hit_is_the_longest_cached_prefix_within_the_bound(hashes, cached, max_blocks) -> None:
    expected = []
    for block_hash in hashes[:max_blocks]:
        if block_hash not in cached:
            break
        expected.append(block_hash * 10)
    blocks = {block_hash: block_hash * 10 for block_hash in cached}
    assert get_hit_blocks(hashes, blocks.get, max_blocks) == expected


def test_nothing_is_looked_up_beyond_the_bound() -> None:
    def fail(block_hash: int) -> None:
        pytest.fail("looked up a block that cannot be hit")

    assert get_hit_blocks([1, 2], fail, 0) == []
