"""The thread that copies on CPU builds, and the files of the disk tier."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import tenuto.vllm.tiers.disk as disk
from tenuto.vllm.compat_offload import LookupResult
from tenuto.vllm.tiers.chunk_file import HEADER, DamagedError, read_chunk, write_chunk
from tenuto.vllm.tiers.copies import Copies, Job, Part, get_rows, make_part, read_rows
from tenuto.vllm.tiers.disk import DiskTier


def make_job(job_id: int, *, is_load: bool, chunk: int = 0, num_parts: int = 1) -> Job:
    cache, host = np.zeros((4, 8), np.int8), np.ones((4, 2, 8), np.int8)
    rows = get_rows(np.array([chunk]), 1, 1, 2)
    parts = [make_part(cache, host, np.array([3]), rows, is_load=is_load) for _ in range(num_parts)]
    return Job(job_id, is_load, parts, (chunk,))


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


def test_a_failed_store_is_never_loaded_until_it_is_stored_again() -> None:
    fails = [True]

    def read(part: Part) -> Any:
        if fails[0]:
            raise OSError("no")
        return read_rows(part)

    copies = Copies(read)
    copies.submit(make_job(1, is_load=False))
    copies.wait({1})
    fails[0] = False
    copies.submit(make_job(2, is_load=True))
    copies.wait({2})
    copies.submit(make_job(3, is_load=False))
    copies.wait({3})
    copies.submit(make_job(4, is_load=True))
    copies.wait({4})
    assert [(each.job_id, each.has_failed) for each in copies.take_done()] == [
        (1, True),
        (2, True),
        (3, False),
        (4, False),
    ]
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


def make_tier(folder: Path, view: memoryview, monkeypatch: pytest.MonkeyPatch, **more: Any) -> DiskTier:
    monkeypatch.setattr(disk, "get_layout_name", lambda spec, size: f"layout_{size}")
    return DiskTier(None, view, "disk", str(folder), **more)


def make_transfer(keys: list[bytes], chunks: list[int], *, is_promotion: bool) -> Any:
    return SimpleNamespace(job_id=len(keys), keys=keys, chunk_ids=np.array(chunks), is_promotion=is_promotion)


def finish(tier: DiskTier) -> list[Any]:
    tier.drain_jobs()
    return list(tier.get_finished_jobs())


def test_chunks_survive_a_restart(tmp_path: Path, view: memoryview, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = make_tier(tmp_path, view, monkeypatch)
    tier.submit_store(make_transfer([b"a", b"b"], [1, 2], is_promotion=False))
    assert [each.success for each in finish(tier)] == [True]
    (tier.get_path(b"a").parent / "x.kv.1.part").write_bytes(b"unfinished")
    (tier.get_path(b"a").parent / "notes.kv").write_bytes(b"somebody else's")
    tier.shutdown()
    other = memoryview(np.zeros((4, SIZE), np.int8))
    tier = make_tier(tmp_path, other, monkeypatch)
    assert tier.lookup(b"a", None) is LookupResult.HIT
    assert tier.lookup(b"c", None) is LookupResult.MISS
    tier.submit_load(make_transfer([b"a", b"b"], [3, 0], is_promotion=True))
    assert [each.success for each in finish(tier)] == [True]
    assert (other[3, 0], other[0, 0]) == (view[1, 0], view[2, 0])
    assert not list(tmp_path.rglob("*.part"))
    tier.shutdown()


@pytest.mark.parametrize("harm", ["cut", "flip", "empty", "swap", "gone"])
def test_a_damaged_file_is_found(
    harm: str, tmp_path: Path, view: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier(tmp_path, view, monkeypatch)
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


def test_the_folder_does_not_grow_beyond_its_limit(
    tmp_path: Path, view: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 2 * (HEADER.size + SIZE)
    tier = make_tier(tmp_path, view, monkeypatch, max_bytes=limit)
    for key in (b"a", b"b"):
        tier.submit_store(make_transfer([key], [1], is_promotion=False))
        finish(tier)
    tier.lookup(b"a", None)
    tier.submit_store(make_transfer([b"c"], [1], is_promotion=False))
    finish(tier)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.kv")) == limit
    assert tier.lookup(b"b", None) is LookupResult.MISS
    tier.shutdown()


def test_a_folder_that_nothing_can_be_removed_from_ends_no_engine(
    tmp_path: Path, view: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier(tmp_path, view, monkeypatch, max_bytes=HEADER.size + SIZE)
    # What stands under a chunk's name cannot be removed as a file is.
    for key in (b"a", b"b"):
        tier.submit_store(make_transfer([key], [1], is_promotion=False))
        tier.drain_jobs()
        if key == b"a":
            list(tier.get_finished_jobs())
            tier.get_path(key).unlink()
            (tier.get_path(key) / "inside").mkdir(parents=True)
    assert [each.success for each in tier.get_finished_jobs()] == [True]
    tier.shutdown()
    tier = make_tier(tmp_path, view, monkeypatch, max_bytes=HEADER.size + SIZE)
    assert tier.lookup(b"a", None) is LookupResult.MISS
    assert tier.lookup(b"b", None) is LookupResult.HIT
    tier.shutdown()


def test_only_the_server_s_user_reads_files(tmp_path: Path) -> None:
    path = tmp_path / "x.kv"
    write_chunk(path, b"k", memoryview(b"12345678"))
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_costs_the_copy_only(
    tmp_path: Path, view: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    tier = make_tier(tmp_path, view, monkeypatch)
    monkeypatch.setattr(disk, "write_chunk", write)
    tier.submit_store(make_transfer([b"a"], [1], is_promotion=False))
    assert [each.success for each in finish(tier)] == [False]
    assert tier.lookup(b"a", None) is LookupResult.MISS
    assert not tier.has_pending_work()
    tier.shutdown()


def test_while_a_read_hangs_the_disk_counts_as_empty(
    tmp_path: Path, view: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = make_tier(tmp_path, view, monkeypatch)
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


def test_a_file_of_another_size_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.kv"
    write_chunk(path, b"k", memoryview(b"12345678"))
    with pytest.raises(DamagedError):
        read_chunk(path, b"k", memoryview(bytearray(4)))
    with pytest.raises(DamagedError):
        read_chunk(path, b"other", memoryview(bytearray(8)))
