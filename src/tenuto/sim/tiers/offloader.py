"""Offloading: what is stored in the tiers and when, what a turn loads, and which blocks wait for a copy.

    computed → store → tier … next turn: GPU hit | loaded from the tier | computed

- *sync*: prompts are stored as they are computed. A step ends when its loads and stores have ended too
  (LMCache 0.3.7 in vLLM: `start_load_kv` and `wait_for_save`; outputs are not stored). Copies share the link
  and run beside the computation. If they ran one after the other, the published sweep at 6 jobs/s would take
  1.7 times as long as it took (see docs/fidelity.md).
- *serial*: as sync, but nothing overlaps: loads, then the computation, then stores. This is what the source
  of LMCache 0.3.7 does. `start_load_kv` synchronises its stream before the forward pass. `wait_for_save`
  copies each request's slot mapping to the GPU without `non_blocking`, which waits for the forward pass, and
  then synchronises after every chunk. docs/fidelity.md compares both modes with the published sweeps.
- *async*: copies run beside the steps, and outputs are stored too. A turn waits, with its blocks, until its
  load has ended. The blocks of a finished turn stay taken until they are stored (vLLM's native offloading).
- *asked*: as async, but only what the policy answers `Offload` for is stored.
- *native*: as async, in vLLM's own host memory, without Tenuto's: no policy orders it.

`chain_offload` is for full attention. `grouped_offload` works block by block, for any layers.
`native_offload` is the same in vLLM's own order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Literal

from tenuto.core.driver import Driver
from tenuto.core.tier_order import Use, list_wished
from tenuto.core.types import LoadOffer, TierView, Turn
from tenuto.core.wishes import Wish
from tenuto.sim.kv.pool import Row
from tenuto.sim.kv.request import Request
from tenuto.sim.tiers.tier import NOBODY, Tier

Offload = Literal["sync", "serial", "async", "asked", "native"]
"""When KV is copied to the tiers below the GPU: see above."""


class Offloader(ABC):
    """Copies between one engine's blocks and its tiers.

    With async and asked, a tier stores and evicts by the policy's `tier_key`, as inside vLLM
    (`tenuto.vllm.tiers.host`). With a `tier_key`, a turn that is known to be its job's last is not stored,
    and the end of a job drops the chunks that only it used. Other policies store every turn, as vLLM does.
    LMCache (sync, serial) stores every prompt and evicts by recency.
    """

    takes_whole_prompts = True
    """Whether a turn that waits for its load already has the blocks of all its tokens."""
    stores_answers = True
    """Whether `store_computed` is called for steps after the prompt, too."""

    def __init__(self, tiers: Sequence[Tier], offload: Offload, chunk_blocks: int) -> None:
        """`tiers`: nearest first. `chunk_blocks`: blocks per chunk. Call `follow` before anything else."""
        self.is_sync = offload in ("sync", "serial")
        self.is_serial = offload == "serial"
        self.num_loaded_tokens = 0
        self.num_stored_tokens = 0
        self._all_tiers = tuple(tiers)
        self._stores_all = offload != "asked"
        self._chunk_blocks = chunk_blocks
        self._driver: Driver
        self._is_ordered = False
        self._views: tuple[TierView, ...] = ()
        """The latest views, which serve for as long as nothing of them has changed."""

    # Turns and jobs.

    def follow(self, driver: Driver) -> None:
        """Let this driver's policy decide from now on, and report to the driver what is stored and held."""
        self._driver = driver
        self._is_ordered = not self.is_sync and driver.policy.overrides("tier_key")
        limits = driver.limits
        for tier in self._all_tiers:
            tier.order.forget_keys()
            tier.order.kept.max_chunks = int(limits.max_wished_share * tier.capacity_chunks)
            tier.order.kept.weights = limits.tenant_weights or {}

    def arrive(self, request: Request) -> None:
        """A request arrived. If it is known to be its job's last, it is not stored."""
        if self._is_ordered:
            turn = self._driver.get_turn(request.turn_id)
            request.is_stored = turn is None or not turn.ends_job

    def leave(self, request: Request, turn: Turn | None, now_s: float) -> None:
        """A request ends. From now on its chunks are ranked by `turn`, the last view of its turn."""
        if turn is not None and not self.is_sync:
            wish = self._driver.get_wish(request.turn_id)
            is_over = self._is_ordered and turn.ends_job and wish is None
            request.is_stored &= not (turn.is_aborted or is_over)
            if request.tier_use is not None or (request.is_stored and self._stores_all):
                request.tier_use = self._make_use(turn, now_s, None if turn.is_aborted else wish)

    def end_job(self, job_id: str, now_s: float) -> None:
        """A job is complete. Drop the chunks that only it used, if the policy orders the tiers."""
        if self._is_ordered:
            self._drop(job_id, now_s)
            self._report_held(now_s)

    # Loads.

    @abstractmethod
    def get_offer(self, request: Request, num_hit_tokens: int, now_s: float) -> LoadOffer | None:
        """What a request that is about to start could load after its hit; None if nothing."""

    @abstractmethod
    def choose_part(self, num_hit_tokens: int, num_tokens: int, num_offered: int) -> int:
        """The number of offered tokens that are loaded after a hit, if the policy wants `num_tokens`."""

    def must_wait(self, request: Request, num_hit_tokens: int, num_tokens: int, now_s: float) -> bool:
        """Whether a part of what it would load is being loaded for another request now."""
        return False

    @abstractmethod
    def load(self, request: Request, num_hit_tokens: int, num_tokens: int, now_s: float) -> float:
        """Begin to copy an offer, or its first tokens, to the GPU; returns when that ends, in seconds."""

    # Stores.

    def begin_stores(self, requests: Sequence[Request], loaded: Iterable[Request], now_s: float) -> None:
        """The stores of a step in which these requests run are about to begin.

        `loaded`: requests whose loads have ended, and which do not run yet.
        """
        del requests, loaded, now_s

    def end_stores(self, now_s: float) -> None:
        """All stores of the step were requested."""
        del now_s

    @abstractmethod
    def store_computed(self, request: Request, now_s: float) -> float:
        """Store what a request that runs has computed; returns when the copy ends, in seconds."""

    @abstractmethod
    def store_finished(self, request: Request, now_s: float) -> None:
        """A request ends, and still has its blocks."""

    def store_asked(self, row: Row, turn: Turn, now_s: float, wish: Wish | None = None) -> None:
        """Store blocks that the policy wants stored. Nothing to do if all turns are stored anyway."""
        del row, turn, now_s, wish

    def release_stored(self, now_s: float) -> None:
        """Free the blocks whose stores are complete by now."""
        del now_s

    # Questions.

    def get_free_s(self, now_s: float) -> float:
        """The time at which all started copies have ended; `now_s` if they have."""
        return max(now_s, *(tier.link.free_at_s for tier in self._all_tiers))

    def get_next_stored_s(self) -> float | None:
        """The end of the next store that blocks wait for; None if no block waits."""
        return None

    def get_views(self, now_s: float) -> tuple[TierView, ...]:
        """The tiers as a policy sees them."""
        for tier, view in zip_longest(self._all_tiers, self._views):
            wait_s, num_used_blocks = max(0.0, tier.link.free_at_s - now_s), len(tier) * self._chunk_blocks
            if view is None or view.wait_s != wait_s or view.num_used_blocks != num_used_blocks:
                self._views = tuple(self._get_view(each, now_s) for each in self._all_tiers)
                break
        return self._views

    # Inside.

    def _get_view(self, tier: Tier, now_s: float) -> TierView:
        return TierView(
            name=tier.name,
            num_blocks=tier.capacity_chunks * self._chunk_blocks,
            num_used_blocks=len(tier) * self._chunk_blocks,
            s_per_block=tier.chunk_bytes / self._chunk_blocks / tier.link.bytes_per_s,
            wait_s=max(0.0, tier.link.free_at_s - now_s),
        )

    @abstractmethod
    def _drop(self, job_id: str, now_s: float) -> None:
        """Drop chunks that only this job used."""

    def _count_stored(self, num_tokens: int, use: Use, now_s: float, request: Request | None = None) -> None:
        self.num_stored_tokens += num_tokens
        if num_tokens:
            self._driver.store(None if request is None else request.turn_id, use.owner, num_tokens)
        self._report_held(now_s)

    def _report_held(self, now_s: float) -> None:
        """Report to the driver the changes in each job's number of chunks in the tiers."""
        for tier in self._all_tiers:
            for owner, num_chunks in tier.order.changes.take().items():
                job_id = owner[0] if isinstance(owner, tuple) else owner
                self._driver.hold_below(str(job_id), tier.name, num_chunks * self._chunk_blocks, now_s)

    def _get_use(self, request: Request, now_s: float) -> Use:
        if request.tier_use is None:
            turn, wish = self._driver.get_turn(request.turn_id), self._driver.get_wish(request.turn_id)
            request.tier_use = NOBODY if turn is None else self._make_use(turn, now_s, wish)
        return request.tier_use

    def _make_use(self, turn: Turn, now_s: float, wish: Wish | None) -> Use:
        key, job = self._driver.get_tier_key(turn, now_s), turn.job
        return Use(key, job.job_id, job.tenant or "", list_wished(wish, now_s))
