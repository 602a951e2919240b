"""How short a lease becomes that cannot be cut anywhere, because its model has several kinds of layers.

There a hit ends where all layer groups are cached, and each shorter prefix needs other blocks of the sliding
windows. So such a lease steps back from one possible hit to an earlier one, in all layer groups together.
"""

from __future__ import annotations

MIN_STEP_SHARE = 1 / 16
"""A step back gives up at least this share of the lease's tokens. Each step costs a look-up of the whole
prefix, and this bounds how many a lease can take."""


def get_max_tokens(num_tokens: int, num_blocks: int, tokens_per_block: int) -> int:
    """The longest prefix that a lease of `num_tokens` may keep if it is to give up `num_blocks` blocks.

    `tokens_per_block`: tokens of the sequence that free one block; with two full-attention groups that is
    half a block's tokens.
    """
    num_fewer = max(num_blocks * tokens_per_block, int(num_tokens * MIN_STEP_SHARE), 1)
    return max(0, num_tokens - num_fewer)
