"""A digest of all that an engine's KV depends on: weights, configuration, layout, versions, the device.

KV in files may only be loaded by an engine with the same digest. The tokenizer, sampling, scheduling and
compilation do not change KV and are left out. The digest includes vLLM's version, so it also covers whatever
is new in a release.

It uses private names of vLLM: the parts of its VllmConfig, and their `compute_hash`, which vLLM needs for
compiled graphs. Checked on vLLM 0.32.0. If anything is missing or cannot be read, no KV of earlier starts is
loaded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

NUM_DIGEST_BYTES = 16
MAX_FILES = 10_000
"""Folders with more files are refused."""
LOCAL_FORMATS = frozenset({
    "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "pt", "npcache", "bitsandbytes", "gguf",
    "mistral", "sharded_state", "runai_streamer", "runai_streamer_sharded",
})  # fmt: skip
"""`--load-format` values that read only the model's own files."""
PACKAGES = ("vllm", "torch", "transformers", "triton", "flashinfer-python", "flash-attn", "xformers")
"""Packages that compute KV or decide its layout in a block."""
IRRELEVANT = frozenset({
    "scheduler_config", "structured_outputs_config", "observability_config", "logging_config",
    "compilation_config", "profiler_config", "kv_transfer_config", "kv_events_config", "ec_transfer_config",
    "ec_manager_config", "reasoning_config", "additional_config", "instance_id", "optimization_level",
    "performance_mode", "weight_transfer_config", "shutdown_timeout", "aux_output_config", "watermark_config",
    "quant_config",
})  # fmt: skip
"""Parts of VllmConfig that do not change KV. `quant_config` follows from the model's own config."""
NOT_SEEN_IN_PICTURES = frozenset({
    "limit_per_prompt", "mm_processor_cache_gb", "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb",
    "mm_encoder_fp8_scale_save_path", "mm_encoder_fp8_scale_save_margin", "mm_encoder_tp_mode",
    "skip_mm_profiling", "mm_tensor_ipc", "mm_ipc_gpu_memory_gb", "enable_mm_embeds",
})  # fmt: skip
"""Settings of pictures, sound and video that do not change what is computed of them."""
RANDOM_HASHES = ("xxhash", "xxhash_cbor")
"""Hash algorithms of the prefix cache whose seed is random at each start, unless PYTHONHASHSEED is set."""


class UnknownOriginError(Exception):
    """What this engine's KV depends on cannot be determined; the message says why."""


def get_origin(vllm_config: Any, kv_cache_config: Any, offloading_config: Any) -> str:
    """The digest, in hex. Raises UnknownOriginError.

    `offloading_config`: vLLM's OffloadingConfig, which describes the layout of a chunk.
    """
    try:
        facts = _get_facts(vllm_config, kv_cache_config, offloading_config)
        text = json.dumps(facts, sort_keys=True)
    except UnknownOriginError:
        raise
    except Exception as error:
        raise UnknownOriginError(f"{type(error).__name__}: {error}") from error
    return hashlib.blake2b(text.encode(), digest_size=NUM_DIGEST_BYTES).hexdigest()


def get_rank(vllm_config: Any) -> int:
    """The data-parallel rank of this engine."""
    return int(vllm_config.parallel_config.data_parallel_index)


def may_span_machines(parallel_config: Any) -> bool:
    """Whether an engine's workers may be on several machines. Ray places them where it has room."""
    is_placed = parallel_config.distributed_executor_backend not in (None, "mp", "uni")
    return bool(parallel_config.nnodes_within_dp > 1 or (is_placed and parallel_config.world_size > 1))


def _get_facts(vllm_config: Any, kv_cache_config: Any, offloading_config: Any) -> dict[str, Any]:
    from vllm import envs

    model_config = vllm_config.model_config
    drafts = vllm_config.speculative_config
    draft_model = getattr(drafts, "draft_model_config", None)
    models = [each for each in (model_config, draft_model) if each is not None]
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    seed = os.environ.get("PYTHONHASHSEED")
    if algorithm in RANDOM_HASHES and seed is None:
        raise UnknownOriginError(f"the seed of {algorithm} is new at each start; set PYTHONHASHSEED")
    layout = dataclasses.asdict(offloading_config)
    for name in ("engine_id", "extra_config", "enable_kv_cache_events", "model"):
        layout.pop(name)
    layout["parallel"].pop("data_parallel_rank_local")
    return {
        "weights": [_get_weights(each, vllm_config.load_config) for each in models],
        "models": [each.hf_config.to_json_string() for each in models],
        "pictures": [_get_pictures(each.multimodal_config) for each in models],
        "drafts": None if drafts is None else [drafts.method, drafts.num_speculative_tokens],
        "config": {
            each.name: _get_config(getattr(vllm_config, each.name))
            for each in dataclasses.fields(vllm_config)
            if each.name not in IRRELEVANT
        },
        "layout": repr(layout),
        "groups": [repr(each.kv_cache_spec) for each in kv_cache_config.kv_cache_groups],
        "hashes": [algorithm, seed],
        "versions": [sys.version_info[:2], *map(_try_get_version, PACKAGES)],
        "device": _get_device(),
        "environment": envs.compile_factors(),
    }


