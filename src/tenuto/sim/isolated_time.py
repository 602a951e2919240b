"""How long a job takes alone on a machine that keeps all its KV: the base of its slowdown."""

from __future__ import annotations

from tenuto.sim.cost import StepBatch, StepCost
from tenuto.workload.schema import Job, Span, count_shared_tokens


def get_isolated_time_s(job: Job, step_cost: StepCost, max_num_batched_tokens: int) -> float:
    """Seconds of a job's steps and tool calls when it is alone and each turn's prefix is cached."""
    total_s = 0.0
    context: tuple[Span, ...] = ()
    for turn in job.turns:
        num_cached = min(count_shared_tokens(context, turn.prompt), turn.num_prompt_tokens - 1)
        while num_cached < turn.num_prompt_tokens:
            num_tokens = min(max_num_batched_tokens, turn.num_prompt_tokens - num_cached)
            total_s += step_cost.seconds(StepBatch.of(prefills=[(num_tokens, num_cached)]))
            num_cached += num_tokens
        # The context grows by a token a step, and the cost with it: the middle step is taken for all.
        middle = turn.num_prompt_tokens + turn.num_output_tokens // 2
        total_s += (turn.num_output_tokens - 1) * step_cost.seconds(StepBatch.of(decodes=[middle]))
        total_s += turn.tool_s
        context = (*turn.prompt, turn.output)
    return total_s
