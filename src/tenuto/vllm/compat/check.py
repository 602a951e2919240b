"""The list of all that Tenuto needs of vLLM, and the check at start that vLLM has it.

Checked on vLLM 0.30.0, 0.31.0, 0.32.0 and 0.33.0. Offloading needs 0.31.0 or later.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection, Iterable
from operator import attrgetter
from typing import Any

import vllm

from tenuto.core.errors import IncompatibleError

VERSION = str(vllm.__version__)
OLDEST, NEWEST = (0, 30), (0, 33)

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"
_COORDINATOR = "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator"
_GROUPS = "vllm.v1.core.single_type_kv_cache_manager"
_POOL = "vllm.v1.core.block_pool:BlockPool"
_BLOCK = "vllm.v1.core.kv_cache_utils:KVCacheBlock"
_CLIENT = "vllm.v1.engine.core_client:EngineCoreClient"
_CORE = "vllm.v1.engine.core:EngineCore"
_BLOCK_MAP = "vllm.v1.core.block_pool:BlockHashToBlockMap"
_WAITING = "vllm.v1.core.sched.request_queue:RequestQueue"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector:OffloadingConnector"
_HOST = "vllm.v1.kv_offload.cpu.manager:CPUOffloadingManager"
_TIER = "vllm.v1.kv_offload.tiering.base:SecondaryTierManager"
_WORKER = "vllm.v1.kv_offload.base:OffloadingWorker"
_SHARED = "vllm.v1.kv_offload.cpu.shared_offload_region:SharedOffloadRegion"


def _list(owner: str, names: str) -> dict[str, str]:
    """Callables of a class, none of whose parameters we rely on by name."""
    return {f"{owner}.{name}": "" for name in names.split()}


NAMES = {
    # callable: parameters we rely on
    **_list(_SCHEDULER, "schedule has_requests shutdown finish_requests"),
    f"{_SCHEDULER}.add_request": "request",
    f"{_SCHEDULER}.get_grammar_bitmask": "scheduler_output",
    f"{_SCHEDULER}.update_from_output": "scheduler_output",
    f"{_SCHEDULER}.reset_prefix_cache": "reset_running_requests reset_connector",
    f"{_SCHEDULER}._free_request": "request",
    f"{_SCHEDULER}._free_blocks": "request",
    f"{_SCHEDULER}._preempt_request": "request timestamp",
    f"{_SCHEDULER}._update_waiting_for_remote_kv": "request",
    f"{_MANAGER}.get_computed_blocks": "request",
    f"{_MANAGER}.get_blocks": "request_id",
    f"{_MANAGER}.free": "request",
    f"{_MANAGER}.allocate_slots": (
        "request num_new_tokens new_computed_blocks num_lookahead_tokens full_sequence_must_fit"
        " reserved_blocks has_scheduled_reqs"
    ),
    f"{_COORDINATOR}.find_longest_cache_hit": "block_hashes max_cache_hit_length",
    f"{_COORDINATOR}.get_num_blocks_to_allocate": (
        "request_id num_tokens new_computed_blocks num_encoder_tokens total_computed_tokens"
        " num_local_computed_tokens num_tokens_main_model apply_admission_cap"
    ),
    f"{_COORDINATOR}.allocate_new_computed_blocks": "num_external_computed_tokens",
    f"{_GROUPS}:MambaManager.remove_skipped_blocks": "request_id",
    f"{_GROUPS}:SlidingWindowManager.cache_blocks": "request num_tokens",
    f"{_CLIENT}.add_request_async": "request",
    f"{_CORE}.collective_rpc": "method",
    f"{_CORE}.add_lora": "lora_request",
    f"{_CORE}.sleep": "level",
    f"{_BLOCK_MAP}.get_one_block": "key",
    f"{_POOL}.get_cached_block": "block_hash kv_cache_group_ids",
    f"{_POOL}.cache_full_blocks": (
        "request blocks num_cached_blocks num_full_blocks block_size kv_cache_group_id"
    ),
    f"{_POOL}.touch": "blocks",
    f"{_POOL}.free_blocks": "ordered_blocks",
    f"{_POOL}.get_new_blocks": "num_blocks",
    **_list(_POOL, "get_num_free_blocks get_usage"),
    **_list(_WAITING, "add_request pop_request peek_request prepend_request prepend_requests"),
    **_list(_WAITING, "remove_request remove_requests"),
}

PUBLIC = {
    # our name for an object: its class, and the fields of it that we use
    "scheduler": (
        _SCHEDULER,
        "connector get_request_counts hash_block_size kv_cache_config max_num_scheduled_tokens requests"
        " reset_prefix_cache running vllm_config waiting",
    ),
    "request": (
        "vllm.v1.request:Request",
        "block_hashes has_encoder_inputs lora_request num_computed_tokens num_output_tokens num_preemptions"
        " num_prompt_tokens num_tokens output_token_ids priority prompt_token_ids request_id resumable"
        " sampling_params skip_reading_prefix_cache",
    ),
    "sampling_params": ("vllm.sampling_params:SamplingParams", "extra_args min_tokens stop"),
    "adapter": ("vllm.lora.request:LoRARequest", "lora_name lora_path"),
    "output": (
        "vllm.v1.core.sched.output:SchedulerOutput",
        "num_scheduled_tokens preempted_req_ids scheduled_spec_decode_tokens total_num_scheduled_tokens",
    ),
    "block": (_BLOCK, "block_hash block_id ref_cnt"),
    "vllm_config": (
        "vllm.config:VllmConfig",
        "additional_config cache_config model_config scheduler_config",
    ),
    "cache_config": ("vllm.config:CacheConfig", "enable_prefix_caching"),
    "model_config": ("vllm.config:ModelConfig", "served_model_name"),
    "scheduler_config": ("vllm.config:SchedulerConfig", "async_scheduling max_num_seqs"),
}
"""All of vLLM that may be used outside this package."""

FIELDS = {
    # class: fields that are used in this package
    "vllm.v1.request:Request": "is_prefill_chunk prefill_stats status",
    _BLOCK: "_block_hash is_null",
    _POOL: "num_gpu_blocks enable_caching enable_kv_cache_events",
    _MANAGER: "coordinator enable_caching num_kv_cache_groups watermark_blocks",
    f"{_GROUPS}:SingleTypeKVCacheManager": (
        "block_pool block_size kv_cache_group_id num_cached_block req_to_blocks use_eagle"
    ),
}

ATTRIBUTES = (
    "requests running waiting kv_cache_manager.block_pool.cached_block_hash_to_block._cache"
    " kv_cache_manager.coordinator.single_type_managers kv_cache_config.kv_cache_groups"
    " max_num_scheduled_tokens max_model_len block_size is_encoder_decoder need_mamba_block_aligned_split"
    " policy.value scheduler_config.long_prefill_token_threshold"
)
"""Attributes of a started scheduler."""

OFFLOADING_NAMES = {
    **_list(_CONNECTOR, "get_num_new_matched_tokens update_state_after_alloc update_connector_output"),
    **_list(_CONNECTOR, "get_transfer_results has_pending_push_work"),
    f"{_HOST}.prepare_store": "keys req_context",
    f"{_HOST}._prepare_load": "keys req_context record_access",
    **_list(_HOST, "_free_chunk _get_num_free_chunks"),
    f"{_HOST}.on_request_finished": "req_context",
    f"{_TIER}.on_new_request": "req_context",
    f"{_TIER}.lookup": "key req_context",
    f"{_TIER}.submit_store": "job_metadata",
    f"{_TIER}.submit_load": "job_metadata",
    **_list(_TIER, "get_finished_jobs has_pending_work drain_jobs shutdown"),
    f"{_WORKER}.submit_store": "job_id src_spec dst_spec",
    f"{_WORKER}.submit_load": "job_id src_spec dst_spec",
    **_list(_WORKER, "get_finished shutdown"),
    f"{_WORKER}.wait": "job_ids",
    **_list(_SHARED, "cleanup create_next_worker_view"),
}
"""As `NAMES`, for servers that use the OffloadingConnector."""

OFFLOADING_PUBLIC = {
    "tier": (_TIER, "block_size_bytes"),
    "job": (
        "vllm.v1.kv_offload.tiering.base:TransferJob",
        "chunk_ids is_promotion job_id keys req_context",
    ),
    "LookupResult": ("vllm.v1.kv_offload.base:LookupResult", "HIT MISS"),
    "Medium": ("vllm.v1.kv_offload.base:Medium", "STORAGE"),
}
"""As `PUBLIC`, for offloading."""

CONNECTOR_ATTRIBUTES = (
    "config manager _req_status _jobs _generate_job_id _build_store_jobs _chunks_being_loaded"
    " _block_id_to_pending_jobs _current_batch_allocated_block_ids _current_batch_jobs_to_flush"
)
"""Attributes of an OffloadingConnector in the scheduler's process. Without the last four, copies could
overwrite each other."""


def find_problems(version: str, *, allow_untested: bool = False) -> list[str]:
    """What does not fit in this vLLM, one line per problem; empty if it fits."""
    problems = []
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if not allow_untested and not OLDEST <= release <= NEWEST:
        problems.append(f"version {version} is not one of 0.{OLDEST[1]} to 0.{NEWEST[1]}")
    problems += _find_missing(NAMES.items(), "parameter ", _get_parameters)
    return problems + _find_missing([*PUBLIC.values(), *FIELDS.items()], "", _get_fields)


def check_attributes(scheduler: Any) -> None:
    """Raise IncompatibleError if a started scheduler lacks an attribute we use."""
    _check("scheduler", scheduler, ATTRIBUTES)


def check_connector(side: Any) -> None:
    """Raise IncompatibleError if an OffloadingConnector in the scheduler's process lacks something we use."""
    _check("OffloadingConnector", side, CONNECTOR_ATTRIBUTES)
    problems = _find_missing(OFFLOADING_NAMES.items(), "parameter ", _get_parameters)
    problems += _find_missing(OFFLOADING_PUBLIC.values(), "", _get_fields)
    if problems:
        raise IncompatibleError(
            f"host memory and disk need vLLM 0.31 or later; this is {VERSION}: {'; '.join(problems)}"
        )


