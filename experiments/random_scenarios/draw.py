"""The prior: how a scenario is drawn. docs/random_scenarios.md says it in a table.

A scenario is a machine, a mixture of kinds of jobs, a way of arriving, and a load. Scenario `n` of a seed
depends on the seed and `n` only, so a longer run of a seed begins as a shorter one did. Lengths and times
are log-normal or log-uniform over what public traces of agents and chats span; no number is fitted to a
policy. Where the drawn machine cannot serve the drawn jobs at all, machine and jobs are drawn again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from experiments.published_memory import with_published_kv
from tenuto.core.errors import ConfigError
from tenuto.sim.hardware.gpus import GPUS
from tenuto.sim.hardware.models import bundled_models, load_model
from tenuto.sim.machine import build
from tenuto.sim.setup import Setup
from tenuto.workload.schema import After, Job, Span, TurnSpec, Workload
from tenuto.workload.transform import arrival_times, scale_tools

HALF_OF_THEM = "llama-3.1-8b", "qwen3-8b"
"""Half of the scenarios have a model of 8B, the size that most single cards serve."""
AGENTS = ("agents", "other agents")
Seed = int | str
"""Of scenarios: a number; or `people-` and a number, where most jobs are people's and plain requests."""
PEOPLE = "people-"
MAX_TURNS = 60
MAX_TOOL_S = 300.0
RELEASE: Literal["0.32", "0.33"] = "0.33"
"""Of vLLM, whose scheduler is simulated."""
MIN_CONTEXTS = 3
"""A cache that does not hold so many of the longest contexts is not what anybody serves agents on."""
SMALLEST_CACHE = 0.1
"""The least share of the room for KV that a scenario has. A run is short: what a large cache shows over
days, a small one shows in its 2,000 turns. And GPUs are shared, with other models, adapters and drafts."""
LONGEST_SHARE = 0.25
"""No context is longer than this share of the cache, or than the model allows."""


@dataclass(frozen=True)
class Spread:
    """A log-normal length or time."""

    mean: float
    cv: float
    """Coefficient of variation."""

    def draw(self, rng: random.Random) -> float:
        """One value."""
        variance = math.log(1 + self.cv**2)
        return rng.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance))

    def draw_tokens(self, rng: random.Random) -> int:
        """One length, at least a token."""
        return max(1, round(self.draw(rng)))


@dataclass(frozen=True)
class Kind:
    """One kind of jobs: agents, people who chat, or plain requests of one turn."""

    name: str
    share: float
    """Of the jobs."""
    turns: str
    """How their number is drawn: fixed, geometric or lognormal."""
    mean_turns: float
    shared_tokens: int
    """The system prompt that all jobs of the kind share."""
    first: Spread
    """Tokens of the first prompt beside it."""
    growth: Spread
    """New tokens of each later prompt, beside the answer before it."""
    output: Spread
    tools: tuple[tuple[str, Spread], ...] = ()
    """Tools, each as likely as another, with the seconds that a call takes. None: people, or one turn."""
    think: Spread | None = None
    """The seconds that a person takes between two turns."""
    sub_agents: float = 0.0
    """How likely a turn is to start one to three sub-agents, for which its job waits."""


@dataclass(frozen=True)
class Scenario:
    """A machine under a mixture of jobs. The rate at which they arrive is found by probing."""

    seed: Seed
    number: int
    setup: Setup
    kinds: tuple[Kind, ...]
    arrival: str
    """poisson, gamma:CV, or ramp: from a third to five thirds of the mean rate."""
    hints: str
    load: float
    """The rate as a share of what stock vLLM can do; `runs.probe` says what that is."""
    max_context: int

    @property
    def name(self) -> str:
        """As reports print it."""
        return f"{self.seed}/{self.number}"

    def describe(self) -> str:
        """One line of what is in it."""
        setup = self.setup
        kinds = "; ".join(
            f"{each.share:.0%} {each.name}: {each.turns} {each.mean_turns:.0f} turns, "
            f"{each.shared_tokens:,} + {each.first.mean:,.0f} + {each.growth.mean:,.0f} a turn "
            f"→ {each.output.mean:,.0f}" + _describe_waits(each)
            for each in self.kinds
        )
        host = f"{setup.host_gb:.0f} GB host" if setup.host_gb else "no host memory"
        return (
            f"{setup.gpu}"
            + (f" × {setup.tp}" if setup.tp > 1 else "")
            + f", {setup.model}, {setup.kv_tokens:,} tokens of cache, {host}, "
            f"{self.arrival}, hints {self.hints}, load {self.load:.2f}; {kinds}"
        )


