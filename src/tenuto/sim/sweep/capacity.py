"""The most jobs a second that one machine could do, from the work that they bring. Nothing is simulated."""

from __future__ import annotations

from statistics import fmean

from tenuto.sim.cost import StepBatch
from tenuto.sim.machine import build
from tenuto.sim.setup import Setup
from tenuto.sim.sweep.steady import NUM_SAMPLED, make_long_workload
from tenuto.workload.load_options import LoadOptions
from tenuto.workload.schema import Span, count_shared_tokens


def get_most_jps(setup: Setup, load: LoadOptions) -> float:
    """Jobs a second of one machine whose steps are full and which computes no token twice.

    A first guess, mostly a little too high: machines wait for tool calls, and lose KV.
    """
    assert load.jps is not None
    machine = build(setup)
    kv, seconds = machine.make_scheduler().kv, machine.step_cost.seconds
    budget = machine.config.max_num_batched_tokens
    jobs = make_long_workload(load, NUM_SAMPLED / load.jps).jobs
    length = round(
        fmean(turn.num_prompt_tokens + turn.num_output_tokens for job in jobs for turn in job.turns)
    )
    num_fitting = kv.pool.num_blocks // kv.count_most_blocks(length)
    num_seqs = max(1, min(machine.config.max_num_seqs, num_fitting))
    s_per_output = seconds(StepBatch.of(decodes=[length] * num_seqs)) / num_seqs
    total_s = 0.0
    for job in jobs:
        context: tuple[Span, ...] = ()
        for turn in job.turns:
            num_new = turn.num_prompt_tokens - count_shared_tokens(context, turn.prompt)
            step = StepBatch.of(prefills=[(budget, turn.num_prompt_tokens)])
            total_s += seconds(step) * num_new / budget + s_per_output * turn.num_output_tokens
            context = (*turn.prompt, turn.output)
    return sum(job.parent is None for job in jobs) / total_s
