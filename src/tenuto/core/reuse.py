"""How many tokens a turn could reuse, and how many were computed a second time. docs/glossary.md explains.

turn 1   prompt 100, output 20   →  119 tokens have KV: the last output token is never computed
turn 2   prompt 150, its first 120 tokens are turn 1's prompt and output

blocks of 16 tokens: min(120, 119, 150 − 1) = 119 tokens, 7 full blocks  →  112 reusable tokens
the engine finds 64 of them                                              →   48 recomputed tokens
turn 2 is preempted with 155 computed tokens and hits 144 when it is back →   11 more: 59
"""

from __future__ import annotations


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
