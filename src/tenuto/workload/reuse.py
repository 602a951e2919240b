"""Reusable tokens of a turn whose content a workload tells."""

from __future__ import annotations

from tenuto.core.reuse import count_computed_tokens, count_reusable_tokens
from tenuto.workload.schema import TurnSpec, count_shared_tokens


def count_reusable(
    before: TurnSpec | None, turn: TurnSpec, block_size: int, *, quotes_answers: bool = True
) -> int:
    """Reusable tokens as `tenuto.core.reuse` defines them.

    `before`: the job's turn that had finished last when this one was sent; None if none had. Without
    `quotes_answers` the prompt does not hold what the engine answered there.
    """
    if before is None:
        return 0
    computed = (*before.prompt, before.output) if quotes_answers else before.prompt
    return count_reusable_tokens(
        count_shared_tokens(computed, turn.prompt),
        count_computed_tokens(before.num_prompt_tokens, before.num_output_tokens),
        turn.num_prompt_tokens,
        block_size,
    )
