"""From spans to block ids: what `hash_ids` does, the other way.

    prompt A   [a 40][b 20]     blocks of 16  →  0 1 2 3        (the last one holds 12 tokens)
    prompt B   [a 40][c 24]                   →  0 1 4 5        alike for 40 tokens, so for 2 whole blocks

An id stands for a block and everything before it. What two prompts share is so rounded down to whole blocks.
"""

from __future__ import annotations

from tenuto.workload.schema import Prompt


class BlockIds:
    """Makes the ids of one scope: equal beginnings of prompts get equal ids."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._ids: dict[object, int] = {}

    def make(self, prompt: Prompt, *, with_last: bool) -> list[int]:
        """The ids of a prompt's full blocks, and with `with_last` of a last one that is not full."""
        ids: list[int] = []
        parent: int | None = None
        held: list[tuple[str, int, int]] = []
        num_free = self._block_size
        for content_id, num_tokens in prompt:
            start = 0
            while start < num_tokens:
                length = min(num_free, num_tokens - start)
                held.append((content_id, start, length))
                start, num_free = start + length, num_free - length
                if not num_free:
                    parent = self._get_id(parent, held)
                    ids.append(parent)
                    held, num_free = [], self._block_size
        if held and with_last:
            ids.append(self._get_id(parent, held))
        return ids

    def _get_id(self, parent: int | None, held: list[tuple[str, int, int]]) -> int:
        return self._ids.setdefault((parent, *held), len(self._ids))
