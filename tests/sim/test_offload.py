"""Tiers inside the simulated engine: by hand, in chaos, and the same result stepped or skipped.

By hand: blocks of 4 tokens, chunks of 8 tokens and 1 byte, a link of 2 bytes per second, so half a second
per chunk.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

from tenuto.core.errors import IntegrityError
from tenuto.core.loader import load_policy
from tenuto.core.policy import Key, Policy
from tenuto.core.requests import Hints
from tenuto.core.types import (
    Decision,
    EngineView,
    Keep,
    Lease,
    LoadOffer,
    Offload,
    Release,
    ToolCall,
    Turn,
)
from tenuto.records.schema import TurnRecord
from tenuto.sim.engine import EngineConfig
from tenuto.sim.engine.scheduler import Scheduler
from tenuto.sim.engine.state import Step
from tenuto.sim.kv import KvConfig
from tenuto.sim.kv.request import Request, Status
from tenuto.sim.simulation import Clients, Simulation
from tenuto.sim.tiers.tier import Link, OffloadTiers, Tier
from tenuto.workload import load_workload
from tenuto.workload.schema import Job, Span, TurnSpec, Workload
from tests.sim.test_loop import LinearSteps, OneSecondSteps
from tests.support.processes import run_under_hash_seeds
from tests.support.sim_checks import check_integrity

MODES = ("sync", "serial", "async", "asked")


@dataclass
class StoreAll(Policy):
    """Copies every context below the GPU when its tool call begins."""

    def retain(self, turn: Turn, view: EngineView) -> Decision:
        return Offload()


@dataclass
class KeepThenStore(Policy):
    """Holds for a while, then copies what it held."""

    hold_s: float = 3.0

    def retain(self, turn: Turn, view: EngineView) -> Decision:
        return Keep(view.now_s + self.hold_s)

    def reconsider(self, lease: Lease, view: EngineView) -> Decision:
        return Offload()


@dataclass
class NeverLoad(Policy):
    """Computes again whatever the tiers have."""

    def load(self, turn: Turn, offer: LoadOffer, view: EngineView) -> bool:
        return False


@dataclass
class LoadPart(Policy):
    """Loads so many tokens of what the tiers have, and computes the rest."""

    num_tokens: int = 20

    def load(self, turn: Turn, offer: LoadOffer, view: EngineView) -> int:
        return self.num_tokens


@dataclass
class InOrder(Policy):
    """Host memory gives up the last job of the alphabet first."""

    def tier_key(self, turn: Turn, view: EngineView) -> Key:
        return (-ord(turn.job.job_id),)


def make_tiers(host_chunks: int = 100, rate: float = 2.0, *, disk: tuple[int, float] | None = None) -> Any:
    """A host tier of so many chunks, and a disk of (chunks, chunks per second) behind it."""
    tiers = [Tier("host", host_chunks, 1, Link(rate))]
    if disk is not None:
        tiers.append(Tier("disk", disk[0], 1, Link(disk[1])))
    return OffloadTiers(tiers)


def make_engine(
    offload: Any = "async",
    tiers: Any = None,
    *,
    policy: Policy | None = None,
    num_blocks: int = 12,
    chunk_tokens: int = 8,
    **settings: Any,
) -> Scheduler:
    config = EngineConfig(
        kv=KvConfig(num_blocks=num_blocks + 1, block_size=4),
        offload=offload,
        offload_chunk_tokens=chunk_tokens,
        **settings,
    )
    return Scheduler(config, policy or load_policy("stock"), tiers=tiers or make_tiers())


def make_turn(name: str, spans: Sequence[tuple[str, int]], num_output: int = 1, **more: Any) -> Request:
    return Request(
        name, list(spans), (f"{name}-output", num_output), 0.0, hints=Hints(job_id=name[0]), **more
    )


def run_step(scheduler: Scheduler, now_s: float) -> Step:
    """One step that takes no time."""
    step = scheduler.schedule(now_s)
    scheduler.finish_step(step, now_s)
    check_integrity(scheduler)
    return step


def warm(scheduler: Scheduler, **more: Any) -> None:
    """32 tokens of `a` through the engine at 0 s; 4 chunks are stored by 2 s, and the GPU forgets them."""
    scheduler.add_request(make_turn("a1", [("a", 32)], **more), 0.0)
    run_step(scheduler, 0.0)
    run_step(scheduler, 2.0)
    assert scheduler.kv.pool.num_free_blocks == 12
    assert scheduler.reset_prefix_cache(3.0)


# Loads.


def test_a_turn_waits_for_its_load_while_others_run() -> None:
    scheduler = make_engine()
    warm(scheduler)
    # 39 // 8 = 4 chunks may come from the host: 2 s on the link.
    scheduler.add_request(make_turn("a2", [("a", 32), ("more", 8)]), 10.0)
    scheduler.add_request(make_turn("c", [("c", 4)], 9), 10.0)
    assert run_step(scheduler, 10.0).num_tokens == {"c": 4}
    assert (scheduler.state.num_loading, scheduler.state.requests["a2"].status) == (1, Status.LOADING)
    assert scheduler.get_next_event_s() == 12.0
    # Its blocks are taken: 10 for 40 tokens, 2 for c's prompt and the token behind it.
    assert scheduler.kv.pool.num_free_blocks == 1
    assert run_step(scheduler, 11.9).num_tokens == {"c": 1}
    step = run_step(scheduler, 12.0)
    assert (step.num_tokens, step.new) == ({"c": 1, "a2": 8}, {"a2": 32})
    assert scheduler.offloader is not None
    # The prompt of a1, and the one chunk of a2's that was not there: 32 + 8. c fills no chunk.
    assert (scheduler.offloader.num_loaded_tokens, scheduler.offloader.num_stored_tokens) == (32, 40)


def test_loads_share_the_link_in_order() -> None:
    scheduler = make_engine(num_blocks=40, tiers=make_tiers())
    for name in "ab":
        scheduler.add_request(make_turn(f"{name}1", [(name, 32)]), 0.0)
    run_step(scheduler, 0.0)
    run_step(scheduler, 4.0)
    assert scheduler.reset_prefix_cache(4.0)
    for name in "ab":
        scheduler.add_request(make_turn(f"{name}2", [(name, 33)]), 10.0)
    run_step(scheduler, 10.0)
    assert scheduler.state.num_loading == 2
    assert [list(run_step(scheduler, now_s).new) for now_s in (11.9, 12.0, 13.9, 14.0)] == [
        [],
        ["a2"],
        [],
        ["b2"],
    ]


def test_a_sync_step_ends_when_its_copies_are_there() -> None:
    scheduler = make_engine("sync")
    scheduler.add_request(make_turn("a1", [("a", 32)]), 0.0)
    assert run_step(scheduler, 0.0).copies_done_s == 2.0  # 4 chunks stored
    assert scheduler.reset_prefix_cache(3.0)
    scheduler.add_request(make_turn("a2", [("a", 32), ("more", 8)]), 10.0)
    step = run_step(scheduler, 10.0)
    # It starts at once, beside its load: 4 chunks until 12 s, and its own fifth one stored behind them.
    assert (step.num_tokens, step.new, step.copies_done_s) == ({"a2": 8}, {"a2": 32}, 12.5)


@pytest.mark.parametrize(
    ("offload", "start_s", "first_token_s"),
    # serial: 2 s of loads, 1 s of computation, half a second for the chunk that it stores.
    [("sync", 10.0, 12.5), ("serial", 10.0, 13.5), ("async", 12.0, 13.0)],
)
def test_the_time_of_a_load_in_a_run(offload: Any, start_s: float, first_token_s: float) -> None:
    """Steps of 1 s. sync: the step at 10 s waits for its copies; async: one begins when the load is there."""
    a = Job("a", 0.0, (TurnSpec((Span("a", 32),), Span("a-out", 1)),))
    # Evicts all of a: 48 tokens are the whole cache.
    b = Job("b", 4.0, (TurnSpec((Span("b", 47),), Span("b-out", 1)),))
    again = Job("again", 10.0, (TurnSpec((Span("a", 32), Span("more", 8)), Span("again-out", 1)),))
    scheduler = make_engine(offload)
    records = Simulation.of_one(scheduler, OneSecondSteps(), Clients(Workload("w", (a, b, again)))).run()  # type: ignore[arg-type]
    assert (records[2].hit_tokens, records[2].start_s) == (32, start_s)
    assert records[2].first_token_s == first_token_s
    assert records[2].prompt_tokens - records[2].hit_tokens == 8


def test_a_policy_may_compute_instead() -> None:
    scheduler = make_engine(policy=NeverLoad())
    warm(scheduler)
    scheduler.add_request(make_turn("a2", [("a", 33)]), 10.0)
    assert run_step(scheduler, 10.0).new == {"a2": 0}
    assert scheduler.offloader is not None
    assert scheduler.offloader.num_loaded_tokens == 0


@pytest.mark.parametrize(("wanted", "loaded"), [(-5, 0), (7, 0), (20, 16), (32, 32), (99, 32)])
def test_a_part_of_an_offer_is_loaded_in_whole_chunks(wanted: int, loaded: int) -> None:
    """The tiers have 32 tokens, in chunks of 8, two of which take a second."""
    scheduler = make_engine(policy=LoadPart(wanted))
    warm(scheduler)
    scheduler.add_request(make_turn("a2", [("a", 33)]), 10.0)
    run_step(scheduler, 10.0)
    assert scheduler.offloader is not None
    assert scheduler.offloader.num_loaded_tokens == loaded
    if loaded:
        assert run_step(scheduler, 10.0 + loaded / 16).new == {"a2": loaded}


def test_a_load_that_does_not_fit_waits() -> None:
    scheduler = make_engine()
    warm(scheduler)
    scheduler.add_request(make_turn("c", [("c", 12)], 3), 10.0)
    run_step(scheduler, 10.0)
    scheduler.add_request(make_turn("a2", [("a", 32), ("more", 8)]), 10.0)  # 10 blocks; c leaves 9
    run_step(scheduler, 11.0)
    assert scheduler.state.num_loading == 0
    run_step(scheduler, 12.0)  # c's last token
    run_step(scheduler, 13.0)
    assert scheduler.state.num_loading == 1
    assert list(run_step(scheduler, 15.0).new) == ["a2"]


def test_a_turn_that_gets_no_blocks_is_not_asked_what_it_would_load() -> None:
    @dataclass
    class Asked(Policy):
        num_asked: int = field(init=False, default=0)

        def load(self, turn: Turn, offer: LoadOffer, view: EngineView) -> bool:
            self.num_asked += 1
            return True

    scheduler = make_engine(policy=(policy := Asked()))
    warm(scheduler)
    scheduler.add_request(make_turn("c", [("c", 12)], 3), 10.0)
    run_step(scheduler, 10.0)
    scheduler.add_request(make_turn("a2", [("a", 32), ("more", 8)]), 10.0)  # 10 blocks; c leaves 9
    run_step(scheduler, 11.0)
    assert policy.num_asked == 0
    run_step(scheduler, 12.0)  # c's last token
    run_step(scheduler, 13.0)
    assert (policy.num_asked, scheduler.state.num_loading) == (1, 1)


@pytest.mark.parametrize("offload", ["async", "native"])
def test_the_last_token_of_a_prompt_that_is_loaded_whole_is_computed(offload: Any) -> None:
    scheduler = make_engine(offload, chunk_tokens=4)
    warm(scheduler)
    scheduler.add_request(make_turn("a2", [("a", 32)]), 10.0)
    run_step(scheduler, 10.0)
    step = run_step(scheduler, 14.0)
    assert (step.num_tokens, step.new) == ({"a2": 1}, {"a2": 31})
    assert scheduler.offloader is not None
    assert scheduler.offloader.num_loaded_tokens == 32
    check_integrity(scheduler, idle=True)


def test_what_the_gpu_has_is_not_loaded() -> None:
    """A lease gives its tail up; the job's next turn hits the rest and loads what is missing."""
    scheduler = make_engine(policy=KeepThenStore(hold_s=100.0))
    scheduler.add_request(make_turn("a1", [("a", 32)], tool=ToolCall("ls")), 0.0)
    run_step(scheduler, 0.0)
    # 24 tokens, then one more: 4 blank blocks and the last 3 of the lease, whose copies are there by then.
    scheduler.add_request(make_turn("b", [("b", 24)], 2), 2.5)
    run_step(scheduler, 2.5)
    run_step(scheduler, 2.6)
    assert len(scheduler.driver.leases.get("a").blocks) == 5  # type: ignore[union-attr]
    scheduler.add_request(make_turn("a2", [("a", 32), ("more", 4)]), 2.7)
    # It needs 9 blocks: 5 of the lease, and 4 of b's, whose 3 chunks are copied from 2.5 to 4 s.
    run_step(scheduler, 3.9)
    assert scheduler.state.num_loading == 0
    # 20 tokens hit, 12 to load: chunks 3 and 4. Half of the third is there already, but a chunk comes whole.
    run_step(scheduler, 4.0)
    assert scheduler.get_next_event_s() == 5.0
    assert run_step(scheduler, 5.0).new == {"a2": 32}
    assert scheduler.offloader is not None
    assert scheduler.offloader.num_loaded_tokens == 12


