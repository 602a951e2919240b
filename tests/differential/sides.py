"""The two schedulers side by side: the same turns go in, and every step of both is laid open."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from tenuto.core.requests import parse_hints
from tenuto.sim.engine.scheduler import Scheduler
from tenuto.sim.engine.state import Step
from tenuto.sim.kv.pool import Extent
from tenuto.sim.kv.request import BlockHashes, Request
from tests.vllm.workerless import make_request

Span = tuple[Hashable, int]
Accept = Callable[[str, int, int], int]
"""How many of a turn's drafts are right: (turn id, its tokens so far, drafts) to a number."""


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


def accept_none(turn_id: str, num_tokens: int, num_drafts: int) -> int:
    return 0


class VllmSide:
    """vLLM's scheduler without workers."""

    def __init__(self, scheduler: Any, *, depth: int = 1, accept: Accept = accept_none) -> None:
        self.scheduler = scheduler
        self._depth = depth
        self._accept = accept
        self._in_flight: deque[Any] = deque()
        self._numbers: dict[Hashable, int] = {}
        self._outputs: dict[str, list[int]] = {}

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
        return decision

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
            kv_connector_output=self._copy(output),
        )
        self.scheduler.update_from_output(output, result)
        num_drafts = self.scheduler.num_spec_tokens
        if num_drafts and self._depth == 1:
            drafts = DraftTokenIds(turn_ids, [[7] * num_drafts for _ in turn_ids])
            self.scheduler.update_draft_token_ids(drafts)

    def _copy(self, output: Any) -> Any:
        """What a step's copies to and from tiers report; there are none."""
        del output

    def _sample(self, output: Any, turn_id: str) -> list[int]:
        request = self.scheduler.requests.get(turn_id)
        if request is None:
            return [0]
        drafts = output.scheduled_spec_decode_tokens.get(turn_id, ())
        num_accepted = self._accept(turn_id, request.num_tokens, len(drafts)) if drafts else 0
        start = request.num_output_tokens
        tokens = self._outputs[turn_id][start : start + 1 + num_accepted]
        # Beyond the request's end anything will do: the scheduler cuts it off.
        return tokens + [0] * (1 + num_accepted - len(tokens))


class SimSide:
    """The simulator's scheduler, with the same face."""

    def __init__(self, scheduler: Scheduler, *, depth: int = 1, accept: Accept = accept_none) -> None:
        self.scheduler = scheduler
        self.now_s = 0.0
        self._depth = depth
        self._accept = accept
        self._in_flight: deque[Step] = deque()
        self._reset_ids: list[str] = []

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
        self._in_flight.append(step)
        keep = self._depth - 1 if step.num_tokens else 0
        while len(self._in_flight) > keep:
            self._process(self._in_flight.popleft())
        return decision

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
        )

    def _list_blocks(self, extents: list[Extent]) -> list[Any]:
        config = self.scheduler.config.kv
        blocks: list[Any] = []
        for extent in extents:
            copies = extent.segment.copies
            group = next(n for n in range(len(copies)) if copies[n] is extent.home)
            num_hashes = config.group_block_sizes[group] // config.hash_block_size
            # In the free queue an extent reads from its last block to its first.
            for n in reversed(range(extent.first, extent.end)):
                blocks.append((group, (extent.segment, (n + 1) * num_hashes - 1)))
        return blocks

    def _process(self, step: Step) -> None:
        num_accepted = {
            turn_id: self._accept(turn_id, self.scheduler.state.requests[turn_id].num_tokens, num_drafts)
            for turn_id, num_drafts in step.num_drafts.items()
            if turn_id in self.scheduler.state.requests
        }
        self.scheduler.finish_step(step, self.now_s, num_accepted)


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

    def get_ours(self, theirs: Any) -> Any:
        """Our hash for one of vLLM's."""
        return self._ours[theirs]

    def translate(self, decision: Decision) -> Decision:
        """What vLLM decided, in our hashes."""
        for theirs, ours in self._pairs:
            assert len(theirs.block_hashes) == len(ours)
            for n in range(self._num_named.get(theirs.request_id, 0), len(ours)):
                assert self._ours.setdefault(theirs.block_hashes[n], ours[n]) == ours[n]
                assert self._theirs.setdefault(ours[n], theirs.block_hashes[n]) == theirs.block_hashes[n]
            self._num_named[theirs.request_id] = len(ours)
        self._pairs = [(theirs, ours) for theirs, ours in self._pairs if not theirs.is_finished()]
        return replace(
            decision,
            free_queue=[held and (held[0], self._ours[held[1]]) for held in decision.free_queue],
        )