def _find_missing(
    needed: Iterable[tuple[str, str]], what: str, get_names: Callable[[Any], Collection[str]]
) -> list[str]:
    problems = []
    for path, names in needed:
        found = _try_get(path)
        if found is None:
            problems.append(f"{path} is missing")
            continue
        known = get_names(found)
        missing = [name for name in names.split() if name not in known]
        if missing:
            problems.append(f"{path} has no {what}{', '.join(missing)}")
    return problems


def _get_parameters(function: Any) -> Collection[str]:
    return inspect.signature(function).parameters


def _get_fields(of_class: type) -> set[str]:
    """Fields that a class declares, and fields that `__init__` sets."""
    known = {*dir(of_class), *getattr(of_class, "__dataclass_fields__", ())}
    for each in of_class.__mro__:
        known.update(getattr(getattr(vars(each).get("__init__"), "__code__", None), "co_names", ()))
        known.update(getattr(each, "__annotations__", ()))
    return known


def _try_get(path: str) -> Any | None:
    """The object at the path `module:name.name`; None if it does not exist."""
    module_name, _, qualname = path.partition(":")
    try:
        return attrgetter(qualname)(importlib.import_module(module_name))
    except (ImportError, AttributeError):
        return None


def _check(owner: str, found: Any, names: str) -> None:
    missing = [name for name in names.split() if not _has(found, name)]
    if missing:
        raise IncompatibleError(f"vLLM's {owner} has no {', '.join(missing)}")


def _has(found: Any, path: str) -> bool:
    try:
        attrgetter(path)(found)
    except AttributeError:
        return False
    return True