def test_a_preempted_turn_loads_what_it_had() -> None:
    scheduler = make_engine(tiers=make_tiers(rate=1e6), num_blocks=10, chunk_tokens=4)
    scheduler.add_request(make_turn("a", [("a", 24)], 16), 0.0)  # 39 tokens of KV in the end: all 10 blocks
    scheduler.add_request(make_turn("b", [("b", 12)], 4), 0.0)
    preempted: dict[str, int] = {}
    resumed: dict[str, int] = {}
    for number in range(1, 60):
        step = run_step(scheduler, float(number))
        preempted |= step.preempted
        resumed |= step.resumed
    # b computed 12 tokens of its prompt and no more: its fourth block was a's seventh. Its prompt was stored.
    assert (preempted, resumed) == ({"b": 12}, {"b": 12})
    assert scheduler.offloader is not None
    assert scheduler.offloader.num_loaded_tokens == 12
    check_integrity(scheduler, idle=True)


# Stores.


def test_blocks_stay_taken_until_they_are_copied() -> None:
    scheduler = make_engine()
    scheduler.add_request(make_turn("a", [("a", 32)]), 0.0)
    run_step(scheduler, 0.0)
    # The turn is done; its 4 chunks take until 2 s.
    assert (scheduler.kv.pool.num_free_blocks, scheduler.get_next_event_s()) == (4, 2.0)
    assert not scheduler.reset_prefix_cache(0.5)
    scheduler.add_request(make_turn("b", [("b", 40)]), 1.0)
    assert run_step(scheduler, 1.9).num_tokens == {}
    assert run_step(scheduler, 2.0).num_tokens == {"b": 40}


