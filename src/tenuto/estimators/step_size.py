"""How many tokens a step should have, while some decode and others have prompts to compute.

A step of T prefill tokens takes about

    f(T) = what decoding alone takes − ride + √(ride² + (T · token)²)       seconds

as prefill rides along with one pass over the weights until it takes as long itself: `ride` is what that
comes to, at most a pass, and less where kernels gain little from being fed together. Per prefill token

- those who wait for prefill, m turns, lose the step, f(T) / T each;
- those who decode, n turns, lose what the step is longer than theirs, (f(T) − f(0)) / T each. How many
  these are is a matter of T as well: while there is always more to compute, T tokens begin T / w turns a
  step, and each decodes for L steps, with w the tokens that a turn has to compute and L those that it
  generates. So n / T is L / w then, and no more than that at other times.

The best T has the least loss of both together. Long outputs want small steps, short ones and long queues
large ones.

m counts those who would start if only prefill were faster: not those who wait for memory. And those who come
while the engine is busy wait for what it still has to do: ρ / (1 − ρ)² turns for a queue with one server (the
derivative of Pollaczek's and Khinchine's mean wait), with ρ the share of steps that are full.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tenuto.core.step_tokens import ADAPTIVE, StepChooser, StepTokens
from tenuto.core.types import EngineView, StepView, Turn
from tenuto.estimators.step_times import StepTimes

MIN_STEP_TOKENS = 512
"""Smaller steps gain nothing on GPUs from the A100 to the B200: kernels lose what decoding gains."""
MAX_BUSY_SHARE = 0.8
"""Bound of the busy share; beyond it, the current queue says more than the expected queue."""
DECAY = 0.99
"""Factor on a turn's weight for each later turn."""
FULL_DECAY = 0.02
"""Weight of the latest step in the moving average of the share of full steps."""


def make_step_chooser(step_tokens: StepTokens | None) -> StepChooser | None:
    """The chooser of adaptive steps; None where the size of steps is fixed."""
    return AdaptiveSteps() if step_tokens == ADAPTIVE else None


@dataclass
class TurnSizes:
    """Mean tokens that turns compute and generate, of the latest hundred or so."""

    weight: float = 0.0
    computed: float = 0.0
    generated: float = 0.0

    def observe(self, num_computed_tokens: int, num_output_tokens: int) -> None:
        """Count one turn that finished."""
        self.weight = DECAY * self.weight + 1
        self.computed = DECAY * self.computed + max(1, num_computed_tokens)
        self.generated = DECAY * self.generated + num_output_tokens


def count_prefilling(sizes: TurnSizes, num_waiting: int, num_free_tokens: int, full_share: float) -> float:
    """Number of turns that slow prefill delays: waiting turns, and turns expected to come.

    `num_free_tokens`: free room in the KV cache. `full_share`: share of the steps without room for more
    prefill.
    """
    if not sizes.weight:
        return 1.0
    num_that_fit = num_free_tokens * sizes.weight / sizes.computed
    busy = min(full_share, MAX_BUSY_SHARE)
    return 1 + full_share * min(num_waiting, num_that_fit) + busy / (1 - busy) ** 2


def choose_step_tokens(
    times: StepTimes,
    sizes: TurnSizes,
    num_decoding: int,
    num_prefilling: float,
    full_share: float,
    most: int,
) -> int | None:
    """Tokens of the next step, decode tokens included: a power of two from 512 up, or `most`.

    `full_share`: as in `count_prefilling`. None before steps and turns were observed.
    """
    token_s, ride_s = times.get_ride()
    if token_s <= 0 or not sizes.weight:
        return None
    decode_s = times.get_decode_s(num_decoding)
    ride_s = min(ride_s, decode_s)
    steady = sizes.generated / sizes.computed
    # There is always more to compute when one full step follows another.
    always_more = full_share**2

    def get_loss(num_tokens: int) -> float:
        num_prefill_tokens = max(1, num_tokens - num_decoding)
        step_s = decode_s - ride_s + math.hypot(ride_s, num_prefill_tokens * token_s)
        present = min(steady, num_decoding / num_prefill_tokens)
        decoding = always_more * steady + (1 - always_more) * present
        return num_prefilling * step_s / num_prefill_tokens + decoding * (step_s - decode_s)

    # Kernels work in tiles: what does not fill the last ones is lost.
    sizes_to_try = [MIN_STEP_TOKENS << n for n in range(16) if MIN_STEP_TOKENS << n < most]
    return min([*sizes_to_try, most], key=get_loss)


@dataclass
class AdaptiveSteps:
    """Chooses the token count of each step with the lowest total delay for decoding and waiting turns.

    It works beside any policy (`--step-tokens adaptive`), and learns from the steps and turns of its engine.
    """

    _times: StepTimes = field(default_factory=StepTimes)
    _sizes: TurnSizes = field(default_factory=TurnSizes)
    _full_share: float = 0.0
    """The share of steps that were full."""

    def observe_step(self, step: StepView) -> None:
        """Learn how long steps take, and whether they are full."""
        self._times.observe(step.num_tokens, step.num_requests, step.duration_s)
        self._full_share += FULL_DECAY * (step.is_full - self._full_share)

    def observe_turn(self, turn: Turn) -> None:
        """Learn how many tokens turns compute and generate."""
        self._sizes.observe(turn.num_prompt_tokens - turn.num_hit_tokens, turn.num_output_tokens)

    def choose(self, view: EngineView) -> int | None:
        """The most tokens of the next step; None while nothing is known, or if no turn would be delayed."""
        num_others = view.num_running - 1
        if num_others < 1:
            return None
        num_waiting = view.num_waiting + view.num_parked
        num_free_tokens = view.num_free_blocks * view.block_size
        num_prefilling = count_prefilling(self._sizes, num_waiting, num_free_tokens, self._full_share)
        return choose_step_tokens(
            self._times,
            self._sizes,
            num_others,
            num_prefilling,
            self._full_share,
            view.max_num_batched_tokens,
        )
