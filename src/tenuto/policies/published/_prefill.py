"""The time to compute a prompt, or to reload its KV: learned from the engine's own steps.

    a step with prefill = fixed + token_s · tokens + token_pair_s · pairs + request_s · requests

The pairs of n tokens after c others are (c + n)² − c²: those of a whole prompt are n², so a measured curve
of prefill time over prompt length has the same coefficients (arXiv 2511.02230 profiles 1k, 2k, 4k, … tokens).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tenuto.core.errors import ConfigError
from tenuto.core.policy import Learns, Policy, setting
from tenuto.core.turn_work import MAX_SUM
from tenuto.core.types import EngineView, StepView, Turn
from tenuto.records.files import read_first

DECAY = 0.995
"""Factor on a step's weight for each later step with prefill: a memory of about 200 such steps."""
MIN_STEPS = 8
"""With fewer observed steps, the assumed profile stays in force."""
MIN_PREFILL_TOKENS = 256
"""Steps with fewer prefill tokens take as long as one pass over the weights, so they show nothing."""
PRIOR_WEIGHT = 0.5
"""Weight of the assumed profile, in steps. It decides if the steps cannot, e.g. if all prompts are equal."""

_UNITS = (1.0, 1e3, 1e7, 1e1)
"""Units of the features step, tokens, pairs, requests; they bring all features to a similar size."""
_NUM_FEATURES = len(_UNITS)


@dataclass(frozen=True, slots=True)
class PrefillProfile:
    """Seconds to compute n tokens from nothing: `fixed_s` + `token_s` · n + `token_pair_s` · n².

    The defaults are those of an 8B model on one H100 at half its peak of 989 TFLOP/s: 2 · 8e9 FLOP a token,
    and 2 · 32 layers · 4096 dimensions FLOP a pair.
    """

    fixed_s: float = 0.0
    token_s: float = 3.2e-5
    token_pair_s: float = 5.3e-10

    def get_s(self, num_tokens: float) -> float:
        """Seconds to compute this many tokens."""
        return self.fixed_s + self.token_s * num_tokens + self.token_pair_s * (num_tokens * num_tokens)


def read_prefill_profile(path: Path) -> PrefillProfile:
    """The prefill fit of a file that `tenuto profile` wrote.

    That fit counts each pair of a token and one before it once, so a prompt of n tokens has n² / 2 of them.
    Raises DataError for another file.
    """
    fields = read_first(path).part("prefill")
    coefficients = fields.numbers("coefficients")
    if len(coefficients) != 3:
        raise fields.error("coefficients", f"must be 3 numbers, got {len(coefficients)}")
    fixed_s, token_s, pair_s = coefficients
    return PrefillProfile(fixed_s, token_s, pair_s / 2)


