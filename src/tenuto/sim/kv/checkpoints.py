"""Which blocks of a sliding window, or which states, are cached: the end at a few places of the sequence.

A later prompt hits where all layer groups are cached. In a sliding window that takes only the last blocks
before the hit's end, so vLLM caches these blocks where a later prompt is expected to part from this one, and
leaves the others without content:

    prompt        ├──────────────────────────┤ output …
    interval 0                    ··      ▒▒ ·           the prompt's end, and where prompts part
    interval 4        ▒▒      ▒▒  ▒▒  ▒▒  ▒▒ ·   ▒▒      and at every fourth block
    None          ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒     every block

A state is cached at the same places; a hit there needs one block.

Source: single_type_kv_cache_manager.py, reachable_block_mask of SlidingWindowManager and MambaManager@0.32.
"""

from __future__ import annotations

from collections.abc import Iterable

from tenuto.core.windows import count_tail_blocks
from tenuto.sim.kv.request import Request


class Checkpoints:
    """The places at which the end of one sliding window, or a state, is cached."""

    def __init__(
        self, window: int, block_size: int, interval: int | None, alignment: int | None = None
    ) -> None:
        """`window` and `interval` are in tokens; the interval is a multiple of the alignment, 0 or None.

        `alignment`: hits end at multiples of so many tokens, whole blocks; by default every block.
        """
        self._block_size = block_size
        self._interval = interval
        self._alignment = alignment or block_size
        self._num_tail_blocks = count_tail_blocks(window, block_size)
        self._num_segment_blocks = (self._alignment if interval is None else interval) // block_size

    def get_runs(
        self, request: Request, first: int, end: int, own: Iterable[int] = ()
    ) -> list[tuple[int, int]]:
        """The blocks to cache of those from `first` to before `end`, as rising runs (first, end).

        `own`: more places that this request caches, in tokens.
        """
        num_tail, num_segment = self._num_tail_blocks, self._num_segment_blocks
        if 0 < num_segment <= num_tail:
            return [(first, end)]
        ends: set[int] = set()
        if num_segment and num_tail:
            ends.update(range((first // num_segment + 1) * num_segment, end + num_tail, num_segment))
        if self._interval is not None:
            # The same prompt again computes its last token, so it can use no more than the tokens before it.
            ends.add(self._align(request.num_prompt_tokens - 1))
            if request.shared_tokens:
                ends.add(self._align(request.shared_tokens))
            ends.update(map(self._align, own))
        runs: list[tuple[int, int]] = []
        for stop in sorted(ends):
            start = max(first, stop - num_tail, runs[-1][1] if runs else 0)
            if start < min(stop, end):
                runs.append((start, min(stop, end)))
        return runs

    def _align(self, num_tokens: int) -> int:
        """The block at which the last possible hit up to here ends."""
        return num_tokens // self._alignment * self._alignment // self._block_size