def test_a_client_that_leaves_ends_no_copy() -> None:
    scheduler = make_engine()
    scheduler.add_request(make_turn("a", [("a", 32)], 9), 0.0)
    run_step(scheduler, 0.0)
    scheduler.abort("a", 0.5)
    check_integrity(scheduler)
    assert scheduler.kv.pool.num_free_blocks == 4
    run_step(scheduler, 2.0)
    assert scheduler.kv.pool.num_free_blocks == 12


@pytest.mark.parametrize(
    ("offload", "num_stored_tokens"),
    # 16 of the prompt; with the output 32 of the 33 tokens have KV. Asked, stock answers Release.
    [("sync", 16), ("async", 32), ("asked", 0)],
)
def test_outputs_are_stored_at_the_end_of_a_turn(offload: Any, num_stored_tokens: int) -> None:
    scheduler = make_engine(offload)
    scheduler.add_request(make_turn("a", [("a", 16)], 17), 0.0)
    for number in range(17):
        run_step(scheduler, float(number))
    assert not scheduler.state.requests
    assert scheduler.offloader is not None
    assert scheduler.offloader.num_stored_tokens == num_stored_tokens


def test_asked_stores_what_the_policy_answers() -> None:
    scheduler = make_engine("asked", policy=StoreAll())
    scheduler.add_request(make_turn("last", [("x", 16)], is_last=True), 0.0)
    scheduler.add_request(make_turn("a1", [("a", 32)], tool=ToolCall("ls")), 0.0)
    run_step(scheduler, 0.0)
    assert scheduler.offloader is not None
    # Nobody is asked about a job's last turn.
    assert scheduler.offloader.num_stored_tokens == 32
    assert scheduler.kv.pool.num_free_blocks == 4
    run_step(scheduler, 2.0)
    assert scheduler.reset_prefix_cache(3.0)
    scheduler.add_request(make_turn("a2", [("a", 33)]), 10.0)
    run_step(scheduler, 10.0)
    assert run_step(scheduler, 12.0).new == {"a2": 32}