def _get_config(config: Any) -> Any:
    """VLLM's own hash of a part of its configuration. Raises TypeError if it has no stable one."""
    from vllm.config.utils import normalize_value

    if hasattr(config, "compute_hash"):
        return config.compute_hash()
    return normalize_value(config)


def _get_pictures(config: Any) -> dict[str, Any] | None:
    """How pictures, sound and video are processed. VLLM's own keys and hashes do not depend on it."""
    from vllm.config.utils import normalize_value

    if config is None:
        return None
    names = (each.name for each in dataclasses.fields(config))
    return {
        name: normalize_value(getattr(config, name)) for name in names if name not in NOT_SEEN_IN_PICTURES
    }


def _get_weights(model_config: Any, load_config: Any) -> list[str]:
    load_format = str(getattr(load_config.load_format, "value", load_config.load_format))
    if load_format not in LOCAL_FORMATS:
        raise UnknownOriginError(f"--load-format {load_format} may read its weights from anywhere")
    folder = _find_model(model_config, load_config)
    digest, changed_s = get_files_digest(folder)
    if changed_s >= _get_start_s():
        # The weights in memory may be those from before or after the change.
        raise UnknownOriginError(f"files of {folder} changed since the engine began to start")
    return [load_format, str(load_config.model_loader_extra_config), digest]


def _find_model(model_config: Any, load_config: Any) -> Path:
    """The folder of the model's files; for a model from the hub, the snapshot of its commit."""
    name = str(getattr(model_config, "model_weights", "") or model_config.model)
    if os.path.exists(name):
        return Path(name)
    from huggingface_hub import snapshot_download

    folder = Path(
        snapshot_download(
            name, revision=model_config.revision, cache_dir=load_config.download_dir, local_files_only=True
        )
    )
    commit = getattr(model_config.hf_config, "_commit_hash", None)
    if commit is None or commit != folder.name:
        raise UnknownOriginError(f"{name} is not of one commit: config {commit}, files {folder.name}")
    return folder


def get_files_digest(path: Path) -> tuple[str, float]:
    """A digest of the names, sizes and times of a file, or of all files below a folder. Raises OSError.

    It includes the inode's change time (ctime), because a program can set the modification time back, but not
    the ctime. Links are followed, as they are when weights are read. The second value is when a file, the
    folder or a link to them last changed.
    """
    if path.is_dir():
        files = []
        for folder, folders, names in os.walk(path, followlinks=True, onerror=_raise):
            folders[:] = [each for each in folders if each[0] != "." and each != "__pycache__"]
            files += [os.path.join(folder, each) for each in names]
            if len(files) > MAX_FILES:
                raise UnknownOriginError(f"{path} has more than {MAX_FILES} files")
    else:
        files = [str(path)]
    if not files:
        raise UnknownOriginError(f"{path} has no files")
    digest = hashlib.blake2b(digest_size=NUM_DIGEST_BYTES)
    links = [each for each in path.absolute().parents if each.is_symlink()]
    changed_s = max(os.lstat(each).st_ctime for each in [path, *links, *map(Path, files)])
    for file in sorted(files):
        found = os.stat(file)
        facts = (os.path.relpath(file, path), found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        digest.update(repr(facts).encode(errors="surrogateescape"))
        changed_s = max(changed_s, found.st_ctime)
    return digest.hexdigest(), changed_s


def _raise(error: OSError) -> None:
    raise error


def _get_start_s() -> float:
    """When this process started, on the clock of `time.time`."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def _get_device() -> list[str]:
    """What the choice of kernels depends on: the device, and on a CPU build the CPU's features."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return [str(current_platform.get_device_name()), str(current_platform.get_device_capability())]
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((each for each in lines if each.lower().startswith(("flags", "features"))), "")
    return [platform.machine(), flags]


def _try_get_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
