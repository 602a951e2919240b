"""Private names of the scheduler's side of vLLM's OffloadingConnector.

Checked on vLLM 0.32.0.

    request arrives ─► get_num_new_matched_tokens ─► update_state_after_alloc ─► (worker loads) ─► starts
    step            ─► build_connector_meta: stores what was computed ─► (worker stores) ─► complete
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from tenuto.core.windows import STATE_WINDOW, count_loaded_blocks
from tenuto.vllm.compat_check import check_connector
from tenuto.vllm.compat_copies import CopyPort
from tenuto.vllm.compat_offload import Adapter, HostManagerHooks, get_host_manager


def find_connector(scheduler: Any) -> Any | None:
    """The OffloadingConnector with our host manager, alone or in a MultiConnector; None without one."""
    found = scheduler.connector
    for each in [found, *getattr(found, "sub_connectors", ())] if found is not None else []:
        if isinstance(each, OffloadingConnector) and get_host_manager(each.connector_scheduler.manager):
            return each
    return None


def _get_window(group: Any) -> int | None:
    """The window of one layer group, in tokens; None for full attention."""
    if group.sliding_window_size_in_chunks is None:
        return None
    spec = group.kv_cache_spec
    size = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    return STATE_WINDOW if size is None else int(size)


class ConnectorPort:
    """What Tenuto asks of one OffloadingConnector, and where it is asked. Sizes are in chunks."""

    def __init__(self, connector: Any, pool: Any) -> None:
        """`pool`: the GPU's blocks."""
        self._connector = connector
        self._pool = pool
        self._scheduler = connector.connector_scheduler
        check_connector(self._scheduler)
        host = get_host_manager(self._scheduler.manager)
        assert host is not None, "another's host manager"
        self.host: HostManagerHooks = host
        self.disks = [
            each
            for each in getattr(self._scheduler.manager, "secondary_tiers", ())
            if hasattr(each, "get_view")
        ]
        """Our own tiers behind host memory (`tenuto.vllm.tiers.disk`)."""
        self._renews_disks = True
        config = self._scheduler.config
        self.copies = CopyPort(connector, pool, host)
        """Copies that no request asked for."""
        self.blocks_per_chunk = self.copies.blocks_per_chunk
        self.tokens_per_chunk = int(config.kv_group_configs[0].tokens_per_chunk)
        windowed = {
            each.group_idx
            for each in config.kv_group_configs
            if each.sliding_window_size_in_chunks is not None
        }
        host._policy.windowed_groups = frozenset(windowed)
        self._groups = [(_get_window(each), int(each.tokens_per_chunk)) for each in config.kv_group_configs]
        self.is_plain = len(self._groups) == 1 and not windowed
        """Whether each block holds all layers' KV of its tokens, and nothing else."""

    # Requests.

    def count_loaded(self, num_hit_tokens: int, num_tokens: int) -> int:
        """Chunks that a load of so many tokens behind a hit copies, in all layer groups."""
        end = num_hit_tokens + num_tokens
        return sum(count_loaded_blocks(window, size, num_hit_tokens, end) for window, size in self._groups)

    def set_stores(self, request_id: str, *, stored: bool) -> None:
        """Whether vLLM stores what this request computes; until then nothing was stored if not."""
        status = self._scheduler._req_status.get(request_id)
        if status is not None:
            given = (status.req.kv_transfer_params or {}).get("max_offload_tokens")
            asked = given if type(given) is int and given >= 0 else None
            status.max_offload_tokens = asked if stored else 0

    def on_load_question(self, answer: Callable[[Any, int, int], int]) -> None:
        """Let `answer(request, tokens hit on the GPU, tokens offered)` say how many tokens are loaded.

        The answer is the offer, 0, or something between that ends with a chunk.
        """
        ask = self._connector.get_num_new_matched_tokens

        def get_num_new_matched_tokens(request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
            offered, is_async = ask(request, num_computed_tokens)
            if not offered:
                return offered, is_async
            num_tokens = answer(request, num_computed_tokens, offered)
            return num_tokens, is_async and num_tokens > 0

        self._connector.get_num_new_matched_tokens = get_num_new_matched_tokens

    def watch_loads_of_others(self, whole: Any) -> None:
        """Let stores that read blocks come before another connector's load into them.

        `whole`: the scheduler's connector. vLLM's MultiConnector tells only the connector that loads of the
        blocks, and a request that waits for its load is in no step, where the others would see it.
        """
        if whole is self._connector:
            return
        tell = whole.update_state_after_alloc

        def update_state_after_alloc(request: Any, blocks: Any, num_external_tokens: int) -> None:
            tell(request, blocks, num_external_tokens)
            if num_external_tokens:
                ids = {block.block_id for group in blocks.blocks for block in group if not block.is_null}
                self._scheduler._current_batch_allocated_block_ids |= ids

        whole.update_state_after_alloc = update_state_after_alloc

    def set_adapter(self, request_id: str, digest: str | None) -> None:
        """The LoRA adapter of a request: a digest of its files, None if unknown."""
        status = self._scheduler._req_status.get(request_id)
        if status is not None:
            status.req_context.set_state(Adapter(digest))

    @contextlib.contextmanager
    def keep_disks(self) -> Iterator[None]:
        """Meanwhile a reset of the cache leaves our disks as they are."""
        self._renews_disks = False
        try:
            yield
        finally:
            self._renews_disks = True

    # Steps.

    def on_idle(self, has_work: Callable[[], bool]) -> None:
        """Keep an idle engine stepping while `has_work()`."""
        ask = self._connector.has_pending_push_work
        self._connector.has_pending_push_work = lambda: ask() or has_work()

    def on_step(
        self, begin: Callable[[], None], holds_back: Callable[[], bool], add: Callable[[Any], None]
    ) -> None:
        """Call `begin` before vLLM chooses what a step stores, and `add(meta)` with what it chose.

        While `holds_back` is true, what running requests computed is not stored yet; vLLM finds it again in a
        later step. What finished requests computed is, because their blocks may go.
        """
        scheduler = self._scheduler
        build, build_stores = scheduler.build_connector_meta, scheduler._build_store_jobs

        def build_connector_meta(scheduler_output: Any) -> Any:
            begin()
            preempted = scheduler_output.preempted_req_ids
            if preempted:
                # A reset preempts requests, and some may load already: vLLM's connector does not expect that.
                scheduler_output.preempted_req_ids = {
                    each for each in preempted if not self._is_loading(each)
                }
            meta = build(scheduler_output)
            scheduler_output.preempted_req_ids = preempted
            add(meta)
            return meta

        def build_store_jobs(scheduler_output: Any) -> Any:
            if holds_back():
                finished = scheduler_output.finished_req_ids
                scheduler_output = SimpleNamespace(num_scheduled_tokens={}, finished_req_ids=finished)
            return build_stores(scheduler_output)

        reset = scheduler.reset_cache

        def reset_cache() -> None:
            # vLLM's connector does not expect a second reset before a step.
            waited_for = set(scheduler._current_batch_jobs_to_flush)
            scheduler._current_batch_jobs_to_flush.clear()
            reset()
            scheduler._current_batch_jobs_to_flush |= waited_for
            for disk in self.disks if self._renews_disks else ():
                disk.renew()

        scheduler.reset_cache = reset_cache
        scheduler.build_connector_meta = build_connector_meta
        scheduler._build_store_jobs = build_store_jobs

    def _is_loading(self, request_id: str) -> bool:
        status = self._scheduler._req_status.get(request_id)
        jobs = self._scheduler._jobs
        return status is not None and any(not jobs[each].is_store for each in status.transfer_jobs)

    def on_copied(self, told: Callable[[bool, int, float], None]) -> None:
        """Call `told(is load, bytes, seconds)` for the copies that the workers report."""
        update = self._connector.update_connector_output

        def update_connector_output(output: Any) -> None:
            meta = output.kv_connector_worker_meta
            if isinstance(meta, OffloadingWorkerMetadata):
                for is_load, stats in ((True, meta.transfer_stats.load), (False, meta.transfer_stats.store)):
                    if not stats.is_empty():
                        told(is_load, stats.bytes, stats.time)
            update(output)

        self._connector.update_connector_output = update_connector_output

    def count_moving(self) -> tuple[int, int]:
        """Chunks that loads and that stores under way move."""
        loads = stores = 0
        for job in self._scheduler._jobs.values():
            if job.is_store:
                stores += len(job.keys)
            else:
                loads += len(job.keys)
        return loads, stores

    @property
    def can_prefetch(self) -> bool:
        """Whether such loads work here: not where vLLM tells others of each cached block.

        Nor without a prefix cache: vLLM would take a block that keeps the name of its content for a hit.
        """
        return self.is_plain and self._pool.enable_caching and not self._pool.enable_kv_cache_events
