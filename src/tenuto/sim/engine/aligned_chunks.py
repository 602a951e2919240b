"""Where the chunks of a prompt end on models with recurrent states, which are cached only there.

    prompt    ├───────────────────────────────────────┤
    blocks    │       │       │       │       │       │ ·
    chunks    ├───────────────┼───────┼───────┼───────┤      3 blocks fit into a step, 1 was left over
                              ↑       ↑       ↑
              a step's last whole block │     the last block that a later prompt can hit
                                      where this prompt leaves what others have

Source: vllm/v1/core/sched/scheduler.py:_mamba_block_aligned_split@0.32.
"""

from __future__ import annotations

from tenuto.sim.engine.config import EngineConfig
from tenuto.sim.engine.step import Step
from tenuto.sim.kv.request import Request


def cut_chunk(
    request: Request,
    start: int,
    num_tokens: int,
    step: Step,
    config: EngineConfig,
    shared_tokens: int | None = None,
) -> int:
    """How many of its next tokens a request computes in this step, if it could compute `num_tokens`.

    `start`: its tokens that are computed. `shared_tokens`: where its prompt leaves what others have, by its
    hit; what the request says, if it runs.
    """
    prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
    if start >= prefill_end:
        return num_tokens
    size = config.kv.block_size
    end = start + num_tokens
    if end < prefill_end:
        most = step.size
        if config.long_prefill_token_threshold > 0:
            most = min(most, config.long_prefill_token_threshold)
        aligned_end = end // size * size
        # A block wider than a step is computed in parts.
        if aligned_end > start or size <= most:
            end = aligned_end
    stops = [(request.num_tokens - 1) // size * size]
    if start % size:
        stops.append((start // size + 1) * size)
    shared_tokens = request.shared_tokens if shared_tokens is None else shared_tokens
    if start < shared_tokens < end:
        stops.append(start + (shared_tokens - start) // size * size)
    end = min((stop for stop in stops if start < stop < end), default=end)
    return max(0, end - start)
