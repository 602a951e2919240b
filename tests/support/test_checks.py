"""`check_integrity` sees each invariant broken; a sound pool passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tenuto.core.errors import IntegrityError
from tenuto.core.policy import Policy
from tenuto.core.types import EngineView, Keep, ToolCall, Turn
from tests.support.checks import check_integrity
from tests.support.toy_engine import ToyEngine, make_tokens


@dataclass
class KeepAll(Policy):
    """Leases the blocks of every turn."""

    def retain(self, turn: Turn, view: EngineView):
        return Keep(view.now_s + 10)


@pytest.fixture
def engine() -> ToyEngine:
    """20 blocks: 10 leased, 5 in use."""
    engine = ToyEngine(KeepAll(), 20)
    for number in range(3):
        # 18 prompt + 3 output − 1 never computed = 20 tokens = 5 blocks of 4.
        engine.arrive(f"turn-{number}", number, make_tokens(100 * number, 18), [1, 2, 3])
        engine.start_first(number)
        if number < 2:
            engine.finish(f"turn-{number}", number, tool=ToolCall("ls"))
    return engine


def get_lease(engine: ToyEngine):
    return next(iter(engine.driver.leases))


def check(engine: ToyEngine, *, idle: bool = False) -> None:
    check_integrity(engine.pool, engine.driver.leases, idle=idle)


def test_a_sound_pool_passes(engine: ToyEngine) -> None:
    check(engine)
    engine.finish("turn-2", 2, is_last=True)
    check(engine, idle=True)
    assert [len(lease.blocks) for lease in engine.driver.leases] == [5, 5]


def lose_a_free_block(engine: ToyEngine) -> None:
    engine.pool.free_block_queue.remove(engine.pool.free_block_queue.get_all_free_blocks()[0])


def miscount_free_blocks(engine: ToyEngine) -> None:
    engine.pool.free_block_queue.num_free_blocks += 1


def queue_a_block_twice(engine: ToyEngine) -> None:
    queue = engine.pool.free_block_queue
    blocks = queue.get_all_free_blocks()
    queue.get_all_free_blocks = lambda: [*blocks, blocks[0]]


def queue_a_block_in_use(engine: ToyEngine) -> None:
    engine.pool.free_block_queue.append_n([engine.running["turn-2"].blocks[0]])


def free_a_block_too_often(engine: ToyEngine) -> None:
    engine.pool.free_block_queue.get_all_free_blocks()[0].ref_cnt = -1


def free_the_null_block(engine: ToyEngine) -> None:
    engine.pool.free_block_queue.append_n([engine.pool.null_block])


def lease_a_block_without_a_reference(engine: ToyEngine) -> None:
    # The lease's own reference is given up behind its back, so the block is in the free queue.
    engine.pool.free([get_lease(engine).blocks[-1]])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lose_a_free_block, "not both counts say so"),
        (miscount_free_blocks, "counted"),
        (queue_a_block_twice, "twice"),
        (queue_a_block_in_use, "not both counts say so"),
        (free_a_block_too_often, "negative ref count"),
        (free_the_null_block, "null block"),
        (lease_a_block_without_a_reference, "1 leases and pins hold it"),
    ],
)
def test_a_fault_is_caught(engine: ToyEngine, fault: Callable[[ToyEngine], None], message: str) -> None:
    fault(engine)
    with pytest.raises(IntegrityError, match=message):
        check(engine)


def test_a_reference_that_no_lease_explains_is_a_leak_once_the_engine_is_idle(engine: ToyEngine) -> None:
    engine.finish("turn-2", 2, is_last=True)
    engine.pool.touch([get_lease(engine).blocks[0]])
    check(engine)
    with pytest.raises(IntegrityError, match="1 leases and pins hold it"):
        check(engine, idle=True)


def test_a_running_turn_is_no_idle_engine(engine: ToyEngine) -> None:
    with pytest.raises(IntegrityError, match="0 leases and pins hold it"):
        check(engine, idle=True)
