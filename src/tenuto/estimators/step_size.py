"""How many tokens a step should have, while some turns decode and others have prompts to compute.

Every step reads the model's weights once, whatever it computes. Large steps favour prompts: decoding turns
wait longer for their next token. Small steps favour decoding. A step of T tokens, n of them for decoding
turns, takes

    f(T) = d(n) + fixed + (T - n) · token         seconds
    v(T) = (T - n) / f(T)                         prompt tokens per second

where d(n) is the time of decoding alone, and `fixed` and `token` are the line that `StepTimes` learns.

The order hardly changes what the engine computes, but it decides what waits. The sum of waits is least if the
part with less work goes first (the cμ rule; Cox and Smith, 1961). Each turn has one prompt and one answer. So
it is enough to compare the shares of the engine's time that prompts and answers take. If prompt tokens arrive
at a rate r, prompts take the share ρ = r · token. If the engine computes for a share b of the time, answers
take the share b - ρ.

If ρ >= weight · (b - ρ), answers go first: the step is the smallest with V(T) >= SLACK · r, of those that
delay decoding hardly more than another (below). Prompts are the larger part then. Turns that already run end
sooner, so fewer run at a time. V(T) is the speed that lasts. Steps with more prompt tokens let more turns
decode, until as many answers end as prompts. Then answers take the same share of a step's tokens as of all
tokens: n = T · answers / (prompts + answers), and V is v with that n. If no step is fast enough, more comes
than the engine can do. Then it is the smallest step whose V(T) is within SLACK twice of the best: both speeds
are guesses. A larger one would only let more turns run at a time.

Otherwise prompts go first, but only as far as this saves more waiting than it causes. While the engine
computes one more prompt token, its own turn waits, and so do the n decoding turns:

    weight / (v(T) - r)              seconds that the prompt waits for it, with the queue before it (M/M/1)
    n · (f(T) - d(n)) / (T - n)      seconds by which it delays decoding

The step is the largest size whose sum is within SLACK of the smallest: of sizes that are as good for all
turns, the largest has the earliest first tokens. The second term is why small steps can be better for all
turns: a few prompt tokens add little to a pass over the weights that decoding needs anyway. Two bounds hold:

- A prompt waits at most PATIENCE times as long as with full steps, so that times to first token stay near
  those of stock vLLM.
- The step is never larger than the smallest one whose prompt speed is within SLACK of a full step's.

Turns that decode hold memory. If memory is short, the KV of idle jobs gives way, and is computed again. So if
a is the share of the prompt tokens that are computed again, the weight is divided by 1 + a / AGAIN, and r is
without these tokens. A job that was away for t seconds counts exp(-t / RATE_S): after long pauses, KV is
given up whatever the step size. If a > AGAIN, steps may also have half of MIN_STEP_TOKENS, if full steps
compute prompts at most PATIENCE times as fast. They do on an RTX 5090.

In a small step, a prompt would leave nothing for the turns behind it. So the engine serves turns that decode
before all prompts. Nor must small steps delay plain requests, those of jobs that call no tools: the next step
has extra room for all waiting plain requests that stock vLLM would compute in one step. No prompt may then
take more than the longest of them or the chosen size, so that a long prompt does not use the extra room.
There is none if a > AGAIN and plain requests recently had over half of the engine: most steps would be full,
and turns that decode would hold memory for longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from tenuto.core.engine import PROMPT_WEIGHT, StepSize
from tenuto.core.turn_work import MAX_LOOKED_AT, get_work
from tenuto.core.types import DecodeSteps, StepView, Turn
from tenuto.estimators.returns import PlainKinds, PlainShare
from tenuto.estimators.step_times import MIN_STEP_TOKENS, StepTimes

SLACK = 1.1
"""Speeds within this factor count as equal, and sums of waits. If answers go first, prompts are computed this
much faster than they arrive, so that their queue empties."""
PATIENCE = 1.5
"""If prompts go first, they wait at most this many times as long as with full steps."""
RATE_S = 30.0
"""Seconds over which the engine's work is averaged."""
AGAIN = 0.02
"""Share of the prompt tokens that are computed again, at which a decoding turn's wait counts twice."""
LEAST_SPEED = 0.5
"""If answers go first only because memory is short, a step has at least this share of the fastest size's
speed. Slower steps would make a queue of prompts, and so make memory shorter still."""
LOOK_EVERY = 64
"""One step in this many is twice as large as chosen, to learn what tokens cost in larger steps."""


class Work(NamedTuple):
    """What an engine computed lately."""

    prompt_rate: float
    """Prompt tokens per second."""
    answer_share: float
    """Share of answers in all tokens."""
    busy: float
    """Share of the time in which it computed."""
    again: float = 0.0
    """Share of the prompt tokens that were computed again because memory was short."""


