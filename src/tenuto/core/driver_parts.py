"""The parts of a driver, and what an engine asks of them. Nothing here changes a job, a turn or a lease."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tenuto.core.admission import Admission
from tenuto.core.canary import Canary
from tenuto.core.engine import Engine
from tenuto.core.fair_order import FairOrder, Service
from tenuto.core.history import History
from tenuto.core.indexed_heap import IndexedHeap
from tenuto.core.job_table import JobTable
from tenuto.core.jobs import Finish, TurnState
from tenuto.core.lease_ledger import LeaseLedger
from tenuto.core.limits import Limits
from tenuto.core.order import Order
from tenuto.core.policy import TOLD_HOOKS, Key, Policy
from tenuto.core.policy_caller import DecisionLog, PolicyCaller
from tenuto.core.quota import NOBODY
from tenuto.core.reasons import name_reason
from tenuto.core.retention import Retention
from tenuto.core.stats import DriverStats
from tenuto.core.step_tokens import StepChooser, StepSize
from tenuto.core.stock_queue import make_stock_queue
from tenuto.core.types import EngineView, LoadOffer, Turn


class DriverParts:
    """One policy, one engine, and what is between them; `Driver` tells them what happens."""

    def __init__(  # noqa: PLR0913 - what an engine chooses, once
        self,
        policy: Policy,
        engine: Engine,
        limits: Limits | None = None,
        *,
        by_priority: bool = False,
        log: DecisionLog | None = None,
        stats: DriverStats | None = None,
        decided: DriverStats | None = None,
        canary: Canary | None = None,
        strict: bool = False,
        step_chooser: StepChooser | None = None,
    ) -> None:
        """Connect a policy to an engine.

        `by_priority`: the engine serves requests by their own priority, and the policy only decides the
        order among requests of equal priority.
        `stats`: the statistics to update; by default the driver makes an empty one.
        `decided`: where to count what was decided, such as leases, if not in `stats`: a driver in shadow
        mode decides, and the engine does not follow.
        `canary`: the jobs that the policy applies to; all by default.
        `strict`: if a hook of the policy fails, raise PolicyError instead of counting the fault.
        `step_chooser`: chooses the size of each step; by default, steps are as large as the engine allows.
        """
        self.policy = policy
        self.limits = limits or Limits()
        self.stats = stats or DriverStats()
        self.decided = decided or self.stats
        self._canary = canary or Canary()
        self._num_earlier_faults = 0
        self._engine = engine
        self._step_chooser = step_chooser
        self._caller = PolicyCaller(policy, log, strict=strict)
        self._history = History(log, is_shadow=self.is_shadow)
        # A policy that treats all jobs alike does not need to know which turns belong to one job.
        infers = self.limits.infer_jobs and any(
            policy.overrides(hook) for hook in ("queue_key", "admit", "retain", "preempt_key", *TOLD_HOOKS)
        )
        view = engine.get_view(0.0)
        self._hit_alignment = engine.hit_alignment
        self._hash_block_size = engine.hash_block_size
        self._jobs = JobTable(self.limits.max_remembered_jobs, engine.hash_block_size, infers=infers)
        self._turns: dict[str, TurnState] = {}
        self._by_priority = by_priority
        self.service = Service(self.limits.tenant_weights)
        self._retention = Retention(engine, self._caller, self.limits, self.decided, by_priority=by_priority)
        self._order = Order(self._caller, engine, self._retention, self._canary, by_priority=by_priority)
        stock_queue = make_stock_queue(policy, self.limits, view.num_blocks * view.block_size)
        self._admission = Admission(self._caller, self._retention, self.limits, self.decided, stock_queue)
        self.leases, self.quota = self._retention.leases, self._retention.quota
        self.pins = self._retention.pins
        self._ledger = LeaseLedger(self.decided, self._history, self._jobs)
        self._ticked_s = -math.inf

    def get_next_deadline_s(self) -> float | None:
        """The next time at which `expire` has work to do; None if there are no leases."""
        return self.leases.get_next_deadline_s()

    @property
    def is_shadow(self) -> bool:
        """Whether the engine does not follow what this driver decides."""
        return self.decided is not self.stats

    @property
    def num_policy_faults(self) -> int:
        """How many calls of policy hooks have failed so far, those of earlier drivers included."""
        return self._num_earlier_faults + self._caller.num_faults

    def get_policy_figures(self) -> dict[str, float]:
        """The figures that the policy reports about what it learned; empty for most policies."""
        return self._caller.get_figures()

    def get_num_leased_blocks(self) -> int:
        """Number of distinct blocks that leases cover."""
        return self._engine.get_num_leased_blocks()

    def get_num_idle_leased_blocks(self) -> int:
        """Number of leased blocks that no turn uses and that always yield: memory that is free in effect."""
        return self._engine.get_num_idle_leased_blocks() if self.limits.always_yield else 0

    def describe_job(self, job_id: str) -> dict[str, Any] | None:
        """What there is to say of a job, in JSON types; None if it is not known.

        It says nothing of other jobs: only hits of what the job itself computed are counted.
        """
        job, lease = self._jobs.get(job_id), self.leases.get(job_id)
        if job is None:
            return None
        what, why = name_reason(job.lease_news)
        return {
            "turns": job.num_turns,
            "leased_blocks": 0 if lease is None or self.is_shadow else len(lease.blocks),
            "lease_news": what,
            "reason": why,
            "reusable_tokens": job.num_reusable_tokens,
            "reused_tokens": job.num_reused_tokens,
        }

    def get_claimed_blocks(self, turn_id: str) -> list[Any]:
        """The leased blocks that wait for a turn; empty if there are none."""
        lease = self._retention.get_claimed(self._turns.get(turn_id))
        return [] if lease is None else lease.blocks

    def get_tenant_blocks(self) -> dict[str, int]:
        """Number of distinct leased blocks by tenant with leases; "" is no tenant."""
        if self.quota.counts_blocks:
            return self.quota.get_leased_blocks()
        return {NOBODY: self.get_num_leased_blocks()} if len(self.leases) else {}

    def get_num_reclaimable_blocks(self, for_turn_id: str) -> int:
        """Upper bound on the leased blocks that `reclaim` could free for this turn while other turns run."""
        return self._retention.get_num_reclaimable_blocks(self._turns.get(for_turn_id))

    def get_view(self, now_s: float) -> EngineView:
        """The engine's state, including the number of leases."""
        return self._retention.get_view(now_s)

    def make_order(self) -> IndexedHeap | FairOrder:
        """An empty queue of turns, for the engine to fill; the keys are those of `get_queue_key`."""
        if not self.limits.fair_tenants:
            return IndexedHeap()
        return FairOrder(self._turns, self.service, by_priority=self._by_priority)

    def get_queue_key(self, turn_id: str, now_s: float) -> Key:
        """The key that orders a waiting turn in the queue; the smallest key goes first."""
        return self._order.get_queue_key(self._turns[turn_id], now_s)

    def get_stock_key(self, turn_id: str) -> Key:
        """The key that puts a waiting turn where stock vLLM would; the smallest key goes first."""
        return self._order.get_stock_key(self._turns[turn_id])

    def runs_as_stock(self, turn_id: str) -> bool:
        """Whether the policy leaves this turn alone, because its job is not in the canary."""
        return self._turns[turn_id].job.runs_as_stock is True

    def get_victim(self, turn_ids: Sequence[str], now_s: float) -> str | None:
        """The running turn to preempt, out of these; None leaves the choice to the engine."""
        return next(iter(self.get_victims(turn_ids, now_s)), None)

    def get_victims(self, turn_ids: Sequence[str], now_s: float) -> list[str]:
        """These running turns in the order in which to preempt them.

        An empty list leaves the choice to the engine.
        """
        known = (self._turns[turn_id] for turn_id in turn_ids if turn_id in self._turns)
        return self._order.get_victims(known, now_s)

    def get_preempted_for(self, turn_id: str, running_ids: Sequence[str], now_s: float) -> str | None:
        """The running turn to preempt so that a waiting turn fits; None if no turn may be preempted."""
        victim_id = self.get_victim(running_ids, now_s)
        if victim_id is None or turn_id not in self._turns:
            return None
        turn, victim = self._turns[turn_id], self._turns[victim_id]
        return victim_id if self._order.may_preempt(turn, victim, now_s) else None

    def get_load_tokens(self, turn_id: str, offer: LoadOffer, now_s: float) -> int:
        """How many tokens of the offer, from its start, a turn that is about to start loads."""
        if turn_id not in self._turns or not self.policy.overrides("load"):
            return offer.num_tokens
        turn = self._view(self._turns[turn_id])
        answer: bool | int = self._caller.ask("load", turn, offer, self.get_view(now_s))
        if isinstance(answer, bool):
            return offer.num_tokens if answer else 0
        return min(max(0, answer), offer.num_tokens)

    def get_tier_key(self, turn: Turn, now_s: float) -> Key:
        """The key of what this turn has in the tiers below the GPU; the smallest is given up first."""
        if not self.policy.overrides("tier_key"):
            return ()
        key: Key = self._caller.ask("tier_key", turn, self.get_view(now_s))
        return key

    def get_turn(self, turn_id: str) -> Turn | None:
        """What the policy sees of a turn that waits or runs; None if it is unknown, or runs as in stock."""
        turn = self._turns.get(turn_id)
        return None if turn is None or turn.job.runs_as_stock else self._view(turn)

    def get_finished_turn(self, turn_id: str, finish: Finish) -> Turn | None:
        """What the policy will see of a turn that is about to finish; as `get_turn`."""
        turn = self._turns.get(turn_id)
        return None if turn is None or turn.job.runs_as_stock else turn.get_finished_view(finish)

    def get_next_tick_s(self) -> float:
        """The next time at which `tick` has work to do; infinity if nothing depends on time."""
        return min(self._admission.get_next_overdue_s(), self._get_next_rekey_s())

    @property
    def hears_steps(self) -> bool:
        """Whether `step` must be called for each step."""
        return self._step_chooser is not None or self._caller.hears("on_step")

    def needs_output(self, turn_id: str) -> bool:
        """Whether the turn's output must be read to learn what follows it.

        It need not be read if the client said that this turn is the job's last.
        """
        turn = self._turns.get(turn_id)
        return turn is not None and turn.arrival.hints.is_last is not True

    def is_first_turn(self, turn_id: str) -> bool:
        """Whether a turn is its job's first, and its beginning may be pinned if other jobs share it."""
        turn = self._turns.get(turn_id)
        if turn is None or not self.pins.max_blocks:
            return False
        return turn.job.num_turns == 1 and not turn.job.runs_as_stock

    def get_arrival_s(self, turn_id: str) -> float | None:
        """When a turn arrived; None if the driver does not know the turn."""
        turn = self._turns.get(turn_id)
        return None if turn is None else turn.arrival_s

    def has_started(self, turn_id: str) -> bool:
        """Whether a turn has had its first step; a turn that the driver does not know has."""
        turn = self._turns.get(turn_id)
        return turn is None or turn.started

    def needs_admission(self, turn_id: str) -> bool:
        """Whether the policy must be asked before this turn starts."""
        return self._admission.needs(self._turns.get(turn_id))

    @property
    def bounds_steps(self) -> bool:
        """Whether `get_step_size` must be asked before each step."""
        return self._step_chooser is not None or self.policy.overrides("step_budget")

    def get_step_size(
        self, now_s: float, max_num_batched_tokens: int, *, only_decodes: bool = False
    ) -> StepSize:
        """Bounds of the next step: at least one token per running turn, at most the engine's budget.

        Within that, it is the smaller of what the chooser and the policy say. With a canary the policy is not
        asked, because a step serves all jobs. `only_decodes`: no turn waits, and no prompt is computed in
        part, so the chooser need not be asked: it leaves room for all turns that decode.
        """
        if only_decodes and not self.policy.overrides("step_budget"):
            return StepSize(max_num_batched_tokens)
        view = self.get_view(now_s)
        answers, per_prompt = [max_num_batched_tokens], 0
        if self._step_chooser is not None:
            chosen = self._step_chooser.choose(view)
            self._caller.write(
                {"kind": "chosen", "what": "step_tokens", "answer": chosen and chosen.num_tokens}
            )
            if chosen is not None:
                answers.append(chosen.num_tokens)
                per_prompt = chosen.per_prompt
        if self.policy.overrides("step_budget") and not self._canary.is_on:
            bound: int | None = self._caller.ask("step_budget", view)
            answers += [] if bound is None else [bound]
        num_tokens = max(1, min(max(min(answers), view.num_running), max_num_batched_tokens))
        return StepSize(num_tokens, per_prompt)

    def _get_next_rekey_s(self) -> float:
        rekey_s = self.policy.needs.rekey_s
        return math.inf if rekey_s is None else self._ticked_s + rekey_s

    def _view(self, turn: TurnState) -> Turn:
        return self._retention.get_turn_view(turn)
