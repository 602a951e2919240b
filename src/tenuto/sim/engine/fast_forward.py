"""Quiet stretches: steps in which every running request decodes one token and nothing else happens.

Nobody has to look at each request in each of them. What a stretch leaves behind is what stepping does; only
the step costs are still added up one by one, so that times are the same to the last bit.
"""

from __future__ import annotations

from tenuto.core.driver import Driver
from tenuto.core.types import Yields
from tenuto.sim.engine.request import Request
from tenuto.sim.engine.scheduler import Scheduler


def count_uneventful_steps(scheduler: Scheduler) -> int:
    """How many of the next steps are quiet, if nothing comes from outside; a lower bound, 0 if in doubt."""
    config, running, pool = scheduler.config, scheduler.running, scheduler.kv.pool
    if (
        not running
        or len(running) > config.max_num_batched_tokens
        or config.num_draft_tokens
        or not scheduler.kv.can_truncate
        or scheduler.has_loaded
    ):
        return 0
    num_steps = min(_count_steps_to_end(scheduler, request) for request in running)
    # Ends on the same blocks as stepping, however full their last ones are.
    num_steps = min(num_steps, pool.num_free_blocks // len(running) * config.kv.block_size)
    if num_steps == 0 or _may_start_one(scheduler) or _writes_twice(running):
        return 0
    return num_steps


def fast_forward(scheduler: Scheduler, num_steps: int) -> None:
    """Do what so many quiet steps do to the requests and their blocks."""
    for request in scheduler.running:
        # The last token of a sequence has no KV yet, so it completes no block.
        request.num_tokens += num_steps - 1
        fits = scheduler.kv.try_allocate(request, num_steps, None, is_busy=True)
        assert fits, "a quiet stretch ran out of blocks"
        request.num_tokens += 1
        request.num_computed_tokens += num_steps


def _count_steps_to_end(scheduler: Scheduler, request: Request) -> int:
    """Steps until the one that may bring a request's last token; 0 if it does not decode steadily."""
    num_placeholders = scheduler.config.max_steps_in_flight - 1
    is_steady = (
        request.num_placeholders == num_placeholders
        and request.num_computed_tokens - num_placeholders == request.num_tokens - 1
        and request.num_output_tokens > 0
    )
    if not is_steady:
        return 0
    num_left = request.max_tokens - request.num_output_tokens
    return max(0, min(num_left, scheduler.config.kv.max_model_len - request.num_tokens) - 1)


def _may_start_one(scheduler: Scheduler) -> bool:
    """Whether a waiting request could start in one of the next steps, as far as is easily told."""
    config, running, waiting = scheduler.config, scheduler.running, scheduler.waiting
    driver = scheduler.driver
    if waiting.get_first_parked() is not None or (waiting.get_first() and scheduler.may_preempt_for_waiting):
        return True
    request = waiting.get_first()
    budget = config.max_num_batched_tokens - len(running)
    if request is None or len(running) == config.max_num_seqs or budget == 0:
        return False
    hit = scheduler.kv.get_hit(request)
    if not {each.path.segments[-1] for each in running}.isdisjoint(request.path.segments):
        return True  # Its hit may grow. Else it only shrinks, and free blocks only get fewer.
    num_tokens = request.num_tokens - hit.num_tokens
    if scheduler.offloader is None:
        num_tokens = min(budget, num_tokens)
    num_missing = scheduler.kv.count_missing(request, num_tokens, hit, is_busy=True)
    return num_missing <= (driver.get_num_reclaimable_blocks(request.turn_id) if _may_yield(driver) else 0)


def _may_yield(driver: Driver) -> bool:
    """Whether a lease could be taken back while something runs."""
    return driver.limits.always_yield or bool(driver.leases.get_first_to_yield(Yields.ALWAYS))


def _writes_twice(running: list[Request]) -> bool:
    """Whether two requests generate the same text: who caches a block first matters then."""
    return len({request.path.segments[-1] for request in running}) < len(running)
