"""The two halves of a step: running requests get their next tokens, then waiting ones start.

    running    [ tokens so far ] + next ones        blocks short? free blocks, leases, then a preemption
    waiting    [ hit | load ] + first ones          the first that cannot start ends the step

Source: vllm/v1/core/sched/scheduler.py:schedule, _preempt_request, reset_prefix_cache and
_mamba_block_aligned_split@0.32.
"""

from __future__ import annotations

from tenuto.core.driver import Driver
from tenuto.sim.engine.config import EngineConfig
from tenuto.sim.engine.loading import Loading
from tenuto.sim.engine.state import EngineState
from tenuto.sim.engine.step import Step
from tenuto.sim.kv.hits import Hit
from tenuto.sim.kv.kv_cache import KvCache
from tenuto.sim.kv.request import Request, Status


class Passes:
    """Fills steps. It asks the driver at the same places as `tenuto.vllm` does."""

    def __init__(
        self, config: EngineConfig, state: EngineState, kv: KvCache, driver: Driver, loading: Loading | None
    ) -> None:
        """`loading` is None in an engine without tiers."""
        self._config = config
        self._state = state
        self._kv = kv
        self._driver = driver
        self._loading = loading
        self._by_priority = config.order == "priority"
        # What comes behind it in `running` may be more important, and has its blocks to take.
        self._goes_on_after_self = self._by_priority and config.kv.vllm_release != "0.32"
        self._has_drafts = config.num_draft_tokens > 0
        self._has_leases = driver.policy.overrides("retain")
        self._may_preempt_for_waiting = driver.policy.overrides("may_preempt")

    def schedule(self, step: Step) -> None:
        """Spend a step's budget."""
        self._schedule_running(step)
        if not step.preempted:
            self._schedule_waiting(step)

    def preempt_all(self) -> None:
        """Preempt all that run; what they have in flight is lost."""
        while self._state.running:
            self._give_up(self._state.running.pop(), drop_stale=True)

    # Running requests.

    def _schedule_running(self, step: Step) -> None:
        """Spend the step's budget on running requests, in their order."""
        running, has_slots = self._state.running, self._kv.has_slots
        index = 0
        while index < len(running) and step.budget > 0:
            request = running[index]
            num_tokens = request.num_tokens
            if (
                request.num_computed_tokens + 1 == num_tokens + request.num_placeholders <= request.slots_end
                and num_tokens + 1 < request.num_tokens_at_end
                and not (request.is_prefill_chunk or self._has_drafts)
            ):
                # Most tokens: one more is decoded, in a block that it has.
                step.num_tokens[request.turn_id] = 1
                step.budget -= 1
                index += 1
                continue
            num_new_tokens = self._count_new_tokens(request, step)
            if num_new_tokens == 0:
                index += 1
                continue
            while not has_slots(request, num_new_tokens) and not self._try_allocate(
                request, num_new_tokens, None
            ):
                victim = self._preempt_for_running(request, step)
                if victim is request:
                    break
                index = running.index(request)
            else:
                self._give(request, num_new_tokens, step)
                index += 1
                continue
            if not self._goes_on_after_self:
                return

    def _give(self, request: Request, num_new_tokens: int, step: Step) -> None:
        step.give(request, num_new_tokens)
        step.has_prefill |= request.is_prefill_chunk
        if request.num_drafts:
            num_certain = request.num_tokens + request.num_placeholders - request.num_computed_tokens
            if num_new_tokens > num_certain:
                step.num_drafts[request.turn_id] = num_new_tokens - num_certain
            request.num_drafts = 0

    def _count_new_tokens(self, request: Request, step: Step) -> int:
        """How many tokens a running request gets.

        known tokens       [ prompt and output so far     | placeholders | drafts ]
        computed tokens    [ num_computed_tokens                 |  ← the new ones  ]
        """
        num_computed_tokens, num_placeholders = request.num_computed_tokens, request.num_placeholders
        if (
            num_placeholders > 0
            and num_computed_tokens + 2 - num_placeholders >= request.num_prompt_tokens + request.max_tokens
        ):
            # The steps in flight bring its last token, even if they reject all drafts.
            return 0
        num_tokens = request.num_tokens + request.num_drafts + num_placeholders
        # One slot stays for the token that is sampled.
        most = self._config.kv.max_model_len - num_computed_tokens - 1
        num_new_tokens = min(step.bound(num_tokens - num_computed_tokens), most)
        if not self._config.kv.has_states:
            return num_new_tokens
        return cut_chunk(request, num_computed_tokens, num_new_tokens, step, self._config)

    # Waiting requests.

    def _schedule_waiting(self, step: Step) -> None:
        """Spend what is left of the step's budget on requests that start."""
        waiting = self._state.waiting
        has_running = bool(step.num_tokens)
        goes_on = self._start_loaded(step)
        while goes_on and step.budget > 0:
            request = waiting.get_first()
            if request is None or not self._has_seat(request, step):
                break
            if request.num_stale_tokens and not request.drops_stale:
                # Its output in flight would arrive after tokens that it computes anew.
                waiting.skip_first()
                continue
            hit = self._kv.get_hit(request)
            if self._loading is not None:
                offered = self._loading.add_offer(request, hit)
                if offered is None:
                    waiting.skip_first()
                    continue
                hit = offered
            if hit.waits:
                goes_on = self._try_load(request, hit, step)
            else:
                goes_on = self._try_start(request, hit, step, has_running=has_running)
        waiting.restore_skipped()

    def _has_seat(self, request: Request, step: Step) -> bool:
        """Whether one more may run, after a preemption if need be."""
        has_seat = len(self._state.running) < self._config.max_num_seqs
        return has_seat or self._preempt_for_waiting(request, step)

    def _try_load(self, request: Request, hit: Hit, step: Step) -> bool:
        """Let a request wait for KV from a tier, with its blocks; False if these are short."""
        assert self._loading is not None
        num_new_tokens = self._loading.count_new_tokens(request, hit)
        while not self._try_allocate(request, num_new_tokens, hit):
            if not self._preempt_for_waiting(request, step):
                return False
        self._state.waiting.remove(request)
        self._loading.begin(request, hit)
        return True

    def _try_start(self, request: Request, hit: Hit, step: Step, *, has_running: bool) -> bool:
        """Start a request; False if its first tokens do not fit into the budget or the cache."""
        num_tokens = request.num_tokens - hit.num_computed_tokens
        num_drafts = self._count_padding(hit, step, has_running=has_running) if num_tokens == 1 else 0
        if 1 + num_drafts > step.budget:
            return False
        num_new_tokens = step.bound(num_tokens + num_drafts)
        if self._config.kv.has_states:
            start = hit.num_computed_tokens
            num_new_tokens = cut_chunk(request, start, num_new_tokens, step, self._config, hit.shared_tokens)
            if num_new_tokens == 0:
                return False
        while not self._try_allocate(request, num_new_tokens, hit):
            if not self._preempt_for_waiting(request, step):
                return False
        if hit.num_loaded_tokens and self._loading is not None:
            step.copies_done_s = max(step.copies_done_s, self._loading.load(request, hit))
        request.num_loaded_tokens = hit.num_loaded_tokens
        self._start(request, hit.num_computed_tokens, num_new_tokens, step)
        if num_drafts:
            step.num_drafts[request.turn_id] = num_drafts
        return True

    def _count_padding(self, hit: Hit, step: Step, *, has_running: bool) -> int:
        """Draft slots for a request that starts with one token, so that all decodes of the step are alike."""
        num_drafts = self._config.num_draft_tokens
        fits = hit.num_tokens + 1 + num_drafts + 1 <= self._config.kv.max_model_len
        joins_decodes = not step.has_prefill and (has_running or hit.num_tokens > 0)
        return num_drafts if fits and joins_decodes else 0

    def _start_loaded(self, step: Step) -> bool:
        """Start requests whose KV has come from a tier; False if the next one does not fit now.

        With full attention their blocks are taken already.
        """
        state = self._state
        while state.loaded and step.budget > 0 and len(state.running) < self._config.max_num_seqs:
            assert self._loading is not None
            request = state.loaded[0]
            self._loading.publish(request)
            start = request.num_computed_tokens
            num_new_tokens = step.bound(request.num_tokens - start)
            if self._config.kv.has_states:
                num_new_tokens = cut_chunk(request, start, num_new_tokens, step, self._config)
            if num_new_tokens == 0 or not self._try_allocate(request, num_new_tokens, None):
                return False
            state.loaded.popleft()
            self._start(request, start, num_new_tokens, step)
        return True

    def _start(self, request: Request, num_computed_tokens: int, num_new_tokens: int, step: Step) -> None:
        started = step.resumed if request.num_preemptions else step.new
        started[request.turn_id] = num_computed_tokens
        self._state.waiting.remove(request)
        self._state.running.append(request)
        request.status = Status.RUNNING
        request.num_computed_tokens = num_computed_tokens
        request.is_prefill_chunk = num_computed_tokens + num_new_tokens < request.num_tokens
        step.give(request, num_new_tokens)

    # Blocks: free ones first, then those that leases give up.

    def _try_allocate(self, request: Request, num_new_tokens: int, hit: Hit | None) -> bool:
        """Take slots for a request's next tokens; False, and nothing is taken, if blocks are short.

        A request that starts brings its hit, a running one None. Leases may have been shortened either way.
        """
        is_busy = bool(self._state.running)
        if self._kv.try_allocate(request, num_new_tokens, hit, is_busy=is_busy):
            return True
        if not self._has_leases:
            return False
        is_allocated = self._allocate_from_leases(request, num_new_tokens, hit)
        # Ending a lease may change the order of waiting turns; no queue changes inside an allocation.
        self._driver.settle()
        return is_allocated

    def _allocate_from_leases(self, request: Request, num_new_tokens: int, hit: Hit | None) -> bool:
        state, now_s = self._state, self._state.now_s
        is_busy = bool(state.running)
        # Requests whose loads are on their way will run without anyone's help.
        num_others = len(state.running) + state.num_loading - (1 if hit is None else 0)
        stalled = num_others <= 0
        num_wanted = self._kv.count_missing(request, num_new_tokens, hit, is_busy=is_busy)
        if not stalled and num_wanted > self._driver.get_num_reclaimable_blocks(request.turn_id):
            # All leases together would not be enough: ending them would help nobody.
            return False
        while self._driver.reclaim(num_wanted, now_s, for_turn_id=request.turn_id, stalled=stalled):
            if self._kv.try_allocate(request, num_new_tokens, hit, is_busy=is_busy):
                return True
            # What was given up is partly held by others, or part of the hit.
            num_wanted *= 2
        return False

    # Preemption: who loses its blocks, and what that does to it.

    def _preempt_for_running(self, request: Request, step: Step) -> Request:
        """Preempt one running request so that another can go on; it may be that request itself."""
        running = self._state.running
        if self._by_priority:
            victim = max(running, key=lambda each: (each.priority, each.arrival_s))
        else:
            self._put_victim_last(request)
            victim = running[-1]
        self._preempt(step, victim)
        return victim

    def _put_victim_last(self, request: Request) -> None:
        """Move the policy's choice to the tail of `running`, where vLLM takes its victim.

        running   [scheduled in this step | request | not scheduled yet …]
                                           └────── candidates ──────────┘
        """
        running = self._state.running
        candidates = running[running.index(request) :]
        victim_id = self._driver.get_victim([each.turn_id for each in candidates], self._state.now_s)
        for each in candidates:
            if each.turn_id == victim_id:
                running.remove(each)
                running.append(each)

    def _preempt_for_waiting(self, request: Request, step: Step) -> bool:
        """Preempt a running request for a waiting one that does not fit, if the policy says so."""
        if not self._may_preempt_for_waiting:
            return False
        # What started in this step stays: so no request is preempted twice in it, and the step ends.
        started = step.new.keys() | step.resumed.keys()
        candidates = [each.turn_id for each in self._state.running if each.turn_id not in started]
        victim_id = self._driver.get_preempted_for(request.turn_id, candidates, self._state.now_s)
        if victim_id is None:
            return False
        self._preempt(step, self._state.requests[victim_id])
        return True

    def _preempt(self, step: Step, victim: Request, *, gives_back: bool = True) -> None:
        self._state.running.remove(victim)
        step.take_out(victim, gives_back=gives_back)
        step.preempted[victim.turn_id] = victim.num_computed_tokens
        self._give_up(victim)

    def _give_up(self, request: Request, *, drop_stale: bool = False) -> None:
        """Free all blocks of a request that has left `running`; it will be computed again."""
        self._driver.preempt(request.turn_id, self._state.now_s, request.num_computed_tokens)
        self._kv.free(request)
        request.status = Status.PREEMPTED
        request.num_computed_tokens = request.num_drafts = request.num_placeholders = 0
        request.num_stored_chunks = 0
        request.drops_stale = drop_stale or (request.drops_stale and request.num_stale_tokens > 0)
        request.num_stale_tokens = request.num_in_flight_tokens
        request.num_preemptions += 1
        self._state.waiting.add_back(request)


