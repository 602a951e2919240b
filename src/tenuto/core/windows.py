"""How many blocks of a sliding window a hit needs, and when a running request may still have them."""

from __future__ import annotations


def count_tail_blocks(window: int, block_size: int) -> int:
    """Blocks before a hit's end that a sliding window needs: the next token sees `window` - 1 others."""
    return -(-(window - 1) // block_size)


def count_spare_blocks(window: int, block_size: int, alignment: int) -> int:
    """Blocks that a request must keep behind its window, to have all blocks of its last possible hit.

    Hits end at multiples of `alignment` tokens, and a request may be up to `alignment` - 1 tokens further.

        alignment     │       │       │       │  hits end at these
        last hit          ├─ tail ────┤
        window                  ├─ window - 1 ─┤ request's end
        spare             ├────┤
    """
    num_behind = (alignment - window) // block_size
    return max(0, num_behind + count_tail_blocks(window, block_size))
