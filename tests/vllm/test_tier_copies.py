"""The thread that copies on CPU builds, and the files of the disk tier."""

from __future__ import annotations

import mmap
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", "0.31.0")

from vllm.v1.kv_offload.base import ReqContext

import tenuto.vllm.tiers.disk as disk
from tenuto.core.errors import ConfigError
from tenuto.core.tier_order import Use
from tenuto.vllm.compat import offload, specs
from tenuto.vllm.compat.offload import Adapter, LookupResult, get_chains
from tenuto.vllm.complaints import COMPLAIN_EVERY_S
from tenuto.vllm.launch import Tiers
from tenuto.vllm.tiers.copies import Copies, Job, Part, get_rows, make_part, read_rows
from tenuto.vllm.tiers.disk import DiskTier
from tenuto.vllm.tiers.files import HEADER, DamagedError, is_chunk, read_chunk, write_chunk


def make_job(job_id: int, *, is_load: bool, chunk: int = 0, num_parts: int = 1) -> Job:
    cache, host = np.zeros((4, 8), np.int8), np.ones((4, 2, 8), np.int8)
    rows = get_rows(np.array([chunk]), 1, 1, 2)
    parts = [make_part(cache, host, np.array([3]), rows, is_load=is_load) for _ in range(num_parts)]
    return Job(job_id, is_load, parts)


def test_rows_begin_inside_a_chunk() -> None:
    chunks, places = get_rows(np.array([7, 9]), 6, 3, 4)
    assert chunks.tolist() == [7, 7, 9]
    assert places.tolist() == [2, 3, 0]


def test_a_load_goes_before_stores_and_both_arrive() -> None:
    begun, go_on, order = threading.Event(), threading.Event(), list[int]()

    def read(part: Part) -> Any:
        begun.set()
        assert go_on.wait(30)
        order.append(0 if part.source.ndim == 2 else 1)
        return read_rows(part)

    copies = Copies(read)
    copies.submit(make_job(1, is_load=False, num_parts=2))
    assert begun.wait(30)
    load = make_job(2, is_load=True)
    copies.submit(load)
    go_on.set()
    copies.wait({1, 2})
    # The load came between the two layers of the store.
    assert order == [0, 1, 0]
    assert load.parts[0].target[3].tolist() == [1] * 8
    assert sorted((each.job_id, each.num_bytes) for each in copies.take_done()) == [(1, 16), (2, 8)]
    copies.close()


@pytest.mark.parametrize("is_load", [True, False])
def test_a_copy_that_hangs_is_given_up_and_writes_nothing_afterwards(is_load: bool) -> None:
    """Nobody waits for it, nor for what is queued behind it; when it goes on, so do copies."""
    go_on, num_reads = threading.Event(), [0]

    def read(part: Part) -> Any:
        num_reads[0] += 1
        if num_reads[0] == 1:
            assert go_on.wait(30)
        return read_rows(part)

    copies = Copies(read, stuck_s=0.05)
    hung, behind = make_job(1, is_load=is_load), make_job(2, is_load=True, chunk=1)
    copies.submit(hung)
    copies.submit(behind)
    copies.wait({1, 2})
    late = make_job(3, is_load=True, chunk=1)
    copies.submit(late)
    copies.wait({3})
    assert {each.job_id: each.has_failed for each in copies.take_done()} == {1: True, 2: True, 3: True}
    before = hung.parts[0].target.copy()
    go_on.set()
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        copies.submit(job := make_job(4, is_load=True, chunk=1))
        copies.wait({4})
        if not copies.take_done()[0].has_failed:
            break
    assert job.parts[0].target[3].tolist() == [1] * 8
    assert (hung.parts[0].target == before).all()
    copies.close()


def test_closing_does_not_wait_for_what_is_queued() -> None:
    copies = Copies()
    copies.close()
    copies.wait({1})


# The disk.

SIZE = 64


@pytest.fixture
def view() -> memoryview:
    return memoryview(np.arange(4 * SIZE, dtype=np.int8).reshape(4, SIZE))


NOBODY = Use()
ORIGIN, OTHER_ORIGIN = "1" * 32, "2" * 32


def make_tier(folder: Path, view: memoryview, *, origin: str | None = ORIGIN, **more: Any) -> DiskTier:
    """An open disk of the model "m"."""
    tier = DiskTier(None, view, "disk", str(folder), **more)
    tier.open("m", 0, origin)
    return tier


