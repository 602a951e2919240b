"""A connector of somebody else: it stores every finished request's blocks, and loads them for later ones.

It moves nothing itself: `tests.vllm.tiered` carries its loads out. Some it begins before the step (as
`ExampleConnector` does) and some beside the steps (as LMCache's server does).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Load:
    """Blocks number `first` to `end` of a request, and whether the request waits for them."""

    request_id: str
    first: int
    end: int
    is_async: bool


@dataclass
class Loads(KVConnectorMetadata):
    """What one step loads."""

    loads: list[Load]


class OtherConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's side. The worker's does nothing."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._known: set[Any] = set()
        self._offers: dict[str, tuple[int, bool]] = {}
        self._loads: list[Load] = []

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        end = first = num_computed_tokens // BLOCK_SIZE
        hashes = request.block_hashes[: (request.num_tokens - 1) // BLOCK_SIZE]
        while end < len(hashes) and hashes[end] in self._known:
            end += 1
        is_async = sum(map(ord, request.request_id)) % 2 == 0
        self._offers[request.request_id] = (first, is_async)
        return (end - first) * BLOCK_SIZE, is_async and end > first

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            first, is_async = self._offers[request.request_id]
            end = first + num_external_tokens // BLOCK_SIZE
            self._loads.append(Load(request.request_id, first, end, is_async))

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        loads, self._loads = self._loads, []
        return Loads(loads)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        self._known.update(request.block_hashes[: request.num_computed_tokens // BLOCK_SIZE])
        self._offers.pop(request.request_id, None)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return self.request_finished(request, block_ids)

    # The worker's side.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_save(self) -> None:
        """Nothing."""
