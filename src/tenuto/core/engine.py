"""What the driver needs from an engine: its interface, its step size, and views of its computed steps.

The step size belongs to the engine, so it works with any policy. A policy may ask for one
(`EngineSettings.step_tokens`). The user's setting overrides that.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

from tenuto.core.errors import ConfigError
from tenuto.core.types import DecodeSteps, EngineView, StepView, Turn
from tenuto.core.wishes import Wish

Blocks = Any
"""Blocks in the order of the tokens: a list, or what has a length and can be cut like one."""


class Engine(Protocol):
    """The interface that the driver needs from an engine; the simulator and the vLLM plugin implement it.

    The driver never looks inside a block. A list of blocks is in the order of the tokens, from the prompt's
    start to the output's end.
    """

    @property
    def can_truncate(self) -> bool:
        """Whether a lease without its last blocks can still be hit.

        If not, a shorter lease may need other blocks: see `get_prefix` and `get_rest`.
        """

    @property
    def hash_block_size(self) -> int:
        """Tokens that each of an `Arrival`'s hashes covers; the engine's blocks may be larger."""

    @property
    def hit_alignment(self) -> int:
        """Hits end at multiples of this many tokens: the block size, or a multiple of it if groups differ."""

    @property
    def can_store(self) -> bool:
        """Whether there is a tier below the GPU that `store` copies to."""

    def get_view(self, now_s: float, num_leases: int = 0) -> EngineView:
        """The engine's state now; `num_leases` is copied into the view."""

    def get_num_running(self) -> int:
        """`EngineView.num_running`, without a view."""

    def get_num_waiting(self) -> int:
        """`EngineView.num_waiting`, without a view."""

    def get_num_free_blocks(self) -> int:
        """Number of blocks that an allocation could take now."""

    def get_cached_blocks(self, turn_id: str, num_hit_tokens: int) -> Blocks:
        """Blocks that a prompt extending this turn would hit; called just before the turn's blocks are freed.

        `num_hit_tokens`: tokens that the turn itself hit when it last started.
        """

    def get_shared_blocks(self, turn_id: str, max_tokens: int) -> tuple[Blocks, int]:
        """A running turn's longest cached prefix, up to `max_tokens`: all groups' blocks, and its tokens.

        Only called if leases cannot be truncated.
        """

    def count_common_tokens(self, blocks: Blocks, hashes: Sequence[Hashable]) -> int:
        """How many of a lease's first tokens a prompt with these chained hashes shares.

        If leases can be truncated, only full blocks count.
        """

    def get_prefix(self, blocks: Blocks, max_tokens: int) -> Blocks:
        """The blocks of the longest part of a lease that can be hit, of at most `max_tokens` tokens.

        Only called if leases cannot be truncated. Some of the blocks may not belong to the lease, and may be
        free. The list is empty if nothing can be hit, and it is `blocks` itself if the whole lease fits.
        """

    def get_rest(self, blocks: Blocks, num_blocks: int) -> Blocks:
        """The blocks that a lease keeps if it frees about `num_blocks` blocks; as `get_prefix`.

        Empty if a shorter lease would free nothing.
        """

    def count_tail(self, blocks: Blocks, num_blocks: int) -> int:
        """How many of a lease's last blocks to release, so that `num_blocks` become free; at most all.

        Only called if leases can be truncated. Blocks that others hold, too, do not become free.
        """

    def get_num_leased_blocks(self) -> int:
        """Number of distinct blocks that leases hold; a block that several leases hold counts once."""

    def get_num_idle_leased_blocks(self) -> int:
        """Number of leased blocks that nothing but leases uses."""

    def get_block_ids(self, blocks: Blocks) -> Collection[Hashable]:
        """The id of each block, in the same order; ids are unique."""

    def hold(self, blocks: Blocks) -> None:
        """Take one reference to each block."""

    def release(self, blocks: Blocks) -> None:
        """Release one reference to each block; the last block is evicted first."""

    def store(self, blocks: Blocks, turn: Turn, wish: Wish | None = None) -> None:
        """Copy a turn's blocks to the tiers below the GPU, if there are any; called before they are freed.

        `wish`: what the turn's client would like to be kept there.
        """

    def end_job(self, job_id: str) -> None:
        """A job is complete, so tiers below the GPU may drop what only this job used."""

    def get_num_cached_tokens(self, turn_id: str) -> int:
        """Prompt tokens of a waiting turn that are in the GPU's cache now."""

    def reorder(self, turn_id: str) -> None:
        """Ask for a waiting turn's queue key again; never called from inside an allocation."""


# The step size.