def choose_step_tokens(
    times: StepTimes, num_decoding: int, work: Work, prompt_weight: float, budget: int
) -> int:
    """Tokens of the next step, decode tokens included: a power of two from 256 up, or `budget`."""
    fixed_s, token_s = times.get_added()
    if token_s <= 0:
        # Before any step was observed: vLLM's default on small GPUs, good enough for a few steps anywhere.
        return min(4 * MIN_STEP_TOKENS, budget)

    pass_s, request_s = times.get_decode_line()

    def look(num_tokens: int, num_decoding: float) -> tuple[float, float]:
        """A step's prompt tokens a second, and seconds by which each delays each turn that decodes."""
        num_prompt_tokens = num_tokens - num_decoding
        if num_prompt_tokens < 1:
            num_prompt_tokens = 1
        added_s, delay_s = fixed_s + num_prompt_tokens * token_s, fixed_s / num_prompt_tokens + token_s
        step_s = pass_s + request_s * num_decoding + (added_s if added_s > 0 else 0.0)
        speed = num_prompt_tokens / step_s if step_s > 0 else math.inf
        return speed, delay_s if delay_s > 0 else 0.0

    most, _ = look(budget, num_decoding)
    half = MIN_STEP_TOKENS // 2
    is_short = work.again > AGAIN and look(half, num_decoding)[0] >= most / PATIENCE
    size = half if is_short else MIN_STEP_TOKENS
    # At least half of a step is for prompts: kernels work in tiles, and a partly filled tile is wasted.
    sizes = []
    while size < budget:
        if size >= 2 * num_decoding:
            sizes.append(size)
        size *= 2
    sizes.append(budget)
    rate, share = work.prompt_rate * (1 - work.again), min(1.0, work.prompt_rate * token_s)
    usual_weight, prompt_weight = prompt_weight, prompt_weight / (1 + work.again / AGAIN)
    if share >= prompt_weight * (work.busy - share):
        looks = [look(size, size * work.answer_share) for size in sizes]
        best_speed = max([speed for speed, _ in looks])
        enough = min(SLACK * rate, best_speed / SLACK**2)
        if share < usual_weight * (work.busy - share):
            # Only because memory is short.
            enough = max(enough, LEAST_SPEED * best_speed)
        delays = {size: delay for size, (speed, delay) in zip(sizes, looks, strict=True) if speed >= enough}
        longest = SLACK * min(delays.values())
        return next(size for size, delay in delays.items() if delay <= longest)
    # Weighted seconds that turns wait for one more prompt token; infinite if prompts wait too long.
    waits, fast = [], 0
    for size in sizes:
        speed, delay = look(size, num_decoding)
        if not fast and speed >= most / SLACK:
            fast = size
        left = speed - rate
        if left <= 0 or left < (most - rate) / PATIENCE:
            waits.append(math.inf)
        else:
            waits.append(prompt_weight / left + num_decoding * delay)
    longest = SLACK * min(waits)
    best = max([size for size, wait in zip(sizes, waits, strict=True) if wait <= longest])
    return min(best, fast)