class PrefillCost:
    """A profile, given or learned. Call it when turns start and stop, and with each step. O(1) per step."""

    def __init__(self, profile: PrefillProfile | None = None) -> None:
        """With a profile nothing is learned. Without one, the default holds until enough steps were seen."""
        self.profile = profile or PrefillProfile()
        self._learns = profile is None
        self._pending: dict[str, tuple[int, int]] = {}
        """Per turn: tokens it still has to compute, and tokens with KV; in the order in which steps run."""
        self._weight = 0.0
        self._moments = [[0.0] * (_NUM_FEATURES + 1) for _ in range(_NUM_FEATURES)]
        """Decayed sums of feature · feature, and of feature · seconds in the last column."""

    def on_started(self, turn: Turn) -> None:
        """A turn started: it computes what it did not hit. For a resumed turn the hit is not known."""
        if self._learns and not turn.num_preemptions:
            self._pending[turn.turn_id] = (turn.num_prompt_tokens - turn.num_hit_tokens, turn.num_hit_tokens)

    def on_stopped(self, turn: Turn) -> None:
        """A turn finished, was preempted or aborted."""
        self._pending.pop(turn.turn_id, None)

    def observe(self, step: StepView) -> None:
        """Learn from a step, if its prefill is large enough and belongs to known turns."""
        if not self._learns or step.duration_s <= 0:
            return
        num_tokens, pairs, num_unknown = self._take(step.num_tokens - step.num_requests)
        if num_tokens < MIN_PREFILL_TOKENS or num_unknown > num_tokens / 20:
            return
        features = [
            value / unit
            for value, unit in zip((1, num_tokens, pairs, step.num_requests), _UNITS, strict=True)
        ]
        for row, feature in zip(self._moments, features, strict=True):
            for column, other in enumerate((*features, step.duration_s)):
                row[column] = row[column] * DECAY + feature * other
        self._weight = self._weight * DECAY + 1
        if self._weight >= MIN_STEPS:
            self.profile = _fit(self._moments, self._weight)

    def get_state(self) -> dict[str, Any]:
        """What was learned, as JSON values."""
        return {"weight": self._weight, "moments": [list(row) for row in self._moments]}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what an earlier run learned. If `state` is malformed, this raises and changes nothing."""
        weight, moments = float(state["weight"]), [[float(each) for each in row] for row in state["moments"]]
        are_sums = all(abs(each) <= MAX_SUM for row in moments for each in (weight, *row))
        if weight < 0 or not are_sums or [len(row) for row in moments] != [len(row) for row in self._moments]:
            raise ValueError("the moments are not those of a prefill cost")
        if not self._learns:
            return
        profile = _fit(moments, weight) if weight >= MIN_STEPS else self.profile
        if not math.isfinite(profile.get_s(MAX_SUM)):
            raise ValueError("the moments give no prefill cost")
        self.profile = profile
        self._weight, self._moments = weight, moments

    def __repr__(self) -> str:
        return f"PrefillCost({self.profile}, {self._pending}, {self._weight}, {self._moments})"

    def _take(self, num_left: int) -> tuple[int, float, int]:
        """Tokens and pairs of a step's prefill, and the number of its tokens that belong to no known turn.

        `num_left` has one token less for each request, as if all of them decoded.
        """
        num_tokens, pairs = 0, 0.0
        if num_left <= 0:
            return num_tokens, pairs, 0
        for turn_id, (num_pending, context) in list(self._pending.items()):
            if num_left <= 0:
                break
            taken = min(num_pending, num_left + 1)
            num_left -= taken - 1
            num_tokens += taken
            pairs += (context + taken) ** 2 - context**2
            if taken == num_pending:
                del self._pending[turn_id]
            else:
                self._pending[turn_id] = (num_pending - taken, context + taken)
        return num_tokens, pairs, num_left


def get_reload_s(num_tokens: int, cost: PrefillCost, view: EngineView) -> float:
    """Seconds to restore KV: to compute it, or to load it from a tier if that is faster."""
    times_s = [cost.profile.get_s(num_tokens)]
    if view.tiers:
        nearest = view.tiers[0]
        times_s.append(nearest.wait_s + num_tokens / view.block_size * nearest.s_per_block)
    return min(times_s)


def _fit(moments: Sequence[Sequence[float]], weight: float) -> PrefillProfile:
    """The least-squares coefficients, none of them negative: more work never takes less time."""
    prior = PrefillProfile()
    ratio = prior.token_pair_s / prior.token_s * _UNITS[2] / _UNITS[1]
    matrix = [list(row) for row in moments]
    # Assumed: neither steps nor requests take time by themselves, and pair_s − ratio · token_s is 0.
    matrix[0][0] += PRIOR_WEIGHT
    matrix[3][3] += PRIOR_WEIGHT
    pull = PRIOR_WEIGHT * matrix[2][2] / weight
    matrix[1][1] += pull * ratio * ratio
    matrix[1][2] -= pull * ratio
    matrix[2][1] -= pull * ratio
    matrix[2][2] += pull
    kept = list(range(_NUM_FEATURES))
    while min(found := _solve([[matrix[row][column] for column in (*kept, -1)] for row in kept])) < 0:
        del kept[found.index(min(found))]
    by_feature = dict(zip(kept, found, strict=True))
    fixed, token, pair, request = (by_feature.get(n, 0.0) / unit for n, unit in enumerate(_UNITS))
    # A turn alone is the only request of its step.
    return PrefillProfile(fixed + request, token, pair)


def _solve(rows: Sequence[Sequence[float]]) -> list[float]:
    """Solve linear equations, each a row with its right side last; undetermined unknowns are 0."""
    rows = [list(row) for row in rows]
    num = len(rows)
    scales = [rows[n][n] for n in range(num)]
    for pivot in range(num):
        head = rows[pivot][pivot]
        if head <= 1e-9 * scales[pivot] or head <= 0:
            rows[pivot] = [0.0] * (num + 1)
            continue
        rows[pivot] = [value / head for value in rows[pivot]]
        for other in range(num):
            if other != pivot and (factor := rows[other][pivot]):
                rows[other] = [a - factor * b for a, b in zip(rows[other], rows[pivot], strict=True)]
    return [row[-1] for row in rows]


# Base classes of policies: `continuum`, `contextserve`, `infercept` and `break-even`.


@dataclass
class LearnsPrefill(Policy, Learns):
    """Base of policies that learn the cost of prefill from the steps."""

    _prefill: PrefillCost = field(init=False, default_factory=PrefillCost)

    def on_turn_started(self, turn: Turn, now_s: float) -> None:
        """Its prefill begins."""
        self._prefill.on_started(turn)

    def on_turn_preempted(self, turn: Turn, now_s: float) -> None:
        """Its prefill stops."""
        self._prefill.on_stopped(turn)

    def on_turn_finished(self, turn: Turn, now_s: float) -> None:
        """Its prefill is over."""
        self._prefill.on_stopped(turn)

    def on_step(self, step: StepView) -> None:
        """Learn what prefill costs."""
        self._prefill.observe(step)

    def get_state(self) -> dict[str, Any]:
        """The learned cost."""
        return {"prefill": self._prefill.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what an earlier run learned."""
        self._prefill.set_state(state["prefill"])


