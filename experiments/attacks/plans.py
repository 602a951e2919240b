"""What attackers send, beside agents and a plain probe: one workload for the simulator and live servers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tenuto.core.requests import Hints
from tenuto.workload.generators.fixed_lengths import ab8_jobs
from tenuto.workload.hints import SayHints
from tenuto.workload.schema import Job, Prompt, Span, TurnSpec, Workload
from tenuto.workload.transform import scale_lengths

YEAR_S = 365 * 86_400.0
LONG_TOKENS = 3000
START_TOKENS = 64
"""A common beginning of prompts; at least one block of the cache."""


@dataclass(frozen=True)
class Attack:
    """Streams of requests; each sends the next one as soon as the one before is answered."""

    num_ids: int = 0
    """Ids that the streams share; 0: every conversation has an id of its own."""
    num_streams: int = 0
    num_turns: int = 0
    """Requests of one stream."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    says_last: bool = False
    """Whether each request says that its job ends; else it says that a tool follows."""
    num_returns: int = 0
    """How often a conversation goes on, with all of its text so far, before the stream begins another."""
    expected_tool_s: float | None = None
    """For how long each request asks to be kept."""


ATTACKS = {
    "none": Attack(),
    "busy": Attack(4, 32, 60, 1500, 60),
    "constant": Attack(1, 48, 40, 1500, 60),
    "long": Attack(2, 24, 12, 3000, 400),
    "fresh": Attack(0, 40, 40, 2000, 16),
    "one-shots": Attack(0, 48, 50, 600, 40, says_last=True),
    "hoard": Attack(0, 40, 50, 800, 8, num_returns=1),
    "year": Attack(0, 40, 40, 2000, 16, expected_tool_s=YEAR_S),
}
"""busy: old ids, each with many requests at any time. constant: one id for everything, all in parallel. long:
long answers. fresh: ids that never come back. one-shots: short requests, each its own job. hoard: 1,000 ids,
each of which comes back once and then never again. year: ids that ask to be kept for a year."""


@dataclass(frozen=True)
class Scene:
    """The engine and the load that an attack meets."""

    window_s: float = 60.0
    """Agents and probes arrive for so long."""
    probe_every_s: float = 2.0
    long_every_s: float = 10.0
    """Plain requests of `LONG_TOKENS`, which take more than one step, arrive so often."""
    agents_per_s: float = 0.8
    kv_tokens: int = 80_000
    num_seqs: int = 24
    lengths: float = 1.0
    """Factor on the length of every text."""
    strength: float = 1.0
    """Factor on the number of an attack's streams."""
    seed: int = 0
    """Moves each arrival by a random part of the time to the next; 0: arrivals are even."""
    no_calls: bool = False
    """Whether the attack's answers contain no tool call. Then its requests look like plain ones."""
    same_start: bool = False
    """Whether the attack's prompts begin like the plain requests of `LONG_TOKENS`. Then they are one kind."""

    @property
    def start(self) -> Prompt:
        """What the prompts of the attack and of the long plain requests begin with."""
        # Its length is scaled with all others, and must still fill a block.
        return (Span("start", round(START_TOKENS / self.lengths)),) if self.same_start else ()


def make_workload(attack: Attack, scene: Scene) -> Workload:
    """The agents, the probes and the attack."""
    rng = random.Random(scene.seed)

    def arrive(number: int, gap_s: float) -> float:
        return (number + (rng.random() if scene.seed else 0.0)) * gap_s

    num_agents = int(scene.window_s * scene.agents_per_s)
    agents = ab8_jobs([arrive(number, 1 / scene.agents_per_s) for number in range(num_agents)])

    def make_probes(
        kind: str, first_s: float, every_s: float, start: Prompt, num_tokens: int, num_out: int
    ) -> list[Job]:
        names = [f"{kind}-{number}" for number in range(int(scene.window_s / every_s))]
        return [
            Job(
                name,
                first_s + arrive(number, every_s),
                (TurnSpec((*start, Span(name, num_tokens)), Span(f"{name}/out", num_out)),),
            )
            for number, name in enumerate(names)
        ]

    probes = make_probes("probe", 1.0, scene.probe_every_s, (), 4, 4)
    long_probes = make_probes("long-probe", 5.0, scene.long_every_s, scene.start, LONG_TOKENS, 20)
    attack = replace(attack, num_streams=round(attack.num_streams * scene.strength))
    streams = _make_streams(attack, scene.start, calls=not (attack.says_last or scene.no_calls))
    long = scale_lengths(Workload("attack", (*agents, *long_probes, *streams)), scene.lengths)
    return Workload("attack", (*long.jobs, *probes))


def make_say(attack: Attack) -> SayHints:
    """What each client says: agents their id and their last turn, probes nothing, the attack its id."""

    def say(job: Job, index: int) -> Hints:
        if is_probe(job.job_id) or is_long_probe(job.job_id):
            return Hints()
        if is_agent(job.job_id):
            return Hints(job_id=job.job_id, is_last=index == len(job.turns) - 1)
        conversation = index // (1 + attack.num_returns)
        name = job.job_id.split("~")[0] if attack.num_ids else f"{job.job_id}/{conversation}"
        is_last = True if attack.says_last else None
        return Hints(job_id=name, is_last=is_last, expected_tool_s=attack.expected_tool_s)

    return say


def is_probe(job_id: str) -> bool:
    """Whether this job is a probe."""
    return job_id.startswith("probe")


def is_long_probe(job_id: str) -> bool:
    """Whether this job is a plain request of several steps."""
    return job_id.startswith("long-probe")


def is_agent(job_id: str) -> bool:
    """Whether this job is an agent's."""
    return job_id.startswith("ab8")


def _make_streams(attack: Attack, start: Prompt, *, calls: bool) -> Iterator[Job]:
    """A stream is a job of the workload; which job the engine takes it for, `make_say` tells."""
    for stream in range(attack.num_streams):
        name = f"attack-{stream % attack.num_ids if attack.num_ids else stream}"
        turns: list[TurnSpec] = []
        for index in range(attack.num_turns):
            new = Span(f"{name}/{stream}/{index}", attack.prompt_tokens)
            goes_on = index % (1 + attack.num_returns)
            prompt: Prompt = turns[-1].followed_by(new) if goes_on else (*start, new)
            output = Span(f"{name}/{stream}/{index}/out", attack.output_tokens)
            turns.append(TurnSpec(prompt, output, tool="tool" if calls else None))
        yield Job(f"{name}~{stream}", 0.5 + 0.01 * stream, tuple(turns))
