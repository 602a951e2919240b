"""tenuto: the default policy.

One order of jobs decides which turns run first, which KV stays, and who waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from tenuto.core.engine import ADAPTIVE
from tenuto.core.policy import EngineSettings, Key, Learns, Needs, Policy, Reports, setting
from tenuto.core.types import (
    Decision,
    EngineView,
    Job,
    Keep,
    Lease,
    LeaseRefusal,
    LoadOffer,
    Offload,
    StepView,
    ToolCall,
    Turn,
)
from tenuto.estimators.remaining_work import RemainingWork, get_mean_left_s
from tenuto.estimators.returns import Backlog, PlainKinds, PlainShare, Returns, TurnTimes
from tenuto.estimators.step_times import StepTimes
from tenuto.estimators.tool_times import ToolSamples

MIN_LOOK_S = 1.0
"""The shortest time until a lease is reconsidered. A thousand leases then cost a few per cent of a CPU
core."""
MAX_LOOK_S = 5.0
"""The longest time until a lease is reconsidered while memory has a price, because the load may change."""
QUIET_LOOK_S = 10.0
"""Time until a lease is reconsidered while no turn waits, so that memory has no price."""
FIRST = -1e12
"""The value of a lease that is not worth its memory. It is reclaimed before all others, for any turn."""
AHEAD_S = 1e9
"""By so many seconds plain requests go before all jobs: more than any job's work takes."""
FULL_DECAY = 0.02
"""Weight of the latest step in the moving average `_full_share`: the share of steps that were full."""
MAX_LOOK_UPS = 64
"""While more turns wait, first turns are not looked up in the cache: at every rekey each costs as much as its
start."""
MIN_RETURNS = 0.3
"""If a smaller share of similar jobs comes back, their KV is not held. Then it is evicted as in vLLM: the
least recently used blocks first."""
MOST = 0.5
"""If fewer new jobs than this come back, most of them are strangers: then those that came back go first."""