def make_context(keys: list[bytes], use: Use = NOBODY, adapter: Any = None) -> Any:
    """A request's, whose chunks these are."""
    context = ReqContext("r")
    for number, key in enumerate(keys):
        # vLLM's keys end with the layer group.
        context.set_offload_key_position(key, 16 * (number + 1))
    offload.get_chains(context, 1)
    context.set_state(use)
    if adapter is not None:
        context.set_state(adapter)
    return context


def make_transfer(
    keys: list[bytes], chunks: list[int], *, is_promotion: bool, use: Use = NOBODY, adapter: Any = None
) -> Any:
    return SimpleNamespace(
        job_id=len(keys),
        keys=keys,
        chunk_ids=np.array(chunks),
        is_promotion=is_promotion,
        req_context=make_context(keys, use, adapter),
    )


def store(tier: DiskTier, *keys: bytes, use: Use = NOBODY, adapter: Any = None) -> list[bool]:
    """Whether each job that is done was whole."""
    tier.submit_store(
        make_transfer(list(keys), [1] * len(keys), is_promotion=False, use=use, adapter=adapter)
    )
    return [each.success for each in finish(tier)]


def finish_removals(tier: DiskTier) -> None:
    """Shut down when all is removed that is to be removed; by itself it leaves the rest to the next start."""
    tier._writers.shutdown()
    tier.shutdown()


def has(tier: DiskTier, key: bytes) -> bool:
    return tier.lookup(key, None) is LookupResult.HIT


def finish(tier: DiskTier) -> list[Any]:
    tier.drain_jobs()
    return list(tier.get_finished_jobs())


def test_chunks_survive_a_restart(tmp_path: Path, view: memoryview) -> None:
    tier = make_tier(tmp_path, view)
    tier.submit_store(make_transfer([b"a", b"b"], [1, 2], is_promotion=False))
    assert [each.success for each in finish(tier)] == [True]
    (tier.get_path(b"a").parent / "ab.kv.1.part").write_bytes(b"unfinished")
    (tier.get_path(b"a").parent / "notes.kv").write_bytes(b"somebody else's")
    tier.shutdown()
    other = memoryview(np.zeros((4, SIZE), np.int8))
    tier = make_tier(tmp_path, other)
    assert tier.lookup(b"a", None) is LookupResult.HIT
    assert tier.lookup(b"c", None) is LookupResult.MISS
    tier.submit_load(make_transfer([b"a", b"b"], [3, 0], is_promotion=True))
    assert [each.success for each in finish(tier)] == [True]
    assert (other[3, 0], other[0, 0]) == (view[1, 0], view[2, 0])
    assert not list(tmp_path.rglob("*.part"))
    tier.shutdown()


@pytest.mark.parametrize("harm", ["cut", "flip", "empty", "swap", "gone"])
def test_a_damaged_file_is_found(harm: str, tmp_path: Path, view: memoryview) -> None:
    tier = make_tier(tmp_path, view)
    tier.submit_store(make_transfer([b"a", b"b"], [1, 2], is_promotion=False))
    finish(tier)
    path = tier.get_path(b"b")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    harmed = {"cut": data[:40], "flip": data, "empty": b"", "swap": tier.get_path(b"a").read_bytes()}
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(harmed[harm])
    tier.submit_load(make_transfer([b"a", b"b"], [0, 3], is_promotion=True))
    (result,) = finish(tier)
    assert (result.success, result.successful_keys) == (False, (b"a",))
    assert tier.lookup(b"b", None) is LookupResult.MISS
    assert tier.lookup(b"a", None) is LookupResult.HIT
    assert not path.exists()
    tier.shutdown()


def test_the_folder_does_not_grow_beyond_its_limit(tmp_path: Path, view: memoryview) -> None:
    limit = 2 * (HEADER.size + SIZE)
    tier = make_tier(tmp_path, view, max_bytes=limit)
    for key in (b"a", b"b"):
        tier.submit_store(make_transfer([key], [1], is_promotion=False))
        finish(tier)
    tier.lookup(b"a", None)
    tier.submit_store(make_transfer([b"c"], [1], is_promotion=False))
    finish(tier)
    tier.drain_jobs()
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.kv")) == limit
    assert tier.lookup(b"b", None) is LookupResult.MISS
    tier.shutdown()


