"""Host memory below one vLLM engine, as used by its scheduler and its policy.

turn arrives   if it is its job's last, its KV is not stored
turn starts    KV in host memory is loaded or computed: `Policy.load`
turn runs      its KV is stored ("async"), unless a load or too many stores are in flight
turn ends      its chunks are ranked: `Policy.tier_key`
lease ends     its KV is stored if the policy answers `Offload`
job ends       chunks that only this job used are dropped, if the policy orders the tier
cache reset    host memory and disk lose all KV for good
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tenuto.core.loader import get_engine_settings
from tenuto.core.policy import Policy
from tenuto.core.tier_order import MAX_STORING_S, Use, list_wished
from tenuto.core.types import LoadOffer, TierView, Turn
from tenuto.core.wishes import Wish
from tenuto.vllm.compat.offload import Adapter, ConnectorPort, HostManagerHooks
from tenuto.vllm.compat.origin import (
    UnknownOriginError,
    get_files_digest,
    get_origin,
    get_rank,
    may_span_machines,
)
from tenuto.vllm.compat.scheduler import count_waiting
from tenuto.vllm.settings import Settings
from tenuto.vllm.tiers.background import LaterStores, LinkSpeed, Prefetch

logger = logging.getLogger("vllm.tenuto")

MAX_ADAPTED = 10_000
"""Most turns whose LoRA adapters are known after they end. What older leases store is not found on disk."""


class HostTier:
    """The host memory of one engine."""

    def __init__(
        self, scheduler: Any, connector: Any, settings: Settings, policy: Policy, clock: Any
    ) -> None:
        """`connector`: vLLM's, with our host manager. `clock`: the module `time`, or a test's."""
        self._scheduler = scheduler
        self._clock = clock
        self._port = port = ConnectorPort(connector, scheduler)
        self.host: HostManagerHooks = port.host
        self._block_size = port.tokens_per_chunk // port.blocks_per_chunk
        chunk_bytes, num_workers = port.host.sizes
        self.loads = LinkSpeed(chunk_bytes, num_workers)
        self.stores = LinkSpeed(chunk_bytes, num_workers)
        self.later = LaterStores(port)
        self.prefetch = Prefetch(port)
        self._is_followed = self._stores_all = True
        self.follow_policy(settings, policy)
        self.num_declined_loads = 0
        self._num_copies = 0
        self._adapters: dict[tuple[str, str], str | None] = {}  # by name and path: a digest of the files
        self._turn_adapters: OrderedDict[str, Adapter] = OrderedDict()
        self._is_mixed = False  # whether the GPU may have KV from before a reset
        self._open_disks()
        port.host.asker = self
        port.on_load_question(self._answer_load)
        port.on_copied(self._observe)
        port.on_idle(self._has_work)
        port.on_step(self._begin_step, self._holds_back, self._add_later)

    @property
    def num_events(self) -> int:
        """Copies and prefetches so far, skipped ones included. It shows whether an idle engine did work."""
        return self._num_copies + self.prefetch.num_begun + self.prefetch.num_skipped

    # Called by the scheduler.

    def arrive(self, request_id: str) -> None:
        """A request arrived; vLLM's connector already knows it."""
        turn = self._get_turn(request_id)
        if turn is not None:
            self.prefetch.come_back(turn.job.job_id, self._clock.monotonic())
        lora = self._scheduler.requests[request_id].lora_request if self._port.disks else None
        if lora is not None:
            adapter = Adapter(self._get_digest(lora.lora_name, lora.lora_path))
            self._port.describe(request_id, adapter)
            # For a store when the turn's lease ends.
            self._turn_adapters[request_id] = adapter
            if len(self._turn_adapters) > MAX_ADAPTED:
                self._turn_adapters.popitem(last=False)
        if self._is_mixed:
            self._try_clean()
        if self._is_mixed or not self._stores_all or (turn is not None and turn.ends_job):
            self._port.end_stores(request_id)

    def finish(self, request: Any, turn: Turn | None) -> None:
        """A request ended; it still has its blocks. `turn`: the last view of its turn."""
        if turn is None:
            return
        wish = None if turn.is_aborted else self._scheduler.driver.get_wish(request.request_id)
        use = self._make_use(turn, wish)
        # In every mode: what is stored from now on is charged to the job.
        self._port.describe(request.request_id, use)
        if not self._is_followed:
            return
        if (turn.ends_job and wish is None) or turn.is_aborted:
            self._port.end_stores(request.request_id)
        if self._port.can_prefetch and not (turn.is_last or turn.is_aborted):
            num_blocks = (request.num_tokens - 1) // self._block_size
            self.prefetch.leave(turn, request.block_hashes, num_blocks, use, self._clock.monotonic())

    def end_job(self, job_id: str) -> None:
        """A job is complete: drop the chunks that only it used. Its wishes count no more on a disk."""
        now_s = self._clock.monotonic()
        self.prefetch.come_back(job_id, now_s)
        for disk in self._port.disks:
            disk.end_job(job_id, now_s)
        if self._is_followed and self._scheduler.driver.orders_tiers:
            self.host.drop(job_id)
            self._report_held()

    def follow_policy(self, settings: Settings, policy: Policy) -> None:
        """This policy decides from now on. In mode off or shadow, all KV is stored and ranked by recency."""
        self._is_followed = settings.mode == "on"
        mode = settings.offload or get_engine_settings(settings.policy, policy).offload
        # With several layer groups, a lease's blocks do not map to tokens one by one, so all KV is stored.
        self._stores_all = mode != "asked" or not self._is_followed or not self._port.is_plain
        for each in (self.host.order, self.later, self.prefetch):
            each.forget_keys()
        limits = settings.limits
        for tier in (self.host, *self._port.disks):
            tier.limit_kept(limits.max_wished_share, limits.tenant_weights or {})
        self._port.forget_uses()

    def reset(self) -> None:
        """The prefix cache is about to be reset: cancel the stores that wait."""
        self.later.cancel()
        self.prefetch.cancel()

    def end_reset(self, *, is_whole: bool, is_clean: bool) -> None:
        """The prefix cache was reset. `is_whole`: host memory and disk too. `is_clean`: so was the GPU.

        Older KV must not be stored below the GPU again, where it would outlive the reset. So the KV of
        running requests is not stored. If the GPU still has older KV that others may hit, nothing is stored
        until that KV is gone.
        """
        if is_clean:
            self._is_mixed = False
        elif is_whole:
            self._is_mixed = True
            logger.warning(
                "blocks are in use during a reset: nothing is stored below the GPU until they are free"
            )
        if is_whole:
            for request_id in self._scheduler.requests:
                self._port.end_stores(request_id)
        self._report_held()

    def change_weights(self, what: str) -> None:
        """The weights in memory may have changed, so that they differ from the model's files."""
        logger.info("after %s, older KV is not used any more; a restart will not use the disk's either", what)
        for disk in self._port.disks:
            disk.forget_origin()
        self._scheduler.reset_prefix_cache(reset_connector=True)

    def load_adapter(self, name: str, path: str, load: Callable[[], bool]) -> bool:
        """Let vLLM load an adapter. If it is loaded again with other weights, older KV is dropped.

        vLLM's own keys depend on the name and the path only. The disk's keys also depend on the weights. But
        the disk begins anew too: until their next step, workers may still copy older KV into host memory that
        is free again, over what was read from the disk meanwhile.
        """
        before = _try_get_digest(path)
        done = load()
        digest = before if before == _try_get_digest(path) else None
        is_known = (name, path) in self._adapters
        known, self._adapters[name, path] = self._adapters.get((name, path)), digest
        if is_known and (digest is None or digest != known):
            logger.info("adapter %s was loaded again: older KV is not used any more", name)
            self._scheduler.reset_prefix_cache(reset_connector=True)
        return done

    def get_next_due_s(self) -> float | None:
        """When an idle engine must run a step for a prefetch; None if it need not."""
        return self.prefetch.get_next_s()

    def store(self, blocks: Sequence[Any], turn: Turn, wish: Wish | None = None) -> None:
        """Store blocks that the policy releases, of a turn or a lease. They stay allocated until then."""
        if not self._stores_all and not self._is_mixed:
            self.later.add(blocks, self._make_use(turn, wish), self._turn_adapters.get(turn.turn_id))

    def get_views(self) -> tuple[TierView, ...]:
        """The tiers as a policy sees them."""
        num_chunks, num_used = self.host.count_chunks()
        loads, stores = self._port.count_moving()
        size = self._port.blocks_per_chunk
        wait_s = loads * self.loads.s_per_chunk + stores * self.stores.s_per_chunk
        s_per_block = max(self.loads.s_per_chunk, self.stores.s_per_chunk) / size
        host = TierView("host", num_chunks * size, num_used * size, s_per_block, wait_s)
        return (host, *(disk.get_view(size) for disk in self._port.disks))

    # Called by the host manager.

    def get_use(self, request_id: str) -> Use:
        """The job whose chunks a request stores and loads, and the policy's key for them."""
        driver = self._scheduler.driver
        turn = driver.get_turn(request_id)
        return Use() if turn is None else self._make_use(turn, driver.get_wish(request_id))

    def count_stored(self, request_id: str, job_id: str | None, num_chunks: int) -> None:
        """`num_chunks` chunks of a request will be stored."""
        self._scheduler.driver.store(request_id, job_id, num_chunks * self._port.tokens_per_chunk)

    # Internal.

    def _report_held(self) -> None:
        """Tell the driver how each job's number of chunks in the tiers has changed since the last call."""
        now_s = self._clock.monotonic()
        disks = (("disk", each.changes) for each in self._port.disks)
        for place, changes in (("host", self.host.order.changes), *disks):
            for owner, num_chunks in changes.take().items():
                job_id = owner[0] if isinstance(owner, tuple) else owner
                num_blocks = num_chunks * self._port.blocks_per_chunk
                self._scheduler.driver.hold_below(str(job_id), place, num_blocks, now_s)

    def _open_disks(self) -> None:
        config = self._scheduler.vllm_config
        if self._port.disks and may_span_machines(config.parallel_config):
            # Each machine has its own host memory, and the disk tier sees that of the scheduler's only.
            logger.error("disk tier: not used: this engine's workers may be on several machines")
            return
        for disk in self._port.disks:
            origin = None
            try:
                origin = get_origin(config, self._scheduler.kv_cache_config, disk.offloading_config)
            except UnknownOriginError as error:
                logger.warning("disk tier: starts empty, now and at the next start: %s", error)
            disk.open(config.model_config.served_model_name, get_rank(config), origin)

    def _get_digest(self, name: str, path: str) -> str | None:
        """The digest of the files from which an adapter was loaded, if they have not changed."""
        known = self._adapters.get((name, path))
        return known if known is not None and known == _try_get_digest(path) else None

    def _try_clean(self) -> None:
        """Reset the GPU's cache if only leases prevent that."""
        leased = self._scheduler.leased_blocks
        if leased.get_num_free_blocks() + leased.count_idle() == leased.num_blocks:
            self._scheduler.reset_prefix_cache()

    def _get_turn(self, request_id: str) -> Turn | None:
        return self._scheduler.driver.get_turn(request_id) if self._is_followed else None

    def _make_use(self, turn: Turn, wish: Wish | None) -> Use:
        now_s, job = self._clock.monotonic(), turn.job
        if not self._is_followed:
            return Use(owner=job.job_id, tenant=job.tenant or "")
        key = self._scheduler.driver.get_tier_key(turn, now_s)
        return Use(key, job.job_id, job.tenant or "", list_wished(wish, now_s), now_s)

    def _answer_load(self, request: Any, num_hit_tokens: int, num_tokens: int) -> int:
        port = self._port
        if not self._is_followed:
            return num_tokens
        num_chunks = port.count_loaded(num_hit_tokens, num_tokens)
        waiting, _ = port.count_moving()
        offer = LoadOffer(num_tokens, (waiting + num_chunks) * self.loads.s_per_chunk)
        wanted = self._scheduler.driver.get_load_tokens(request.request_id, offer, self._clock.monotonic())
        if wanted >= num_tokens:
            return num_tokens
        # A part ends with a whole chunk. With several layer groups, only some may have stored that end.
        size = port.tokens_per_chunk
        part = (num_hit_tokens + wanted) // size * size - num_hit_tokens if port.is_plain else 0
        if part > 0:
            return part
        self.num_declined_loads += 1
        return 0

    def _observe(self, is_load: bool, num_bytes: int, seconds: float) -> None:
        self._num_copies += 1
        (self.loads if is_load else self.stores).observe(num_bytes, seconds)

    def _begin_step(self) -> None:
        self.host.order.expire(self._clock.monotonic())
        self.later.collect()
        self.prefetch.collect()

    def _holds_back(self) -> bool:
        """Whether new stores must wait for loads or earlier stores."""
        loads, stores = self._port.count_moving()
        return loads > 0 or stores * self.stores.s_per_chunk > MAX_STORING_S

    def _add_later(self, meta: Any) -> None:
        self.later.begin(meta, lambda: not self._holds_back())
        if self._port.can_prefetch:
            loads, _ = self._port.count_moving()
            is_free = self._is_followed and not loads and not count_waiting(self._scheduler)
            self.prefetch.begin(meta, self._clock.monotonic(), may_load=is_free)
        self._report_held()

    def _has_work(self) -> bool:
        """Whether an idle engine must keep running steps."""
        return len(self.later) > 0 or len(self.prefetch) > 0


def _try_get_digest(path: str) -> str | None:
    try:
        return get_files_digest(Path(path))[0]
    except (OSError, UnknownOriginError):
        return None