@dataclass
class TakesPrefillProfile(LearnsPrefill):
    """Base of policies that know the cost of prefill, from their settings or from the steps."""

    prefill_token_s: float = setting(
        0.0, "measured prefill time, seconds per token; 0 learns it from the engine's steps", minimum=0
    )
    prefill_token_pair_s: float = setting(
        0.0, "measured prefill time, seconds per token squared; only with prefill_token_s", minimum=0
    )
    prefill_fixed_s: float = setting(
        0.0,
        "measured prefill time that does not depend on the tokens, seconds; only with prefill_token_s",
        minimum=0,
    )

    prefill_profile: str = setting(
        "",
        "file that `tenuto profile` wrote: the measured prefill time, instead of the three numbers",
        is_file=True,
    )

    def __post_init__(self) -> None:
        self._prefill = PrefillCost(self._try_get_profile())

    def _try_get_profile(self) -> PrefillProfile | None:
        """The measured profile; None if there is none.

        Raises ConfigError if its main part is missing or if it is given twice, DataError for another file.
        """
        if self.prefill_profile:
            if self.prefill_token_s or self.prefill_fixed_s or self.prefill_token_pair_s:
                raise ConfigError("give prefill_profile or the prefill times, not both")
            path = Path(self.prefill_profile)
            if not path.is_file():
                raise ConfigError(f"prefill_profile: {path}: no such file")
            return read_prefill_profile(path)
        if self.prefill_token_s:
            return PrefillProfile(self.prefill_fixed_s, self.prefill_token_s, self.prefill_token_pair_s)
        if self.prefill_fixed_s or self.prefill_token_pair_s:
            raise ConfigError("prefill_fixed_s and prefill_token_pair_s need prefill_token_s beside them")
        return None
