"""Plans as text: a table, the answer in words, and what it depends on."""

from __future__ import annotations

from collections.abc import Sequence

from tenuto.sim.setup import name_gpus
from tenuto.sim.sweep.plan import Effect, Plan, get_best
from tenuto.sim.sweep.point import format_s
from tenuto.sim.sweep.target import Target


def format_plans(plans: Sequence[Plan], target: Target) -> str:
    """The table and the answer."""
    has_prices = any(plan.usd_per_hour is not None for plan in plans)
    price = f" {'$/hour':>8}" if has_prices else ""
    wide = max(18, *(len(name_policy(plan)) for plan in plans))
    lines = [f"{'gpu':11} {'policy':{wide}} {'GPUs':>5}{price}  {'result':34}  with one machine less"]
    for plan in plans:
        count = "none" if plan.num_gpus is None else str(plan.num_gpus)
        cost = f" {'' if plan.usd_per_hour is None else f'{plan.usd_per_hour:.2f}':>8}" if has_prices else ""
        result = str(plan.point)
        if plan.num_gpus is None:
            result = f"{plan.point.num_machines} machines: {result}"
        fewer = "" if plan.fewer is None else str(plan.fewer)
        lines.append(
            f"{name_gpu(plan):11} {name_policy(plan):{wide}} {count:>5}{cost}  {result:34}  {fewer}".rstrip()
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
        f"{'Cheapest' if has_prices else 'Fewest'}: {_name_gpus(best)} with policy "
        f"{name_policy(best)}{'' if best.usd_per_hour is None else f', {best.usd_per_hour:.2f} $/hour'}.",
        f"P95 job time {format_s(best.point.p95_s)} ({format_s(low)} to {format_s(high)} over {len(runs)} "
        f"seeds), P95 TTFT {format_s(best.point.p95_ttft_s)}. Target: {target}.",
        f"{_describe_share(best)} until steady: {min(run.simulated_s for run in runs):.0f} to "
        f"{max(run.simulated_s for run in runs):.0f} s, less a warm-up of "
        f"{min(run.warm_up_s for run in runs):.0f} to {max(run.warm_up_s for run in runs):.0f} s."
        f"{_describe_router(best)}",
        f"Step times: {describe_step_cost(runs[0].step_cost)}.",
    ]
    if num_cut := max(run.num_cut for run in runs):
        lines.append(
            f"{num_cut} turns are too long for this machine and were left out: their jobs end early."
        )
    return "\n".join(lines)


def format_meaning(plans: Sequence[Plan]) -> str:
    """What the plans mean, in a sentence for each kind of machine; the best plan's kind first."""
    best = get_best(plans)
    if best is None:
        return ""
    kinds: dict[tuple[str, str | None], list[Plan]] = {_get_kind(best): []}
    for plan in plans:
        kinds.setdefault(_get_kind(plan), []).append(plan)
    sentences = [_describe_kind(each) for each in kinds.values()]
    return f"In short: {' '.join(sentence for sentence in sentences if sentence)}"


def _get_kind(plan: Plan) -> tuple[str, str | None]:
    return name_gpu(plan), plan.setup.fleet.router if plan.setup.fleet is not None else None


def _describe_kind(plans: Sequence[Plan]) -> str:
    """The best policy on one kind of machine against stock; against the next best if it is stock."""
    best = get_best(plans)
    if best is None:
        return f"No number of {name_gpu(plans[0])} that was tried is enough."
    others = [plan for plan in plans if plan is not best]
    other = next((plan for plan in others if plan.setup.policy == "stock"), get_best(others))
    policy, gpus = name_policy(best), _name_gpus(best)
    if other is None:
        return f"{gpus} {'is' if best.num_gpus == 1 else 'are'} enough with {policy}."
    if other.num_gpus is None:
        return f"{gpus} with {policy}; with {name_policy(other)} no number that was tried is enough."
    p95s = f"{format_s(best.point.p95_s)} against {format_s(other.point.p95_s)}"
    if best.num_gpus != other.num_gpus:
        return f"{gpus} with {policy}, {other.num_gpus} with {name_policy(other)}; P95 job time {p95s}."
    return (
        f"The same number of GPUs, {gpus}, with {policy} and {name_policy(other)}; with {policy} the P95 job "
        f"time {_describe_ratio(best.point.p95_s / other.point.p95_s)} ({p95s})."
    )


def _describe_ratio(ratio: float) -> str:
    if 0.45 <= ratio <= 0.55:
        return "halves"
    percent = abs(round(100 * (ratio - 1)))
    if percent < 5:
        return "hardly changes"
    return f"is {percent} % {'shorter' if ratio < 1 else 'longer'}"


def name_gpu(plan: Plan) -> str:
    """The kind of GPU, or the kinds if several were given."""
    kinds = set(plan.setup.fleet.servers) if plan.setup.fleet is not None else {""}
    return plan.setup.gpu if kinds == {""} else name_gpus(plan.setup, plan.setup.gpu)


def name_policy(plan: Plan) -> str:
    """The policy, and the router if one was simulated."""
    return plan.setup.policy + ("" if plan.setup.fleet is None else f"@{plan.setup.fleet.router}")


def _name_gpus(plan: Plan) -> str:
    name = name_gpu(plan)
    return f"{plan.num_gpus} × {name}" if name == plan.setup.gpu else name


def _describe_share(plan: Plan) -> str:
    if plan.setup.fleet is not None:
        return f"All machines were simulated behind the router {plan.setup.fleet.router}"
    share_jps = plan.point.jps / plan.point.num_machines
    return f"One machine was simulated at its share, {share_jps:.3g} jobs/s,"


def _describe_router(plan: Plan) -> str:
    if plan.setup.fleet is not None:
        return ""
    return " A perfect router with session affinity keeps each job on one machine; --router simulates one."


def describe_step_cost(name: str) -> str:
    """Where step times come from, in words."""
    known = {
        "tables": "measured operator tables (aiconfigurator-core)",
        "roofline": "a roofline model, a rougher guess than measured tables",
    }
    return known.get(name, f"a fit to observed steps, {name}")


def format_effects(effects: Sequence[Effect], plan: Plan) -> str:
    """What the plan depends on."""
    lines = [f"With the same {_name_gpus(plan)}, if:"]
    for effect in effects:
        verdict = "still enough" if effect.is_enough else "not enough"
        lines.append(f"  {effect.name:24} {verdict:13} {effect.point}")
    return "\n".join(lines)