def test_a_prefix_that_is_hit_above_the_disk_goes_after_what_is_not_used(
    tmp_path: Path, view: memoryview
) -> None:
    tier = make_tier(tmp_path, view, max_bytes=4 * (HEADER.size + SIZE))
    store(tier, b"shared", b"a1", b"a2")
    tier.on_request_finished(make_context([b"shared", b"a1", b"a2"]))
    store(tier, b"b")
    tier.on_request_finished(make_context([b"shared", b"b"]))
    store(tier, b"c")
    assert list(tier._files) == [b"a1", b"b", b"shared", b"c"], "and tails go before what they continue"
    late = make_transfer([b"shared", b"d"], [1, 1], is_promotion=False)
    tier.submit_store(late)
    get_chains(late.req_context, 1).has_ended = True  # as host memory does, which hears of the end first
    tier.on_request_finished(late.req_context)
    finish(tier)
    assert list(tier._files) == [b"b", b"c", b"d", b"shared"], "also if a store ends after its request"
    tier.shutdown()


def test_a_folder_that_nothing_can_be_removed_from_ends_no_engine(tmp_path: Path, view: memoryview) -> None:
    tier = make_tier(tmp_path, view, max_bytes=HEADER.size + SIZE)
    # What stands under a chunk's name cannot be removed as a file is.
    for key in (b"a", b"b"):
        tier.submit_store(make_transfer([key], [1], is_promotion=False))
        tier.drain_jobs()
        if key == b"a":
            list(tier.get_finished_jobs())
            tier.get_path(key).unlink()
            (tier.get_path(key) / "inside").mkdir(parents=True)
    assert [each.success for each in tier.get_finished_jobs()] == [True]
    tier._writers.shutdown()
    assert not tier.has_pending_work()
    tier.shutdown()
    tier = make_tier(tmp_path, view, max_bytes=HEADER.size + SIZE)
    assert tier.lookup(b"a", None) is LookupResult.MISS
    assert tier.lookup(b"b", None) is LookupResult.HIT
    tier.shutdown()


