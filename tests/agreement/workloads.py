"""Two small workloads: turns one after the other, and a crowd that does not fit the KV cache."""

from __future__ import annotations

from itertools import pairwise

from tenuto.workload import After, Job, Span, TurnSpec, Workload

SYSTEM_TOKENS = 64


def make_job(name: str, arrival_s: float, turns: list[tuple[int, int]], **more: tuple[After, ...]) -> Job:
    """A job whose turns read so many new tokens and answer with so many; `afterN` belongs to turn N."""
    prompt: tuple[Span, ...] = (Span("system", SYSTEM_TOKENS),)
    made = []
    for number, (num_new_tokens, num_output_tokens) in enumerate(turns):
        prompt = (*prompt, Span(f"{name}/text{number}", num_new_tokens))
        output = Span(f"{name}/out{number}", num_output_tokens)
        is_last = number == len(turns) - 1
        made.append(
            TurnSpec(
                prompt,
                output,
                tool=None if is_last else "ls",
                tool_s=0.0 if is_last else 0.02,
                after=more.get(f"after{number}", ()),
            )
        )
        prompt = (*prompt, output)
    return Job(name, arrival_s, tuple(made))


def make_serial() -> Workload:
    """Three jobs that take turns: a0 b0 c0 a1 b1 c1 …, never two at once.

    What is cached then depends on the order alone and not on how long steps take: real time and virtual
    time must give the same hits. Together they hold about 70 blocks at the end.
    """
    names, turns = "abc", [(40, 20), (50, 20), (37, 25), (61, 9)]
    order = [(name, number) for number in range(len(turns)) for name in names]
    waits: dict[str, dict[str, tuple[After, ...]]] = {name: {} for name in names}
    for (before, turn), (name, number) in pairwise(order):
        waits[name][f"after{number}"] = (After(before, turn, "finished"),)
    return Workload("serial", tuple(make_job(name, 0.0, turns, **waits[name]) for name in names))


def make_crowd() -> Workload:
    """Six jobs close together, whose answers grow until the KV cache is full: turns are preempted."""
    turns = [(90, 60), (33, 80), (47, 30)]
    return Workload("crowd", tuple(make_job(f"job{n}", 2.5 * n, turns) for n in range(6)))


def make_busy() -> Workload:
    """Twelve jobs whose long prompts arrive while others decode, so that the step size matters."""
    turns = [(900, 40), (300, 60), (500, 40), (200, 30)]
    return Workload("busy", tuple(make_job(f"job{n}", 0.7 * n, turns) for n in range(12)))