def test_a_lease_that_runs_out_is_stored() -> None:
    scheduler = make_engine("asked", policy=KeepThenStore())
    scheduler.add_request(make_turn("a1", [("a", 32)], tool=ToolCall("ls")), 0.0)
    run_step(scheduler, 0.0)
    assert scheduler.offloader is not None
    assert (scheduler.offloader.num_stored_tokens, scheduler.get_next_event_s()) == (0, 3.0)
    run_step(scheduler, 3.0)
    # The lease is over; the copy holds its 8 blocks until 5 s.
    assert (len(scheduler.driver.leases), scheduler.kv.pool.num_free_blocks) == (0, 4)
    assert (scheduler.offloader.num_stored_tokens, scheduler.get_next_event_s()) == (32, 5.0)
    run_step(scheduler, 5.0)
    assert scheduler.kv.pool.num_free_blocks == 12


def test_a_disk_behind_the_host_decides_how_long_a_load_takes() -> None:
    seen: list[LoadOffer] = []

    @dataclass
    class Looking(Policy):
        def load(self, turn: Turn, offer: LoadOffer, view: EngineView) -> bool:
            seen.append(offer)
            return True

    scheduler = make_engine(policy=Looking(), tiers=make_tiers(2, 2.0, disk=(100, 0.5)))
    scheduler.add_request(make_turn("a1", [("a", 32)]), 0.0)
    run_step(scheduler, 0.0)
    assert scheduler.get_next_event_s() == 8.0  # 4 chunks to the disk, at 2 s each
    run_step(scheduler, 8.0)
    assert scheduler.reset_prefix_cache(9.0)
    scheduler.add_request(make_turn("a2", [("a", 33)]), 10.0)
    run_step(scheduler, 10.0)
    # The host holds the first 2 chunks; the others come from the disk in 4 s, passing the host's link.
    assert seen == [LoadOffer(32, 4.0)]
    assert scheduler.get_next_event_s() == 14.0