@dataclass
class Tenuto(Policy, Learns, Reports):
    """Least remaining work first, and everything follows from that order.

    - *Which turn runs next*: jobs are ordered by arrival time. A job moves back by `stretch` seconds for each
      second of work that it is expected to still need. Such guesses are drawn towards the mean by how wrong
      they have been; without any trust in them, the order is first come, first served. What is known needs
      no trust: a turn with little to compute, after which its job is likely to pause, goes early. So do short
      turns while the queue is empty before their jobs come back: then jobs do not compete, turns do. Requests
      of jobs that call no tools go first of all, if stock vLLM would compute their prompt in one step.
    - *Which KV stays*: the KV of every job stays through every tool call, as long as no turn needs the
      memory. A turn that needs memory reclaims it from jobs behind it in the order, starting with the last
      job. It waits rather than reclaim from a job before it. So jobs at the front are never recomputed. A job
      counts as behind if it still is when what it loses is added to the turn's work, because somebody must
      compute that again. Where host memory gives KV back faster than it is computed, a turn also reclaims
      from a job whose tool is expected to take longer than the turn. Host memory itself gives up what was not
      used for longest.
    - *At what price*: memory has a price when turns wait for memory while steps have room for more tokens.
      The price is the throughput that one more decoding turn would add. If a tool is expected to take
      longer than the KV is worth, the job gives its KV up. With a host copy this happens sooner, because
      the KV is then cheaper to restore.
    - *How long a step is*: prefill shares a step with decoding. The engine's chooser of step sizes
      (`tenuto.estimators.step_size`), which this policy asks for, makes its chunks small enough not to delay
      decoding turns, and large enough not to delay waiting turns.

    Nothing here is tuned to a GPU or a workload. The policy learns step times from the engine's steps, and
    lengths and tool times from earlier jobs. Stock vLLM never calls `load`.
    """

    needs: ClassVar[Needs] = Needs(
        rekey_s=2.0,
        max_waiting_with_hits=MAX_LOOK_UPS,
        engine=EngineSettings(offload="async", step_tokens=ADAPTIVE),
    )

    stretch: float = setting(
        500.0, "seconds by which a job is put back for each second of work it still needs", minimum=0
    )
    max_idle_s: float = setting(600.0, "seconds after which the KV of a silent job is given up", minimum=0)
    patience: float = setting(
        4.0, "wait for a load this many times as long as computing would take", minimum=0
    )
    _steps: StepTimes = field(init=False, default_factory=StepTimes)
    _backlog: Backlog = field(init=False, default_factory=Backlog)
    _work: RemainingWork = field(init=False, default_factory=RemainingWork)
    _tools: ToolSamples = field(init=False, default_factory=ToolSamples)
    _contexts: dict[str, int] = field(init=False, default_factory=dict)
    _full_share: float = field(init=False, default=0.0)
    _returns: Returns = field(init=False, default_factory=Returns)
    _kinds: PlainKinds = field(init=False, default_factory=PlainKinds)
    _share: PlainShare = field(init=False, default_factory=PlainShare)
    _turn_times: TurnTimes = field(init=False, default_factory=TurnTimes)
    _step_tokens: int = field(init=False, default=0)
    """The engine's budget of a step."""

    # The order.

    def wants_hits(self, turn: Turn) -> bool:
        """Of first turns only: the policy knows what later ones go on behind. Not if it goes first anyway."""
        return turn.job.num_turns == 1 and not self._goes_first(turn.job, turn.num_prompt_tokens)

    def queue_key(self, turn: Turn, now_s: float) -> Key:
        """Sort by the job's place in the order; turns of one job by arrival."""
        place = self._get_place(turn, self._backlog.get_share_back(now_s))
        return (place, turn.job.job_id, turn.arrival_s)

    def preempt_key(self, turn: Turn, view: EngineView) -> Key:
        """Preempt the turn that is last in the order."""
        return (-self._get_place(turn),)

    def _get_place(self, turn: Turn, share_back: float = 1.0) -> float:
        """The place of a turn that waits or runs: its new prompt tokens are known.

        `share_back`: of its job's later turns, so much competes with the turns that wait now.
        """
        known = max(self._get_context(turn), turn.num_cached_tokens or 0)
        new_tokens = max(1, turn.num_prompt_tokens - known)
        if self._goes_first(turn.job, new_tokens):
            return turn.arrival_s - AHEAD_S
        return self._get_place_of(turn.job, self._get_rank(turn.job, float(new_tokens), share_back))

    def _goes_first(self, job: Job, new_tokens: int) -> bool:
        """Whether this is a plain request that stock vLLM would compute in one step."""
        return new_tokens <= self._step_tokens and self._kinds.is_plain(job)

    def _get_rank(self, job: Job, new_tokens: float, share_back: float) -> float:
        """The work that a waiting turn is ordered by, in prefill tokens."""
        return self._work.get_rank(job, new_tokens, share_back)

    def _get_context(self, turn: Turn) -> int:
        """Tokens that its job had before this turn and that the turn goes on behind.

        Otherwise one id for all requests would make each of them look as if it had nothing to compute.
        """
        return 0 if turn.is_parted else self._contexts.get(turn.job.job_id, 0)

    def _get_place_of(self, job: Job, work: float) -> float:
        """The place of a job with so much work, in prefill tokens."""
        place = job.arrival_s + self.stretch * self._steps.get_token_s() * work
        # A flood of plain requests must not keep jobs waiting: their KV would fill the memory meanwhile.
        if self._share.is_flood and not self._kinds.is_plain(job):
            return place - 2 * AHEAD_S
        # Nor may a flood of jobs that never come back take the memory of those that do.
        if self._is_crowded and self._returns.came_back(job.job_id):
            return place - AHEAD_S / 2
        return place

    @property
    def _is_crowded(self) -> bool:
        """Whether most new jobs do not come back."""
        return self._returns.share_of_new < MOST

    def _get_lease_place(self, job: Job) -> float:
        """The place of a job in a tool call."""
        return self._get_place_of(job, self._work.get_work_left(job))

    # Memory.

    def retain(self, turn: Turn, view: EngineView) -> Decision:
        """Keep the KV until it is reconsidered, unless similar jobs rarely come back."""
        return self._keep(turn, 0.0, view)

    def reconsider(self, lease: Lease, view: EngineView) -> Decision:
        """Decide again while the tool still runs. KV that is idle for `max_idle_s` is given up."""
        idle_s = view.now_s - lease.granted_s
        if lease.next_turn_waiting:
            return Keep(view.now_s + self.max_idle_s, value=lease.value)
        if idle_s >= self.max_idle_s:
            return Offload(LeaseRefusal.IDLE)
        return self._keep(lease.turn, idle_s, view)

    def _keep(self, turn: Turn, idle_s: float, view: EngineView) -> Decision:
        if self._returns.get_share(turn.job, _get_tool_name(turn)) < MIN_RETURNS:
            return Offload(LeaseRefusal.NOT_EXPECTED_BACK)
        left_s, worth_s = self._get_tool_left_s(turn, idle_s), self._get_worth_s(view)
        if self._is_spared(turn.job):
            # It is strangers that wait, and memory is not for sale to them.
            worth_s = self.max_idle_s
        why = None if left_s <= worth_s else LeaseRefusal.PRICE
        value = -self._get_lease_place(turn.job) if why is None else FIRST
        # Reconsider later: the worth changes with the load. The expected rest of the tool's time changes as
        # well, because it is estimated from calls that took at least as long.
        has_price = worth_s < self.max_idle_s
        look_s = min(max(left_s, MIN_LOOK_S), MAX_LOOK_S) if has_price else QUIET_LOOK_S
        return Keep(view.now_s + min(look_s, self.max_idle_s), value=value, why=why)

    def evict_key(self, lease: Lease, view: EngineView) -> Key:
        """Evict first what is not worth its memory, oldest first; then the last in the order."""
        return (lease.value, lease.granted_s)

    def tier_key(self, turn: Turn, view: EngineView) -> Key:
        """Host memory gives up what was not used for longest, and what ended jobs used at once.

        Tool calls that have taken long take longer yet, and the order of jobs says nothing about that.
        """
        return ()

    def may_reclaim(self, lease: Lease, turn: Turn, view: EngineView) -> bool:
        """Allow turns before it in the order; allow any turn if the lease is not worth its memory.

        Also allow any turn that is expected to be done before the tool, if the KV can be loaded again then.

        What the lease loses counts as the turn's work: if the turn is not before it even so, both jobs are
        done sooner, in sum, if the turn waits. Without this, jobs whose places are close take the memory from
        each other in turns.

        While strangers crowd the engine, a turn waits for what their turns hold, which is of no more use when
        they end, rather than take the cache of a job that came back.
        """
        if self._loads_faster(view) and self._is_away_for_long(lease, view):
            return True
        if lease.value > FIRST and self._is_spared(lease.turn.job):
            return False
        return -lease.value > self._get_place(turn) + self.stretch * self._get_loss_s(lease, turn, view)

    def _get_loss_s(self, lease: Lease, turn: Turn, view: EngineView) -> float:
        """Seconds in which the lease gets back what the turn may take: no more than its prompt needs."""
        known = self._get_context(turn) if turn.has_lease else turn.num_cached_tokens or 0
        num_missing = max(0, turn.num_prompt_tokens - known)
        num_lost = min(lease.num_blocks, -(-num_missing // view.block_size))
        return self._get_restore_s(view) * num_lost

    def _is_spared(self, job: Job) -> bool:
        """Whether this job came back while most do not: then its memory is not for those that come."""
        return self._is_crowded and self._returns.came_back(job.job_id)

    def _get_tool_left_s(self, turn: Turn, idle_s: float) -> float:
        """Estimate the seconds until the tool returns, from its earlier calls that took at least `idle_s`.

        Without such calls, the client's own estimate is used.
        """
        times = self._tools.try_get(turn.tool.name) if turn.tool is not None else None
        left_s = get_mean_left_s(times.get_sorted(), idle_s) if times is not None else None
        if left_s is not None:
            return left_s
        # No earlier call took this long. For times of unknown scale, the elapsed time is a fair guess of
        # the rest.
        return max(idle_s, turn.expected_tool_s or 0.0, 1.0)

    def _get_worth_s(self, view: EngineView) -> float:
        """Return for how many seconds KV is worth its memory; `max_idle_s` while no turn needs the memory."""
        num_running_blocks = view.num_blocks - view.num_free_blocks - view.num_leased_blocks
        step_s = self._steps.get_decode_s(view.num_running)
        if not (view.num_waiting + view.num_parked and num_running_blocks > 0 and step_s > 0):
            return self.max_idle_s
        # One more decoding turn shares the pass over the weights, and so saves a part of it. When steps are
        # full of prefill, it saves nothing.
        gain = (1 - self._full_share) * self._steps.get_pass_s() / step_s / num_running_blocks
        return min(self.max_idle_s, self._get_restore_s(view) / gain) if gain > 0 else self.max_idle_s

    def _get_restore_s(self, view: EngineView) -> float:
        """Seconds in which a block that was given up is computed or loaded again, whichever is faster."""
        compute_s = self._steps.get_token_s() * view.block_size
        return min([compute_s, *(tier.s_per_block for tier in view.tiers)])

    def _loads_faster(self, view: EngineView) -> bool:
        """Whether a tier gives KV back faster than it is computed; not before steps were seen."""
        return self._get_restore_s(view) < self._steps.get_token_s() * view.block_size

    def _is_away_for_long(self, lease: Lease, view: EngineView) -> bool:
        """Whether the tool is expected to run for longer than a turn."""
        if lease.next_turn_waiting:
            return False
        return self._get_tool_left_s(lease.turn, view.now_s - lease.granted_s) >= self._turn_times.mean_s

    # Loads.

    def load(self, turn: Turn, offer: LoadOffer, view: EngineView) -> bool:
        """Load the KV, unless loading takes more than `patience` times as long as computing."""
        compute_s = self._steps.get_token_s() * offer.num_tokens
        return compute_s == 0 or offer.load_s <= self.patience * compute_s

    # Events.

    def on_step(self, step: StepView) -> None:
        """Learn how long steps take, and whether they are full."""
        self._steps.observe(step.num_tokens, step.num_requests, step.duration_s)
        self._full_share += FULL_DECAY * (step.is_full - self._full_share)

    def on_tool_returned(self, turn: Turn, tool: ToolCall | None, tool_s: float) -> None:
        """Learn how long tools take."""
        if not turn.is_parted:
            self._returns.come_back(turn.job.job_id)
        self._work.come_back(turn.job.job_id, tool_s)
        self._backlog.come_back(tool_s)
        if tool is not None:
            self._tools.observe(tool.name, tool_s)

    def on_turn_arrived(self, turn: Turn, now_s: float) -> None:
        """Learn how long the queue lasts."""
        self._backlog.wait(turn.turn_id, now_s)

    def on_turn_started(self, turn: Turn, now_s: float) -> None:
        """Learn how long the queue lasts, and how long turns run."""
        self._backlog.leave(turn.turn_id)
        self._turn_times.start(turn.turn_id, now_s)

    def on_turn_preempted(self, turn: Turn, now_s: float) -> None:
        """Learn how long the queue lasts."""
        self._backlog.wait(turn.turn_id, now_s)

    def on_tick(self, view: EngineView) -> None:
        """Learn what the engine computes in one step."""
        self._step_tokens = view.max_num_batched_tokens

    def on_turn_finished(self, turn: Turn, now_s: float) -> None:
        """Learn the work per turn. A generated token counts as the number of prefill tokens that it costs."""
        self._backlog.leave(turn.turn_id)
        self._turn_times.end(turn.turn_id, now_s)
        if turn.is_aborted:
            return
        self._kinds.observe(turn)
        num_computed = max(0, turn.num_prompt_tokens - turn.num_hit_tokens)
        decode_work = self._steps.get_tokens_per_decode() * turn.num_output_tokens
        work = num_computed + decode_work
        self._share.observe(work, is_plain=self._kinds.is_plain(turn.job))
        job_id = turn.job.job_id
        if turn.is_parted:
            # It goes on behind nothing, so it is as good as a new job.
            self._returns.end(job_id)
        if not turn.is_last:
            self._returns.leave(turn.job, _get_tool_name(turn), num_computed + turn.num_output_tokens)
        # Of a first turn, what other jobs had computed is not its work.
        known = self._get_context(turn) or turn.num_hit_tokens
        new_tokens = max(1, turn.num_prompt_tokens - known)
        self._contexts[job_id] = turn.num_prompt_tokens + turn.num_output_tokens
        work = new_tokens + decode_work
        self._work.observe_turn(turn.job, float(new_tokens), work, stops=turn.tool is None)

    def on_job_ended(self, job: Job, now_s: float) -> None:
        """Learn how long jobs are."""
        self._contexts.pop(job.job_id, None)
        self._returns.end(job.job_id)
        self._work.end_job(job.job_id)

    # Figures for reports.

    def get_figures(self) -> dict[str, float]:
        """Return the shares of jobs that come back."""
        return self._returns.get_figures()

    # State that survives a restart. Step times are not saved: they are learned again within seconds.

    def get_state(self) -> dict[str, Any]:
        """How long tools and jobs are."""
        return {"tools": self._tools.get_state(), "jobs": self._work.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take up what an earlier run learned."""
        tools = ToolSamples()
        tools.set_state(state["tools"])
        self._work.set_state(state["jobs"])
        self._tools = tools


def _get_tool_name(turn: Turn) -> str | None:
    return turn.tool.name if turn.tool is not None else None
