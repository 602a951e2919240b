"""Random clients of one scheduler: agents, one-shots, parallel turns, strangers, aborts and resets."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from experiments.fuzz.hostile import make_hints, make_request_id
from experiments.soak.changes import try_changes
from experiments.soak.engine import SoakEngine
from tenuto.core.jobs import UNVERIFIED
from tenuto.vllm.tenants import FIELD, sign
from tests.vllm.conftest import Clock
from tests.vllm.workerless import EOS, make_request

VOCABULARY = (10, 900)
MAX_PROMPT_TOKENS = 480
"""A longer conversation begins anew. Every pool holds a request of this length and its answer."""
FORGED_EVERY = 40
"""Of so many turns of an episode with tenants, two come with a tenant that they only claim."""
MAX_OUTPUT_TOKENS = 150


@dataclass
class Talk:
    """One agent: its prompt grows by its answers and by what its tools return."""

    job_id: str
    tenant: str
    tokens: list[int]
    says: str
    """What it tells the server: its id, an id that others use too, nothing, or nonsense."""
    turn_id: str | None = None
    back_s: float = 0.0


@dataclass
class Mix:
    """How an episode's clients behave: shares and chances per step."""

    num_agents: int
    num_tenants: int
    arrivals: float
    """Turns per step that are sent on average."""
    one_shots: float
    parallel: float
    hostile: float
    aborts: float
    resets: float
    tool_s: float
    step_s: float
    jump: float
    """Chance per step that the clock jumps by minutes."""
    changes: float
    """Chance per step that the operator changes what runs."""


def make_mix(rng: random.Random) -> Mix:
    """An episode's clients."""
    return Mix(
        num_agents=rng.choice((3, 10, 30, 100)),
        num_tenants=rng.choice((1, 1, 3, 20)),
        arrivals=rng.choice((0.3, 0.8, 2.0)),
        one_shots=rng.choice((0.0, 0.1, 0.5)),
        parallel=rng.choice((0.0, 0.05, 0.4)),
        hostile=rng.choice((0.02, 0.02, 0.5)),
        aborts=rng.choice((0.0, 0.02, 0.2)),
        resets=rng.choice((0.0, 0.0005, 0.01)),
        tool_s=rng.choice((0.05, 0.5, 5.0, 60.0)),
        step_s=rng.choice((0.02, 0.1, 0.5)),
        jump=rng.choice((0.0, 0.001)),
        changes=rng.choice((0.0, 0.0, 0.002, 0.03)),
    )


