"""A disk below host memory, as a tier of vLLM's TieringOffloadingSpec.

    FOLDER / engine / what KV depends on / ab / abcdef….kv     one file per chunk: a header, then its bytes

An engine locks its folder. A second engine of the same name takes the next folder. The folder inside is named
by a digest of all that its KV depends on (`compat.origin`). Each file's header has the digest too, so KV of
other weights is never loaded. A cache reset renames the folder, so its KV is never loaded again. The header
also has a checksum: a damaged file is removed, and its tokens are computed. A file gets its name only when it
is complete. The next start removes unfinished files of a killed server, and uses the others. At `max_bytes`,
KV of other weights is removed first, then the files that were used least recently.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import re
import stat
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tenuto.core.tier_order import HeldChanges, KeptChunks
from tenuto.core.types import TierView
from tenuto.vllm.compat.offload import (
    JobResult,
    LookupResult,
    Medium,
    RequestOffloadingContext,
    SecondaryTier,
    get_use,
    try_get_chains,
    try_get_name,
)
from tenuto.vllm.complaints import Complaints
from tenuto.vllm.state import sync_folder
from tenuto.vllm.tiers.background import LinkSpeed
from tenuto.vllm.tiers.files import (
    HEADER,
    DamagedError,
    get_engine_name,
    is_chunk,
    list_folders,
    make_folder,
    prepare_folder,
    read_chunk,
    remove_chunks,
    scan,
    try_read_name,
    write_chunk,
)

logger = logging.getLogger("vllm.tenuto")

NUM_THREADS = 4
"""For reads, and as many for writes: a read never waits for a write."""
MAX_WAITING_SHARE = 1 / 8
"""The share of host memory from which on stores are dropped, because as much already waits for the disk and
cannot be evicted. A slow disk must not block host memory."""
MAX_READ_S = 5.0
"""While a read takes longer than this, its time in the queue included, the disk counts as empty: turns
compute instead of waiting for it."""
MAX_ENGINES = 64
"""Engines of one name and rank that may share a folder."""
MAX_ENDED = 10_000
"""Most ended jobs that are remembered, while what they wished may still be copied."""
_ORIGIN = re.compile(r"[0-9a-f]{32}")
_ONCE = re.compile(r"once-[0-9a-f]{32}")
"""A folder whose KV must not be loaded: it is older than a reset, or its origin is unknown."""


@dataclass(frozen=True)
class _Space:
    """The folder of files whose KV depends on the same things."""

    folder: Path
    origin: bytes

    def get_path(self, name: bytes) -> Path:
        text = name.hex()
        return self.folder / text[:2] / f"{text}.kv"


@dataclass
class _Job:
    """One job of vLLM's manager."""

    job: Any
    space: _Space | None
    """None if the job is refused: nothing is read or written."""
    names: dict[bytes, bytes]
    """The file names of its keys, as far as they are known."""
    owner: str | None = None
    """The agent's job that uses the chunks."""
    good: set[bytes] = field(default_factory=set)
    seconds: float = 0.0


