"""Uses of a tier by whole sequences of chunks."""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence

from tenuto.core.policy import Key
from tenuto.core.tier_order import TierOrder


def use(order: TierOrder, chunks: Sequence[Hashable], key: Key, owner: Hashable | None = None) -> None:
    """A turn used these chunks, which follow each other from its start; new ones are added."""
    number = order.begin_use()
    for place, chunk in enumerate(chunks):
        before = chunks[place - 1] if place else None
        order.put(chunk, before, (key, number, -place), owner=owner)


def pop_firsts(
    order: TierOrder, number: int, up_to: Key | None = None, spared: Container[Hashable] = ()
) -> list[Hashable]:
    """Remove the chunks to evict first."""
    return [each.chunk for each in order._pop_firsts(number, up_to, spared)]
