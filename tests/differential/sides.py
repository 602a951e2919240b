"""The two schedulers side by side: the same turns go in, and every step of both is laid open."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id
from vllm.v1.kv_offload.base import get_offload_block_hash, get_offload_group_idx
from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from tenuto.core.driver import Driver
from tenuto.core.engine import StepClock
from tenuto.core.requests import parse_hints
from tenuto.sim.engine.scheduler import Scheduler
from tenuto.sim.engine.state import Step
from tenuto.sim.kv.pool import Extent
from tenuto.sim.kv.request import BlockHashes, Request
from tests.vllm.conftest import Clock
from tests.vllm.workerless import make_request

STEP_S = 0.25
"""The time of a step. Copies to and from host memory take less."""
Span = tuple[Hashable, int]


@dataclass(frozen=True)
class Turn:
    """A request as both sides are given it."""

    turn_id: str
    prompt: tuple[Span, ...]
    output: Span
    arrival_s: float = 0.0
    priority: int = 0
    xargs: dict[str, Any] | None = None


@dataclass(frozen=True)
class Decision:
    """What a scheduler decided in one step, and what it left behind."""

    num_tokens: list[tuple[str, int]]
    preempted: list[str]
    started: list[tuple[str, int]]
    """Requests that start or resume, and their hit in tokens."""
    num_drafts: dict[str, int]
    running: list[str]
    waiting: list[str]
    free_queue: list[Any]
    """What every free block holds, in eviction order; None for nothing."""
    loading: set[str]
    """Requests whose loads from host memory begin."""
    host_content: set[Any] | None = None
    """Layer groups and hashes of what host memory holds after the step; None without host memory."""
    totals: dict[str, Any] | None = None
    """What Tenuto's driver counted, and its leases; None for stock vLLM."""


def accept_some(turn_id: str, num_tokens: int, num_drafts: int) -> int:
    return random.Random(f"{turn_id}/{num_tokens}").randint(0, num_drafts)


def get_totals(driver: Driver) -> dict[str, Any]:
    """What a driver counted and which leases it has."""
    totals = {name: value for name, value in vars(driver.stats).items() if isinstance(value, int | dict)}
    del totals["groups"]
    leases = sorted((lease.job_id, len(lease.blocks), lease.terms.until_s) for lease in driver.leases)
    return {**totals, "leases": leases}


