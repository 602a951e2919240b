"""The scheduler of the simulated engine: vLLM V1's, which asks the driver at the same few places.

There is no prefill phase and no decode phase. Every step has a budget of tokens. It gives each request tokens
until all tokens of the request are computed: running requests first, then waiting ones.

    schedule       leases expire, loads arrive, keys change
                   running    [ tokens so far ] + next ones    blocks short? free ones, leases, a preemption
                   waiting    [ hit | load ] + first ones      the first that cannot start ends the step
                   what the step computes counts as computed: the next one can be scheduled at once
    finish_step    requests get output and finish ─► their blocks are leased or freed

The parts of a step are below in this order. Requests and the time are in `EngineState`, blocks in `KvCache`.
The policy is asked through `Driver`. Decisions equal vLLM's step by step (`tests/differential`); the driver
is asked where `tenuto.vllm.scheduler` asks it. Source: vllm/v1/core/sched/scheduler.py and
async_scheduler.py@0.32.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Mapping, Sequence
from operator import attrgetter

from tenuto.core.driver import Driver
from tenuto.core.engine import get_prompt_weight
from tenuto.core.jobs import Arrival, Finish
from tenuto.core.limits import Limits
from tenuto.core.policy import Policy
from tenuto.core.policy_caller import DecisionLog
from tenuto.core.stats import DriverStats
from tenuto.core.types import ShortHit, TierView, Yields
from tenuto.core.windows import STATE
from tenuto.estimators.step_size import AdaptiveSteps
from tenuto.sim.cost.batch import StepBatch
from tenuto.sim.engine import EngineConfig
from tenuto.sim.engine.driver_port import SimEngine
from tenuto.sim.engine.state import ChunkSteps, EngineState, Load, Step, WaitingQueue
from tenuto.sim.kv.kv_cache import KvCache
from tenuto.sim.kv.pool import Segment
from tenuto.sim.kv.request import BlockHashes, Hit, Request, Status
from tenuto.sim.tiers import make_offloader
from tenuto.sim.tiers.offloader import Offloader
from tenuto.sim.tiers.tier import OffloadTiers

PUBLISHED = Limits(
    max_leased_share=1.0,
    max_pinned_share=0.0,
    always_yield=False,
    max_held_back_s=math.inf,
    max_wait_over_stock=None,
    max_parallel_turns=8,
)
"""Policies run as published: a lease that yields on a deadlock only is not reclaimed before one, and only the
policy ends a wait."""


class Scheduler:
    """Decides what each step computes. The caller calls `schedule` and `finish_step` in turn."""

    def __init__(
        self,
        config: EngineConfig,
        policy: Policy,
        limits: Limits = PUBLISHED,
        *,
        tiers: OffloadTiers | None = None,
        log: DecisionLog | None = None,
        strict: bool = False,
    ) -> None:
        """`tiers` belong to the engine that `config.offload` describes; `strict` is as in `Driver`."""
        self._log, self._strict = log, strict
        self.config = config
        self._by_priority = config.order == "priority"
        self._is_fork = config.scheduler == "continuum-fork"
        self._has_drafts = config.num_draft_tokens > 0
        self._prompt_weight = get_prompt_weight(config.step_tokens)
        """Of adaptive steps; None if steps have a fixed size."""
        self._has_states = config.kv.has_states
        self._is_async = config.max_steps_in_flight > 1
        self.kv = kv = KvCache(
            config.kv,
            config.max_steps_in_flight * config.max_num_batched_tokens,
            keeps_ends=policy.overrides("retain"),
        )
        self.offloader = make_offloader(config.offload, tiers, kv, config.offload_chunk_tokens)
        kv.holds_whole_prompts = self.offloader is None or self.offloader.takes_whole_prompts
        self._needs_whole_prompts = config.kv.reserve_full_sequence and kv.holds_whole_prompts
        """Whether a turn that starts needs blocks for its whole prompt, as many with a load as without."""
        self._has_stretches = (
            kv.can_truncate
            and not self._has_drafts
            and not (self.offloader is not None and self.offloader.stores_answers)
            # With more, a stretch would drop a step whose results are still to come.
            and config.max_steps_in_flight <= 2
        )
        self._has_chunk_steps = (
            self._has_stretches
            and config.prefill_schedule_interval == 1
            and not (self.offloader is not None and self.offloader.is_sync)
        )
        self.state = EngineState(WaitingQueue(None))
        self._port = SimEngine(config, self.state, kv, self.offloader)
        self._follow(self._make_driver(policy, limits))

    def _make_driver(self, policy: Policy, limits: Limits, stats: DriverStats | None = None) -> Driver:
        prompt_weight = self._prompt_weight
        return Driver(
            policy,
            self._port,
            limits,
            by_priority=self._by_priority,
            log=self._log,
            stats=stats,
            strict=self._strict,
            step_chooser=None if prompt_weight is None else AdaptiveSteps(prompt_weight),
        )

    def _follow(self, driver: Driver) -> None:
        """Use this driver from now on, and make an empty queue in its order."""
        policy = driver.policy
        self.driver = driver
        self._has_leases = policy.overrides("retain")
        self._may_preempt_for_waiting = policy.overrides("may_preempt")
        self._asks_admission = policy.overrides("admit")
        self.needs_each_step = (
            self._log is not None or policy.overrides("step_budget") or policy.needs.reorder_s == 0
        )
        """Whether a log has the size of each step, or the policy is asked or told something before each."""
        self._skips_refused = (
            self.offloader is not None
            and self._needs_whole_prompts
            and self.kv.can_truncate
            and self._log is None
            and not self._may_preempt_for_waiting
        )
        """Whether a turn that surely gets no blocks is not asked what it would load."""
        if self._asks_admission or policy.overrides("queue_key"):
            self.state.waiting = WaitingQueue(
                lambda turn_id: driver.get_queue_key(turn_id, self.state.now_s), driver.make_order
            )
        else:
            self.state.waiting = WaitingQueue(driver.get_stock_key if self._by_priority else None)
        if self.offloader is not None:
            self.offloader.follow(driver)

    # What an engine calls.

    def add_request(self, request: Request, now_s: float) -> None:
        """A turn came in. Raises ConfigError if it can never run here."""
        self.kv.enter(request)
        self.state.now_s = now_s
        self.state.requests[request.turn_id] = request
        arrival = Arrival(
            hints=request.hints,
            num_prompt_tokens=request.num_prompt_tokens,
            prompt=request.prompt_ids,
            hashes=BlockHashes(request, self.config.kv.hash_block_size),
            priority=request.priority,
        )
        self.driver.arrive(request.turn_id, now_s, arrival)
        request.has_checkpoints = self.driver.is_first_turn(request.turn_id)
        if self.offloader is not None:
            self.offloader.arrive(request)
        self._add_waiting(request)

    def schedule(self, now_s: float) -> Step:
        """Decide the next step. If it has no tokens, nothing can run now."""
        state, driver, offloader = self.state, self.driver, self.offloader
        self.begin_step(now_s)
        if self._asks_admission:
            idle = not (state.running or state.num_loading)
            state.waiting.admit(driver, now_s, idle=idle)
        step = self._make_step(only_decodes=driver.bounds_steps and self._will_only_decode())
        step.defers_prefill = self._defers_prefill()
        copied_s = offloader.get_free_s(now_s) if offloader is not None and offloader.is_serial else now_s
        self._schedule_running(step)
        if not step.preempted:
            self._schedule_waiting(step)
        state.num_executed_steps += bool(step.num_tokens)
        if step.has_prefill or step.starts_prefill:
            state.last_prefill_step = state.num_executed_steps
        self._advance(step)
        if offloader is not None and offloader.is_serial:
            step.copies_s = max(0.0, step.copies_done_s - copied_s)
        for turn_id, num_hit_tokens in (*step.new.items(), *step.resumed.items()):
            short_hit = _get_short_hit(state.requests[turn_id], num_hit_tokens)
            if driver.start(turn_id, now_s, num_hit_tokens, short_hit):
                self._put_first(state.requests[turn_id])
        if self._prompt_weight is not None and step.chunks:
            # Turns behind a prompt that a step cuts would get nothing from the next ones, if these are small.
            state.running.sort(key=attrgetter("is_prefill_chunk"))
        return step

    def _put_first(self, request: Request) -> None:
        """Compute the rest of a prompt before those of other running requests, if one step can."""
        if 0 < request.num_prompt_tokens - request.num_computed_tokens < self.config.max_step_tokens:
            self.state.running.remove(request)
            self.state.running.insert(0, request)

    def abort(self, turn_id: str, now_s: float, *, num_early_tokens: int = 0) -> None:
        """The client of a turn disconnected. Nothing happens if the turn is done.

        `num_early_tokens`: output tokens that a running turn was given before their time.
        """
        request = self.state.requests.get(turn_id)
        if request is None:
            return
        state = self.state
        state.now_s = now_s
        num_output_tokens = request.num_output_tokens
        if request.status is Status.RUNNING:
            state.running.remove(request)
            num_output_tokens -= num_early_tokens
        elif request in state.loaded:
            state.loaded.remove(request)
        elif request.status in (Status.LOADING, Status.LOADED):
            state.loading = [load for load in state.loading if load.request is not request]
        else:
            state.waiting.discard(turn_id)
        computed = request.num_computed_tokens
        self._finish(request, Finish(num_output_tokens, aborted=True, num_computed_tokens=computed))

    def reset_prefix_cache(self, now_s: float, *, preempt_running: bool = False) -> bool:
        """Forget all cached content, including leases. While requests run, return False and keep the content.

        With `preempt_running`, running requests start over instead, and their output in flight is lost.
        """
        self.state.now_s = now_s
        self.driver.drop_all(now_s)
        if preempt_running:
            while self.state.running:
                self._give_up(self.state.running.pop(), drop_stale=True)
        return self.kv.pool.reset()

    def get_next_event_s(self) -> float | None:
        """The time of the next event without a step: a lease expires, or a copy is complete. None if none."""
        times_s = [self.driver.get_next_deadline_s()]
        if self.offloader is not None:
            # Requests wait for loads, blocks for stores.
            times_s.append(self.offloader.get_next_stored_s())
            times_s += [load.done_s for load in self.state.loading[:1]]
        known_s = [each for each in times_s if each is not None]
        return min(known_s) if known_s else None

    def get_tiers(self) -> Sequence[TierView]:
        """The tiers below the GPU; empty in an engine without tiers."""
        return () if self.offloader is None else self.offloader.get_views(self.state.now_s)

    def switch(self, policy: Policy, limits: Limits, now_s: float, *, keeps_leases: bool) -> None:
        """Let another policy decide from now on, for the same requests. See `Driver.take_over`."""
        self.state.now_s = now_s
        driver = self._make_driver(policy, limits, self.driver.stats)
        driver.take_over(self.driver, now_s, keeps_leases=keeps_leases)
        waiting = sorted(self.state.waiting, key=lambda request: driver.get_stock_key(request.turn_id))
        self._follow(driver)
        for request in waiting:
            self._add_waiting(request)

    def begin_step(self, now_s: float) -> None:
        """Do what is due: leases expire, loads arrive, keys change. Once for each time is enough."""
        self.state.now_s = now_s
        self.kv.begin_step()
        self.driver.expire(now_s)
        if self.offloader is not None:
            self._collect_loaded(self.offloader)
        if self.driver.tick(now_s):
            self.state.waiting.reorder_all()

    def _add_waiting(self, request: Request) -> None:
        self.state.waiting.add(request, is_parked=self.driver.needs_admission(request.turn_id))

    def _make_step(self, *, only_decodes: bool) -> Step:
        """The next step, still empty. `only_decodes`: as in `Driver.get_step_size`."""
        state, driver = self.state, self.driver
        budget, per_prompt = self.config.max_step_tokens, self.config.long_prefill_token_threshold
        if driver.bounds_steps:
            budget, chosen = driver.get_step_size(state.now_s, budget, only_decodes=only_decodes)
            per_prompt = per_prompt or chosen
        # A single request cannot starve another one.
        is_alone = len(state.running) + state.num_waiting <= 1
        return Step(budget, 0 if is_alone else per_prompt)

    def _will_only_decode(self) -> bool:
        """Whether the next step surely has one token of each request, however small; False if in doubt."""
        state = self.state
        # A log has the chosen size of every step.
        if self._log is not None or self._has_drafts or state.num_waiting:
            return False
        return not any(request.is_prefill_chunk for request in state.running)

    def _defers_prefill(self) -> bool:
        """Whether the next step computes no prompts, because one of the last steps computed some.

        False if nothing decodes, or if the last step that started requests could not start all of them.
        Otherwise the queue would grow without bound. Source: `local_prefill_interval` in
        vllm/v1/core/sched/scheduler.py@0.33.
        """
        state, interval = self.state, self.config.prefill_schedule_interval
        if interval == 1 or state.is_capacity_bound or state.last_prefill_step is None:
            return False
        is_early = state.num_executed_steps + 1 - state.last_prefill_step < interval
        return is_early and any(not request.is_prefill_chunk for request in state.running)

    # Running requests.

    def _schedule_running(self, step: Step) -> None:
        """Spend the step's budget on running requests, in their order."""
        running, has_slots = self.state.running, self.kv.has_slots
        index = 0
        while index < len(running) and step.budget > 0:
            request = running[index]
            num_tokens = request.num_tokens
            if (
                request.num_computed_tokens + 1 == num_tokens + request.num_placeholders <= request.slots_end
                and num_tokens + 1 < request.num_tokens_at_end
                and not (request.is_prefill_chunk or self._has_drafts)
            ):
                # The usual case: one more token is decoded, into a block that the request has.
                step.num_tokens[request.turn_id] = 1
                step.budget -= 1
                index += 1
                continue
            is_deferred = step.defers_prefill and request.is_prefill_chunk and not self._is_fork
            num_new_tokens = 0 if is_deferred else self._count_new_tokens(request, step)
            if num_new_tokens == 0:
                index += 1
                continue
            while not has_slots(request, num_new_tokens) and not self._try_allocate(
                request, num_new_tokens, None
            ):
                victim = self._preempt_for_running(request, step)
                if victim is request:
                    break
                if not self._is_fork:
                    index = running.index(request)
            else:
                self._give(request, num_new_tokens, step)
                index += 1
                continue
            if self._is_fork or not self._by_priority or self.config.kv.vllm_release == "0.32":
                return
            # Requests after it in `running` may be more important, and need its blocks.

    def _give(self, request: Request, num_new_tokens: int, step: Step) -> None:
        step.give(request, num_new_tokens)
        step.has_prefill |= request.is_prefill_chunk
        if request.num_drafts:
            num_certain = request.num_tokens + request.num_placeholders - request.num_computed_tokens
            if num_new_tokens > num_certain:
                step.num_drafts[request.turn_id] = num_new_tokens - num_certain
            request.num_drafts = 0

    def _count_new_tokens(self, request: Request, step: Step) -> int:
        """The number of tokens that a running request gets.

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
        most = self.config.kv.max_model_len - num_computed_tokens - 1
        num_new_tokens = min(step.bound(num_tokens - num_computed_tokens), most)
        if self._has_states:
            return self._cut_chunk(request, num_computed_tokens, num_new_tokens, step, request.shared_tokens)
        return num_new_tokens

    # Waiting requests.

    def _schedule_waiting(self, step: Step) -> None:
        """Spend the rest of the step's budget on requests that start."""
        state, waiting = self.state, self.state.waiting
        step.has_running = bool(step.num_tokens)
        goes_on = self._start_loaded(step)
        while goes_on and step.budget > 0:
            request = waiting.get_first()
            if request is None:
                break
            has_seat = len(state.running) < self.config.max_num_seqs
            if not (has_seat or self._preempt_for_waiting(request, step)):
                break
            if request.num_stale_tokens and not request.drops_stale:
                # Its output in flight would arrive after tokens that it computes again.
                waiting.skip_first()
                continue
            hit = self.kv.get_hit(request)
            if self._skips_refused and state.running and self._is_refused(request, hit):
                self.driver.block(request.turn_id)
                break
            if self.offloader is not None:
                offered = self._add_offer(request, hit, self.offloader)
                if offered is None:
                    waiting.skip_first()
                    continue
                hit = offered
                if hit.waits:
                    goes_on = self._try_load(request, hit, step, self.offloader)
                    continue
            goes_on = self._try_start(request, hit, step)
        waiting.restore_skipped()
        if not step.defers_prefill:
            state.is_capacity_bound = waiting.num_eligible > 0

    def _try_start(self, request: Request, hit: Hit, step: Step) -> bool:
        """Start a request; False if its first tokens do not fit into the budget or the cache."""
        start = hit.num_computed_tokens
        num_new_tokens, num_drafts = self._count_first_tokens(request, start, hit.shared_tokens, step)
        if num_new_tokens == 0:
            return False
        while not self._try_allocate(request, num_new_tokens, hit):
            if not self._preempt_for_waiting(request, step):
                return False
        if hit.num_loaded_tokens and self.offloader is not None:
            done_s = self.offloader.load(request, hit.num_tokens, hit.num_loaded_tokens, self.state.now_s)
            self.driver.load(request.turn_id, hit.num_loaded_tokens)
            step.copies_done_s = max(step.copies_done_s, done_s)
        request.num_loaded_tokens = hit.num_loaded_tokens
        self._start(request, start, num_new_tokens, num_drafts, step)
        return True

    def _count_first_tokens(
        self, request: Request, start: int, shared_tokens: int, step: Step
    ) -> tuple[int, int]:
        """The number of tokens with which a request starts, and of draft slots among them; 0 if it cannot.

        One that starts with a single token gets slots for drafts, so that all decodes of the step are equal.
        `start` and `shared_tokens`: see `_cut_chunk`.
        """
        num_tokens, num_drafts = request.num_tokens - start, 0
        if step.defers_prefill and num_tokens > 1:
            return 0, 0
        if num_tokens == 1 and not step.has_prefill and (step.has_running or start > 0):
            num_drafts = self.config.num_draft_tokens
            if start + 1 + num_drafts + 1 > self.config.kv.max_model_len:
                num_drafts = 0
        if 1 + num_drafts > step.budget:
            return 0, 0
        num_new_tokens = step.bound(num_tokens + num_drafts)
        if self._has_states:
            num_new_tokens = self._cut_chunk(request, start, num_new_tokens, step, shared_tokens)
        return num_new_tokens, num_drafts

    def _start(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int, num_drafts: int, step: Step
    ) -> None:
        started = step.resumed if request.num_preemptions else step.new
        started[request.turn_id] = num_computed_tokens
        self.state.waiting.discard(request.turn_id)
        self.state.running.append(request)
        step.starts_prefill |= num_computed_tokens < request.num_tokens - 1
        request.status = Status.RUNNING
        request.num_computed_tokens = num_computed_tokens
        request.is_prefill_chunk = num_computed_tokens + num_new_tokens < request.num_tokens
        step.give(request, num_new_tokens)
        if num_drafts:
            step.num_drafts[request.turn_id] = num_drafts

    def _cut_chunk(
        self, request: Request, start: int, num_tokens: int, step: Step, shared_tokens: int
    ) -> int:
        """The number of its next `num_tokens` that a request computes, if layers have states.

        States are cached only where a chunk of the prompt ends:

            prompt    ├───────────────────────────────────────┤
            blocks    │       │       │       │       │       │ ·
            chunks    ├───────────────┼───────┼───────┼───────┤      3 blocks fit into a step, 1 was left over
                                      ↑       ↑       ↑
                      a step's last whole block │     the last block that a later prompt can hit
                                              where this prompt leaves what others have

        `start`: its computed tokens. `shared_tokens`: where its prompt stops matching other prompts.
        """
        config = self.config
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
        if start < shared_tokens < end:
            stops.append(start + (shared_tokens - start) // size * size)
        end = min((stop for stop in stops if start < stop < end), default=end)
        return max(0, end - start)

    # Requests that load KV from the tiers.

    def _add_offer(self, request: Request, hit: Hit, offloader: Offloader) -> Hit | None:
        """The hit, with what the policy wants to load after it; None to ask again in a later step."""
        now_s = self.state.now_s
        offer = offloader.get_offer(request, hit.num_tokens, now_s)
        if offer is None:
            return hit
        if offloader.must_wait(request, hit.num_tokens, offer.num_tokens, now_s):
            return None
        num_tokens = self.driver.get_load_tokens(request.turn_id, offer, now_s)
        num_tokens = offloader.choose_part(hit.num_tokens, num_tokens, offer.num_tokens)
        if num_tokens <= 0:
            return hit
        num_reserved = 0 if offloader.takes_whole_prompts else self._count_reserved()
        return hit._replace(
            num_loaded_tokens=num_tokens,
            waits=not offloader.is_sync,
            num_reserved_blocks=num_reserved,
        )

    def _count_reserved(self) -> int:
        """Free blocks for the rest of started requests' prompts. With drafts, also for a step of decoding.

        Source: _inflight_prefill_reserved_blocks in vllm/v1/core/sched/scheduler.py@0.32.
        """
        state, kv = self.state, self.config.kv
        num_drafts = self.config.num_draft_tokens
        num_slots = 1 + num_drafts + kv.num_lookahead_tokens if num_drafts else 0
        begun = [load.request for load in state.loading]
        begun += [*state.loaded, *(each for each in state.running if each.is_prefill_chunk)]
        num_step_blocks = sum(-(-num_slots // size) for size in kv.group_block_sizes)
        return num_step_blocks + sum(self.kv.count_rest(each, num_slots) for each in begun)

    def _try_load(self, request: Request, hit: Hit, step: Step, offloader: Offloader) -> bool:
        """Let a request wait for KV from a tier, with its blocks. False if there are too few blocks.

        With full attention it takes the blocks of all its tokens; vLLM takes only those of the loaded tokens.
        This difference is on purpose: requests that hold only these could keep each other from starting for
        ever. Hybrid models are as in vLLM, which leaves enough free blocks for other requests.
        """
        takes_all = offloader.takes_whole_prompts
        num_new_tokens = request.num_tokens - hit.num_computed_tokens if takes_all else 0
        while not self._try_allocate(request, num_new_tokens, hit):
            if not self._preempt_for_waiting(request, step):
                return False
        self.state.waiting.discard(request.turn_id)
        request.status = Status.LOADING
        request.num_computed_tokens = hit.num_computed_tokens
        request.num_loaded_tokens = hit.num_loaded_tokens
        done_s = offloader.load(request, hit.num_tokens, hit.num_loaded_tokens, self.state.now_s)
        self.driver.load(request.turn_id, hit.num_loaded_tokens)
        insort(self.state.loading, Load(done_s, request), key=attrgetter("done_s"))
        return True

    def _collect_loaded(self, offloader: Offloader) -> None:
        """Move requests whose loads have ended to `loaded`.

        With full attention, the loaded blocks are cached from here on. In hybrid models they are cached when
        the request is about to start, as in vLLM. Blocks that only waited for their stores are freed first.
        """
        state = self.state
        offloader.release_stored(state.now_s)
        while state.loading and state.loading[0].done_s <= state.now_s:
            request = state.loading.pop(0).request
            if offloader.takes_whole_prompts:
                self._publish_load(request)
            if self._by_priority:
                # vLLM's queue of turns that hold blocks never has the policy's order.
                insort(state.loaded, request, key=lambda each: self.driver.get_stock_key(each.turn_id))
            else:
                state.loaded.append(request)

    def _publish_load(self, request: Request) -> None:
        if request.status is Status.LOADING:
            self.kv.cache(request, request.num_computed_tokens)
            # Of a prompt that came as a whole, the last token is computed, so that the next can be sampled.
            request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
            request.status = Status.LOADED

    def _start_loaded(self, step: Step) -> bool:
        """Start requests whose KV has come from a tier. False if the next one does not fit now.

        With full attention they have their blocks already.
        """
        state = self.state
        while state.loaded and step.budget > 0 and len(state.running) < self.config.max_num_seqs:
            request = state.loaded[0]
            self._publish_load(request)
            start = request.num_computed_tokens
            num_new_tokens, num_drafts = self._count_first_tokens(request, start, request.shared_tokens, step)
            if num_new_tokens == 0 or not self._try_allocate(request, num_new_tokens, None):
                return False
            state.loaded.popleft()
            self._start(request, start, num_new_tokens, num_drafts, step)
            # As in vLLM, until the step is complete its reserved blocks are not given to other loads.
            request.is_prefill_chunk = True
        return True

    # Blocks: free ones first, then those that leases free.

    def _try_allocate(self, request: Request, num_new_tokens: int, hit: Hit | None) -> bool:
        """Take slots for a request's next tokens. If there are too few blocks, return False and take none.

        `hit`: the hit of a request that starts; None for a running one. Either way leases may have been
        shortened.
        """
        is_busy = bool(self.state.running)
        if self.kv.try_allocate(request, num_new_tokens, hit, is_busy=is_busy):
            return True
        is_allocated = self._has_leases and self._allocate_from_leases(request, num_new_tokens, hit)
        if not is_allocated and request.status is not Status.RUNNING:
            self.driver.block(request.turn_id)
        # Ending a lease may change the order of waiting turns; no queue changes inside an allocation.
        self.driver.settle()
        return is_allocated

    def _allocate_from_leases(self, request: Request, num_new_tokens: int, hit: Hit | None) -> bool:
        state, now_s = self.state, self.state.now_s
        is_busy = bool(state.running)
        # Loading requests will run without help.
        num_others = len(state.running) + state.num_loading - (1 if hit is None else 0)
        stalled = num_others <= 0
        num_wanted = self.kv.count_missing(request, num_new_tokens, hit, is_busy=is_busy)
        if not stalled and num_wanted > self.driver.get_num_reclaimable_blocks(request.turn_id):
            # All leases together would not be enough, so ending them would not help.
            return False
        while self.driver.reclaim(num_wanted, now_s, for_turn_id=request.turn_id, stalled=stalled):
            if self.kv.try_allocate(request, num_new_tokens, hit, is_busy=is_busy):
                return True
            # Other requests hold a part of the freed blocks, or the blocks are part of the hit.
            num_wanted *= 2
        return False

    # Preemption: which request loses its blocks, and what happens to it.

    def _preempt_for_running(self, request: Request, step: Step) -> Request:
        """Preempt one running request so that `request` can continue. It may be `request` itself.

            running   [scheduled in this step | request | not scheduled yet …]
            vLLM                               └────── candidates ──────────┘
            fork       └───────────────── candidates ───────────────────────┘

        The fork is the public Continuum prototype, made from vLLM 0.10.2. Its victim may have tokens in this
        step, and the step's budget does not get them back. Nor does its position in `running` move back if
        the victim was before it. So another request misses the step. A request that preempts itself ends the
        pass. Source: `schedule` and `pop_running_request_based_on_last_step` of the fork's scheduler.py.
        """
        running = self.state.running
        if self._by_priority and not self._is_fork:
            victim = max(running, key=lambda each: (each.priority, each.arrival_s))
        else:
            candidates = running if self._is_fork else running[running.index(request) :]
            victim_id = self.driver.get_victim([each.turn_id for each in candidates], self.state.now_s)
            victim = running[-1] if victim_id is None else self.state.requests[victim_id]
        self._preempt(step, victim, gives_back=not self._is_fork)
        return victim

    def _preempt_for_waiting(self, request: Request, step: Step) -> bool:
        """Preempt a running request for a waiting one that does not fit, if the policy says so."""
        if not self._may_preempt_for_waiting:
            return False
        # Requests that started in this step stay. So none is preempted twice in it, and the step ends.
        started = step.new.keys() | step.resumed.keys()
        candidates = [each.turn_id for each in self.state.running if each.turn_id not in started]
        victim_id = self.driver.get_preempted_for(request.turn_id, candidates, self.state.now_s)
        if victim_id is None:
            return False
        self._preempt(step, self.state.requests[victim_id])
        return True

    def _preempt(self, step: Step, victim: Request, *, gives_back: bool = True) -> None:
        self.state.running.remove(victim)
        step.take_out(victim, gives_back=gives_back)
        step.preempted[victim.turn_id] = victim.num_computed_tokens
        self._give_up(victim)

    def _give_up(self, request: Request, *, drop_stale: bool = False) -> None:
        """Free all blocks of a request that has left `running`; it will be computed again."""
        self.driver.preempt(request.turn_id, self.state.now_s, request.num_computed_tokens)
        self.kv.free(request)
        request.status = Status.PREEMPTED
        request.num_computed_tokens = request.num_drafts = request.num_placeholders = 0
        request.num_stored_chunks = 0
        request.drops_stale = drop_stale or (request.drops_stale and request.num_stale_tokens > 0)
        request.num_stale_tokens = request.num_in_flight_tokens
        request.num_preemptions += 1
        self.state.waiting.add(request, is_back=True)

    # The results of a step: scheduled tokens count as computed, requests get output and finish.

    def _advance(self, step: Step) -> None:
        """Count a step's tokens as computed, so that the next step can be scheduled at once."""
        requests, offloader = self.state.requests, self.offloader
        is_async, has_drafts = self._is_async, self._has_drafts
        chunk_tokens = chunk_context = num_decodes = decode_context = 0
        num_pairs = 0.0
        if offloader is not None:
            running = [requests[turn_id] for turn_id in step.num_tokens]
            offloader.begin_stores(running, self.state.loaded, self.state.now_s)
        for turn_id, num_tokens in step.num_tokens.items():
            request = requests[turn_id]
            context = request.num_computed_tokens
            if num_tokens == 1:
                num_decodes += 1
                decode_context += context
            else:
                chunk_tokens += num_tokens
                chunk_context += context
                num_pairs += num_tokens * (context + num_tokens / 2)
            request.num_computed_tokens = num_computed_tokens = context + num_tokens
            # With full attention, nothing after the prompt is stored before the turn ends.
            if offloader is not None and (context < request.num_prompt_tokens or offloader.stores_answers):
                done_s = offloader.store_computed(request, self.state.now_s)
                if offloader.is_sync:
                    step.copies_done_s = max(step.copies_done_s, done_s)
            request.num_in_flight_tokens += num_tokens
            is_chunk = num_computed_tokens < request.num_tokens + request.num_placeholders
            request.is_prefill_chunk = is_chunk
            if is_chunk:
                step.chunks.add(turn_id)
            elif is_async:
                request.num_placeholders += 1
                if has_drafts:
                    request.num_placeholders += step.num_drafts.get(turn_id, 0)
                    request.num_drafts = self.config.num_draft_tokens
        if offloader is not None:
            offloader.end_stores(self.state.now_s)
        num_chunks = len(step.num_tokens) - num_decodes
        step.batch = StepBatch(
            num_chunks, chunk_tokens, chunk_context, num_pairs, num_decodes, decode_context
        )

    def finish_step(
        self, step: Step, now_s: float, num_accepted: Mapping[str, int] | None = None
    ) -> list[tuple[Request, int]]:
        """Process the results of a step. Steps finish in the order in which they were scheduled.

        `num_accepted`: the number of correct drafts by request, 0 by default. Returns the requests that got
        output, with the number of new tokens. Requests that are done have `Status.FINISHED`.
        """
        self.state.now_s = now_s
        outputs: list[tuple[Request, int]] = []
        finished: list[Request] = []
        requests, chunks = self.state.requests, step.chunks
        is_async, has_drafts = self._is_async, self._has_drafts
        for turn_id, num_tokens in step.num_tokens.items():
            request = requests.get(turn_id)
            if request is None:
                continue  # aborted meanwhile
            request.num_in_flight_tokens -= num_tokens
            if (
                request.num_computed_tokens <= request.slots_end
                and request.num_tokens + 1 < request.num_tokens_at_end
                and not (request.num_stale_tokens or has_drafts or turn_id in chunks)
            ):
                # The usual case: the token fills no block and is not the last one.
                request.num_tokens += 1
                if is_async:
                    request.num_placeholders -= 1
                outputs.append((request, 1))
                continue
            is_stale = request.num_stale_tokens > 0
            if is_stale:
                request.num_stale_tokens -= num_tokens
                if request.drops_stale:
                    continue
            if turn_id in chunks:
                continue
            num_right = num_accepted.get(turn_id, 0) if num_accepted else 0
            if turn_id in step.num_drafts and not is_stale:
                # Wrong drafts are dropped, and the tokens that were computed for them.
                num_wrong = step.num_drafts[turn_id] - num_right
                request.num_computed_tokens -= num_wrong if request.num_computed_tokens > 0 else 0
                request.num_placeholders -= num_wrong if request.num_placeholders > 0 else 0
            outputs.append((request, self._append(request, 1 + num_right, is_stale=is_stale)))
            if request.status is Status.FINISHED:
                finished.append(request)
        self._remove_finished(finished)
        if has_drafts and not is_async:
            for request, _ in outputs:
                request.num_drafts = self.config.num_draft_tokens
        return outputs

    def _append(self, request: Request, num_new_tokens: int, *, is_stale: bool) -> int:
        """Add output tokens, up to the request's end. Returns their number."""
        num_left = request.num_tokens_at_end - request.num_tokens
        num_cut = max(0, num_new_tokens - num_left)
        num_new_tokens -= num_cut
        request.num_tokens += num_new_tokens
        if not is_stale:
            self._cache_output(request, num_new_tokens, num_cut)
        if num_new_tokens == num_left:
            seen = (request.tool, request.is_last) if self.config.read_tool_calls else (None, None)
            self._finish(request, Finish(request.num_output_tokens, *seen))
        return num_new_tokens

    def _cache_output(self, request: Request, num_new_tokens: int, num_cut: int) -> None:
        """Cache the blocks that new output fills, if they were not cached when they were scheduled.

        `num_cut`: tokens of the output that are beyond the request's end.
        """
        if self.config.kv.vllm_release == "0.32":
            if self._is_async:
                request.num_placeholders -= num_new_tokens
                self.kv.cache(request, request.num_computed_tokens - request.num_placeholders)
            return
        if self._is_async:
            request.num_placeholders -= num_new_tokens + num_cut
        if self._is_async or self._has_drafts:
            request.num_computed_tokens -= num_cut
            self.kv.cache(request, request.num_computed_tokens - request.num_in_flight_tokens)

    def _remove_finished(self, finished: list[Request]) -> None:
        if finished:
            running = self.state.running
            running[:] = [each for each in running if each.status is not Status.FINISHED]
        for request in finished:
            # A request that was preempted while its last token was in flight is in the queue.
            self.state.waiting.discard(request.turn_id)

    def _finish(self, request: Request, finish: Finish) -> None:
        """End a request and free its blocks. Just before, a lease may take them over."""
        now_s, offloader = self.state.now_s, self.offloader
        if offloader is not None:
            offloader.leave(request, self.driver.get_finished_turn(request.turn_id, finish), now_s)
        self.driver.finish(request.turn_id, now_s, finish)
        if offloader is not None:
            offloader.store_finished(request, now_s)
            # vLLM does this before it asks its connector, so these blocks are freed before the others.
            self.kv.leave(request)
        self.kv.free(request)
        request.status = Status.FINISHED
        del self.state.requests[request.turn_id]

    # Stretches: many steps done together, with the same result as each alone. Only their times are still
    # added up one by one (`tenuto.sim.event_loop`), so that they are the same to the last bit.
    #
    #     quiet steps    every running request decodes one token, and nothing else happens
    #     chunk steps    the last running request computes a chunk of its prompt instead, which fills the step

    def count_quiet_steps(self, now_s: float | None = None) -> int:
        """A lower bound of the number of next steps that are quiet if no event comes from outside.

        0 if in doubt. Changes nothing, unless it gets the time: then it may take the blocks that the next
        step needs, as that step would do first. If that step is not quiet, it finds them taken.
        """
        state, running = self.state, self.state.running
        if not (self._has_stretches and 0 < len(running) <= self.config.max_step_tokens) or state.loaded:
            return 0
        num_steps = self._count_steps_to_end(running)
        if num_steps == 0:
            return 0
        num_in_blocks = self._count_steps_in_blocks(running, self.kv.pool.num_free_blocks)
        if num_in_blocks == 0 and now_s is not None:
            state.now_s = now_s
            for each in running:
                if each.num_computed_tokens >= each.slots_end and not self._try_allocate(each, 1, None):
                    return 0
            num_in_blocks = self._count_steps_in_blocks(running, self.kv.pool.num_free_blocks)
        num_steps = min(num_steps, num_in_blocks)
        if num_steps == 0:
            return 0
        # Of requests that generate the same text, it matters which caches a block first.
        texts = {each.path.segments[-1] for each in running}
        return 0 if len(texts) < len(running) or self._may_start_one(texts) else num_steps

    def run_quiet_steps(self, num_steps: int) -> None:
        """Apply the effects of this many quiet steps to requests and their blocks."""
        self.state.num_executed_steps += num_steps
        self._decode(self.state.running, num_steps, num_steps)

    def find_chunk_steps(self) -> ChunkSteps | None:
        """The next chunk steps if no event comes from outside; None if there are none, or if in doubt.

        They are full, so no waiting request can start. The step with the last chunk is none of them.
        """
        state, running = self.state, self.state.running
        if not (self._has_chunk_steps and running) or state.waiting.num_parked:
            return None
        *decoding, request = running
        if not request.is_prefill_chunk or any(each.is_prefill_chunk for each in decoding):
            return None
        # It matters which of several requests caches a block of one text first.
        texts = {each.path.segments[-1] for each in decoding}
        if len(texts) < len(decoding) or not texts.isdisjoint(request.path.segments):
            return None
        # Those that decode can do so for over a hundred steps, and the prompt may take all other blocks.
        num_free = self.kv.pool.num_free_blocks
        num_kept = max(num_free - self.kv.count_rest(request), min(num_free // 2, 8 * len(decoding)))
        most = self._count_steps_to_end(decoding)
        if decoding:
            most = min(most, self._count_steps_in_blocks(decoding, num_kept))
        if most == 0:
            return None
        context = sum([each.num_computed_tokens for each in decoding])
        return ChunkSteps(request, decoding, most, num_free - num_kept, context)

    def schedule_chunk(self, steps: ChunkSteps, now_s: float) -> Step | None:
        """Schedule the next of these steps; None if it must be scheduled like any other.

        The blocks, and what is decoded, are counted by `end_chunk_steps`.
        """
        self.state.now_s = now_s
        request, num_decodes = steps.request, len(steps.decoding)
        step = self._make_step(only_decodes=False)
        num_tokens, context = step.budget - num_decodes, request.num_computed_tokens
        num_blocks = (steps.num_tokens + num_tokens) // self.config.kv.block_size + 1
        if (
            not 1 < num_tokens < request.num_tokens - context
            or step.bound(num_tokens) < num_tokens
            or num_blocks > steps.num_blocks
        ):
            return None
        step.num_tokens = {**steps.decodes, request.turn_id: num_tokens}
        step.budget = 0
        step.chunks.add(request.turn_id)
        num_pairs = num_tokens * (context + num_tokens / 2)
        step.batch = StepBatch(1, num_tokens, context, num_pairs, num_decodes, steps.decode_context)
        request.num_computed_tokens += num_tokens
        if self.offloader is not None:
            self.offloader.store_computed(request, now_s)
        steps.num_scheduled += 1
        steps.num_tokens += num_tokens
        steps.decode_context += num_decodes
        return step

    def end_chunk_steps(self, steps: ChunkSteps, num_finished: int, in_flight: Sequence[Step]) -> None:
        """Apply the effects of the scheduled steps. `num_finished` steps have ended meanwhile."""
        self.state.num_executed_steps += steps.num_scheduled
        # Its tokens count as computed already.
        fits = self.kv.try_allocate(steps.request, 0, None, is_busy=True)
        assert fits, "chunk steps ran out of blocks"
        self._decode(steps.decoding, steps.num_scheduled, num_finished)
        for each in self.state.running:
            each.num_in_flight_tokens = sum([step.num_tokens.get(each.turn_id, 0) for step in in_flight])

    def _decode(self, requests: Sequence[Request], num_scheduled: int, num_finished: int) -> None:
        """Let requests decode in this many steps. All of them have ended, or all but the last."""
        num_in_flight = num_scheduled - num_finished
        for request in requests:
            # The last token of a sequence has no KV yet, so it completes no block.
            request.num_tokens += num_scheduled - 1
            if request.num_computed_tokens + num_scheduled > request.slots_end:
                fits = self.kv.try_allocate(request, num_scheduled, None, is_busy=True)
                assert fits, "a stretch ran out of blocks"
            request.num_tokens += 1 - num_in_flight
            request.num_computed_tokens += num_scheduled
            request.num_placeholders += num_in_flight if self._is_async else 0

    def _count_steps_to_end(self, running: list[Request]) -> int:
        """Steps before the one that may bring a request's last token; 0 if one does not decode steadily.

        steadily, with two steps in flight:   [ computed …  | placeholder ]
                                              [ num_tokens … ]
        """
        num_placeholders, num_left = self.config.max_steps_in_flight - 1, self.config.kv.max_model_len
        for request in running:
            num_tokens = request.num_tokens
            if (
                request.num_placeholders != num_placeholders
                or request.num_computed_tokens - num_placeholders != num_tokens - 1
                or num_tokens == request.num_prompt_tokens
            ):
                return 0
            left = request.num_tokens_at_end - num_tokens
            if left < num_left:
                num_left = left
        return max(0, num_left - 1)

    def _count_steps_in_blocks(self, running: list[Request], num_free: int) -> int:
        """Steps for which free blocks surely suffice, if each of these requests computes one token a step.

        free slots in own blocks    request 1 │····      block size 16, 5 free blocks, 3 requests:
                                    request 2 │··        one more for each, and two of the three get a second;
                                    request 3 │·······   after 16 + 7 steps the third has none
        """
        size = self.config.kv.block_size
        num_each, num_more = divmod(num_free, len(running))
        if num_each >= self.config.kv.max_model_len // size:
            return num_each * size
        slots: list[int] = [
            (table.row.num_blocks + table.num_blanks) * size - each.num_computed_tokens
            for each in running
            for table in each.tables  # one, with full attention
        ]
        slots.sort()
        return num_each * size + min(slots[num_more], size)

    def _may_start_one(self, texts: set[Segment]) -> bool:
        """Whether a waiting request could start in one of the next steps; True if in doubt.

        `texts`: what running requests generate.
        """
        config, running, waiting = self.config, self.state.running, self.state.waiting
        request = waiting.get_first()
        if waiting.num_parked or (request and self._may_preempt_for_waiting):
            return True
        budget = config.max_step_tokens - len(running)
        if request is None or len(running) == config.max_num_seqs or budget == 0:
            return False
        if not texts.isdisjoint(request.path.segments):
            # It continues a running request's output, so its hit may grow. Any other request's hit can only
            # shrink, and the number of free blocks only falls.
            return True
        hit = self.kv.get_hit(request)
        most = min(budget, config.long_prefill_token_threshold or budget)
        is_refused = self._is_refused(request, hit, min(most, request.num_tokens - hit.num_tokens))
        if is_refused:
            self.driver.block(request.turn_id)
        return not is_refused

    def _is_refused(self, request: Request, hit: Hit, num_tokens: int = 0) -> bool:
        """Whether a waiting request surely gets no blocks, now and in each step that only decodes.

        Others run. `num_tokens`: its first tokens, if it may start without blocks for all of them.
        """
        num_missing = self.kv.count_missing(request, num_tokens, hit, is_busy=True)
        driver = self.driver
        if num_missing <= 0:
            return False
        if num_missing > driver.get_num_reclaimable_blocks(request.turn_id):
            return True
        if self._needs_whole_prompts and driver.refuses_steadily(request.turn_id, self.state.now_s):
            return True
        # Whether no lease could be shortened while something runs.
        return not driver.limits.always_yield and not any(
            driver.leases.get_first_to_yield(kind) for kind in (Yields.FIRST, Yields.ALWAYS)
        )


def _get_short_hit(request: Request, num_hit_tokens: int) -> ShortHit | None:
    layers = request.short_layers
    if layers is None or request.num_loaded_tokens:
        # What was loaded is not computed again. The plugin sees look-ups on the GPU only.
        return None
    name = layers if layers == STATE else f"window {layers}"
    return ShortHit(name, request.shared_tokens - num_hit_tokens)