class DiskTier(SecondaryTier):
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
        """`folder`: the operator's, which engines may share. `max_bytes`: the limit of this engine's files.

        The disk counts as empty and stores nothing until `open` says what the KV depends on.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._root = Path(folder)
        self._lock_file: int | None = None
        self._space: _Space | None = None
        self._is_known = False
        self._view = primary_kv_view.cast("B")
        self._max_bytes = max_bytes
        self._file_bytes = HEADER.size + int(self.block_size_bytes)
        self._files: OrderedDict[bytes, str | None] = OrderedDict()
        """By name: the job that used the file last in this run, or None. The least recently used file is
        first."""
        self.changes = HeldChanges()
        self._kept = KeptChunks()
        self._ended: OrderedDict[str | None, float] = OrderedDict()
        """When clients ended their jobs, whose last chunks may still be copied."""
        self._older: list[tuple[float, Path, int]] = []  # folders of other weights: their time, path, bytes
        self._readers = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tenuto-disk-read")
        self._writers = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tenuto-disk-write")
        self._lock = threading.Condition()
        self._num_running = 0
        self._num_storing = 0  # chunks that wait for the disk
        self._done: list[_Job] = []
        self._reads: dict[int, float] = {}  # by job, the oldest first: when it was asked for
        self._speed = LinkSpeed(self.block_size_bytes, 1)
        self._write_complaints, self._read_complaints = (Complaints("disk tier") for _ in range(2))

    def open(self, model: str, rank: int, origin: str | None) -> None:
        """Use the files whose KV has the same origin, and no others.

        `model`: the served model name. `rank`: the data-parallel rank. `origin`: the digest of what KV
        depends on, 32 hex digits; None if that is unknown: then no KV of earlier starts is used. Raises
        ConfigError if the folder may not be used.
        """
        prepare_folder(self._root)
        try:
            engine, self._lock_file = self._lock_engine(model, rank, origin)
            self._is_known = origin is not None
            self._space = space = self._make_space(engine, origin)
        except OSError as error:
            logger.error("disk tier: not used: %s", error)
            return
        self._find_files()
        self._find_older()
        self._trim()
        logger.info("disk tier: %d chunks of earlier runs in %s", len(self._files), space.folder)

    def forget_origin(self) -> None:
        """From the next `renew` on, what KV depends on counts as unknown."""
        self._is_known = False

    def renew(self) -> None:
        """Never again load what was stored until now, not even after a restart.

        Raises OSError if that cannot be guaranteed; then the disk is not used any more.
        """
        self.drain_jobs()
        space, self._space = self._space, None
        for name in list(self._files):
            self._forget(name)
        self._kept.clear()
        if space is None:
            return
        engine = space.folder.parent
        gone = engine / f"once-{uuid.uuid4().hex}"
        os.rename(space.folder, gone)
        sync_folder(engine)
        self._space = self._make_space(engine, space.origin.hex() if self._is_known else None)
        self._writers.submit(remove_chunks, gone)

    def limit_kept(self, share: float, weights: Mapping[str, Any]) -> None:
        """Set the largest share of the byte limit that is evicted last because clients wished it."""
        most = 0 if self._max_bytes is None else self._max_bytes // self._file_bytes
        self._kept.max_chunks, self._kept.weights = int(share * most), weights

    def end_job(self, job_id: str, now_s: float) -> None:
        """A client ended its job: what it alone wished is not evicted last any more."""
        self._kept.end_job(job_id)
        self._ended[job_id] = now_s
        self._ended.move_to_end(job_id)
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    # Called by vLLM's tiering manager.

    def on_new_request(self, req_context: Any) -> Any:
        """The same rules for every request."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Record the job as the user of the chunks, which are evicted last for as long as the client wishes.

        A restart forgets users and wishes.
        """
        chains = try_get_chains(req_context)
        if chains is None:
            return
        use = get_use(req_context)
        is_over = self._ended.get(use.owner, -math.inf) >= use.since_s
        keeps = bool(use.wished) and self._kept.max_chunks > 0 and not is_over
        # Tails first, so that they go before what they continue.
        for key, end in sorted(chains.list_ends(), key=lambda each: each[1], reverse=True):
            name = try_get_name(key, req_context)
            if name is None:
                return
            if name in self._files:
                self._put(name, use.owner)
            until_s = use.get_kept_until_s(end) if keeps else 0.0
            if until_s:
                self._kept.keep(name, until_s, use.tenant, end, use.owner)

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Whether a file has this chunk and the disk responds."""
        name = try_get_name(key, req_context)
        if name not in self._files or name is None or self._hangs():
            return LookupResult.MISS
        self._files.move_to_end(name)
        return LookupResult.HIT

    def submit_store(self, job_metadata: Any) -> None:
        """Write chunks that no file has yet, in the background."""
        if self._space is None:
            self._write_complaints.add("not open, so nothing is written")
        chains = try_get_chains(job_metadata.req_context)
        if chains is not None:
            chains.num_disk_stores += 1
        self._start(job_metadata, self._writers)

    def submit_load(self, job_metadata: Any) -> None:
        """Read chunks in the background."""
        self._start(job_metadata, self._readers)

    def get_finished_jobs(self) -> Iterable[Any]:
        """The jobs that ended since the last call. Updates the index of files."""
        with self._lock:
            done, self._done = self._done, []
        results = []
        for each in done:
            job, bad = each.job, set(each.job.keys) - each.good
            chains = None if job.is_promotion else try_get_chains(job.req_context)
            if chains is not None:
                chains.num_disk_stores -= 1
            if each.space is not None and each.space is self._space:
                if job.is_promotion:
                    for key in bad:
                        self._forget(each.names[key])
                else:
                    # A failed store may not have reached files that are there.
                    for key in each.good:
                        self._put(each.names[key], each.owner)
                    # The last of a request that has ended: each time, all its chunks are ranked.
                    if chains is not None and chains.has_ended and not chains.num_disk_stores:
                        self.on_request_finished(job.req_context)
                    self._trim()
            size = len(each.good) * self.block_size_bytes
            if job.is_promotion:
                self._speed.observe(size, each.seconds)
            partly = tuple(each.good) if job.is_promotion and bad and each.good else None
            results.append(JobResult(job.job_id, not bad, partly, each.seconds, size))
        return results

    def has_pending_work(self) -> bool:
        """Whether files are being written, read or removed."""
        with self._lock:
            return self._num_running > 0 or bool(self._done)

    def drain_jobs(self) -> None:
        """Wait until no file is being written, read or removed."""
        with self._lock:
            self._lock.wait_for(lambda: not self._num_running)

    def shutdown(self) -> None:
        """Wait for the files that are being read and written. Queued jobs are dropped."""
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=True, cancel_futures=True)
        self._view.release()
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    # The files.

    def get_path(self, key: bytes) -> Path:
        """The file of a chunk. The disk must be open."""
        assert self._space is not None, "the disk is closed"
        return self._space.get_path(key)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return len(self._files) * self._file_bytes

    def get_view(self, blocks_per_chunk: int) -> TierView:
        """The tier as a policy sees it, in GPU blocks. Without a limit, its size is what it holds."""
        num_used = len(self._files)
        num_chunks = num_used if self._max_bytes is None else self._max_bytes // self._file_bytes
        s_per_block = self._speed.s_per_chunk / blocks_per_chunk
        with self._lock:
            wait_s = self._num_running * s_per_block * blocks_per_chunk
        return TierView(
            "disk", num_chunks * blocks_per_chunk, num_used * blocks_per_chunk, s_per_block, wait_s
        )

    def _lock_engine(self, model: str, rank: int, origin: str | None) -> tuple[Path, int]:
        """A folder that no running engine has locked, and its lock. Prefers a folder with files for us."""
        folders = [self._root / get_engine_name(model, rank, each) for each in range(MAX_ENGINES)]
        for folder in sorted(folders, key=lambda each: origin is None or not (each / origin).is_dir()):
            try:
                make_folder(folder)
            except FileExistsError:  # not ours
                continue
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
            except OSError:
                os.close(lock)
                raise
            else:
                return folder, lock
        raise OSError(
            f"all {MAX_ENGINES} folders for {model!r} in {self._root} are locked by engines, or not ours"
        )

    def _make_space(self, engine: Path, origin: str | None) -> _Space:
        number = uuid.uuid4().hex
        space = _Space(engine / (origin or f"once-{number}"), bytes.fromhex(origin or number))
        make_folder(space.folder)
        return space

    def _put(self, name: bytes, owner: str | None) -> None:
        """Record that this job used a file last. The file may be new."""
        before = self._files.get(name)
        self._files[name] = owner
        self._files.move_to_end(name)
        if before != owner:
            self.changes.count(before, -1)
            self.changes.count(owner, 1)

    def _forget(self, name: bytes) -> None:
        """Remove a file from the index, if it is there."""
        self.changes.count(self._files.pop(name, None), -1)

    def _find_files(self) -> None:
        """Add the complete files of an earlier server to the index, the least recently written first."""
        assert self._space is not None
        found: list[tuple[float, bytes]] = []
        for entry, facts in scan(self._space.folder):
            key = try_read_name(entry.name)
            # Files that cannot be removed stay, and so do files of another size.
            with contextlib.suppress(OSError):
                if key is None:
                    os.unlink(entry.path)
                elif facts.st_size == self._file_bytes:
                    found.append((facts.st_mtime, key))
        self._files.update((key, None) for _, key in sorted(found))

    def _find_older(self) -> None:
        """Remove files that must not be loaded. Count files of other weights, or remove them too.

        Without a limit of bytes, they are removed here, because nothing else would ever do it.
        """
        assert self._space is not None
        for folder in list_folders(self._space.folder.parent):
            if folder == self._space.folder:
                continue
            if _ONCE.fullmatch(folder.name) or (_ORIGIN.fullmatch(folder.name) and self._max_bytes is None):
                self._writers.submit(remove_chunks, folder)
            elif _ORIGIN.fullmatch(folder.name):
                files = [facts for _, facts in scan(folder)]
                used_s = max((each.st_mtime for each in files), default=0.0)
                self._older.append((used_s, folder, sum(each.st_size for each in files)))
        self._older.sort()

    def _trim(self) -> None:
        """Keep within the limit. Folders of other weights are removed first, the oldest before the others."""
        if self._max_bytes is None:
            return
        while self._older and self.num_bytes + sum(size for _, _, size in self._older) > self._max_bytes:
            self._writers.submit(remove_chunks, self._older.pop(0)[1])
        for _ in self._kept.expire(time.monotonic()):
            pass
        num_passed, gone = 0, list[Path]()
        while self._files and self.num_bytes > self._max_bytes:
            key = next(iter(self._files))
            if key in self._kept and num_passed < len(self._files) - 1:
                self._files.move_to_end(key)
                num_passed += 1
                continue
            self._forget(key)
            self._kept.discard(key)
            gone.append(self.get_path(key))
        if gone:
            # The engine calls this between two steps, and the disk may hang. A chunk that is stored again
            # meanwhile may lose its file; then its read fails.
            with self._lock:
                self._num_running += 1
            self._writers.submit(self._remove, gone)

    def _hangs(self) -> bool:
        with self._lock:
            oldest_s = next(iter(self._reads.values()), None)
        return oldest_s is not None and time.perf_counter() - oldest_s > MAX_READ_S

    # In threads.

    def _start(self, job: Any, pool: ThreadPoolExecutor) -> None:
        """Read or write in the background.

        Refuses if the disk is closed, or if it is too slow to write more, or if the origin of this request's
        KV is unknown.
        """
        found = ((key, try_get_name(key, job.req_context)) for key in job.keys)
        names = {key: name for key, name in found if name is not None}
        made = _Job(job, self._space, names, get_use(job.req_context).owner)
        with self._lock:
            num_bytes = self._num_storing * self.block_size_bytes
            is_late = not job.is_promotion and num_bytes >= MAX_WAITING_SHARE * self._view.nbytes
            if made.space is None or is_late or len(names) < len(set(job.keys)):
                made.space = None
                self._done.append(made)
                return
            self._num_running += 1
            if job.is_promotion:
                self._reads[job.job_id] = time.perf_counter()
            else:
                self._num_storing += len(job.keys)
        pool.submit(self._run, made)

    def _run(self, each: _Job) -> None:
        job = each.job
        started_s = time.perf_counter()
        try:
            (self._load if job.is_promotion else self._store)(each)
        except Exception as error:
            complaints = self._read_complaints if job.is_promotion else self._write_complaints
            complaints.add(f"job {job.job_id} failed: {error!r}")
        each.seconds = time.perf_counter() - started_s
        with self._lock:
            self._done.append(each)
            self._reads.pop(job.job_id, None)
            self._num_running -= 1
            self._num_storing -= 0 if job.is_promotion else len(job.keys)
            self._lock.notify_all()

    def _remove(self, gone: Iterable[Path]) -> None:
        for path in gone:
            # A disk that became read-only must not stop the engine.
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        with self._lock:
            self._num_running -= 1
            self._lock.notify_all()

    def _store(self, each: _Job) -> None:
        """Write the chunks of a job; `good` gets those that are on the disk afterwards."""
        for key, name, path, origin, chunk in self._get_chunks(each):
            try:
                if not is_chunk(path, self._file_bytes):
                    write_chunk(path, name, chunk, origin)
                each.good.add(key)
            except OSError as error:
                # The disk is full, for example. The chunk is still in host memory.
                self._write_complaints.add(f"cannot write {path}: {error}")
                break

    def _load(self, each: _Job) -> None:
        """Read the chunks of a job; `good` gets those that are intact."""
        for key, name, path, origin, chunk in self._get_chunks(each):
            try:
                read_chunk(path, name, chunk, origin)
                each.good.add(key)
            except (DamagedError, OSError) as error:
                self._read_complaints.add(f"{path} is not used: {error}")
                # If it is not a file, it belongs to another program.
                with contextlib.suppress(OSError):
                    if stat.S_ISREG(path.lstat().st_mode):
                        path.unlink()

    def _get_chunks(self, each: _Job) -> Iterator[tuple[bytes, bytes, Path, bytes, memoryview]]:
        """For each chunk of a job: its key, its file's name, path and origin, its place in host memory."""
        space, size = each.space, self.block_size_bytes
        assert space is not None, "a refused job"
        for key, chunk in zip(each.job.keys, each.job.chunk_ids, strict=True):
            first, name = int(chunk) * size, each.names[key]
            yield key, name, space.get_path(name), space.origin, self._view[first : first + size]