def cut_chunk(
    request: Request,
    start: int,
    num_tokens: int,
    step: Step,
    config: EngineConfig,
    shared_tokens: int | None = None,
) -> int:
    """How many of its next tokens a request with recurrent states computes, if it could compute `num_tokens`.

    States are cached only where a chunk of the prompt ends:

        prompt    ├───────────────────────────────────────┤
        blocks    │       │       │       │       │       │ ·
        chunks    ├───────────────┼───────┼───────┼───────┤      3 blocks fit into a step, 1 was left over
                                  ↑       ↑       ↑
                  a step's last whole block │     the last block that a later prompt can hit
                                          where this prompt leaves what others have

    `start`: its tokens that are computed. `shared_tokens`: where its prompt leaves what others have, by its
    hit; what the request says, if it runs.
    """
    prefill_end = max(request.num_prompt_tokens, request.num_tokens - 1)
    if start >= prefill_end:
        return num_tokens
    size = config.kv.block_size
    end = start + num_tokens
    if end < prefill_end:
        most = step.size
        if config.long_prefill_token_threshold > 0:
            most = min(most, config.long_prefill_token_threshold)
        aligned_end = end // size * size
        # A block wider than a step is computed in parts.
        if aligned_end > start or size <= most:
            end = aligned_end
    stops = [(request.num_tokens - 1) // size * size]
    if start % size:
        stops.append((start // size + 1) * size)
    shared_tokens = request.shared_tokens if shared_tokens is None else shared_tokens
    if start < shared_tokens < end:
        stops.append(start + (shared_tokens - start) // size * size)
    end = min((stop for stop in stops if start < stop < end), default=end)
    return max(0, end - start)