def test_only_the_server_s_user_reads_files(tmp_path: Path) -> None:
    path = tmp_path / "x.kv"
    write_chunk(path, b"k", memoryview(b"12345678"), bytes(16))
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_costs_the_copy_only(
    tmp_path: Path, view: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    tier = make_tier(tmp_path, view)
    monkeypatch.setattr(disk, "write_chunk", write)
    tier.submit_store(make_transfer([b"a"], [1], is_promotion=False))
    assert [each.success for each in finish(tier)] == [False]
    assert tier.lookup(b"a", None) is LookupResult.MISS
    assert not tier.has_pending_work()
    tier.shutdown()


def test_a_failed_store_forgets_no_file_that_is_there(
    tmp_path: Path, view: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    limit = 2 * (HEADER.size + SIZE)
    tier = make_tier(tmp_path, view, max_bytes=limit)
    store(tier, b"a", b"b")
    with monkeypatch.context() as full:
        full.setattr(disk, "write_chunk", write)
        assert store(tier, b"new", b"a", b"b") == [False]
    assert has(tier, b"a")
    assert has(tier, b"b")
    store(tier, b"c", b"d")
    tier.drain_jobs()
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.kv")) == limit
    tier.shutdown()


def test_an_eighth_of_host_memory_waits_for_a_slow_disk_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def write(*arguments: Any) -> None:
        assert go_on.wait(30)
        write_chunk(*arguments)

    monkeypatch.setattr(disk, "write_chunk", write)
    tier = make_tier(tmp_path, memoryview(np.zeros((32, SIZE), np.int8)))
    for name in (b"a", b"b", b"c"):
        tier.submit_store(make_transfer([name + b"%d" % n for n in range(3)], [0, 1, 2], is_promotion=False))
    assert [each.success for each in tier.get_finished_jobs()] == [False], "more than four chunks wait"
    go_on.set()
    assert [each.success for each in finish(tier)] == [True, True]
    assert store(tier, b"c0") == [True]
    tier.shutdown()


def test_while_a_read_hangs_the_disk_counts_as_empty(
    tmp_path: Path, view: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier(tmp_path, view)
    tier.submit_store(make_transfer([b"a"], [1], is_promotion=False))
    finish(tier)
    begun, go_on = threading.Event(), threading.Event()

    def read(*arguments: Any) -> None:
        begun.set()
        assert go_on.wait(30)

    monkeypatch.setattr(disk, "read_chunk", read)
    monkeypatch.setattr(disk, "MAX_READ_S", 0.0)
    tier.submit_load(make_transfer([b"a"], [3], is_promotion=True))
    assert begun.wait(30)
    assert tier.lookup(b"a", None) is LookupResult.MISS
    go_on.set()
    finish(tier)
    assert tier.lookup(b"a", None) is LookupResult.HIT
    tier.shutdown()


def test_reads_do_not_wait_for_writes_that_hang(
    tmp_path: Path, view: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier(tmp_path, view)
    store(tier, b"a")
    go_on = threading.Event()
    monkeypatch.setattr(disk, "write_chunk", lambda *_: go_on.wait(300))
    monkeypatch.setattr(disk, "MAX_WAITING_SHARE", 10)
    for number in range(2 * disk.NUM_THREADS):
        tier.submit_store(make_transfer([b"b%d" % number], [1], is_promotion=False))
    tier.submit_load(make_transfer([b"a"], [3], is_promotion=True))
    deadline_s = time.monotonic() + 30
    while not (ended := list(tier.get_finished_jobs())) and time.monotonic() < deadline_s:
        time.sleep(0.001)
    go_on.set()
    assert [each.success for each in ended] == [True]
    finish(tier)
    tier.shutdown()


def test_the_engine_does_not_wait_for_removals_that_hang(
    tmp_path: Path, view: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier(tmp_path, view, max_bytes=HEADER.size + SIZE)
    store(tier, b"a")
    go_on, unlink = threading.Event(), Path.unlink

    def unlink_late(*arguments: Any, **more: Any) -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert go_on.wait(30)
        unlink(*arguments, **more)

    monkeypatch.setattr(Path, "unlink", unlink_late)
    assert store(tier, b"b") == [True]
    assert (has(tier, b"a"), has(tier, b"b")) == (False, True)
    go_on.set()
    tier.drain_jobs()
    assert [each.name for each in tmp_path.rglob("*.kv")] == ["62.kv"]
    tier.shutdown()


def test_a_load_waits_for_the_removal_of_many_files_as_for_one_copy(
    tmp_path: Path, view: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a policy computes what the disk has, because each file removed would count as a read."""
    tier = make_tier(tmp_path, view, max_bytes=4 * (HEADER.size + SIZE))
    store(tier, b"a", b"b", b"c", b"d")
    go_on, unlink = threading.Event(), Path.unlink

    def unlink_late(*arguments: Any, **more: Any) -> None:
        assert go_on.wait(30)
        unlink(*arguments, **more)

    monkeypatch.setattr(Path, "unlink", unlink_late)
    store(tier, b"e", b"f", b"g", b"h")
    seen = tier.get_view(1)
    assert seen.wait_s == seen.s_per_block
    go_on.set()
    tier.drain_jobs()
    assert tier.get_view(1).wait_s == 0
    assert len(list(tmp_path.rglob("*.kv"))) == 4
    tier.shutdown()


def test_a_read_that_waits_for_others_hangs_too(
    tmp_path: Path, view: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier(tmp_path, view)
    store(tier, b"a")
    monkeypatch.setattr(tier._readers, "submit", lambda *_: None)
    tier.submit_load(make_transfer([b"a"], [3], is_promotion=True))
    assert has(tier, b"a")
    monkeypatch.setattr(disk, "MAX_READ_S", 0.0)
    assert not has(tier, b"a")
    tier.shutdown()


def test_a_file_of_another_size_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.kv"
    write_chunk(path, b"k", memoryview(b"12345678"), bytes(16))
    with pytest.raises(DamagedError):
        read_chunk(path, b"k", memoryview(bytearray(4)), bytes(16))
    with pytest.raises(DamagedError):
        read_chunk(path, b"other", memoryview(bytearray(8)), bytes(16))


def test_a_file_of_other_weights_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.kv"
    write_chunk(path, b"k", memoryview(b"12345678"), bytes(16))
    with pytest.raises(DamagedError, match="other weights"):
        read_chunk(path, b"k", memoryview(bytearray(8)), bytes([1] * 16))


@pytest.mark.parametrize("origin", [OTHER_ORIGIN, None])
def test_kv_of_other_weights_is_not_found(origin: str | None, tmp_path: Path, view: memoryview) -> None:
    """An unknown origin (None) finds nothing of earlier starts either, nor is anything of it found."""
    for each, found in ((ORIGIN, False), (ORIGIN, True), (origin, False), (origin, origin is not None)):
        tier = make_tier(tmp_path, view, origin=each, max_bytes=10**6)
        assert has(tier, b"a") is found
        assert store(tier, b"a") == [True]
        tier.shutdown()
    tier = make_tier(tmp_path, view, max_bytes=10**6)
    assert has(tier, b"a")
    tier.shutdown()


def test_nothing_of_before_a_reset_is_found_after_it_or_after_a_restart(
    tmp_path: Path, view: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even a chunk that was being written when the reset came."""
    tier = make_tier(tmp_path, view)
    store(tier, b"a")
    begun, write = threading.Event(), disk.write_chunk

    def write_late(*arguments: Any) -> None:
        begun.set()
        write(*arguments)

    monkeypatch.setattr(disk, "write_chunk", write_late)
    tier.submit_store(make_transfer([b"b"], [1], is_promotion=False))
    assert begun.wait(30)
    tier.renew()
    assert [each.success for each in tier.get_finished_jobs()] == [True]
    assert not has(tier, b"a")
    assert not has(tier, b"b")
    assert store(tier, b"c") == [True]
    tier.shutdown()
    tier = make_tier(tmp_path, view)
    assert [has(tier, each) for each in (b"a", b"b", b"c")] == [False, False, True]
    # The weights in memory are not those of the files any more.
    tier.forget_origin()
    tier.renew()
    store(tier, b"d")
    assert has(tier, b"d")
    tier.shutdown()
    tier = make_tier(tmp_path, view)
    assert not any(has(tier, each) for each in (b"a", b"b", b"c", b"d"))
    finish_removals(tier)
    assert not list(tmp_path.rglob("*.kv"))


def test_a_reset_that_cannot_give_up_the_files_says_so(
    tmp_path: Path, view: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename(*arguments: Any) -> None:
        raise OSError(30, "Read-only file system")

    tier = make_tier(tmp_path, view)
    store(tier, b"a")
    monkeypatch.setattr(disk.os, "rename", rename)
    with pytest.raises(OSError, match="Read-only"):
        tier.renew()
    assert not has(tier, b"a")
    assert store(tier, b"b") == [False]
    tier.shutdown()


def test_it_tells_whose_chunks_became_more_or_fewer(tmp_path: Path, view: memoryview) -> None:
    one, two = Use(owner="one"), Use(owner="two")
    tier = make_tier(tmp_path, view, max_bytes=4 * (HEADER.size + SIZE))
    store(tier, b"a", b"b", use=one)
    assert tier.changes.take() == {"one": 2}
    assert tier.changes.take() == {}
    # Another job ends that had the first chunk too; the disk lacks its second.
    tier.on_request_finished(make_context([b"a", b"x"], two))
    assert tier.changes.take() == {"one": -1, "two": 1}
    store(tier, b"b", use=two)  # a file that is there is not written again
    assert tier.changes.take() == {"one": -1, "two": 1}
    store(tier, b"c", b"d")
    assert tier.changes.take() == {}, "of a request that belongs to no job"
    tier.get_path(b"b").write_bytes(b"damaged")
    tier.submit_load(make_transfer([b"b"], [1], is_promotion=True, use=one))
    finish(tier)
    store(tier, b"e", b"f", use=one)  # "a" makes room
    assert tier.changes.take() == {"two": -2, "one": 2}
    tier.renew()
    assert tier.changes.take() == {"one": -2}
    store(tier, b"g", use=one)
    tier.shutdown()


def test_what_an_earlier_run_left_is_nobody_s_until_it_is_used(tmp_path: Path, view: memoryview) -> None:
    one = Use(owner="one")
    tier = make_tier(tmp_path, view)
    store(tier, b"a", b"b", use=one)
    tier.shutdown()
    tier = make_tier(tmp_path, view)
    assert has(tier, b"a")
    assert tier.changes.take() == {}
    tier.submit_load(make_transfer([b"a"], [1], is_promotion=True, use=one))
    finish(tier)
    tier.on_request_finished(make_context([b"a"], one))
    assert tier.changes.take() == {"one": 1}
    # An adapter whose weights are not known has no files.
    tier.on_request_finished(make_context([b"b"], one, Adapter(None)))
    assert tier.changes.take() == {}
    tier.shutdown()


def test_what_other_weights_left_counts_and_goes_first(tmp_path: Path, view: memoryview) -> None:
    size = HEADER.size + SIZE
    for number, origin in enumerate((ORIGIN, OTHER_ORIGIN)):
        tier = make_tier(tmp_path, view, origin=origin, max_bytes=10 * size)
        store(tier, b"a", b"b")
        for path in (tmp_path / disk.get_engine_name("m", 0, 0) / origin).rglob("*.kv"):
            os.utime(path, (number, number))
        tier.shutdown()
    (tmp_path / disk.get_engine_name("m", 0, 0) / ORIGIN / "61" / "notes.txt").write_text("another's")
    tier = make_tier(tmp_path, view, origin="3" * 32, max_bytes=4 * size)
    store(tier, b"c")
    finish_removals(tier)
    left = sorted(path.parts[-3][0] + path.name for path in tmp_path.rglob("*.kv"))
    assert left == ["261.kv", "262.kv", "363.kv"]
    assert list(tmp_path.rglob("notes.txt"))
    # Without a limit nothing else would ever remove them.
    finish_removals(make_tier(tmp_path, view, origin="3" * 32))
    assert len(list(tmp_path.rglob("*.kv"))) == 1


def test_two_engines_and_two_ranks_share_no_files(tmp_path: Path, view: memoryview) -> None:
    tiers = [make_tier(tmp_path, view) for _ in range(2)]
    rank = DiskTier(None, view, "disk", str(tmp_path))
    rank.open("m", 1, ORIGIN)
    assert len({tier.get_path(b"a") for tier in [*tiers, rank]}) == 3
    for number, tier in enumerate([*tiers, rank]):
        store(tier, bytes([number]))
        assert [has(tier, bytes([each])) for each in range(3)] == [each == number for each in range(3)]
    for tier in [*tiers, rank]:
        tier.shutdown()
    # The first that starts finds what was there.
    tier = make_tier(tmp_path, view)
    assert has(tier, bytes([0]))
    tier.shutdown()


def test_nothing_is_written_or_removed_through_a_link(tmp_path: Path, view: memoryview) -> None:
    limit = HEADER.size + SIZE
    tier = make_tier(tmp_path / "kv", view, max_bytes=limit)
    store(tier, b"a")
    below, outside = tier.get_path(b"a").parent, tmp_path / "outside"
    tier.shutdown()
    below.rename(outside)
    below.symlink_to(outside)
    tier = make_tier(tmp_path / "kv", view, max_bytes=limit)
    assert not has(tier, b"a")
    (outside / "61.kv").rename(outside / "62.kv")
    assert store(tier, b"a") == [False]
    assert store(tier, b"b") == [True]
    tier.shutdown()
    engine = below.parent.parent
    below.parent.rename(engine / OTHER_ORIGIN)
    finish_removals(make_tier(tmp_path / "kv", view))
    assert [each.name for each in outside.iterdir()] == ["62.kv"]


@pytest.mark.parametrize("kind", ["fifo", "folder", "link", "unreadable", "folder unreadable"])
def test_what_stands_under_a_chunk_s_name_blocks_nothing_and_stays(
    kind: str, tmp_path: Path, view: memoryview
) -> None:
    tier = make_tier(tmp_path / "kv", view)
    store(tier, b"a", b"b")
    path, target = tier.get_path(b"a"), tmp_path / "target"
    target.write_bytes(path.read_bytes())
    if "unreadable" not in kind:
        path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(target)
    else:
        (path.parent if kind == "folder unreadable" else path).chmod(0)
    tier.submit_load(make_transfer([b"a", b"b"], [0, 3], is_promotion=True))
    (result,) = finish(tier)
    is_root = os.geteuid() == 0 and "unreadable" in kind
    assert result.success is is_root
    if not is_root:
        assert not has(tier, b"a")
        assert result.successful_keys == (b"b",)
    if "unreadable" not in kind:
        assert store(tier, b"a") == [False]
        assert os.path.lexists(path)
    tier.shutdown()
    tier = make_tier(tmp_path / "kv", view)
    assert has(tier, b"b")
    assert has(tier, b"a") is is_root
    tier.shutdown()
    path.parent.chmod(0o700)
    assert target.exists()


def test_the_folder_is_its_owner_s_alone(tmp_path: Path, view: memoryview) -> None:
    make_tier(tmp_path / "kv", view).shutdown()
    for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path
    (tmp_path / "kv").chmod(0o755)
    make_tier(tmp_path / "kv", view).shutdown()
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700


def test_a_folder_with_others_files_or_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    folder.chmod(0o755)
    (folder / "notes").write_text("another's")
    with pytest.raises(ConfigError, match="'notes' in it is not Tenuto's"):
        Tiers(1, str(folder)).check()
    assert folder.stat().st_mode & 0o777 == 0o755
    folder.chmod(0o700)
    Tiers(1, str(folder)).check()
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        Tiers(1, str(folder)).check()


def test_what_another_user_put_into_the_folder_is_not_used(
    tmp_path: Path, view: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier(tmp_path, view)
    assert store(tier, b"a") == [True]
    tier.shutdown()
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    monkeypatch.setattr(disk, "prepare_folder", lambda folder: None)
    tier = make_tier(tmp_path, view)
    assert tier._lock_file is None, "each engine's folder is another user's"
    tier.shutdown()
    # A file of theirs in a folder of ours.
    monkeypatch.setattr(disk, "make_folder", lambda folder: None)
    tier = make_tier(tmp_path, view)
    assert not has(tier, b"a")
    with pytest.raises(OSError, match="not a plain file of ours"):
        read_chunk(tier.get_path(b"a"), b"a", view[1:2].cast("B", [SIZE]), bytes.fromhex(ORIGIN))
    assert not is_chunk(tier.get_path(b"a"), HEADER.size + SIZE)
    tier.shutdown()


def test_a_full_disk_is_logged_at_a_bounded_rate(
    tmp_path: Path, view: memoryview, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    def write(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "write_chunk", write)
    now_s = [0.0]
    monkeypatch.setattr(disk.time, "monotonic", lambda: now_s[0])
    tier = make_tier(tmp_path, view)
    for number in range(50):
        store(tier, bytes([number]))
    now_s[0] += COMPLAIN_EVERY_S
    store(tier, b"x")
    tier.shutdown()
    lines = [each.getMessage() for each in log.records if "No space" in each.getMessage()]
    assert len(lines) == 2
    assert "50 such failures" in lines[1]


def test_a_closed_disk_is_empty_and_takes_nothing(tmp_path: Path, view: memoryview) -> None:
    tier = DiskTier(None, view, "disk", str(tmp_path))
    assert store(tier, b"a") == [False]
    assert not has(tier, b"a")
    assert not list(tmp_path.iterdir())
    tier.renew()
    tier.shutdown()


def test_kv_of_an_adapter_is_found_with_its_weights_only(tmp_path: Path, view: memoryview) -> None:
    tier = make_tier(tmp_path, view)
    assert store(tier, b"a", adapter=Adapter("one")) == [True]
    assert store(tier, b"a", adapter=Adapter(None)) == [False]
    found = {}
    for digest in ("one", "two", None):
        context = ReqContext("r")
        context.set_state(Adapter(digest))
        found[digest] = tier.lookup(b"a", context) is LookupResult.HIT
    assert found == {"one": True, "two": False, None: False}
    assert not has(tier, b"a")
    tier.shutdown()


def test_memory_that_killed_servers_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although there are processes that may not be looked at, or that end meanwhile; what is mapped stays."""
    monkeypatch.setattr(specs, "SHARED_MEMORY", tmp_path)
    files = {name: tmp_path / f"vllm_offload_{name}.mmap" for name in ("left", "used", "new")}
    for file in files.values():
        file.write_bytes(b"x" * mmap.PAGESIZE)
    for name in ("left", "used"):
        os.utime(files[name], (1, 1))
    read_text = Path.read_text

    def read(path: Path, *arguments: Any) -> str:
        if path == Path(f"/proc/{os.getppid()}/maps"):
            raise PermissionError(path)
        if path == Path("/proc/1/maps"):
            raise ProcessLookupError(path)
        return read_text(path, *arguments)

    monkeypatch.setattr(Path, "read_text", read)
    with open(files["used"], "r+b") as file, mmap.mmap(file.fileno(), 0):
        specs.remove_left_memory()
    assert [name for name, file in files.items() if file.exists()] == ["used", "new"]
    specs.remove_left_memory()
    assert [name for name, file in files.items() if file.exists()] == ["new"]
