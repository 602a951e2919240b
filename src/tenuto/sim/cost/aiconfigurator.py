"""Operator tables of the `aiconfigurator-core` package: times of vLLM's kernels on real GPUs."""

from __future__ import annotations

import logging
import shutil
import tempfile
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from tenuto.core.errors import ConfigError
from tenuto.sim.cost.tables import TableStepCost
from tenuto.sim.hardware.gpus import GPUS, Gpu
from tenuto.sim.hardware.model import Model

# Pinned: the tables are measurements, and another version may hold other ones.
AICONFIGURATOR_VERSION = "0.12.0"
# The vLLM release whose kernels were timed.
_VLLM_VERSION = "0.24.0"
_VLLM_VERSION_A100 = "0.14.0"


class NoTablesError(ConfigError):
    """There are no measured tables of a model on a GPU."""


class AiconfiguratorTables:
    """aiconfigurator's measurements of one model on one kind of GPU; a read takes about 15 us."""

    def __init__(self, gpu: Gpu, model: Model, tp: int) -> None:
        """Read the tables: about a second for a process's first model.

        Raises:
            NoTablesError: aiconfigurator-core has none of this GPU, model, data type or `tp`.
            ConfigError: it is missing or another version.
        """
        self._engine = _compile(gpu, model, model.check_tp(tp))
        try:
            self._prefill_ops(1, 1, 0)
            self._decode_ops(1, 1)
        except Exception as error:
            raise _no_tables(gpu, model, tp, error) from error

    def linear_s(self, num_tokens: int) -> float:
        """Everything but attention and the output head, for that many tokens in a step."""
        ops = self._prefill_ops(1, num_tokens, 0)
        return sum(s for name, s in ops if not name.endswith(("_attention", "_logits_gemm")))

    def head_s(self, num_requests: int) -> float:
        """The output head for that many requests."""
        return sum(s for name, s in self._decode_ops(num_requests, 1) if name.endswith("_logits_gemm"))

    def prefill_attention_s(self, num_chunks: int, num_tokens: int, num_context_tokens: int) -> float:
        """Attention of equal prefill chunks: their tokens, each after that much context."""
        ops = self._prefill_ops(num_chunks, num_tokens, num_context_tokens)
        return sum(s for name, s in ops if name.endswith("_attention"))

    def decode_attention_s(self, num_decodes: int, num_context_tokens: int) -> float:
        """Attention of decodes at equal contexts."""
        return sum(
            s for name, s in self._decode_ops(num_decodes, num_context_tokens) if name.endswith("_attention")
        )

    def _prefill_ops(
        self, num_chunks: int, num_tokens: int, num_context_tokens: int
    ) -> list[tuple[str, float]]:
        # aiconfigurator counts the cached prefix into the input length.
        ops, _ = self._engine.run_static_per_op(
            batch_size=num_chunks,
            isl=num_context_tokens + num_tokens,
            osl=1,
            prefix=num_context_tokens,
            mode="static_ctx",
        )
        return [(name, milliseconds / 1000) for name, milliseconds, *_ in ops]

    def _decode_ops(self, num_decodes: int, num_context_tokens: int) -> list[tuple[str, float]]:
        # The first decode follows the first output token, so it attends to one token more than the input.
        _, ops = self._engine.run_static_per_op(
            batch_size=num_decodes, isl=max(1, num_context_tokens - 1), osl=2, mode="static_gen"
        )
        return [(name, milliseconds / 1000) for name, milliseconds, *_ in ops]


def installed_version() -> str | None:
    """The version of aiconfigurator-core in this environment; None where it is not installed."""
    try:
        return metadata.version("aiconfigurator-core")
    except metadata.PackageNotFoundError:
        return None


@cache
def load_table_step_cost(gpu: Gpu, model: Model, tp: int) -> TableStepCost:
    """The measured step cost of a model on a GPU, read once per process. Raises as `AiconfiguratorTables`."""
    return TableStepCost(AiconfiguratorTables(gpu, model, tp))


def _compile(gpu: Gpu, model: Model, tp: int) -> Any:
    if gpu.table_system is None:
        measured = ", ".join(other.name for other in GPUS.values() if other.table_system)
        raise NoTablesError(f"no measured tables for {gpu.name}; choose one of {measured}, or the roofline")
    if model.state is not None:
        raise NoTablesError(f"no measured tables for {model.name}, which has states; choose the roofline")
    if installed_version() != AICONFIGURATOR_VERSION:
        raise ConfigError(
            f"measured tables need aiconfigurator-core=={AICONFIGURATOR_VERSION}, not {installed_version()}; "
            "install it, or choose the roofline"
        )
    from aiconfigurator_core.sdk import EngineHandle

    # Its loader warns about every table that the model does not use.
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(model.config_path, Path(folder) / "config.json")
        try:
            return EngineHandle.compile(
                folder,
                gpu.table_system,
                "vllm",
                backend_version=_VLLM_VERSION_A100 if gpu.table_system == "a100_sxm" else _VLLM_VERSION,
                tp_size=tp,
                moe_tp_size=tp if model.num_experts > 1 else 1,
                gemm_quant_mode="fp8" if model.attention_dtype == "fp8" else None,
                kvcache_quant_mode="fp8" if model.kv_cache_dtype == "fp8" else None,
            )
        except Exception as error:
            raise _no_tables(gpu, model, tp, error) from error


def _no_tables(gpu: Gpu, model: Model, tp: int, error: Exception) -> NoTablesError:
    # Its errors have no common base: any error before the first step means that it has no such tables.
    return NoTablesError(
        f"no measured tables for {model.name} on {gpu.name}, tp {tp}; choose the roofline: {error}"
    )