ADAPTIVE = "adaptive"
"""The value of `step_tokens` for which a `StepChooser` chooses each step's size."""
PROMPT_WEIGHT = 1.0
"""With adaptive steps: the weight of a second that a prompt waits, relative to one of a decoding turn."""
StepTokens = str | int
"""The most tokens of a step: "adaptive", "adaptive:3" (`PROMPT_WEIGHT` is 3), or a fixed number."""


def get_prompt_weight(step_tokens: StepTokens | None) -> float | None:
    """The `PROMPT_WEIGHT` of adaptive steps; None for steps of a fixed size. Raises ValueError."""
    if not isinstance(step_tokens, str):
        return None
    name, colon, weight = step_tokens.partition(":")
    if name != ADAPTIVE:
        raise ValueError(step_tokens)
    prompt_weight = float(weight) if colon else PROMPT_WEIGHT
    if not 0 <= prompt_weight < math.inf:
        raise ValueError(step_tokens)
    return prompt_weight


def get_max_step_tokens(step_tokens: StepTokens | None, max_num_batched_tokens: int) -> int:
    """The most tokens that any step may have, given the engine's own budget."""
    return (
        min(step_tokens, max_num_batched_tokens) if isinstance(step_tokens, int) else max_num_batched_tokens
    )


class StepSize(NamedTuple):
    """The bounds of one step."""

    num_tokens: int
    """The most tokens in all."""
    per_prompt: int = 0
    """The most tokens of one prompt; 0 for no bound."""


class StepChooser(Protocol):
    """Chooses the size of each step from reported turns and steps. See `estimators.step_size`."""

    def observe_step(self, step: StepView) -> None:
        """The engine computed a step."""

    def observe_decodes(self, steps: DecodeSteps) -> None:
        """As `observe_step`, for several steps in a row that only decode."""

    def observe_arrival(self, turn: Turn, num_new_tokens: int) -> None:
        """A turn arrived; this many tokens of its prompt are new to its job."""

    def observe_start(self, turn_id: str) -> bool:
        """A turn got its first step, or left before it. Returns whether it is a plain request."""

    def observe_turn(self, turn: Turn, num_missed_tokens: int, pause_s: float | None) -> None:
        """A turn finished; it was not aborted.

        `num_missed_tokens`: prompt tokens that it computed although its job's last turn had. `pause_s`: for
        how long its job was away; None if it was not.
        """

    def choose(self, num_running: int, budget: int, block_size: int) -> StepSize | None:
        """The bounds of the next step; None leaves them to the engine. Does not change the chooser.

        `budget`: most tokens that the engine allows. `block_size`: tokens in a block.
        """


def read_step_tokens(text: str) -> StepTokens:
    """The value of a command line option, not yet checked (see `check_step_tokens`)."""
    return int(text) if text.isdecimal() else text


def check_step_tokens(given: StepTokens | None, where: str) -> None:
    """Raise ConfigError if this is neither "adaptive" nor a number from 1 up. `where` names the option."""
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and given >= 1):
        return
    try:
        if get_prompt_weight(given) is not None:
            return
    except ValueError:
        pass
    raise ConfigError(
        f"{where} must be {ADAPTIVE}, {ADAPTIVE}:X with X from 0 up, or a number of tokens from 1 up; "
        f"got {given!r}"
    )


class StepClock:
    """Makes a `StepView` of each step that ended. Steps end in the order in which they were scheduled."""

    def __init__(self, ended_s: float = -math.inf) -> None:
        """`ended_s`: when the latest step ended; no step ran before this time."""
        self.ended_s = ended_s

    def finish(
        self,
        now_s: float,
        scheduled_s: float,
        num_tokens: int,
        num_requests: int,
        *,
        is_full: bool,
    ) -> StepView:
        """The view of a step that just ended.

        `num_tokens` does not include drafts. A decoding request counts one token, whatever is drafted for it.
        The other tokens of a step are its prefill.
        """
        duration_s = now_s - max(self.ended_s, scheduled_s)
        self.ended_s = now_s
        return StepView(now_s, duration_s, num_tokens, num_requests, is_full)

    def finish_decodes(
        self, ends_s: Sequence[float], scheduled_s: float, num_requests: int, *, is_full: bool
    ) -> DecodeSteps:
        """As `finish`, for several steps that only decode. Each was scheduled before the one before it ended.

        `scheduled_s`: when the first step was scheduled.
        """
        first_s = ends_s[0] - max(self.ended_s, scheduled_s)
        self.ended_s = ends_s[-1]
        durations_s = [first_s, *map(operator.sub, ends_s[1:], ends_s)]
        return DecodeSteps(ends_s, durations_s, num_requests, is_full)