@dataclass
class AdaptiveSteps:
    """Chooses the token count of each step from its engine's earlier steps and turns. Works with any policy.

    `--step-tokens adaptive`, or `adaptive:3` for another `prompt_weight`.
    """

    prompt_weight: float = PROMPT_WEIGHT
    """Weight of a second that a prompt waits, relative to a second that a decoding turn waits."""
    _times: StepTimes = field(default_factory=StepTimes)
    _num_prompt_tokens: float = 0.0
    """Prompt tokens computed for recently finished turns. They decay over `RATE_S`, as do the next three."""
    _num_answer_tokens: float = 0.0
    """Tokens that these turns answered."""
    _num_again_tokens: float = 0.0
    """Of the prompt tokens, those that were computed again because memory was short."""
    _busy_s: float = 0.0
    """Seconds of recent steps."""
    _decayed_s: float = math.inf
    """When these sums decayed last: at the latest turn."""
    _latest_s: float = 0.0
    """Seconds of the steps since then."""
    _since_s: float = math.inf
    _now_s: float = 0.0
    _num_steps: int = 0
    _kinds: PlainKinds = field(default_factory=PlainKinds)
    _plain_share: PlainShare = field(default_factory=PlainShare)
    _plain: dict[str, int] = field(default_factory=dict)
    """Waiting plain requests, with the number of tokens to compute for each."""

    def observe_arrival(self, turn: Turn, num_new_tokens: int) -> None:
        """Learn which plain requests wait."""
        if turn.job.came_back and not turn.is_parted:
            # Pauses are not known here. So people's later prompts get no room of their own.
            self._kinds.come_back(turn.job)
        if self._kinds.is_plain(turn.job):
            self._plain[turn.turn_id] = num_new_tokens

    def observe_start(self, turn_id: str) -> bool:
        """Note that a turn waits no more. Returns whether it is a plain request."""
        return self._plain.pop(turn_id, None) is not None

    def observe_step(self, step: StepView) -> None:
        """Learn how long steps take."""
        self._times.observe(step.num_tokens, step.num_requests, step.duration_s)
        self._begin(step.now_s - step.duration_s)
        self._now_s = max(self._now_s, step.now_s)
        self._latest_s += step.duration_s
        self._num_steps += 1

    def observe_decodes(self, steps: DecodeSteps) -> None:
        """Learn the same from many decode steps."""
        self._times.observe_decodes(steps.durations_s, steps.num_requests)
        self._begin(steps.ends_s[0] - steps.durations_s[0])
        self._now_s = max(self._now_s, steps.ends_s[-1])
        # Not `sum`: from Python 3.12 on it rounds otherwise, and both ways must agree to the last bit.
        for duration_s in steps.durations_s:
            self._latest_s += duration_s
        self._num_steps += len(steps.ends_s)

    def observe_turn(self, turn: Turn, num_missed_tokens: int, pause_s: float | None) -> None:
        """Learn how many prompt tokens arrive or are computed again, and which jobs call tools."""
        work = get_work(turn.num_prompt_tokens, turn.num_hit_tokens, turn.num_output_tokens)
        self._plain_share.observe(work, is_plain=self._kinds.observe(turn))
        left, self._busy_s = self._decay()
        if left < 1:
            self._decayed_s, self._latest_s = self._now_s, 0.0
        num_prompt_tokens = turn.num_prompt_tokens - turn.num_hit_tokens or 1
        self._num_prompt_tokens = left * self._num_prompt_tokens + num_prompt_tokens
        self._num_answer_tokens = left * self._num_answer_tokens + turn.num_output_tokens
        num_again_tokens = 0.0 if pause_s is None else num_missed_tokens * math.exp(-pause_s / RATE_S)
        self._num_again_tokens = left * self._num_again_tokens + num_again_tokens

    def choose(self, num_running: int, budget: int, block_size: int) -> StepSize | None:
        """The bounds of the next step; None if no turn runs that a large step could delay."""
        num_decoding = num_running - 1
        if num_decoding < 0:
            return None
        work = self._get_work()
        chosen = choose_step_tokens(self._times, num_decoding, work, self.prompt_weight, budget)
        if self._num_steps % LOOK_EVERY == 0:
            chosen = min(2 * chosen, budget)
        # Models with recurrent states compute prompts in whole blocks, and their blocks are large.
        chosen = max(chosen, min(num_decoding + block_size, budget))
        if work.again > AGAIN and self._plain_share.is_flood:
            return StepSize(chosen)
        return self._add_plain(chosen, budget, budget - num_running)

    def _begin(self, started_s: float) -> None:
        if self._since_s == math.inf:
            self._since_s = self._decayed_s = started_s

    def _decay(self) -> tuple[float, float]:
        """What is left of the sums until now, and the seconds of recent steps."""
        elapsed_s = self._now_s - self._decayed_s
        if elapsed_s <= 0:
            return 1.0, self._busy_s
        left = math.exp(-elapsed_s / RATE_S)
        # As if these steps were spread evenly.
        return left, left * self._busy_s + self._latest_s / elapsed_s * RATE_S * (1 - left)

    def _get_work(self) -> Work:
        """The work of recently finished turns. About as much arrives, or a little more."""
        elapsed_s = self._now_s - self._since_s
        lately_s = RATE_S * (1 - math.exp(-max(0.0, elapsed_s) / RATE_S))
        if lately_s <= 0:  # also after a tiny step: the exponential is 1 then
            return Work(0.0, 0.0, 1.0)
        left, busy_s = self._decay()
        num_tokens = self._num_prompt_tokens + self._num_answer_tokens
        return Work(
            left * self._num_prompt_tokens / lately_s,
            self._num_answer_tokens / num_tokens if num_tokens else 0.0,
            min(1.0, busy_s / lately_s),
            self._num_again_tokens / self._num_prompt_tokens if self._num_prompt_tokens else 0.0,
        )

    def _add_plain(self, chosen: int, most: int, room: int) -> StepSize:
        """Add room for waiting plain requests that stock vLLM would compute in one step, in this room."""
        fitting = [tokens for tokens in islice(self._plain.values(), MAX_LOOKED_AT) if tokens <= room]
        if not fitting:
            return StepSize(chosen)
        longest = max(chosen, *fitting)
        num_decoding = most - room
        return StepSize(min(most, num_decoding + longest + sum(fitting)), longest)