# The policy's order.


def run_turn(scheduler: Scheduler, turn: Request, now_s: float) -> None:
    """A turn of one step, alone; its copies end before the next second."""
    scheduler.add_request(turn, now_s)
    run_step(scheduler, now_s)


def get_offered(scheduler: Scheduler, job: str) -> int:
    """The tokens that a turn of 33 tokens of this job could load."""
    turn = make_turn(f"{job}9", [(job, 33)])
    scheduler.kv.enter(turn)
    assert scheduler.offloader is not None
    offer = scheduler.offloader.get_offer(turn, 0, 99.0)
    return 0 if offer is None else offer.num_tokens


def test_a_job_behind_does_not_displace_one_before_it() -> None:
    """Room for one job of 4 chunks."""
    scheduler = make_engine(tiers=make_tiers(4, 1000.0), policy=InOrder())
    run_turn(scheduler, make_turn("b1", [("b", 32)]), 0.0)
    run_turn(scheduler, make_turn("c1", [("c", 32)]), 1.0)
    assert (get_offered(scheduler, "b"), get_offered(scheduler, "c")) == (32, 0)
    run_turn(scheduler, make_turn("a1", [("a", 16)]), 2.0)
    # Its 2 chunks displace the last two of b.
    assert (get_offered(scheduler, "a"), get_offered(scheduler, "b")) == (16, 16)


def test_keys_of_numbers_go_before_keys_of_strings() -> None:
    """Room for one job of 4 chunks."""

    @dataclass
    class ByLetterOrNumber(Policy):
        def tier_key(self, turn: Turn, view: EngineView) -> Key:
            return ("a",) if turn.job.job_id == "a" else (ord(turn.job.job_id),)

    scheduler = make_engine(tiers=make_tiers(4, 1000.0), policy=ByLetterOrNumber())
    for now_s, job in enumerate("cab"):
        run_turn(scheduler, make_turn(f"{job}1", [(job, 32)]), float(now_s))
    assert [get_offered(scheduler, job) for job in "abc"] == [32, 0, 0]


def test_a_job_that_ends_leaves_nothing_if_the_policy_orders_the_tier() -> None:
    for policy, left in ((InOrder(), 0), (load_policy("stock"), 32)):
        scheduler = make_engine(policy=policy, tiers=make_tiers(100, 1000.0))
        run_turn(scheduler, make_turn("a1", [("a", 32)]), 0.0)
        assert get_offered(scheduler, "a") == 32
        run_step(scheduler, 1.0)
        scheduler.driver.release("a", 1.0)
        assert get_offered(scheduler, "a") == left