def _describe_waits(kind: Kind) -> str:
    if kind.think is not None:
        return f", thinks {kind.think.mean:.0f} s"
    if not kind.tools:
        return ""
    longest, shortest = (pick(each.mean for _, each in kind.tools) for pick in (max, min))
    tools = f", {len(kind.tools)} tools of {shortest:.2g} to {longest:.2g} s"
    return tools + (", sub-agents" if kind.sub_agents else "")


@dataclass(frozen=True)
class Flow:
    """How a scenario's jobs come; `runs.probe` finds it."""

    rate: float
    """Jobs a second, in the mean."""
    num_jobs: int
    """Without the sub-agents that they start."""
    waits: float = 1.0
    """Tools and people take so many times as long as drawn: less where the jobs would else hardly load the
    engine."""


def draw_scenario(seed: Seed, number: int) -> Scenario:
    """Scenario `number` of a seed."""
    # A text seeds the generator through SHA-512, which gives the same seed in every process.
    rng = random.Random(f"scenario/{seed}/{number}")
    draw_shares = _draw_shares if isinstance(seed, int) else _draw_more_people
    while True:
        setup = _draw_machine(rng)
        cache = get_cache_tokens(setup)
        share = _log_uniform(rng, SMALLEST_CACHE, 1.0)
        kinds = _draw_kinds(rng, *draw_shares(rng))
        arrival = rng.choice(("poisson", "poisson", f"gamma:{rng.uniform(2, 5):.1f}", "ramp"))
        hints = rng.choice(("none", "last", "tool"))
        load = rng.uniform(0.6, 1.5)
        if cache is None:
            continue
        cache = round(share * cache)
        setup = replace(setup, kv_tokens=cache)
        max_model_len = build(setup).config.kv.max_model_len
        max_context = min(max_model_len - 1, int(cache * LONGEST_SHARE))
        longest = max(each.shared_tokens + each.first.mean + each.output.mean for each in kinds)
        if longest * MIN_CONTEXTS > cache or longest > max_context:
            continue
        return Scenario(seed, number, setup, kinds, arrival, hints, load, max_context)


def get_cache_tokens(setup: Setup) -> int | None:
    """Tokens that the KV cache holds; None where the model does not fit, or `tp` does not divide it."""
    try:
        config = build(with_published_kv(setup)).config.kv
    except ConfigError:
        return None
    return config.num_blocks * config.block_size


def _draw_machine(rng: random.Random) -> Setup:
    gpu = rng.choice(sorted(GPUS))
    model = rng.choice(HALF_OF_THEM if rng.random() < 0.5 else bundled_models())
    tp = rng.choice((1, 1, 1, 2, 4))
    host_gb = 0.0 if rng.random() < 0.5 else round(_log_uniform(rng, 50, 400))
    if any(window is not None for window in load_model(model).windows):
        # Host memory of models whose layers differ takes the simulator minutes a run.
        host_gb = 0.0
    return Setup(gpu=gpu, model=model, tp=tp, host_gb=host_gb, vllm=RELEASE)


def _draw_shares(rng: random.Random) -> tuple[float, float]:
    """Of the jobs, the share of plain requests, and that of people."""
    plain = 0.0 if rng.random() < 0.4 else rng.uniform(0.1, 0.6)
    people = 0.0 if rng.random() < 0.75 else rng.uniform(0.1, 0.5)
    return plain, people * (1 - plain)


