"""How many tokens a step should have, while some decode and others have prompts to compute.

A step of T prefill tokens takes about

    f(T) = what decoding alone takes + fixed + T · token       seconds

`fixed` is below zero where prefill rides along with the pass over the weights, and above it where a step that
mixes both has a cost of its own. Per prefill token

- those who wait for prefill, m turns, lose the step, f(T) / T each;
- those who decode, n turns, lose what the step is longer than theirs, (f(T) − f(0)) / T each. How many
  these are is a matter of T as well: while there is always more to compute, T tokens begin T / w turns a
  step, and each decodes for L steps, with w the tokens that a turn has to compute and L those that it
  generates. So n / T is L / w then, and no more than that at other times. There is always more when one full
  step follows another. If steps that mix both have a cost of their own, this is asked of steps of T tokens
  (`full_shares`): short prompts fill small steps, and would else keep them small for ever;
- turns begin and end with a step. One that arrives waits for half a step on average, and so does the one
  whose last tokens share a step with others.

The best T has the least loss of all together. Long outputs want small steps, short ones and long queues large
ones.

Plain requests, those of jobs that call no tools, shall not pay for this. What waits of them, and what stock
vLLM would compute in one step, gets room of its own in the next step. No prompt may then take more than the
longest of them or the chosen size, so that a long prompt leaves this room to them. A stream of short plain
requests therefore has the steps of stock vLLM.

m counts those who would start if only prefill were faster, not those who wait for memory, and where mixing
costs something, for each of them another one who comes meanwhile; or those to come while the engine is
busy, if they are more: (2 − ρ) · ρ / (2 · (1 − ρ)²) turns, with ρ the share of the time in full steps (the
derivative of the mean wait of Pollaczek and Khinchine, by the time of service).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from tenuto.core.engine import ADAPTIVE, StepChooser, StepSize, StepTokens
from tenuto.core.types import EngineView, StepView, Turn
from tenuto.estimators.returns import PlainKinds
from tenuto.estimators.step_times import StepTimes

LATEST_STEP_WEIGHT = 0.02
"""Weight of the latest step in the moving averages."""
MAX_WEIGHT = 1e9
"""Before a step weighs more, all weights are made smaller: once in a thousand steps."""


class FullShares:
    """How often there is enough to compute for a step of a given size, whatever size steps have now.

    The share of steps that are full says little of other sizes: a prompt of 700 tokens fills a step of 512,
    and none of 1,024. So the tokens are counted that arrived and are not computed yet. A step that is not
    full leaves none of them: what still waits then waits for memory, or has left.

    Steps come far more often than questions. So no share is made smaller at each step: a step weighs more
    than the one before it, and counts once, for the largest size that it fills.

    O(log sizes) a step.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes`: tokens of a step, from the smallest to the largest."""
        self._sizes = tuple(sizes)
        self._weight = 1.0
        """Of the latest step."""
        self._full = 0.0
        """The weight of the steps that were full, at the size that they had."""
        self._filled = [0.0] * (len(self._sizes) + 1)
        """The weight of the steps by how many of the sizes they fill."""
        self._num_left = 0
        """Prompt tokens that are still to compute."""
        self._num_new = 0
        """Of these, those that arrived since the latest step."""

    def observe_arrival(self, num_new_tokens: int) -> None:
        """A turn arrived, with so many tokens to compute."""
        self._num_left += num_new_tokens
        self._num_new += num_new_tokens

    def observe_step(self, num_tokens: int, num_requests: int, *, is_full: bool) -> None:
        """Count one step: its tokens, and its requests (each counts as one that decodes)."""
        num_left = max(0, self._num_left - max(0, num_tokens - num_requests))
        self._num_left = num_left if is_full else min(num_left, self._num_new)
        self._num_new = 0
        self._weight /= 1 - LATEST_STEP_WEIGHT
        if self._weight > MAX_WEIGHT:
            self._full /= self._weight
            self._filled = [each / self._weight for each in self._filled]
            self._weight = 1.0
        if is_full:
            self._full += self._weight
            num_tokens += num_left
        self._filled[bisect_right(self._sizes, num_tokens)] += self._weight

    @property
    def full_share(self) -> float:
        """The share of steps that were full, at the size that they had."""
        return LATEST_STEP_WEIGHT * self._full / self._weight

    def get(self, size: int) -> float:
        """The share of steps that would be full at this size: of the largest known size up to it, else 1."""
        num_sizes = bisect_right(self._sizes, size)
        return LATEST_STEP_WEIGHT * sum(self._filled[num_sizes:]) / self._weight if num_sizes else 1.0

    def __repr__(self) -> str:
        sums = (self._weight, self._full, self._filled)
        return f"FullShares({sums!r}, {self._num_left!r}, {self._num_new!r})"


MIN_STEP_TOKENS = 512
"""Smaller steps gain nothing on GPUs from the A100 to the B200: kernels lose what decoding gains."""
SMALL_STEP_TOKENS = 256
"""Such steps are better where they compute prompts nearly as fast (on CPUs decoding hardly counts), or where
prefill is cheap in them: a turn holds its memory for some steps longer than its prompt takes."""
SAME_SPEED = 0.85
"""Share of the speed that is as good as all of it. Beside 14 who decode at 10,000 tokens, steps of 256 reach
0.6 to 0.75 of the speed of steps of 512 tokens on GPUs from the A100 to the B200, 0.88 on an RTX 5090, and
0.96 on a CPU. With 0.8, an H200 where few decode loses 3 % (`ab8`, 15 jobs/s)."""
CHEAP = 0.75
"""A token is cheap in small steps if it takes at most this share of what it takes in steps of the least size:
then prefill rides along with the pass over the weights. It takes half on an A100 of 40 GB, and 0.78 or more
on the other GPUs."""
SIZES = tuple(MIN_STEP_TOKENS << n for n in range(8))
"""The sizes to choose from: up to 65,536 tokens, beside the engine's own budget."""
FOLLOWERS = 2
"""Where mixed steps have a cost of their own, who waits counts so often, for those who come meanwhile and
wait as well. Chosen on `ab8` at 3 jobs/s with the pessimistic step cost, 1 % worse without; if it held
everywhere, it would cost up to 7 % (`ab8` on an H200, 6 jobs/s, default step cost)."""
HELD_SHARE = 0.25
"""A turn that waits takes the room of what it computes, and of this share of what it hits: that is there, or
was lost, and its job grows. With 0, steps grow to 4,096 tokens for turns that memory cannot hold, 3 % on
`ab8` at 15 jobs/s on an H200, which it was chosen on. With 1, an L40S at 3 jobs/s loses 2 %."""
MAX_BUSY_SHARE = 0.8
"""Bound of the busy share; beyond it, the current queue says more than the expected queue."""
FIRST_STEP_TOKENS = 2048
"""Before steps were observed: vLLM's default on small GPUs, which no engine suffers from for long."""
TYPICAL_TURN = (2000.0, 100.0)
"""Tokens that a turn computes and generates, as one turn seen before the first: of agents, in public
traces."""
BUSY_S = 30.0
"""Time over which the share of time in full steps is averaged."""
LOOK_EVERY = 64
"""One step in so many is twice as large as it should be."""
RATE_S = 30.0
"""Time over which the rate of turns is averaged."""
DECAY = 0.99
"""Factor on a turn's weight for each later turn."""
MAX_PLAIN = 64
"""Of the plain requests that wait, so many are looked at before each step: more do not fit into one."""


def make_step_chooser(step_tokens: StepTokens | None) -> StepChooser | None:
    """The chooser of adaptive steps; None where the size of steps is fixed."""
    return AdaptiveSteps() if step_tokens == ADAPTIVE else None


@dataclass
class TurnSizes:
    """Mean tokens that turns compute, generate and hold, of the latest hundred or so."""

    weight: float = 1.0
    computed: float = TYPICAL_TURN[0]
    generated: float = TYPICAL_TURN[1]
    held: float = sum(TYPICAL_TURN)
    """Of the whole context, what was hit in the cache included."""
    _num_recent: float = 0.0
    _since_s: float | None = None
    _now_s: float = 0.0

    def observe_time(self, now_s: float) -> None:
        """The time of a step."""
        if self._since_s is None:
            self._since_s = now_s
        self._num_recent *= math.exp((self._now_s - now_s) / RATE_S) if now_s > self._now_s else 1.0
        self._now_s = max(now_s, self._now_s)

    def get_rate(self) -> float:
        """Turns that finish a second, of late; so many also come, or a few more."""
        elapsed_s = self._now_s - (self._now_s if self._since_s is None else self._since_s)
        return self._num_recent / (RATE_S * (1 - math.exp(-elapsed_s / RATE_S))) if elapsed_s > 0 else 0.0

    def observe(self, turn: Turn) -> None:
        """Count one turn that finished."""
        self._num_recent += 1
        self.weight = DECAY * self.weight + 1
        self.computed = DECAY * self.computed + max(1, turn.num_prompt_tokens - turn.num_hit_tokens)
        self.generated = DECAY * self.generated + turn.num_output_tokens
        self.held = DECAY * self.held + turn.num_prompt_tokens + turn.num_output_tokens


def count_prefilling(
    sizes: TurnSizes, num_waiting: int, num_free_tokens: int, full_share: float, busy_share: float
) -> float:
    """Number of turns that slow prefill delays: waiting turns, and turns expected to come.

    `num_free_tokens`: free room in the KV cache. `full_share`: share of the steps without room for more
    prefill. `busy_share`: share of the time that such steps take.
    """
    room_of_one = (HELD_SHARE * sizes.held + (1 - HELD_SHARE) * sizes.computed) / sizes.weight
    num_that_fit = num_free_tokens / room_of_one
    busy = min(busy_share, MAX_BUSY_SHARE)
    to_come = (2 - busy) * busy / (2 * (1 - busy) ** 2)
    return 1 + max(full_share * min(num_waiting, num_that_fit), to_come)


def choose_step_tokens(
    times: StepTimes,
    sizes: TurnSizes,
    num_decoding: int,
    num_prefilling: float,
    full_shares: FullShares,
    most: int,
) -> int | None:
    """Tokens of the next step, decode tokens included: a power of two from 512 up, or `most`.

    `full_shares`: how often a step of each size would be full. None before steps and turns were observed.
    """
    fixed_s, token_s = times.get_added()
    if token_s <= 0:
        return min(FIRST_STEP_TOKENS, most)
    decode_s = times.get_decode_s(num_decoding)
    steady = sizes.generated / sizes.computed
    turns_per_token, rate = sizes.weight / sizes.computed, sizes.get_rate()

    def get_loss(num_tokens: int) -> float:
        num_prefill_tokens = max(1, num_tokens - num_decoding)
        step_s = decode_s + max(0.0, fixed_s + num_prefill_tokens * token_s)
        present = min(steady, num_decoding / num_prefill_tokens)
        # Where prefill rides along, small steps cost nothing: there, the present steps decide for all sizes.
        full_share = full_shares.get(num_tokens) if fixed_s > 0 else full_shares.full_share
        always_more = full_share**2
        decoding = always_more * steady + (1 - always_more) * present
        return (
            num_prefilling * step_s / num_prefill_tokens
            + decoding * (step_s - decode_s)
            + (rate * step_s / num_prefill_tokens + full_share * turns_per_token) * step_s / 2
        )

    # Kernels work in tiles: what does not fill the last ones is lost. Half of a step is for prefill at least.
    least = 2 * num_decoding
    sizes_to_try = [size for size in SIZES if max(MIN_STEP_TOKENS, least) <= size < most]
    best = min([*sizes_to_try, most], key=get_loss)
    if not (decode_s > 0 and least <= SMALL_STEP_TOKENS < best):
        return best
    num_tokens, num_small = best - num_decoding, SMALL_STEP_TOKENS - num_decoding
    token_s = max(0.0, fixed_s + num_tokens * token_s) / num_tokens
    # The line says nothing of small steps. Before they were seen, a token takes what it takes in the best.
    small_token_s = times.try_get_small_token_s()
    small_token_s = token_s if small_token_s is None else small_token_s
    is_fast = SAME_SPEED * (decode_s / num_small + small_token_s) <= decode_s / num_tokens + token_s
    is_cheap = best == MIN_STEP_TOKENS and small_token_s <= CHEAP * token_s
    return SMALL_STEP_TOKENS if is_fast or is_cheap else best


@dataclass
class AdaptiveSteps:
    """Chooses the token count of each step with the lowest total delay for decoding and waiting turns.

    It works beside any policy (`--step-tokens adaptive`), and learns from the steps and turns of its engine.
    """

    _times: StepTimes = field(default_factory=StepTimes)
    _sizes: TurnSizes = field(default_factory=TurnSizes)
    _full_shares: FullShares = field(default_factory=lambda: FullShares(SIZES))
    _busy_share: float = 0.0
    _now_s: float = 0.0
    _num_steps: int = 0
    _kinds: PlainKinds = field(default_factory=PlainKinds)
    _plain: dict[str, int] = field(default_factory=dict)
    """Plain requests that wait, with the tokens that they have to compute."""

    def observe_arrival(self, turn: Turn, num_new_tokens: int) -> None:
        """Learn who waits."""
        self._full_shares.observe_arrival(num_new_tokens)
        if self._kinds.is_plain(turn.job):
            self._plain[turn.turn_id] = num_new_tokens

    def observe_start(self, turn_id: str) -> None:
        """Learn who waits no more."""
        self._plain.pop(turn_id, None)

    def observe_step(self, step: StepView) -> None:
        """Learn how long steps take, and whether they are full."""
        now_s, duration_s, is_full = step.now_s, step.duration_s, step.is_full
        self._times.observe(step.num_tokens, step.num_requests, duration_s)
        self._sizes.observe_time(now_s)
        self._full_shares.observe_step(step.num_tokens, step.num_requests, is_full=is_full)
        elapsed_s = max(duration_s, now_s - self._now_s if self._now_s else 0.0)
        self._now_s = now_s
        share = duration_s / elapsed_s if is_full and elapsed_s > 0 else 0.0
        self._busy_share += (1 - math.exp(-elapsed_s / BUSY_S)) * (share - self._busy_share)
        self._num_steps += 1

    def observe_turn(self, turn: Turn) -> None:
        """Learn how many tokens turns compute and generate, and whether they call tools."""
        self._kinds.observe(turn)
        self._sizes.observe(turn)

    def choose(self, view: EngineView) -> StepSize | None:
        """The bounds of the next step; None while nothing is known, or if no turn would be delayed."""
        num_others = view.num_running - 1
        if num_others < 0:
            return None
        # Where mixed steps have a cost of their own, small ones let the queue grow.
        followers = FOLLOWERS if self._times.get_added()[0] > 0 else 1
        num_waiting = followers * (view.num_waiting + view.num_parked)
        num_free_tokens = view.num_free_blocks * view.block_size
        num_prefilling = count_prefilling(
            self._sizes, num_waiting, num_free_tokens, self._full_shares.full_share, self._busy_share
        )
        chosen = choose_step_tokens(
            self._times,
            self._sizes,
            num_others,
            num_prefilling,
            self._full_shares,
            view.max_num_batched_tokens,
        )
        if chosen is None:
            return None
        if self._num_steps % LOOK_EVERY == 0:
            # A larger step now and then shows what tokens cost, and whether steps have a cost of their own.
            chosen = min(2 * chosen, view.max_num_batched_tokens)
        # Where layers have states, prompts are computed in whole blocks, and blocks are large.
        chosen = max(chosen, min(num_others + view.block_size, view.max_num_batched_tokens))
        return self._add_plain(chosen, view)

    def _add_plain(self, chosen: int, view: EngineView) -> StepSize:
        """Add room for the plain requests that wait and that stock vLLM would compute in one step."""
        most = view.max_num_batched_tokens
        room = most - view.num_running
        fitting = [tokens for tokens in islice(self._plain.values(), MAX_PLAIN) if tokens <= room]
        if not fitting:
            return StepSize(chosen)
        longest = max(chosen, *fitting)
        return StepSize(min(most, longest + sum(fitting)), longest)