@pytest.mark.parametrize("is_told", [True, False])
def test_what_a_last_turn_computes_is_not_stored(is_told: bool) -> None:
    """Told with the request, nothing of it is; seen in its output, not the output."""
    scheduler = make_engine(tiers=make_tiers(100, 1000.0), policy=InOrder())
    run_turn(scheduler, make_turn("a1", [("a", 8)]), 0.0)
    last = make_turn("a2", [("a", 24)], 9, is_last=True)
    last.hints = Hints(job_id="a", is_last=is_told or None)
    run_turn(scheduler, last, 1.0)
    for number in range(8):
        run_step(scheduler, 2.0 + number)
    assert not scheduler.state.requests
    assert scheduler.offloader is not None
    assert scheduler.offloader.num_stored_tokens == (8 if is_told else 24)


def test_a_copy_under_way_is_not_given_up() -> None:
    """Room for 4 chunks, half a second each: the first job's are on their way until 2 s."""
    scheduler = make_engine(tiers=make_tiers(4), num_blocks=40)
    run_turn(scheduler, make_turn("a1", [("a", 32)]), 0.0)
    run_turn(scheduler, make_turn("b1", [("b", 32)]), 1.0)
    assert get_offered(scheduler, "b") == 0
    run_turn(scheduler, make_turn("b2", [("b", 32)]), 2.0)
    assert (get_offered(scheduler, "a"), get_offered(scheduler, "b")) == (0, 32)


# Faults.


def test_an_aborted_load_leaks_nothing() -> None:
    scheduler = make_engine(max_num_seqs=1)
    warm(scheduler)
    scheduler.add_request(make_turn("a2", [("a", 33)]), 10.0)
    run_step(scheduler, 10.0)
    scheduler.abort("a2", 11.0)
    check_integrity(scheduler, idle=True)
    assert (scheduler.kv.pool.num_free_blocks, scheduler.get_next_event_s()) == (12, None)
    # The same with the load complete and no seat free.
    scheduler.add_request(make_turn("a3", [("a", 33)]), 20.0)
    run_step(scheduler, 20.0)
    scheduler.add_request(make_turn("c", [("c", 4)], 9), 21.0)
    run_step(scheduler, 21.0)
    run_step(scheduler, 22.0)
    assert (len(scheduler.state.loaded), len(scheduler.state.running)) == (1, 1)
    scheduler.abort("a3", 23.0)
    check_integrity(scheduler)
    assert not scheduler.state.loaded
    # 32 loaded tokens stay cached, for whoever comes next; they are free.
    assert scheduler.kv.pool.num_free_blocks == 10


def test_a_cache_is_not_reset_under_a_load() -> None:
    scheduler = make_engine()
    warm(scheduler)
    scheduler.add_request(make_turn("a2", [("a", 33)]), 10.0)
    run_step(scheduler, 10.0)
    assert not scheduler.reset_prefix_cache(11.0, preempt_running=True)
    assert run_step(scheduler, 12.0).new == {"a2": 32}
    assert scheduler.reset_prefix_cache(13.0)


def make_windowed_engine() -> Scheduler:
    """Blocks of 4 tokens; full attention, a window of 8 tokens (two blocks at a hit's end), and a state."""
    kv = KvConfig(num_blocks=61, block_size=4, windows=(None, 8, "state"))
    config = EngineConfig(kv=kv, offload="async", offload_chunk_tokens=4)
    return Scheduler(config, load_policy("stock"), tiers=make_tiers())


def test_of_windows_and_states_only_the_end_is_stored_and_loaded() -> None:
    """Of 8 blocks in each of three groups: 8, the window's last 2, and the state behind the last."""
    scheduler = make_windowed_engine()
    scheduler.add_request(make_turn("a1", [("a", 33)]), 0.0)
    run_step(scheduler, 0.0)
    run_step(scheduler, 10.0)
    assert scheduler.offloader is not None
    assert scheduler.offloader.get_views(10.0)[0].num_used_blocks == 8 + 2 + 1
    assert scheduler.reset_prefix_cache(10.0)
    scheduler.add_request(make_turn("a2", [("a", 33), ("b", 20)]), 10.0)
    run_step(scheduler, 10.0)
    (load,) = scheduler.state.loading
    # 11 blocks at half a second each.
    assert (load.done_s, load.request.num_loaded_tokens) == (15.5, 32)
    assert run_step(scheduler, 15.5).new == {"a2": 32}


