"""The interface that the driver needs from an engine."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any, Protocol

from tenuto.core.types import EngineView


class Engine(Protocol):
    """The interface that the driver needs from an engine; the simulator and the vLLM plugin implement it.

    The driver never looks inside a block. A list of blocks is in the order of the tokens, from the prompt's
    start to the output's end.
    """

    @property
    def can_truncate(self) -> bool:
        """Whether a lease without its last blocks can still be hit. If not, leases are reclaimed whole."""

    @property
    def hash_block_size(self) -> int:
        """Tokens that each of an `Arrival`'s hashes covers; the engine's blocks may be larger."""

    @property
    def can_store(self) -> bool:
        """Whether there is a tier below the GPU that `store` copies to."""

    def get_view(self, now_s: float, num_leases: int = 0) -> EngineView:
        """The engine's state now; `num_leases` is copied into the view."""

    def get_num_free_blocks(self) -> int:
        """Number of blocks that an allocation could take now."""

    def get_cached_blocks(self, turn_id: str, num_hit_tokens: int) -> list[Any]:
        """Blocks that a prompt extending this turn would hit; called just before the turn's blocks are freed.

        `num_hit_tokens`: tokens that the turn itself hit when it last started.
        """

    def count_common_blocks(self, blocks: list[Any], hashes: Sequence[Hashable]) -> int:
        """How many of these blocks, from the first on, a prompt with these chained hashes shares."""

    def get_num_leased_blocks(self) -> int:
        """Number of distinct blocks that leases hold; a block that several leases hold counts once."""

    def get_num_idle_leased_blocks(self) -> int:
        """Number of leased blocks that nothing but leases uses."""

    def get_block_ids(self, blocks: list[Any]) -> Collection[Hashable]:
        """The id of each block, in the same order; ids are unique."""

    def hold(self, blocks: list[Any]) -> None:
        """Take one reference to each block."""

    def release(self, blocks: list[Any]) -> None:
        """Release one reference to each block; the last block is evicted first."""

    def store(self, blocks: list[Any]) -> None:
        """Copy blocks to the tiers below the GPU, if there are any; called before the blocks are freed."""

    def get_num_cached_tokens(self, turn_id: str) -> int:
        """Prompt tokens of a waiting turn that are in the GPU's cache now."""

    def reorder(self, turn_id: str) -> None:
        """Ask for a waiting turn's queue key again; never called from inside an allocation."""
