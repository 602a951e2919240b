"""How many tokens a turn could reuse, and how many were computed a second time. See docs/glossary.md.

turn 1   prompt 100, output 20   →  119 tokens have KV: the last output token is never computed
turn 2   prompt 150, its first 120 tokens are turn 1's prompt and output

blocks of 16 tokens: min(120, 119, 150 − 1) = 119 tokens, 7 full blocks  →  112 reusable tokens
the engine finds 64 of them                                              →   48 recomputed tokens
turn 2 is preempted at 155 computed tokens and hits 144 when it resumes  →   11 more: 59
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence


def count_shared_tokens(a: Sequence[tuple[str, int]], b: Sequence[tuple[str, int]]) -> int:
    """Number of leading tokens that two prompts share. Each part is a text's name and the tokens of it."""
    shared = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            return shared + (min(left[1], right[1]) if left[0] == right[0] else 0)
        shared += left[1]
    return shared


def count_computed_tokens(num_prompt_tokens: int, num_output_tokens: int) -> int:
    """Tokens of a finished turn that are in the KV cache: all but the last output token."""
    return max(0, num_prompt_tokens + num_output_tokens - 1)


def count_reusable_tokens(
    num_shared_tokens: int, num_computed_tokens: int, num_prompt_tokens: int, block_size: int
) -> int:
    """Prompt tokens that a turn can hit because the job's previous turn computed them.

    `num_shared_tokens`: leading tokens that the prompt shares with the previous turn's prompt and output.
    `num_computed_tokens`: the previous turn's tokens with KV. Only full blocks can be hit. The prompt's last
    token is never hit: it must be computed to produce the first output token.
    """
    num_tokens = min(num_shared_tokens, num_computed_tokens, num_prompt_tokens - 1)
    return max(0, num_tokens) // block_size * block_size


def count_missed_tokens(num_reusable_tokens: int, num_hit_tokens: int) -> int:
    """Tokens that are computed a second time when a turn first starts."""
    return max(0, num_reusable_tokens - num_hit_tokens)


def count_lost_tokens(num_computed_tokens: int, num_hit_tokens: int) -> int:
    """Tokens that are computed a second time because of a preemption.

    `num_computed_tokens`: tokens that the turn had computed when it was preempted. `num_hit_tokens`: tokens
    that it hit when it started again. Tokens of a partly filled block count too, because without the
    preemption they would not be computed again.
    """
    return max(0, num_computed_tokens - num_hit_tokens)


def count_common(one: Sequence[int], other: Sequence[int], start: int = 0) -> int:
    """How many first tokens, or ids, of `one` the other sequence has from `start` on."""
    low = 0
    middle = high = min(len(one), len(other) - start)  # often all are common
    while low < high:
        if one[low:middle] == other[start + low : start + middle]:
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return low


LEAST_LENGTH = 0.8
"""A prompt shorter than this share of the job's last prompt counts as shortened, not changed."""


def changes_prompt(num_shared_tokens: int, num_last_tokens: int, num_tokens: int, block_size: int) -> bool:
    """Whether a prompt differs from the job's last prompt before the last full block of that.

    False for a much shorter prompt, because the client dropped history on purpose, and where the last prompt
    has less than two full blocks.
    """
    num_blocks = num_last_tokens // block_size
    if num_blocks < 2 or num_tokens < num_last_tokens * LEAST_LENGTH:
        return False
    return num_shared_tokens // block_size < num_blocks - 1


class PrefixMarks:
    """Some block hashes of a finished turn, which show how much of the turn a later prompt shares.

    All hashes of ten thousand long turns would take gigabytes, so only some are kept, the *marks*. The hashes
    at the end of the computed tokens and at the end of the prompt are kept. They are exact for a prompt that
    extends the whole turn or only its prompt. Of the other hashes, O(log n) are kept. A prompt that differs
    in the middle of the turn counts as shared up to the last mark before the difference. Each hash also
    covers the blocks before its own.

    Of vLLM's hashes, which are bytes, Python's own `hash` is kept: 8 bytes instead of 65 for each mark of an
    idle job. Those of the simulator are equal to others only while they exist, so they are kept themselves.
    """

    __slots__ = ("_block_size", "_hashes", "_num_blocks", "_num_computed_tokens", "_num_prompt_tokens")

    def __init__(
        self, hashes: Sequence[Hashable], num_prompt_tokens: int, num_computed_tokens: int, block_size: int
    ) -> None:
        """`hashes`: the hashes of the turn's full blocks (prompt and output), of `block_size` tokens each."""
        self._num_computed_tokens = num_computed_tokens
        self._num_prompt_tokens = num_prompt_tokens
        self._block_size = block_size
        self._num_blocks = min(num_computed_tokens // block_size, len(hashes))
        ends = [hashes[each - 1] for each in self._get_positions()]
        are_bytes = bool(ends) and isinstance(ends[0], bytes)
        self._hashes: Sequence[Hashable] = array("q", [*map(hash, ends)]) if are_bytes else tuple(ends)
        """The hash of each kept prefix's last block."""

    def count_reusable_tokens(self, num_shared_blocks: int, num_prompt_tokens: int, block_size: int) -> int:
        """Reusable tokens of a later prompt that shares so many blocks. `block_size` is the engine's."""
        num_shared_tokens = num_shared_blocks * self._block_size
        return count_reusable_tokens(
            num_shared_tokens, self._num_computed_tokens, num_prompt_tokens, block_size
        )

    def find_first_difference(self, num_shared_blocks: int, num_prompt_tokens: int) -> int | None:
        """The first token at which a prompt that shares so many blocks differs; None if it goes on.

        It is a lower bound: the last mark before the difference. None also where `changes_prompt` is false.
        """
        num_shared = num_shared_blocks * self._block_size
        is_other = changes_prompt(num_shared, self._num_prompt_tokens, num_prompt_tokens, self._block_size)
        return num_shared if is_other else None

    def is_followed_by(self, num_shared_blocks: int) -> bool:
        """Whether a prompt that shares so many blocks continues this turn's prompt.

        If this turn's prompt has fewer than two full blocks, every prompt continues it. A chat template may
        drop the end of the prompt, so its last full block may differ.
        """
        return num_shared_blocks >= self._num_prompt_tokens // self._block_size - 1

    def shares_half(self, num_shared_blocks: int) -> bool:
        """Whether a prompt that shares so many blocks shares half of this turn's prompt."""
        return num_shared_blocks >= self._num_prompt_tokens // self._block_size // 2

    def count_shared_blocks(self, hashes: Sequence[Hashable]) -> int:
        """Leading blocks that a prompt with these hashes shares with this turn, up to the last mark.

        Takes O(log n) time in the number of the turn's blocks.
        """
        is_short = isinstance(self._hashes, array)
        for position, known in zip(self._get_positions(), self._hashes, strict=True):
            if position <= len(hashes):
                found = hashes[position - 1]
                if (hash(found) if is_short else found) == known:
                    return position
        return 0

    def _get_positions(self) -> list[int]:
        """The number of blocks of each kept prefix, longest first. Not kept, because it takes memory."""
        num_blocks = self._num_blocks
        num_prompt_blocks = min(self._num_prompt_tokens // self._block_size, num_blocks)
        positions = {0, num_blocks, num_prompt_blocks, max(0, num_prompt_blocks - 1)}
        distance = 1
        while distance < num_blocks:
            positions.add(distance)
            positions.add(num_blocks - distance)
            distance *= 2
        return sorted(positions, reverse=True)[:-1]
