"""The driver on a toy engine, under every order of events Hypothesis can think of."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tenuto.core.jobs import NOBODY
from tenuto.core.limits import Limits
from tenuto.core.policy import Policy
from tenuto.core.requests import Hints
from tenuto.core.types import Decision, EngineView, Keep, Lease, Release, ToolCall, Turn, Yields
from tenuto.core.wishes import Span, Wish
from tests.support.checks import check_integrity
from tests.support.toy_engine import ToyEngine, ToyTurn

pytestmark = pytest.mark.slow

NUM_BLOCKS = 12
BLOCK_SIZE = 4
SYSTEM_PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


@dataclass
class Scripted(Policy):
    """Answers what the machine wrote down for it."""

    script: list[Decision] = field(init=False, default_factory=lambda: [Release()])
    """What `retain` and `reconsider` answer next."""

    def queue_key(self, turn: Turn, now_s: float):
        return (0 if turn.has_lease else 1, turn.arrival_s)

    def retain(self, turn: Turn, view: EngineView) -> Decision:
        return self.script[0]

    def reconsider(self, lease: Lease, view: EngineView) -> Decision:
        return self.script[0]

    def evict_key(self, lease: Lease, view: EngineView):
        return (lease.value, lease.until_s)


@st.composite
def decisions(draw: st.DrawFn) -> tuple[float, Yields, float] | None:
    """Keep for so many seconds with such terms, or None for Release."""
    if draw(st.integers(0, 4)) == 0:
        return None
    ttl_s = draw(st.sampled_from([1.0, 3.0, 10.0, 1e6]))
    value = float(draw(st.integers(0, 2)))
    return ttl_s, draw(st.sampled_from(Yields)), value


limits = st.builds(
    Limits,
    max_lease_s=st.sampled_from([4.0, 600.0]),
    max_leased_share=st.sampled_from([1.0, 1.0, 0.5]),
    max_tenant_share=st.sampled_from([1.0, 1.0, 0.25]),
    max_tenant_leases=st.sampled_from([1, 1000]),
    max_remembered_jobs=st.sampled_from([2, 100]),
    always_yield=st.booleans(),
)
tokens = st.integers(10, 12)
WISHES = [Wish("openai", (Span(3.0),)), Wish("anthropic", (Span(3600.0, 2 * BLOCK_SIZE + 1), Span(2.0)))]


@st.composite
def arrivals(draw: st.DrawFn) -> tuple:
    """(which conversation goes on, 0: a new one; how much of it is kept, None: all; the rest of the turn)."""
    conversation = draw(st.sampled_from([0, 0, 0, 1, 1, 2, 3, 4]))
    num_said = draw(st.one_of(st.none(), st.none(), st.integers(1, 30)))
    start = draw(st.sampled_from([[], SYSTEM_PROMPT]))
    added = draw(st.lists(tokens, min_size=1, max_size=24))
    output = draw(st.lists(tokens, min_size=1, max_size=10))
    hints = Hints(
        job_id=draw(st.sampled_from([None, None, "a", "b", "c"])),
        tool=draw(st.sampled_from([None, "ls"])),
        tenant=draw(st.sampled_from([None, "x", "y"])),
        wish=draw(st.sampled_from([None, None, *WISHES])),
    )
    return conversation, num_said, start, added, output, hints


def pick(turns: dict[str, ToyTurn], number: int) -> str:
    """One of the turns, by number."""
    return list(turns)[number % len(turns)]


class DriverMachine(RuleBasedStateMachine):
    """Turns come, run, end; leases are granted and reclaimed; the invariants always hold."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.num_turns = 0
        self.policy = Scripted()
        # Finished conversations: what was said, and the job id the client gave (None: none).
        self.said: list[tuple[list[int], Hints]] = []
        self.hints: dict[str, Hints] = {}

    @initialize(limits=limits)
    def begin(self, limits: Limits) -> None:
        self.limits = limits
        self.engine = ToyEngine(self.policy, NUM_BLOCKS, BLOCK_SIZE, limits)
        self.driver = self.engine.driver

    # Turns.

    @rule(arrival=arrivals())
    def arrive(self, arrival: tuple) -> None:
        conversation, num_said, start, added, output, hints = arrival
        if conversation and self.said:
            said, hints = self.said[(conversation - 1) % len(self.said)]
            start = said if num_said is None else said[:num_said]
        # One turn alone always fits: longer ones no engine would take.
        prompt = (start + added)[: NUM_BLOCKS * BLOCK_SIZE - len(output)] or [1]
        turn_id = f"turn-{self.num_turns}"
        self.num_turns += 1
        self.hints[turn_id] = hints
        self.engine.arrive(turn_id, self.now_s, prompt, output, hints)

    @precondition(lambda self: len(self.engine.waiting))
    @rule()
    def start(self) -> None:
        turn = self.engine.turns[self.engine.waiting.get_first()]
        stalled = not self.engine.running
        free_for_it, wanted = self._count_without_leases(turn)
        num_free = self.engine.pool.num_free_blocks
        num_reclaimable = self.driver.get_num_reclaimable_blocks(turn.turn_id)
        started = self.engine.start_first(self.now_s)
        if started is None and not stalled:
            assert self.engine.pool.num_free_blocks - num_free <= num_reclaimable
        if started is not None:
            assert started == turn.turn_id
            assert turn.num_hit_blocks * BLOCK_SIZE <= len(turn.prompt) - 1
            assert len(turn.blocks) == self.engine.count_blocks(turn)
        elif stalled or (self.limits.always_yield and not self._must_wait_for_others(turn)):
            # Leases cost no allocation: this one would have failed without them.
            assert wanted > free_for_it

    @rule(arrival=arrivals(), decision=decisions(), number=st.integers(0, 3))
    def turn_runs(self, arrival: tuple, decision, number: int) -> None:
        """Shorthand for the most common history, so that runs get further."""
        self.arrive(arrival)
        self.start()
        if self.engine.running:
            self.finish(number, decision, None)

    def _must_wait_for_others(self, turn: ToyTurn) -> bool:
        """Whether its tenant is over its fair share: then it takes nothing from tenants that use less."""
        return self.driver.quota.is_over(self.driver._turns[turn.turn_id].job.tenant or NOBODY)

    def _count_without_leases(self, turn: ToyTurn) -> tuple[int, int]:
        """(blocks that would be free, blocks this turn would take) if there were no leases."""
        held = self.engine.count_held()
        blocks = self.engine.pool.blocks[1:]
        num_free = sum(block.ref_cnt == held[block.block_id] for block in blocks)
        hit = self.engine.get_hit(turn)
        num_new = self.engine.count_blocks(turn) - len(hit)
        return num_free, num_new + sum(block.ref_cnt == held[block.block_id] for block in hit)

    @precondition(lambda self: self.engine.running)
    @rule(number=st.integers(0, 3))
    def preempt(self, number: int) -> None:
        self.engine.preempt(pick(self.engine.running, number), self.now_s)

    @precondition(lambda self: self.engine.running)
    @rule(number=st.integers(0, 3), decision=decisions(), is_last=st.sampled_from([None, None, False, True]))
    def finish(self, number: int, decision, is_last: bool | None) -> None:
        turn = self.engine.running[pick(self.engine.running, number)]
        self._script(decision)
        tool = None if is_last else ToolCall("ls")
        self.engine.finish(turn.turn_id, self.now_s, tool=tool, is_last=is_last)
        self.said = [(turn.tokens, self.hints[turn.turn_id]), *self.said[:5]]

    @precondition(lambda self: self.engine.turns)
    @rule(number=st.integers(0, 3))
    def abort(self, number: int) -> None:
        self.engine.abort(pick(self.engine.turns, number), self.now_s)

    # Time and memory.

    @rule(seconds=st.sampled_from([0.5, 1.0, 5.0]), decision=decisions())
    def time_passes(self, seconds, decision) -> None:
        self.now_s += seconds
        self._script(decision)
        self.driver.expire(self.now_s)
        next_s = self.driver.get_next_deadline_s()
        assert next_s is None or next_s > self.now_s

    def _script(self, decision) -> None:
        answer: Decision = Release()
        if decision is not None:
            ttl_s, yields, value = decision
            answer = Keep(self.now_s + ttl_s, value, yields)
        self.policy.script[0] = answer

    @rule(num_blocks=st.integers(1, NUM_BLOCKS))
    def pressure(self, num_blocks) -> None:
        in_use = {block.block_id for turn in self.engine.running.values() for block in turn.blocks}
        has_room = self.engine.grab(num_blocks, self.now_s)
        if self.limits.always_yield or not self.engine.running:
            assert has_room == (num_blocks <= NUM_BLOCKS - len(in_use))

    @rule()
    def allocate_too_much(self) -> None:
        before = self._snapshot()
        with pytest.raises(ValueError):
            self.engine.pool.allocate(self.engine.pool.num_free_blocks + 1)
        assert self._snapshot() == before

    def _snapshot(self) -> list[object]:
        pool = self.engine.pool
        order = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        return [order, [(block.ref_cnt, block.block_hash) for block in pool.blocks], len(self.driver.leases)]

    @rule(chance=st.integers(1, 6))
    def reset(self, chance) -> None:
        if chance < 6:
            return
        assert self.engine.reset() == (not self.engine.running)
        assert len(self.driver.leases) == 0

    # What always holds.

    @invariant()
    def pool_and_leases_are_whole(self) -> None:
        check_integrity(self.engine.pool, self.driver.leases, idle=not self.engine.running)
        references = Counter(block.block_id for turn in self.engine.running.values() for block in turn.blocks)
        references += self.engine.count_held()
        for block in self.engine.pool.blocks[1:]:
            assert block.ref_cnt == references[block.block_id]

    @invariant()
    def leases_are_bounded(self) -> None:
        leases = list(self.driver.leases)
        assert len({lease.job_id for lease in leases}) == len(leases)
        covered: set[int] = set()
        for lease in leases:
            assert lease.blocks
            assert lease.terms.until_s - lease.granted_s <= self.limits.max_lease_s
            assert lease.next_turn_id is None or lease.next_turn_id in self.engine.waiting
            covered |= {block.block_id for block in lease.blocks}
        # A block counts once, however many leases share it.
        assert self.driver.get_view(self.now_s).num_leased_blocks == len(covered)
        assert len(covered) <= self.limits.max_leased_share * NUM_BLOCKS

    @invariant()
    def tenants_are_counted(self) -> None:
        quota, leases = self.driver.quota, list(self.driver.leases)
        active = {turn.job.tenant or "" for turn in self.driver._turns.values()}
        assert quota._tenants.keys() == active | {lease.tenant or "" for lease in leases}
        for name, own in quota._tenants.items():
            ours = [lease for lease in leases if (lease.tenant or "") == name]
            assert own.num_leases == len(ours)
            if quota.counts_blocks:
                assert len(own.leased) == len({block.block_id for lease in ours for block in lease.blocks})
            running = [
                quota._running_blocks.get(turn.turn_id, 0)
                for turn in self.driver._turns.values()
                if (turn.job.tenant or "") == name and turn.turn_id in self.engine.running
            ]
            assert own.num_running_blocks == sum(running)
        assert quota._sum_of_weights == len(quota._tenants)

    @invariant()
    def driver_knows_the_turns_and_no_others(self) -> None:
        assert self.driver._turns.keys() == self.engine.turns.keys()
        idle = self.driver._jobs.jobs.keys() - {turn.job.job_id for turn in self.driver._turns.values()}
        assert idle == set(self.driver._jobs.idle)
        assert len(idle) <= self.limits.max_remembered_jobs
        # Only what a client wished outlives its job.
        of_jobs = {lease.job_id for lease in self.driver.leases if lease.wish is None}
        assert of_jobs <= self.driver._jobs.jobs.keys()
        assert self.driver.num_policy_faults == 0

    def teardown(self) -> None:
        """All turns end, all time passes: nothing is held, no count left over."""
        self._script(None)
        for turn_id in list(self.engine.turns):
            self.engine.abort(turn_id, self.now_s)
        self.driver.expire(self.now_s + self.limits.max_lease_s + 1)
        assert len(self.driver.leases) == 0
        assert self.driver.get_next_deadline_s() is None
        check_integrity(self.engine.pool, self.driver.leases, idle=True)
        assert self.engine.pool.num_free_blocks == NUM_BLOCKS
        assert len(self.driver.quota) == 0


TestDriverMachine = DriverMachine.TestCase
TestDriverMachine.settings = settings(
    max_examples=250,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_the_machine_lets_a_tenant_over_its_share_wait() -> None:
    """The case in which leases may cost an allocation: they are of a tenant that uses less."""
    machine = DriverMachine()
    machine.begin(Limits())
    for conversation, added in ((0, [10] * 5), (1, [11] * 3)):
        hints = Hints(job_id="a", tool="ls", tenant="y")
        machine.turn_runs((conversation, None, [], added, [10], hints), (1e6, Yields.ALWAYS, 0.0), 0)
    machine.arrive((0, None, [], [12] * 30, [10, 10], Hints(job_id="b", tenant="x")))
    machine.start()
    machine.arrive((0, None, [], [13] * 10, [10, 10], Hints(job_id="c", tenant="x")))
    machine.start()
    assert len(machine.engine.waiting) == 1
    assert len(machine.driver.leases) == 1
    machine.teardown()