@dataclass
class Traffic:
    """Sends the requests of one episode, and checks what comes back."""

    rng: random.Random
    mix: Mix
    engine: SoakEngine
    clock: Clock
    num_sent: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_resets: int = 0
    num_preempted: int = 0
    num_changes: int = 0
    _talks: list[Talk] = field(default_factory=list)
    _sent: dict[str, tuple[int, Talk | None]] = field(default_factory=dict)
    """Requests under way: the tokens that each asked for, and whose it is."""

    def __post_init__(self) -> None:
        """Make the agents; some share the beginning of their prompts."""
        shared = self._make_tokens(40)
        for number in range(self.mix.num_agents):
            start = shared if self.rng.random() < 0.5 else []
            tenant = f"tenant{self.rng.randrange(self.mix.num_tenants)}"
            says = self.rng.choice(("id", "id", "id", "nothing", "shared", "nonsense"))
            tokens = [*start, *self._make_tokens(self.rng.randrange(5, 90))]
            self._talks.append(Talk(f"job{number}", tenant, tokens, says))

    def act(self) -> None:
        """Do what happens between two steps: time passes, clients send, leave, or reset the cache."""
        rng, mix = self.rng, self.mix
        self.clock.now_s += mix.step_s * rng.random()
        if rng.random() < mix.jump:
            self.clock.now_s += rng.choice((60.0, 700.0, 1e6))
        for _ in range(int(mix.arrivals + rng.random())):
            self._send_any()
        if self._sent and rng.random() < mix.aborts:
            self._abort(rng.choice(sorted(self._sent)))
        if rng.random() < mix.resets:
            self.num_resets += 1
            self.engine.scheduler.reset_prefix_cache(reset_running_requests=rng.random() < 0.5)
        if rng.random() < mix.changes:
            self.num_changes += 1
            try_changes(self.engine.scheduler, rng)

    def collect(self, output: Any) -> None:
        """Take the answers that are complete; raises AssertionError for one of the wrong length."""
        self.num_preempted += len(output.preempted_req_ids or ())
        requests = self.engine.scheduler.requests
        for turn_id in [each for each in self._sent if each not in requests]:
            max_tokens, talk = self._sent.pop(turn_id)
            answer = self.engine.forget(turn_id)
            if len(answer) != max_tokens and not (answer and answer[-1] == EOS):
                raise AssertionError(f"{turn_id} asked for {max_tokens} tokens and got {len(answer)}")
            self.num_finished += 1
            if talk is not None:
                self._go_on(talk, answer)

    def _send_any(self) -> None:
        rng, mix = self.rng, self.mix
        if len(self._sent) > 200 or rng.random() < mix.one_shots:
            if len(self._sent) <= 200:
                self._send(None, self._make_tokens(rng.randrange(1, 120)), self._say_one_shot())
            return
        talk = rng.choice(self._talks)
        is_free = talk.turn_id is None and talk.back_s <= self.clock.now_s
        if is_free or rng.random() < mix.parallel:
            self._send(talk, talk.tokens, self._say(talk), is_parallel=not is_free)

    def _send(
        self, talk: Talk | None, prompt: list[int], hints: dict[str, Any] | None, *, is_parallel: bool = False
    ) -> None:
        rng = self.rng
        self.num_sent += 1
        # The order of ids must not be the order of arrival, and clients choose how an id begins.
        turn_id = f"{make_request_id(rng, rng.randrange(10**6))}-{self.num_sent}"
        max_tokens = rng.choice((1, 2, 8, 20, 40, rng.randrange(1, MAX_OUTPUT_TOKENS)))
        request = make_request(
            turn_id,
            prompt,
            max_tokens=max_tokens,
            priority=rng.randrange(3),
            arrival_time=self.clock.now_s,
            block_size=self.engine.scheduler.hash_block_size,
        )
        # Set here, because vLLM would refuse some of the worst values itself.
        tenant, request.sampling_params.extra_args = self._sign(talk, hints)
        request.skip_reading_prefix_cache = rng.random() < 0.02
        self._sent[turn_id] = (max_tokens, None if is_parallel else talk)
        if talk is not None and not is_parallel:
            talk.turn_id = turn_id
        self.engine.scheduler.add_request(request)
        job = self.engine.scheduler.driver._turns[turn_id].job
        if job.tenant != tenant:
            raise AssertionError(f"{turn_id} is of tenant {tenant!r}, and its job of {job.tenant!r}")

    def _sign(
        self, talk: Talk | None, hints: dict[str, Any] | None
    ) -> tuple[str | None, dict[str, Any] | None]:
        """The tenant that a turn must have, and its hints as they come from an API server."""
        if self.mix.num_tenants == 1:
            return (UNVERIFIED if FIELD in (hints or {}) else None), hints
        kind = self.num_sent % FORGED_EVERY
        tenant = "nobody" if talk is None else talk.tenant
        if kind == 0:
            return UNVERIFIED, hints if hints is None else {**hints, FIELD: f"00:{tenant}"}
        if kind == 1:
            # The signature of another tenant.
            return UNVERIFIED, {**(hints or {}), FIELD: sign("else")[FIELD].replace(":else", f":{tenant}")}
        return tenant, {**(hints or {}), **sign(tenant)}

    def _abort(self, turn_id: str) -> None:
        self.num_aborted += 1
        _, talk = self._sent.pop(turn_id)
        self.engine.abort(turn_id)
        self.engine.forget(turn_id)
        if talk is not None:
            talk.turn_id = None

    def _go_on(self, talk: Talk, answer: list[int]) -> None:
        """The agent's tool runs, and its next prompt is this one, the answer and the tool's output."""
        rng = self.rng
        talk.turn_id = None
        talk.back_s = self.clock.now_s + self.mix.tool_s * rng.expovariate(1.0)
        kept = talk.tokens if rng.random() < 0.9 else talk.tokens[: rng.randrange(1, len(talk.tokens) + 1)]
        talk.tokens = [*kept, *answer, *self._make_tokens(rng.randrange(1, 60))]
        if len(talk.tokens) > MAX_PROMPT_TOKENS:
            talk.tokens = self._make_tokens(rng.randrange(5, 90))
            talk.job_id = f"job{self.num_sent}"

    def _say(self, talk: Talk) -> dict[str, Any] | None:
        if self.rng.random() < self.mix.hostile or talk.says == "nonsense":
            return make_hints(self.rng)
        if talk.says == "nothing":
            return None
        hints: dict[str, Any] = {"job_id": talk.job_id if talk.says == "id" else "shared"}
        if self.mix.num_tenants > 1:
            hints["tenant"] = "somebody else"
        kind = self.rng.random()
        if kind < 0.7:
            hints["tool"] = self.rng.choice(("ls", "cat", "pytest", "make"))
        elif kind < 0.8:
            hints["is_last_step"] = 1
        if self.rng.random() < 0.2:
            hints["expected_tool_seconds"] = self.rng.choice((0.01, 1, 60, 31_536_000))
        return hints

    def _say_one_shot(self) -> dict[str, Any] | None:
        kind = self.rng.random()
        if kind < 0.5:
            return None
        # Ids that never return; some say that a tool follows, as a hoarder would.
        return {"job_id": f"once{self.num_sent}", "tool": "x", "expected_tool_seconds": 31_536_000}

    def _make_tokens(self, num_tokens: int) -> list[int]:
        # Few different ones, so that prompts share blocks now and then.
        first = self.rng.randrange(*VOCABULARY)
        if self.rng.random() < 0.3:
            return [first] * num_tokens
        return [self.rng.randrange(*VOCABULARY) for _ in range(num_tokens)]
