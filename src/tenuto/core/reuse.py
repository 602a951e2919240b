"""How many tokens a turn could reuse, and how many were computed a second time. docs/glossary.md explains.

turn 1   prompt 100, output 20   →  119 tokens have KV: the last output token is never computed
turn 2   prompt 150, its first 120 tokens are turn 1's prompt and output

blocks of 16 tokens: min(120, 119, 150 − 1) = 119 tokens, 7 full blocks  →  112 reusable tokens
the engine finds 64 of them                                              →   48 recomputed tokens
turn 2 is preempted with 155 computed tokens and hits 144 when it is back →   11 more: 59
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def count_computed_tokens(num_prompt_tokens: int, num_output_tokens: int) -> int:
    """Tokens of a finished turn that have KV: all but the last output token."""
    return max(0, num_prompt_tokens + num_output_tokens - 1)


def count_reusable_tokens(
    num_shared_tokens: int, num_computed_tokens: int, num_prompt_tokens: int, block_size: int
) -> int:
    """Prompt tokens that the job's turn before makes it possible to hit.

    `num_shared_tokens`: leading tokens that the prompt has in common with that turn's prompt and output;
    `num_computed_tokens`: those of that turn with KV. Only full blocks can be hit, and never all of a prompt:
    its last token is computed for the first output.
    """
    num_tokens = min(num_shared_tokens, num_computed_tokens, num_prompt_tokens - 1)
    return max(0, num_tokens) // block_size * block_size


def count_missed_tokens(num_reusable_tokens: int, num_hit_tokens: int) -> int:
    """Tokens computed a second time when a turn first starts."""
    return max(0, num_reusable_tokens - num_hit_tokens)


def count_lost_tokens(num_computed_tokens: int, num_hit_tokens: int) -> int:
    """Tokens computed a second time because of a preemption.

    `num_computed_tokens`: the turn's own when it was preempted; `num_hit_tokens`: what it found when it
    started again. A part of a block counts too: without the preemption it would not be computed again.
    """
    return max(0, num_computed_tokens - num_hit_tokens)


class PrefixMarks:
    """Some of a finished turn's chained block hashes: they tell how far a later prompt runs through the turn.

    All hashes of ten thousand long turns would take gigabytes. Kept are those at the end of the computed
    tokens and of the prompt: they answer for a prompt that extends the turn or repeats its prompt. Of the
    others O(log n) are kept: a prompt that leaves the turn in its middle counts up to the mark before that.
    """

    __slots__ = ("_block_size", "_marks", "_num_computed_tokens")

    def __init__(
        self, hashes: Sequence[Hashable], num_prompt_tokens: int, num_computed_tokens: int, block_size: int
    ) -> None:
        """`hashes`: of the turn's full blocks of `block_size` tokens, prompt and output."""
        num_blocks = min(num_computed_tokens // block_size, len(hashes))
        num_prompt_blocks = min(num_prompt_tokens // block_size, num_blocks)
        positions = {num_blocks, num_prompt_blocks, num_prompt_blocks - 1}
        distance = 1
        while distance < num_blocks:
            positions |= {distance, num_blocks - distance}
            distance *= 2
        self._num_computed_tokens = num_computed_tokens
        self._block_size = block_size
        self._marks = tuple(
            (position, hashes[position - 1]) for position in sorted(positions, reverse=True) if position > 0
        )
        """Longest prefix first: its number of blocks, and the hash of the last of them."""

    def count_reusable_tokens(
        self, hashes: Sequence[Hashable], num_prompt_tokens: int, block_size: int
    ) -> int:
        """Reusable tokens of a later prompt with these hashes; O(log n). `block_size` is the engine's."""
        for position, block_hash in self._marks:
            if position <= len(hashes) and hashes[position - 1] == block_hash:
                return count_reusable_tokens(
                    position * self._block_size, self._num_computed_tokens, num_prompt_tokens, block_size
                )
        return 0
