"""Plans as text: a table, the answer in words, and what it depends on."""

from __future__ import annotations

from collections.abc import Sequence

from tenuto.sim.sweep.plan import Plan, Target, format_s, get_best
from tenuto.sim.sweep.sensitivity import Effect


def format_plans(plans: Sequence[Plan], target: Target) -> str:
    """The table and the answer."""
    has_prices = any(plan.usd_per_hour is not None for plan in plans)
    price = f" {'$/hour':>8}" if has_prices else ""
    lines = [f"{'gpu':11} {'policy':18} {'GPUs':>5}{price}  {'result':34}  with one machine less"]
    for plan in plans:
        count = "none" if plan.num_gpus is None else str(plan.num_gpus)
        cost = f" {'' if plan.usd_per_hour is None else f'{plan.usd_per_hour:.2f}':>8}" if has_prices else ""
        result = str(plan.point)
        if plan.num_gpus is None:
            result = f"{plan.point.num_machines} machines: {result}"
        fewer = "" if plan.fewer is None else str(plan.fewer)
        lines.append(
            f"{plan.setup.gpu:11} {plan.setup.policy:18} {count:>5}{cost}  {result:34}  {fewer}".rstrip()
        )
    return "\n".join((*lines, "", _format_answer(plans, target)))


def _format_answer(plans: Sequence[Plan], target: Target) -> str:
    best = get_best(plans)
    if best is None:
        return f"Nothing that was tried keeps {target}; allow more with --max-machines."
    runs = best.point.runs
    has_prices = all(plan.usd_per_hour is not None for plan in plans if plan.num_gpus is not None)
    low, high = (pick(run.p95_s for run in runs) for pick in (min, max))
    lines = [
        f"{'Cheapest' if has_prices else 'Fewest'}: {best.num_gpus} × {best.setup.gpu} with policy "
        f"{best.setup.policy}{'' if best.usd_per_hour is None else f', {best.usd_per_hour:.2f} $/hour'}.",
        f"P95 job time {format_s(best.point.p95_s)} ({format_s(low)} to {format_s(high)} over {len(runs)} "
        f"seeds), P95 TTFT {format_s(best.point.p95_ttft_s)}. Target: {target}.",
        f"One machine was simulated at its share, {best.point.jps / best.point.num_machines:.3g} jobs/s, "
        f"until it was steady: {min(run.simulated_s for run in runs):.0f} to "
        f"{max(run.simulated_s for run in runs):.0f} s, less a warm-up of "
        f"{min(run.warm_up_s for run in runs):.0f} to {max(run.warm_up_s for run in runs):.0f} s. A router "
        "with session affinity keeps each job on one machine.",
        f"Step times: {describe_step_cost(runs[0].step_cost)}.",
    ]
    if num_cut := max(run.num_cut for run in runs):
        lines.append(
            f"{num_cut} turns are too long for this machine and were left out: their jobs end early."
        )
    return "\n".join(lines)


def describe_step_cost(name: str) -> str:
    """Where step times come from, in words."""
    known = {
        "tables": "measured operator tables (aiconfigurator-core)",
        "roofline": "a roofline model, a rougher guess than measured tables",
    }
    return known.get(name, f"a fit to observed steps, {name}")


def format_effects(effects: Sequence[Effect], plan: Plan) -> str:
    """What the plan depends on."""
    lines = [f"With the same {plan.num_gpus} × {plan.setup.gpu}, if:"]
    for effect in effects:
        verdict = "still enough" if effect.is_enough else "not enough"
        lines.append(f"  {effect.name:24} {verdict:13} {effect.point}")
    return "\n".join(lines)
