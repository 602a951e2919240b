"""How many blocks of a sliding window or a state a hit needs, and what leases on such layers may keep."""

from __future__ import annotations

from typing import Literal

Layers = int | Literal["state"] | None
"""The kind of a layer or layer group: a sliding window of N tokens, a recurrent state, or None for full
attention."""
STATE: Literal["state"] = "state"
STATE_WINDOW = 2
"""A state behaves like a window of two tokens: a hit needs the one block before its end."""
MOST_STATES = 3
"""Most states of one request: its current state, the state before it, and that of a step in flight."""


def get_window(layers: Layers) -> int | None:
    """The window of a kind of layers, in tokens; None for full attention."""
    return STATE_WINDOW if layers == STATE else layers


def count_skipped_blocks(window: int | None, block_size: int, num_tokens: int) -> int:
    """Number of blocks before the next token's window."""
    return 0 if window is None else max(0, num_tokens - window + 1) // block_size


def count_loaded_blocks(window: int | None, block_size: int, first: int, end: int) -> int:
    """Number of blocks in a group's window that a load of tokens `first` to before `end` copies."""
    num_there = max(first // block_size, count_skipped_blocks(window, block_size, end))
    return max(0, -(-end // block_size) - num_there)


def count_tail_blocks(window: int, block_size: int) -> int:
    """Number of blocks before a hit's end that a window needs: the next token sees `window` - 1 others."""
    return -(-(window - 1) // block_size)


def count_spare_blocks(window: int, block_size: int, alignment: int) -> int:
    """Blocks that a request must keep before its window, to have all blocks of its last possible hit.

    Hits end at multiples of `alignment` tokens, and a request may be up to `alignment` - 1 tokens further.

        alignment     │       │       │       │  hits end at these
        last hit          ├─ tail ────┤
        window                  ├─ window - 1 ─┤ request's end
        spare             ├────┤
    """
    num_behind = (alignment - window) // block_size
    return max(0, num_behind + count_tail_blocks(window, block_size))


def count_behind_kept_state(
    num_tokens: int, num_prompt_tokens: int, block_size: int, num_kept: int = 1
) -> int:
    """The number of leading tokens, of `num_tokens`, whose states a running request may free.

    It keeps the last `num_kept` states of its answer that end at a block boundary, for its job's next turn.

        prompt and answer   ├──────────────┼─────────────────────┤ num_tokens
        blocks              │       │       │       │       │       │
                                 given back  ───────┤ kept  │ now
    """
    end = num_tokens // block_size * block_size
    if end <= num_prompt_tokens:
        return num_tokens
    return max(0, end - num_kept * block_size) + 1


def choose_checkpoint_tokens(
    num_checkpoint_blocks: int, full_blocks_per_token: float, alignment: int
) -> int | None:
    """The shortest distance between two checkpoints, in tokens.

    That many tokens take as many blocks in full attention as one checkpoint does.

    `num_checkpoint_blocks`: blocks of one checkpoint in all windows and states. `full_blocks_per_token`:
    blocks of a token in all full-attention groups. Hits end at multiples of `alignment` tokens. None if the
    model has no window and no state, or has only these.
    """
    if not num_checkpoint_blocks or not full_blocks_per_token:
        return None
    num_tokens = num_checkpoint_blocks / full_blocks_per_token
    return max(1, round(num_tokens / alignment)) * alignment


def get_next_checkpoint(before: int, tokens: int, alignment: int) -> int:
    """The next checkpoint after token `before`: `tokens` later, or at 1.5 × `before` if that is later.

    So long prompts have few checkpoints, and the last one before any token is at two thirds of its position
    or later.
    """
    return before + max(tokens, before // 2 // alignment * alignment)


def get_checkpoints(tokens: int, alignment: int, end: int) -> tuple[int, ...]:
    """All checkpoints up to token `end`."""
    checkpoints = []
    place = get_next_checkpoint(0, tokens, alignment)
    while place <= end:
        checkpoints.append(place)
        place = get_next_checkpoint(place, tokens, alignment)
    return tuple(checkpoints)


MIN_STEP_SHARE = 1 / 16
"""The least share of a lease's tokens by which it is shortened at once. Each time costs a look-up of the
whole prefix, so this bounds the number of look-ups per lease."""


def get_max_tokens(num_tokens: int, num_blocks: int, tokens_per_block: int) -> int:
    """The longest prefix that a lease of `num_tokens` may keep if it must free `num_blocks` blocks.

    On a model with several kinds of layers, a hit ends where all layer groups are cached. Each shorter prefix
    needs other blocks of the sliding windows. So such a lease is shortened from one possible hit to an
    earlier one, in all layer groups together.

    `tokens_per_block`: how many fewer tokens free one block. With two full-attention groups, that is half a
    block's tokens.
    """
    num_fewer = max(num_blocks * tokens_per_block, int(num_tokens * MIN_STEP_SHARE), 1)
    return max(0, num_tokens - num_fewer)
