"""Blocks that several leases cover count once, at every moment."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
from hypothesis import given

from tenuto.core.fairness import BlockRefCounts

ids = st.sets(st.integers(0, 12), min_size=1)


@given(st.lists(st.tuples(ids, st.integers(0, 9)), max_size=30))
def test_it_counts_what_a_count_per_block_does(changes: list[tuple[set[int], int]]) -> None:
    coverage, leases, counts = BlockRefCounts(), [], Counter[int]()
    for block_ids, number in changes:
        if number < 6 or not leases:
            leases.append(list(block_ids))
            coverage.add(leases[-1])
            counts.update(block_ids)
        else:
            ended = leases.pop(number % len(leases))
            coverage.remove(ended)
            counts.subtract(ended)
        assert len(coverage) == sum(count > 0 for count in counts.values())
    for lease in leases:
        coverage.remove(lease)
    assert len(coverage) == 0
    assert not coverage._more


def test_a_lease_may_be_truncated() -> None:
    coverage = BlockRefCounts()
    coverage.add([1, 2, 3, 4])
    coverage.add([1, 2, 5])
    coverage.remove([3, 4])
    assert len(coverage) == 3
    coverage.remove([5])
    coverage.remove([1, 2])
    assert len(coverage) == 2