class VllmSide:
    """vLLM's scheduler without workers. A copy to or from host memory ends with the step it began in."""

    def __init__(self, scheduler: Any, clock: Clock, *, depth: int = 1, num_host_chunks: int = 0) -> None:
        self.scheduler = scheduler
        self._clock = clock
        self._depth = depth
        self._in_flight: deque[Any] = deque()
        self._numbers: dict[Hashable, int] = {}
        self._outputs: dict[str, list[int]] = {}
        self._connector: Any = None
        self._last_runs: dict[str, int] = {}
        self._num_runs = 0
        if num_host_chunks:
            self._connector = scheduler.connector.connector_scheduler
            self._connector.manager._num_chunks = num_host_chunks
            self._build_meta = self._connector.build_connector_meta
            self._connector.build_connector_meta = self._build_meta_in_order

    def set_time(self, now_s: float) -> None:
        self._clock.now_s = now_s

    def add(self, turn: Turn) -> Any:
        request = make_request(
            turn.turn_id,
            self.get_tokens(turn.prompt),
            max_tokens=turn.output[1],
            block_size=self.scheduler.hash_block_size,
            arrival_time=turn.arrival_s,
            priority=turn.priority,
            xargs=turn.xargs,
        )
        self._outputs[turn.turn_id] = self.get_tokens([turn.output])
        self.scheduler.add_request(request)
        return request

    def get_tokens(self, spans: Sequence[Span]) -> list[int]:
        """Token ids of named texts, no two alike, so that equal tokens are equal content."""
        tokens: list[int] = []
        for content_id, num_tokens in spans:
            first = self._numbers.setdefault(content_id, len(self._numbers) + 1) * 10**6
            tokens.extend(range(first, first + num_tokens))
        return tokens

    def abort(self, turn_id: str) -> None:
        self.scheduler.finish_requests(turn_id, RequestStatus.FINISHED_ABORTED)
        self._note_run(turn_id)

    def reset(self, *, preempt_running: bool) -> bool:
        return bool(self.scheduler.reset_prefix_cache(reset_running_requests=preempt_running))

    def step(self) -> Decision:
        output = self.scheduler.schedule()
        if output.total_num_scheduled_tokens:
            # As vLLM's engine does, while the GPU computes.
            self.scheduler.get_grammar_bitmask(output)
        samples = [t for t in output.num_scheduled_tokens if not self.scheduler.requests[t].is_prefill_chunk]
        decision = self._describe(output)
        self._in_flight.append((output, samples))
        keep = self._depth - 1 if output.total_num_scheduled_tokens else 0
        while len(self._in_flight) > keep:
            self._process(*self._in_flight.popleft())
        driver = getattr(self.scheduler, "driver", None)
        return replace(
            decision,
            host_content=None if self._connector is None else self._get_host_content(),
            totals=None if driver is None else get_totals(driver),
        )

    def _describe(self, output: Any) -> Decision:
        scheduler = self.scheduler
        cached = output.scheduled_cached_reqs
        started = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        started += [
            (turn_id, num_tokens)
            for turn_id, num_tokens in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            if turn_id in cached.resumed_req_ids
        ]
        queue = scheduler.kv_cache_manager.block_pool.free_block_queue
        hashes = [block.block_hash for block in queue.get_all_free_blocks()]
        contents = [h if h is None else (get_group_id(h), get_block_hash(h)) for h in hashes]
        return Decision(
            num_tokens=list(output.num_scheduled_tokens.items()),
            preempted=sorted(output.preempted_req_ids or ()),
            started=started,
            num_drafts={t: len(ids) for t, ids in output.scheduled_spec_decode_tokens.items()},
            running=[request.request_id for request in scheduler.running],
            waiting=[request.request_id for request in scheduler.waiting],
            free_queue=contents,
            loading=self._get_loading(output),
        )

    def _process(self, output: Any, samples: list[str]) -> None:
        turn_ids = list(output.num_scheduled_tokens)
        sampled = [self._sample(output, turn_id) if turn_id in samples else [] for turn_id in turn_ids]
        result = ModelRunnerOutput(
            req_ids=turn_ids,
            req_id_to_index={turn_id: n for n, turn_id in enumerate(turn_ids)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=None if self._connector is None else self._copy(output),
        )
        self._clock.now_s += STEP_S
        self.scheduler.update_from_output(output, result)
        num_drafts = self.scheduler.num_spec_tokens
        if num_drafts and self._depth == 1:
            drafts = DraftTokenIds(turn_ids, [[7] * num_drafts for _ in turn_ids])
            self.scheduler.update_draft_token_ids(drafts)
        self._clock.now_s -= STEP_S
        for turn_id in turn_ids:
            self._note_run(turn_id)

    def _note_run(self, turn_id: str) -> None:
        self._num_runs += 1
        self._last_runs[turn_id] = self._num_runs

    def _build_meta_in_order(self, output: Any) -> Any:
        # vLLM goes through them in the order of a set of strings, which is another one in each process.
        # Ours is that in which they end.
        output.finished_req_ids = sorted(output.finished_req_ids, key=self._last_runs.__getitem__)
        return self._build_meta(output)

    def _get_host_content(self) -> set[Any]:
        policy = self._connector.manager._policy
        keys = policy.chunks if isinstance(policy, LRUCachePolicy) else policy._chunks
        return {(int(get_offload_group_idx(key)), get_offload_block_hash(key)) for key in keys}

    def _copy(self, output: Any) -> KVConnectorOutput:
        meta = output.kv_connector_metadata
        done = OffloadingWorkerMetadata()
        for job_id in (*meta.load_jobs, *meta.store_jobs):
            done.mark_completed(job_id)
        return KVConnectorOutput(finished_recving=self._get_loading(output), kv_connector_worker_meta=done)

    def _get_loading(self, output: Any) -> set[str]:
        meta = output.kv_connector_metadata
        return set() if meta is None else {job.req_id for job in meta.load_jobs.values()}

    def _sample(self, output: Any, turn_id: str) -> list[int]:
        request = self.scheduler.requests.get(turn_id)
        if request is None:
            return [0]
        drafts = output.scheduled_spec_decode_tokens.get(turn_id, ())
        num_accepted = accept_some(turn_id, request.num_tokens, len(drafts)) if drafts else 0
        start = request.num_output_tokens
        tokens = self._outputs[turn_id][start : start + 1 + num_accepted]
        # Beyond the request's end anything will do: the scheduler cuts it off.
        return tokens + [0] * (1 + num_accepted - len(tokens))


class SimSide:
    """The simulator's scheduler, with the same face."""

    def __init__(self, scheduler: Scheduler, *, depth: int = 1) -> None:
        self.scheduler = scheduler
        self.now_s = 0.0
        self._depth = depth
        self._in_flight: deque[tuple[Step, float]] = deque()
        self._reset_ids: list[str] = []
        self._step_clock = StepClock()

    def add(self, turn: Turn) -> Request:
        hints = parse_hints(turn.xargs)
        request = Request(
            turn.turn_id, turn.prompt, turn.output, turn.arrival_s, priority=turn.priority, hints=hints
        )
        self.scheduler.add_request(request, self.now_s)
        return request

    def abort(self, turn_id: str) -> None:
        self.scheduler.abort(turn_id, self.now_s)

    def reset(self, *, preempt_running: bool) -> bool:
        if preempt_running:
            self._reset_ids = [request.turn_id for request in self.scheduler.state.running]
        return self.scheduler.reset_prefix_cache(self.now_s, preempt_running=preempt_running)

    def step(self) -> Decision:
        step = self.scheduler.schedule(self.now_s)
        decision = self._describe(step)
        self._in_flight.append((step, self.now_s))
        keep = self._depth - 1 if step.num_tokens else 0
        while len(self._in_flight) > keep:
            self._process(*self._in_flight.popleft())
        return replace(
            decision,
            host_content=None if self.scheduler.offloader is None else self._get_host_content(),
            totals=get_totals(self.scheduler.driver),
        )

    def _describe(self, step: Step) -> Decision:
        scheduler = self.scheduler
        num_blanks, free = scheduler.kv.pool.get_queue()
        preempted, self._reset_ids = sorted([*step.preempted, *self._reset_ids]), []
        return Decision(
            num_tokens=list(step.num_tokens.items()),
            preempted=preempted,
            started=[*step.new.items(), *step.resumed.items()],
            num_drafts=step.num_drafts,
            running=[request.turn_id for request in scheduler.state.running],
            waiting=[request.turn_id for request in scheduler.state.waiting],
            free_queue=[None] * num_blanks + self._list_blocks(free),
            loading={load.request.turn_id for load in scheduler.state.loading},
        )

    def _list_blocks(self, extents: list[Extent]) -> list[Any]:
        blocks: list[Any] = []
        for extent in extents:
            copies = extent.segment.copies
            group = next(n for n in range(len(copies)) if copies[n] is extent.home)
            # In the free queue an extent reads from its last block to its first.
            for n in reversed(range(extent.first, extent.end)):
                blocks.append(self._name_block(group, extent.segment, n))
        return blocks

    def _get_host_content(self) -> set[Any]:
        (tier,) = self.scheduler.offloader._all_tiers
        return {self._name_block(*block) for block in tier.order}

    def _name_block(self, group: int, segment: Any, block: int) -> tuple[int, Any]:
        """A block of a layer group, named by its last hash."""
        config = self.scheduler.config.kv
        num_hashes = config.group_block_sizes[group] // config.hash_block_size
        return group, (segment, (block + 1) * num_hashes - 1)

    def _process(self, step: Step, scheduled_s: float) -> None:
        end_s = self.now_s + STEP_S
        num_tokens = sum(step.num_tokens.values()) - sum(step.num_drafts.values())
        if step.num_tokens:
            # As the event loop does.
            view = self._step_clock.finish(
                end_s, scheduled_s, num_tokens, len(step.num_tokens), is_full=step.budget == 0
            )
            self.scheduler.driver.step(view)
        num_accepted = {
            turn_id: accept_some(turn_id, self.scheduler.state.requests[turn_id].num_tokens, num_drafts)
            for turn_id, num_drafts in step.num_drafts.items()
            if turn_id in self.scheduler.state.requests
        }
        self.scheduler.finish_step(step, end_s, num_accepted)


class Names:
    """Which of our block hashes stands for which of vLLM's; a second name for one is a failure."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._ours: dict[Any, Any] = {}
        self._theirs: dict[Any, Any] = {}
        self._pairs: list[tuple[Any, BlockHashes]] = []
        self._num_named: dict[str, int] = {}

    def pair(self, theirs: Any, ours: Request) -> None:
        self._pairs.append((theirs, BlockHashes(ours, self._block_size)))

    def translate(self, decision: Decision) -> Decision:
        """What vLLM decided, in our hashes."""
        for theirs, ours in self._pairs:
            assert len(theirs.block_hashes) == len(ours)
            for n in range(self._num_named.get(theirs.request_id, 0), len(ours)):
                assert self._ours.setdefault(theirs.block_hashes[n], ours[n]) == ours[n]
                assert self._theirs.setdefault(ours[n], theirs.block_hashes[n]) == theirs.block_hashes[n]
            self._num_named[theirs.request_id] = len(ours)
        self._pairs = [(theirs, ours) for theirs, ours in self._pairs if not theirs.is_finished()]
        host = decision.host_content
        return replace(
            decision,
            free_queue=[held and (held[0], self._ours[held[1]]) for held in decision.free_queue],
            host_content=None if host is None else {(group, self._ours[each]) for group, each in host},
        )