def _draw_more_people(rng: random.Random) -> tuple[float, float]:
    """The same where agents are the fewer."""
    both = rng.uniform(0.5, 0.9)
    plain = both * rng.choice((0.0, 1.0, rng.random(), rng.random()))
    return plain, both - plain


def _draw_kinds(rng: random.Random, plain: float, people: float) -> tuple[Kind, ...]:
    kinds = []
    if plain:
        kinds.append(_draw_plain(rng, plain))
    if people:
        kinds.append(_draw_people(rng, people))
    rest = 1 - sum(each.share for each in kinds)
    num = rng.choice((1, 1, 2))
    first = rng.uniform(0.3, 0.7) if num == 2 else 1.0
    for name, share in zip(AGENTS, (first, 1 - first), strict=True):
        if share > 0:
            kinds.append(_draw_agents(rng, name, rest * share))
    return tuple(kinds)


def _draw_agents(rng: random.Random, name: str, share: float) -> Kind:
    tools = tuple(
        (f"{name} {index}", Spread(_log_uniform(rng, 0.1, 30), rng.choice((0.3, 1.0, 2.0, 4.0))))
        for index in range(rng.randint(1, 6))
    )
    return Kind(
        name=name,
        share=share,
        turns=rng.choice(("fixed", "geometric", "lognormal")),
        mean_turns=_log_uniform(rng, 3, 25),
        shared_tokens=0 if rng.random() < 0.3 else round(_log_uniform(rng, 200, 20_000)),
        first=Spread(_log_uniform(rng, 200, 8000), rng.uniform(0.2, 1.2)),
        growth=Spread(_log_uniform(rng, 50, 3000), rng.uniform(0.3, 1.5)),
        output=Spread(_log_uniform(rng, 30, 800), rng.uniform(0.3, 1.2)),
        tools=tools,
        sub_agents=0.15 if rng.random() < 0.2 else 0.0,
    )


def _draw_people(rng: random.Random, share: float) -> Kind:
    return Kind(
        name="people",
        share=share,
        turns="geometric",
        mean_turns=_log_uniform(rng, 2, 8),
        shared_tokens=0 if rng.random() < 0.5 else round(_log_uniform(rng, 100, 2000)),
        first=Spread(_log_uniform(rng, 100, 4000), 1.0),
        growth=Spread(_log_uniform(rng, 30, 300), 1.0),
        output=Spread(_log_uniform(rng, 100, 600), 0.7),
        think=Spread(_log_uniform(rng, 10, 60), 1.0),
    )


def _draw_plain(rng: random.Random, share: float) -> Kind:
    return Kind(
        name="plain",
        share=share,
        turns="fixed",
        mean_turns=1,
        shared_tokens=0 if rng.random() < 0.5 else round(_log_uniform(rng, 100, 4000)),
        first=Spread(_log_uniform(rng, 30, 8000), rng.uniform(0.3, 1.2)),
        growth=Spread(1, 0.1),
        output=Spread(_log_uniform(rng, 10, 600), rng.uniform(0.3, 1.0)),
    )


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def make_jobs(scenario: Scenario, flow: Flow, repeat: int = 0) -> Workload:
    """The jobs of a scenario. Job `n` depends on the scenario, `repeat` and `n`."""
    times = _get_arrivals(scenario, flow, repeat)
    shares = [each.share for each in scenario.kinds]
    jobs: list[Job] = []
    for number, arrival_s in zip(range(flow.num_jobs), times, strict=False):
        rng = random.Random(f"jobs/{scenario.name}/{repeat}/{number}")
        kind = rng.choices(scenario.kinds, shares)[0]
        jobs += _make_job(f"{kind.name}-{number}", kind, arrival_s, scenario.max_context, rng)
    workload = Workload(f"random {scenario.name}", tuple(jobs))
    return workload if flow.waits == 1.0 else scale_tools(workload, flow.waits)