def test_who_wants_what_is_being_loaded_waits_for_that() -> None:
    scheduler = make_windowed_engine()
    scheduler.add_request(make_turn("a1", [("a", 33)]), 0.0)
    run_step(scheduler, 0.0)
    run_step(scheduler, 10.0)
    assert scheduler.reset_prefix_cache(10.0)
    scheduler.add_request(make_turn("a2", [("a", 33), ("b", 20)]), 10.0)
    scheduler.add_request(make_turn("b1", [("a", 33), ("c", 20)]), 10.0)
    run_step(scheduler, 10.0)
    assert (scheduler.state.num_loading, len(scheduler.state.waiting)) == (1, 1)
    assert run_step(scheduler, 15.5).new == {"a2": 32}
    # Of a window the GPU caches the prompt's own end only, which is not what was loaded. So it loads too.
    assert (scheduler.state.num_loading, len(scheduler.state.waiting)) == (1, 0)
    assert run_step(scheduler, 30.0).new == {"b1": 32}


def test_the_checker_sees_a_request_that_got_lost() -> None:
    scheduler = make_engine()
    warm(scheduler)
    scheduler.add_request(make_turn("a2", [("a", 33)]), 10.0)
    run_step(scheduler, 10.0)
    scheduler.state.loading.clear()
    with pytest.raises(IntegrityError, match="1 requests, but 0 that run, wait or load"):
        check_integrity(scheduler)


# Whole runs.


@dataclass
class AtRandom(Policy):
    """Keeps, stores and lets go, by the length of the prompt."""

    def retain(self, turn: Turn, view: EngineView) -> Decision:
        answers = (
            Keep(view.now_s + 1.5),
            Keep(view.now_s + 2),
            Offload(),
            Release(),
        )
        return answers[turn.num_prompt_tokens % 4]

    def reconsider(self, lease: Lease, view: EngineView) -> Decision:
        return Offload() if lease.num_blocks % 2 else Release()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("offload", MODES)
def test_chaos(offload: Any, seed: int) -> None:
    """Random turns that share beginnings, leave, and are reset, on engines much too small for them."""
    rng = random.Random(seed)
    disk = (rng.choice([4, 30]), rng.choice([0.5, 20.0])) if seed % 2 else None
    scheduler = make_engine(
        offload,
        make_tiers(rng.choice([1, 6, 40]), rng.choice([0.7, 4.0, 1000.0]), disk=disk),
        policy=AtRandom(),
        num_blocks=rng.choice([16, 30]),
        max_steps_in_flight=1 + seed % 3 // 2,
        max_num_seqs=rng.choice([1, 3, 8]),
        max_num_batched_tokens=rng.choice([5, 32]),
    )
    in_flight: list[Step] = []
    now_s = 0.0

    def go() -> None:
        nonlocal now_s
        step = scheduler.schedule(now_s)
        check_integrity(scheduler)
        now_s += rng.choice([0.01, 0.3, 2.0])
        if step.num_tokens:
            in_flight.append(step)
        if len(in_flight) == scheduler.config.max_steps_in_flight or (in_flight and not step.num_tokens):
            scheduler.finish_step(in_flight.pop(0), now_s)
            check_integrity(scheduler)

    for number in range(250):
        if rng.random() < 0.4:
            spans = [(rng.choice("ab"), rng.choice([8, 16])), (rng.choice("cdefg"), rng.randint(1, 24))]
            tool = ToolCall("ls") if rng.random() < 0.7 else None
            scheduler.add_request(
                make_turn(f"{number % 7}-{number}", spans, rng.randint(1, 12), tool=tool), now_s
            )
        if scheduler.state.requests and rng.random() < 0.1:
            scheduler.abort(rng.choice(list(scheduler.state.requests)), now_s)
            check_integrity(scheduler)
        if rng.random() < 0.03:
            scheduler.reset_prefix_cache(now_s, preempt_running=rng.random() < 0.5)
            check_integrity(scheduler)
        go()
    num_steps = 0
    while scheduler.state.requests or in_flight:
        go()
        num_steps += 1
        assert num_steps < 5000, f"the engine stalled over {scheduler.state.requests}"
    while (event_s := scheduler.get_next_event_s()) is not None:
        now_s = max(now_s, event_s)
        scheduler.schedule(now_s)
    check_integrity(scheduler, idle=True)
    assert scheduler.offloader is not None
    assert (scheduler.offloader.get_next_stored_s(), scheduler.state.num_loading) == (None, 0)
    assert scheduler.kv.pool.num_free_blocks == scheduler.kv.pool.num_blocks


