"""Fast-forward: many steps at once, while every running request decodes one token and nothing else happens.

Such steps are *uneventful*. Doing many of them together leaves behind what doing each would. Only their
costs are still added up one by one (`tenuto.sim.simulation`), so that times are the same to the last bit.
"""

from __future__ import annotations

from tenuto.core.driver import Driver
from tenuto.core.types import Yields
from tenuto.sim.engine.config import EngineConfig
from tenuto.sim.engine.state import EngineState
from tenuto.sim.kv.kv_cache import KvCache
from tenuto.sim.kv.request import Request


class FastForward:
    """Knows how many of the next steps are uneventful, and does them."""

    def __init__(
        self, config: EngineConfig, state: EngineState, kv: KvCache, driver: Driver, *, has_tiers: bool
    ) -> None:
        self._config = config
        self._state = state
        self._kv = kv
        self._driver = driver
        self._has_tiers = has_tiers
        self._may_preempt_for_waiting = driver.policy.overrides("may_preempt")

    def count_steps(self) -> int:
        """How many of the next steps are uneventful if nothing comes from outside: at least so many.

        0 if in doubt. Changes nothing.
        """
        config, state, running = self._config, self._state, self._state.running
        if (
            not running
            or len(running) > config.max_step_tokens
            or config.num_draft_tokens
            or not self._kv.can_truncate
            or state.loaded
        ):
            return 0
        num_steps = self._count_steps_to_end(running)
        # All requests may fill their last blocks in the same step: free blocks must do for all of them.
        num_free_each = self._kv.pool.num_free_blocks // len(running)
        num_steps = min(num_steps, num_free_each * config.kv.block_size)
        if num_steps == 0 or self._may_start_one() or _has_equal_outputs(running):
            return 0
        return num_steps

    def run(self, num_steps: int) -> None:
        """Do what so many uneventful steps do to the requests and their blocks."""
        for request in self._state.running:
            # The last token of a sequence has no KV yet, so it completes no block.
            request.num_tokens += num_steps - 1
            if request.num_computed_tokens + num_steps > request.slots_end:
                fits = self._kv.try_allocate(request, num_steps, None, is_busy=True)
                assert fits, "uneventful steps ran out of blocks"
            request.num_tokens += 1
            request.num_computed_tokens += num_steps

    def _count_steps_to_end(self, running: list[Request]) -> int:
        """Steps before the one that may bring a request's last token; 0 if one does not decode steadily.

        steadily, with two steps in flight:   [ computed …  | placeholder ]
                                              [ num_tokens … ]
        """
        num_placeholders, max_model_len = self._config.max_steps_in_flight - 1, self._config.kv.max_model_len
        num_left = max_model_len
        for request in running:
            num_tokens = request.num_tokens
            if (
                request.num_placeholders != num_placeholders
                or request.num_computed_tokens - num_placeholders != num_tokens - 1
                or num_tokens == request.num_prompt_tokens
            ):
                return 0
            num_left = min(num_left, request.num_tokens_at_end - num_tokens, max_model_len - num_tokens)
        return max(0, num_left - 1)

    def _may_start_one(self) -> bool:
        """Whether a waiting request could start in one of the next steps; True if in doubt."""
        config, running, waiting = self._config, self._state.running, self._state.waiting
        request = waiting.get_first()
        if waiting.get_first_parked() is not None or (request and self._may_preempt_for_waiting):
            return True
        budget = config.max_step_tokens - len(running)
        if request is None or len(running) == config.max_num_seqs or budget == 0:
            return False
        hit = self._kv.get_hit(request)
        if not {each.path.segments[-1] for each in running}.isdisjoint(request.path.segments):
            # It goes on from what a running request generates: its hit may grow. Any other request's hit
            # can only shrink, and free blocks only get fewer.
            return True
        num_tokens = request.num_tokens - hit.num_tokens
        if not self._has_tiers:
            num_tokens = min(budget, num_tokens)
        num_missing = self._kv.count_missing(request, num_tokens, hit, is_busy=True)
        num_reclaimable = 0
        if self._may_reclaim():
            num_reclaimable = self._driver.get_num_reclaimable_blocks(request.turn_id)
        return num_missing <= num_reclaimable

    def _may_reclaim(self) -> bool:
        """Whether a lease could be shortened while something runs."""
        driver = self._driver
        return driver.limits.always_yield or bool(driver.leases.get_first_to_yield(Yields.ALWAYS))


def _has_equal_outputs(running: list[Request]) -> bool:
    """Whether two requests generate the same text: then it matters which of them caches a block first."""
    return len({request.path.segments[-1] for request in running}) < len(running)
