"""A disk behind host memory, as a tier of vLLM's TieringOffloadingSpec.

    FOLDER / model and layout / ab / abcdef….kv      one file per chunk: a header, then the chunk's bytes

The header has a checksum, so a damaged file is found, removed, and its tokens are computed again. A file
appears under its name only when it is whole. What a killed server left unfinished is removed at the next
start, and everything else is used again. The files used least recently go first once `max_bytes` are reached.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tenuto.core.types import TierView
from tenuto.vllm.compat_offload import (
    JobResult,
    LookupResult,
    Medium,
    RequestOffloadingContext,
    SecondaryTierManager,
    get_layout_name,
)
from tenuto.vllm.tiers.chunk_file import (
    HEADER,
    UNFINISHED,
    DamagedError,
    read_chunk,
    try_read_name,
    write_chunk,
)
from tenuto.vllm.tiers.link import LinkSpeed

logger = logging.getLogger("vllm.tenuto")

NUM_THREADS = 4
MAX_WAITING_STORES = 64
"""Stores that may wait for the disk; those beyond are not written. A slow disk must not pin host memory."""
MAX_READ_S = 5.0
"""While a read takes longer than this, the disk counts as empty: turns compute, and do not wait for it."""


class DiskTier(SecondaryTierManager):  # type: ignore[misc]
    """Chunks in files. vLLM calls all methods in the scheduler's process, one at a time."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        folder: str,
        max_bytes: int | None = None,
        backpressure_detector: Any = None,
    ) -> None:
        """`folder`: for the files of any models and layouts. `max_bytes`: of this layout's files."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._folder = Path(folder) / get_layout_name(offloading_spec, self.block_size_bytes)
        self._view = primary_kv_view.cast("B")
        self._max_bytes = max_bytes
        self._file_bytes = HEADER.size + int(self.block_size_bytes)
        self._files: OrderedDict[bytes, None] = OrderedDict()  # the least recently used first
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tenuto-disk")
        self._lock = threading.Condition()
        self._num_running = 0
        self._num_stores = 0
        self._done: list[tuple[Any, set[bytes], set[bytes], float]] = []
        self._reads: dict[int, float] = {}  # by job, since when a thread reads its files
        self._speed = LinkSpeed(self.block_size_bytes, 1)
        self.num_damaged = 0
        self.num_not_written = 0
        self._find_files()

    # vLLM's tiering manager calls these.

    def on_new_request(self, req_context: Any) -> Any:
        """Nothing special for any request."""
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Whether a file has this chunk, on a disk that answers."""
        if key not in self._files or self._hangs():
            return LookupResult.MISS
        self._files.move_to_end(key)
        return LookupResult.HIT

    def submit_store(self, job_metadata: Any) -> None:
        """Write chunks that no file has yet, beside what follows."""
        with self._lock:
            is_full = self._num_stores >= MAX_WAITING_STORES
            self._num_stores += 0 if is_full else 1
        if is_full:
            self.num_not_written += len(job_metadata.keys)
            self._end(job_metadata, set(), set(), 0.0, is_store=False)
            return
        self._start(self._store, job_metadata, is_store=True)

    def submit_load(self, job_metadata: Any) -> None:
        """Read chunks, beside what follows."""
        self._start(self._load, job_metadata, is_store=False)

    def get_finished_jobs(self) -> Iterable[Any]:
        """What has ended since the last call; the index of files follows."""
        with self._lock:
            done, self._done = self._done, []
        results = []
        for job, good, bad, seconds in done:
            for key in bad:
                self._files.pop(key, None)
            if not job.is_promotion:
                for key in good:
                    self._files[key] = None
                self._trim()
            is_whole = not bad
            size = len(good) * self.block_size_bytes
            if job.is_promotion:
                self._speed.observe(size, seconds)
            partly = tuple(good) if job.is_promotion and bad and good else None
            results.append(JobResult(job.job_id, is_whole, partly, seconds, size))
        return results

    def has_pending_work(self) -> bool:
        """Whether files are being written or read."""
        with self._lock:
            return self._num_running > 0 or bool(self._done)

    def drain_jobs(self) -> None:
        """Wait until no file is being written or read."""
        with self._lock:
            self._lock.wait_for(lambda: not self._num_running)

    def shutdown(self) -> None:
        """Wait for the files that are being written; what waits is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._view.release()

    # The files.

    def get_path(self, key: bytes) -> Path:
        """The file of a chunk."""
        name = key.hex()
        return self._folder / name[:2] / f"{name}.kv"

    @property
    def num_bytes(self) -> int:
        """What the files take."""
        return len(self._files) * self._file_bytes

    def get_view(self, blocks_per_chunk: int) -> TierView:
        """The tier as a policy sees it, in GPU blocks; without a limit its size is what it holds."""
        num_used = len(self._files)
        num_chunks = num_used if self._max_bytes is None else self._max_bytes // self._file_bytes
        s_per_block = self._speed.s_per_chunk / blocks_per_chunk
        with self._lock:
            wait_s = self._num_running * s_per_block * blocks_per_chunk
        return TierView(
            "disk", num_chunks * blocks_per_chunk, num_used * blocks_per_chunk, s_per_block, wait_s
        )

    def _find_files(self) -> None:
        """Take up what an earlier server left: whole files, the least recently written first."""
        self._folder.mkdir(parents=True, exist_ok=True)
        found: list[tuple[float, bytes]] = []
        for folder in self._folder.iterdir():
            for entry in os.scandir(folder) if folder.is_dir() else ():
                key = try_read_name(entry.name)
                # What cannot be removed or looked at, such as what stands under a chunk's name and is no
                # file, is left alone.
                with contextlib.suppress(OSError):
                    if entry.name.endswith(UNFINISHED):
                        Path(entry.path).unlink(missing_ok=True)
                    elif key is not None and entry.is_file():
                        found.append((entry.stat().st_mtime, key))
        self._files.update((key, None) for _, key in sorted(found))
        self._trim()
        logger.info("disk tier: %d chunks of earlier runs in %s", len(self._files), self._folder)

    def _trim(self) -> None:
        while self._max_bytes is not None and self._files and self.num_bytes > self._max_bytes:
            key, _ = self._files.popitem(last=False)
            # The engine calls this between two steps: a disk that became read-only must not end it.
            with contextlib.suppress(OSError):
                self.get_path(key).unlink(missing_ok=True)

    def _hangs(self) -> bool:
        with self._lock:
            return bool(self._reads) and time.perf_counter() - min(self._reads.values()) > MAX_READ_S

    # In threads.

    def _start(self, work: Any, job: Any, *, is_store: bool) -> None:
        with self._lock:
            self._num_running += 1
        self._pool.submit(self._run, work, job, is_store)

    def _run(self, work: Any, job: Any, is_store: bool) -> None:
        started_s = time.perf_counter()
        good: set[bytes] = set()
        if not is_store:
            with self._lock:
                self._reads[job.job_id] = started_s
        try:
            good = work(job)
        except Exception:
            logger.exception("disk tier: job %d failed", job.job_id)
        bad = set(job.keys) - good
        self._end(job, good, bad, time.perf_counter() - started_s, is_store=is_store, was_running=True)

    def _end(
        self,
        job: Any,
        good: Collection[bytes],
        bad: Collection[bytes],
        seconds: float,
        *,
        is_store: bool,
        was_running: bool = False,
    ) -> None:
        with self._lock:
            self._done.append((job, set(good), set(bad), seconds))
            self._reads.pop(job.job_id, None)
            self._num_running -= int(was_running)
            self._num_stores -= int(is_store)
            self._lock.notify_all()

    def _store(self, job: Any) -> set[bytes]:
        """Write the chunks of a job; returns those that are on the disk now."""
        good: set[bytes] = set()
        for key, chunk in zip(job.keys, job.chunk_ids, strict=True):
            path = self.get_path(key)
            try:
                if not path.exists():
                    write_chunk(path, key, self._get_chunk(chunk))
                good.add(key)
            except OSError as error:
                # A full disk: the chunk is in host memory all the same.
                logger.warning("disk tier: cannot write %s: %s", path, error)
                break
        return good

    def _load(self, job: Any) -> set[bytes]:
        """Read the chunks of a job; returns those that are whole."""
        good: set[bytes] = set()
        for key, chunk in zip(job.keys, job.chunk_ids, strict=True):
            path = self.get_path(key)
            try:
                read_chunk(path, key, self._get_chunk(chunk))
                good.add(key)
            except (DamagedError, OSError) as error:
                self.num_damaged += 1
                logger.warning("disk tier: %s is not used: %s", path, error)
                path.unlink(missing_ok=True)
        return good

    def _get_chunk(self, chunk: int) -> memoryview:
        first = int(chunk) * self.block_size_bytes
        return self._view[first : first + self.block_size_bytes]