def simulate(
    policy: Policy,
    offload: Any,
    *,
    depth: int = 1,
    skips: bool = True,
    host_chunks: int = 3000,
    chunk_tokens: int = 256,
) -> tuple[list[TurnRecord], Simulation]:
    """ab8 on a cache of a few contexts, with chunks of 256 tokens and a link slow enough to matter."""
    config = EngineConfig(
        kv=KvConfig(num_blocks=1501),
        max_num_batched_tokens=2048,
        max_num_seqs=64,
        max_steps_in_flight=depth,
        offload=offload,
        offload_chunk_tokens=chunk_tokens,
    )
    tiers = make_tiers(host_chunks, 100.0)
    jobs = load_workload("ab8", jps=1.5, window_s=8, seed=3)
    simulation = Simulation.of_one(Scheduler(config, policy, tiers=tiers), LinearSteps(), Clients(jobs))
    simulation.engines[0].fast_forwards = skips
    return simulation.run(), simulation


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "offload", "depth"),
    [
        *itertools.product(["stock"], MODES, [1, 2]),
        ("tenuto", "async", 1),
        ("tenuto", "asked", 2),
        ("break-even", "asked", 1),
        ("stock", "async", 3),
    ],
)
def test_quiet_stretches_are_what_stepping_is(name: str, offload: Any, depth: int) -> None:
    stepped, one = simulate(load_policy(name), offload, depth=depth, skips=False)
    skipped, other = simulate(load_policy(name), offload, depth=depth)
    assert skipped == stepped
    assert other.engines[0].num_steps == one.engines[0].num_steps
    for simulation in (one, other):
        check_integrity(simulation.scheduler, idle=True)


@pytest.mark.parametrize("offload", ["native", "async"])
def test_stretches_store_answers_as_steps_do(offload: Any) -> None:
    found = [
        simulate(load_policy("stock"), offload, skips=skips, host_chunks=400, chunk_tokens=16)
        for skips in (False, True)
    ]
    (stepped, one), (skipped, other) = found
    assert skipped == stepped
    for simulation in (one, other):
        assert simulation.scheduler.offloader is not None
    assert other.scheduler.offloader.num_stored_tokens == one.scheduler.offloader.num_stored_tokens


def test_what_is_loaded_and_stored_adds_up() -> None:
    records, simulation = simulate(load_policy("stock"), "async", host_chunks=100_000)
    offloader = simulation.scheduler.offloader
    assert offloader is not None
    (host,) = offloader.get_views(0.0)
    # Nothing was evicted below, so what was stored once is there once.
    assert offloader.num_stored_tokens == host.num_used_blocks * 16
    alone, _ = simulate(load_policy("stock"), None)
    gained = sum(each.hit_tokens for each in records) - sum(each.hit_tokens for each in alone)
    assert offloader.num_loaded_tokens > 0
    # Loads are all that a start can hit beyond the GPU's own cache.
    assert 0 < gained <= offloader.num_loaded_tokens


SCRIPT = """
import json
from dataclasses import asdict
from tenuto.core.loader import load_policy
from tests.sim.test_offload import simulate
records, simulation = simulate(load_policy("tenuto"), "async", host_chunks=300)
offloader = simulation.scheduler.offloader
print(json.dumps([offloader.num_loaded_tokens, offloader.num_stored_tokens, *map(asdict, records)]))
"""


@pytest.mark.slow
def test_the_same_under_every_hash_seed() -> None:
    output = run_under_hash_seeds(SCRIPT)
    records, _ = simulate(load_policy("tenuto"), "async", host_chunks=300)
    # Through JSON, which has no tuples.
    assert json.loads(output)[2:] == json.loads(json.dumps([asdict(record) for record in records]))