def _get_arrivals(scenario: Scenario, flow: Flow, repeat: int) -> Iterator[float]:
    seed = int(str(scenario.seed).removeprefix(PEOPLE)) * 1_000_003 + scenario.number * 101 + repeat
    if scenario.arrival != "ramp":
        return arrival_times(scenario.arrival, flow.rate, seed)
    return _ramp(arrival_times("poisson", 1.0, seed), flow.num_jobs, flow.rate)


def _ramp(even: Iterator[float], num_jobs: int, rate: float) -> Iterator[float]:
    """Times whose rate grows from a third to five thirds of `rate`, from times at one a second."""
    window_s = num_jobs / rate
    for time in even:
        # rate/3·t + (4/3·rate)·t²/(2·window) jobs have come by t.
        a, b = 2 / 3 * rate / window_s, rate / 3
        yield (math.sqrt(b * b + 4 * a * time) - b) / (2 * a)


def _draw_turns(kind: Kind, rng: random.Random) -> int:
    if kind.turns == "fixed":
        number = round(kind.mean_turns)
    elif kind.turns == "geometric":
        number = 1 + int(rng.expovariate(1 / max(0.5, kind.mean_turns - 0.5)))
    else:
        number = Spread(kind.mean_turns, 0.8).draw_tokens(rng)
    return min(MAX_TURNS, max(1, number))


def _make_job(
    name: str, kind: Kind, arrival_s: float, max_context: int, rng: random.Random, parent: str | None = None
) -> list[Job]:
    """A job, and the sub-agents that it starts. It ends before its context is too long."""
    head = (Span(f"{kind.name}/system", kind.shared_tokens),) if kind.shared_tokens else ()
    turns: list[TurnSpec] = []
    children: list[Job] = []
    awaited: tuple[After, ...] = ()
    for index in range(_draw_turns(kind, rng)):
        output = Span(f"{name}/out{index}", kind.output.draw_tokens(rng))
        if turns:
            prompt = turns[-1].followed_by(Span(f"{name}/new{index}", kind.growth.draw_tokens(rng)))
        else:
            prompt = (*head, Span(f"{name}/task", kind.first.draw_tokens(rng)))
        if sum(span.num_tokens for span in prompt) + output.num_tokens > max_context:
            if turns:
                break
            # The first prompt of a job that would not fit is as long as fits.
            room = max_context - kind.shared_tokens - output.num_tokens
            prompt = (*head, Span(f"{name}/task", max(1, room)))
        tool, wait_s = _draw_wait(kind, rng)
        turns.append(TurnSpec(prompt, output, tool=tool, tool_s=wait_s, after=awaited))
        started = []
        if parent is None and rng.random() < kind.sub_agents:
            started = _start_children(name, kind, index, arrival_s, max_context, rng)
        awaited = tuple(After(each.job_id, len(each.turns) - 1, "finished") for each in started)
        children += started
    turns[-1] = replace(turns[-1], tool=None, tool_s=0.0)
    # Who is started by the last turn has nobody who waits for it; it runs all the same.
    return [Job(name, arrival_s, tuple(turns), parent=parent), *children]


def _start_children(
    name: str, kind: Kind, index: int, arrival_s: float, max_context: int, rng: random.Random
) -> list[Job]:
    small = replace(kind, mean_turns=max(1.0, kind.mean_turns / 3), sub_agents=0.0)
    found = []
    for number in range(rng.randint(1, 3)):
        child_name = f"{name}/{index}.{number}"
        (child,) = _make_job(child_name, small, arrival_s, max_context, rng, parent=name)
        first = replace(child.turns[0], after=(After(name, index, "finished"),))
        found.append(replace(child, turns=(first, *child.turns[1:])))
    return found


def _draw_wait(kind: Kind, rng: random.Random) -> tuple[str | None, float]:
    if kind.tools:
        tool, spread = rng.choice(kind.tools)
        return tool, min(MAX_TOOL_S, spread.draw(rng))
    return None, 0.0 if kind.think is None else min(MAX_TOOL_S, kind.think.draw(rng))
