"""A turn inside the simulated engine, and what it hits."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple, overload

from tenuto.core.requests import Hints
from tenuto.core.tier_order import Use
from tenuto.core.types import ToolCall
from tenuto.core.windows import Layers
from tenuto.sim.kv.pool import BlockHash, Path, Row, Span

NO_HINTS = Hints()


class Status(Enum):
    """The state of a request."""

    WAITING = auto()
    LOADING = auto()
    """It has its blocks, and they are being filled from a tier."""
    LOADED = auto()
    """Its load has ended and can be hit, but it has not started."""
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """One turn: its content (set by the sender) and its progress (set by the engine).

    `key` is what its KV depends on in addition to its tokens: the cache salt and the LoRA adapter. An image
    is a span named by its hash.

        prompt and output so far                │ what steps in flight will add
        ├────────────── num_tokens ─────────────┼── num_placeholders ──┼── num_drafts ──┤
        ├────────── num_computed_tokens … (grows as steps are scheduled, before they are computed)
    """

    turn_id: str
    prompt: Sequence[Span]
    output: Span
    """The text it generates, and how many tokens of it."""
    arrival_s: float
    priority: int = 0
    """Smaller goes first, in an engine that schedules by priority."""
    hints: Hints = NO_HINTS
    tool: ToolCall | None = None
    """The tool call at the end of its output."""
    is_last: bool | None = None
    """Whether its job ends with it; None if its output does not show that."""
    key: Hashable = None
    prompt_ids: Sequence[int] = ()
    """Its prompt's token ids, if there are any. Jobs without an id are recognised by them."""

    num_prompt_tokens: int = field(init=False)
    path: Path = field(init=False)
    """In blocks of the hashes."""
    paths: tuple[Path, ...] = field(init=False)
    """In blocks of each layer group."""
    tables: tuple[Any, ...] = field(init=False)
    """Its blocks in each layer group: a `BlockTable`, or a `StateTable`."""
    status: Status = field(init=False, default=Status.WAITING)
    num_tokens: int = field(init=False)
    """Prompt and output so far."""
    num_tokens_at_end: int = field(init=False)
    """Prompt and output in the end, at most the model's longest context. `KvCache` sets it."""
    slots_end: int = field(init=False, default=0)
    """Up to this many tokens, one more token neither needs nor fills a block, nor comes near the model's
    longest context. `KvCache` sets it, to save time on every token."""
    known_hit: tuple[tuple[int, int], Hit] | None = field(init=False, default=None)
    """The result of the last look-up, with `Subtree.version` and the number of tokens. `KvCache` sets it."""
    num_computed_tokens: int = field(init=False, default=0)
    """Tokens with KV, including those of steps in flight."""
    num_drafts: int = field(init=False, default=0)
    """Draft tokens to verify in its next step."""
    has_checkpoints: bool = field(init=False, default=False)
    """Whether ends of its windows are cached at regular distances too: it is its job's first turn."""
    shared_tokens: int = field(init=False, default=0)
    """Where its prompt stops matching what a layer group had cached at its start, if that is after its hit;
    else 0. Source: `shared_prefix_boundary` in vllm/v1/request.py@0.32."""
    short_layers: Layers = field(init=False, default=None)
    """In that case, the sliding window or state that ended its hit."""
    state_tokens: int = field(init=False, default=0)
    """Where the latest of its own checkpoints of states was cached."""
    num_placeholders: int = field(init=False, default=0)
    """Output tokens that steps in flight will bring, drafts included."""
    num_in_flight_tokens: int = field(init=False, default=0)
    num_stale_tokens: int = field(init=False, default=0)
    """Tokens that were in flight when it was preempted. Their output counts, but their KV is lost."""
    drops_stale: bool = field(init=False, default=False)
    """Whether its stale output is dropped, because it was preempted for a reset of the cache."""
    is_prefill_chunk: bool = field(init=False, default=False)
    """Whether its latest step leaves known tokens to compute."""
    num_preemptions: int = field(init=False, default=0)
    num_loaded_tokens: int = field(init=False, default=0)
    """Tokens of its latest hit that came from below the GPU."""
    num_stored_chunks: int = field(init=False, default=0)
    """Chunks of its prompt that were stored below the GPU, or came from there."""
    stored_s: float = field(init=False, default=0.0)
    """When the last of these stores is complete."""
    is_stored: bool = field(init=False, default=True)
    """Whether tiers that store every turn store it. False if it is known to be its job's last turn."""
    tier_use: Use | None = field(init=False, default=None)
    """The rank of its chunks there; None until it is computed."""
    chunks: list[BlockHash] = field(init=False, default_factory=list)
    """The chained hashes of its first chunks, made when `tenuto.sim.tiers.chain_offload` needs them."""
    group_chunks: tuple[Any, ...] = field(init=False, default=())
    """The same for each layer group of a hybrid model (see `tenuto.sim.tiers.grouped_offload`)."""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_tokens = sum(num_tokens for _, num_tokens in self.prompt)
        if self.num_prompt_tokens < 1 or self.output[1] < 1:
            raise ValueError(f"turn {self.turn_id}: its prompt or its output is empty")

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def max_tokens(self) -> int:
        """Output tokens in the end."""
        return self.output[1]


class Hit(NamedTuple):
    """The longest cached prefix of a request, and what a tier has after it."""

    num_tokens: int
    rows: tuple[Row, ...]
    """Its blocks in each layer group; in a sliding window only those that the window still covers."""
    shared_tokens: int = 0
    """Where the prompt stops matching what a layer group has cached, if that is after the hit; else 0."""
    short_layers: Layers = None
    """In that case, the sliding window or state that has the least of it."""
    num_loaded_tokens: int = 0
    """Tokens after the hit that come from a tier."""
    waits: bool = False
    """Whether the request waits for them. Its blocks are cached when they are loaded."""
    num_reserved_blocks: int = 0
    """In that case, free blocks that it leaves to other requests."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that do not need to be computed."""
        return self.num_tokens + self.num_loaded_tokens


class BlockHashes(Sequence[BlockHash]):
    """The chained hashes of a request's full blocks, made on demand; the list grows with its output."""

    def __init__(self, request: Request, block_size: int) -> None:
        self.path = request.path
        self._request = request
        self._block_size = block_size

    def __len__(self) -> int:
        return self._request.num_tokens // self._block_size

    @overload
    def __getitem__(self, index: int) -> BlockHash: ...
    @overload
    def __getitem__(self, index: slice) -> list[BlockHash]: ...
    def __getitem__(self, index: int | slice) -> BlockHash | list[BlockHash]:
        if isinstance(index, slice):
            return [self[n] for n in range(*index.indices(len(self)))]
        num_blocks = self._request.num_tokens // self._block_size
        block = index + num_blocks if index < 0 else index
        if not 0 <= block < num_blocks:
            raise IndexError(f"block {index} of {num_blocks}")
        return self.path.get_segment(block), block
