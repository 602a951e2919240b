"""Which names of vLLM Tenuto relies on, and the check at start that they are as expected.

Checked on vLLM 0.30.0, 0.31.0, 0.32.0 and 0.33.0.
"""

from __future__ import annotations

import importlib
import inspect
from operator import attrgetter
from typing import Any

import vllm

from tenuto.core.errors import IncompatibleError

VERSION = str(vllm.__version__)
OLDEST, NEWEST = (0, 30), (0, 33)

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"
_COORDINATOR = "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator"
_STATES = "vllm.v1.core.single_type_kv_cache_manager:MambaManager"
_POOL = "vllm.v1.core.block_pool:BlockPool"
_BLOCK = "vllm.v1.core.kv_cache_utils:KVCacheBlock"
_CLIENT = "vllm.v1.engine.core_client:EngineCoreClient"
_BLOCK_MAP = "vllm.v1.core.block_pool:BlockHashToBlockMap"
_WAITING = "vllm.v1.core.sched.request_queue:RequestQueue"

NAMES: dict[str, tuple[str, ...]] = {
    # callable: parameters we rely on
    f"{_SCHEDULER}.schedule": (),
    f"{_SCHEDULER}.add_request": ("request",),
    f"{_SCHEDULER}.update_from_output": ("scheduler_output",),
    f"{_SCHEDULER}.has_requests": (),
    f"{_SCHEDULER}.reset_prefix_cache": ("reset_running_requests", "reset_connector"),
    f"{_SCHEDULER}.shutdown": (),
    f"{_SCHEDULER}._free_request": ("request",),
    f"{_SCHEDULER}._preempt_request": ("request", "timestamp"),
    f"{_SCHEDULER}._update_waiting_for_remote_kv": ("request",),
    f"{_MANAGER}.get_computed_blocks": ("request",),
    f"{_MANAGER}.get_blocks": ("request_id",),
    f"{_MANAGER}.allocate_slots": (
        "request",
        "num_new_tokens",
        "new_computed_blocks",
        "num_lookahead_tokens",
        "full_sequence_must_fit",
        "reserved_blocks",
        "has_scheduled_reqs",
    ),
    f"{_COORDINATOR}.get_num_blocks_to_allocate": (
        "request_id",
        "num_tokens",
        "new_computed_blocks",
        "num_encoder_tokens",
        "total_computed_tokens",
        "num_local_computed_tokens",
        "num_tokens_main_model",
        "apply_admission_cap",
    ),
    f"{_STATES}.remove_skipped_blocks": ("request_id",),
    f"{_CLIENT}.add_request_async": ("request",),
    f"{_BLOCK}._block_hash": (),
    f"{_BLOCK_MAP}.get_one_block": ("key",),
    f"{_POOL}.get_cached_block": ("block_hash", "kv_cache_group_ids"),
    f"{_POOL}.touch": ("blocks",),
    f"{_POOL}.free_blocks": ("ordered_blocks",),
    f"{_POOL}.get_num_free_blocks": (),
    f"{_POOL}.get_usage": (),
    **{
        f"{_WAITING}.{name}": ()
        for name in (
            "add_request",
            "pop_request",
            "peek_request",
            "prepend_request",
            "prepend_requests",
            "remove_request",
            "remove_requests",
        )
    },
}

ATTRIBUTES = (
    "requests",
    "running",
    "waiting",
    "kv_cache_manager.block_pool.cached_block_hash_to_block._cache",
    "kv_cache_manager.coordinator.single_type_managers",
    "max_num_scheduled_tokens",
    "max_model_len",
    "is_encoder_decoder",
    "need_mamba_block_aligned_split",
)

CONNECTOR_ATTRIBUTES = (
    "config",
    "manager",
    "_req_status",
    "_jobs",
    "_generate_job_id",
    "_build_store_jobs",
    "_chunks_being_loaded",
    "_block_id_to_pending_jobs",
    "_current_batch_allocated_block_ids",
    "_current_batch_jobs_to_flush",
)
"""Of the scheduler's side of an OffloadingConnector. Without the last four, copies could overwrite each
other."""


def find_problems(version: str, *, allow_untested: bool = False) -> list[str]:
    """Where this vLLM does not fit, as one line per problem; empty if it fits."""
    problems = []
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if not allow_untested and not OLDEST <= release <= NEWEST:
        problems.append(f"version {version} is not one of 0.{OLDEST[1]} to 0.{NEWEST[1]}")
    for path, parameters in NAMES.items():
        module_name, _, qualname = path.partition(":")
        try:
            found: Any = importlib.import_module(module_name)
            for name in qualname.split("."):
                found = getattr(found, name)
        except (ImportError, AttributeError):
            problems.append(f"{path} is missing")
            continue
        missing = [name for name in parameters if name not in inspect.signature(found).parameters]
        if missing:
            problems.append(f"{path} has no parameter {', '.join(missing)}")
    return problems


def check_attributes(scheduler: Any) -> None:
    """Raise IncompatibleError if a started scheduler lacks an attribute we use."""
    _check("scheduler", scheduler, ATTRIBUTES)


def check_connector(side: Any) -> None:
    """Raise IncompatibleError if the scheduler's side of an OffloadingConnector lacks an attribute we use."""
    _check("OffloadingConnector", side, CONNECTOR_ATTRIBUTES)


def _check(owner: str, found: Any, names: tuple[str, ...]) -> None:
    missing = [name for name in names if not _has(found, name)]
    if missing:
        raise IncompatibleError(f"vLLM's {owner} has no {', '.join(missing)}")


def _has(found: Any, path: str) -> bool:
    try:
        attrgetter(path)(found)
    except AttributeError:
        return False
    return True
