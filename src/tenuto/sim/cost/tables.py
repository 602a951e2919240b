"""Step times from measured operator tables: times of vLLM's kernels on real GPUs.

A step is the sum of four parts. Each is read from the tables once per size and then cached:

    everything but attention and the output head, by the step's tokens        exact
    the output head, by the step's requests                                    exact
    prefill attention, by chunks, mean length and (query, key) pairs           linear between lengths
    decode attention, by decodes and mean context                              linear between contexts

The tables are those of the `aiconfigurator-core` package.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

from tenuto.core.errors import ConfigError
from tenuto.sim.cost.batch import PartedCost, StepBatch, StepParts
from tenuto.sim.hardware.gpus import GPUS, Gpu
from tenuto.sim.hardware.models import Model

# Four lengths per doubling, up to 256K tokens. Beyond that, the last slope continues.
LENGTHS = tuple(sorted({round(2 ** (quarter / 4)) for quarter in range(4 * 18 + 1)}))


class TableStepCost(PartedCost):
    """Step times interpolated from operator tables: GPU work alone, `HostedStepCost` adds the host."""

    def __init__(self, tables: AiconfiguratorTables) -> None:
        self._tables = tables
        self._linear_s = cache(tables.linear_s)
        self._head_s = cache(tables.head_s)
        self._prefill_curve = cache(self._read_prefill)
        self._decode_curve = cache(
            lambda num_decodes: _Curve(partial(tables.decode_attention_s, num_decodes))
        )
        self._prefill_fixed_s = _prefill_fixed_s(tables)

    def get_parts(self, batch: StepBatch) -> StepParts:
        """See `PartedCost`."""
        num_tokens = batch.num_prefill_tokens + batch.num_decodes
        if num_tokens == 0:
            return StepParts(0.0, 0.0, 0.0)
        others_s = self._get_others_s(num_tokens, batch.num_prefills + batch.num_decodes)
        prefill_s = decode_s = 0.0
        if batch.num_prefills:
            num_cached = batch.num_prefill_tokens + batch.num_prefill_context_tokens
            s_per_pair = self._prefill_curve(batch.num_prefills).at(num_cached / batch.num_prefills)
            prefill_s = self._prefill_fixed_s + s_per_pair * batch.num_prefill_pairs
        if batch.num_decodes:
            decode_s = self._decode_curve(batch.num_decodes).at(
                batch.num_decode_context_tokens / batch.num_decodes
            )
        return StepParts(others_s, prefill_s, decode_s)

    def price_stretch(self, num_decodes: int, num_context_tokens: int, num_steps: int) -> list[float]:
        """See `StepCost`."""
        others_s = self._get_others_s(num_decodes, num_decodes)
        attention_s = self._decode_curve(num_decodes).at_each(num_decodes, num_context_tokens, num_steps)
        return [others_s + each_s for each_s in attention_s]

    def _get_others_s(self, num_tokens: int, num_requests: int) -> float:
        return self._linear_s(num_tokens) + self._head_s(num_requests)

    def _read_prefill(self, num_chunks: int) -> _Curve:
        def s_per_pair(length: int) -> float:
            whole_s = self._tables.prefill_attention_s(num_chunks, length, 0)
            return (whole_s - self._prefill_fixed_s) / (num_chunks * length * length / 2)

        return _Curve(s_per_pair)


def _prefill_fixed_s(tables: AiconfiguratorTables) -> float:
    """Seconds of prefill attention that do not depend on its pairs: rotary embedding and cache write.

    The tables scale the kernel's time by the share of a sequence's pairs that a chunk visits. So two chunks
    that end at the same length give two equations: whole = fixed + kernel, last = fixed + share * kernel.
    """
    length = 64
    whole_s = tables.prefill_attention_s(1, length, 0)
    last_s = tables.prefill_attention_s(1, 1, length - 1)
    share = 1 - ((length - 1) / length) ** 2
    return (last_s - share * whole_s) / (1 - share)


class _Curve:
    """A function of a length, linear between `LENGTHS`. Its values there are read on first use."""

    def __init__(self, read: Callable[[int], float]) -> None:
        self._value = cache(lambda i: read(LENGTHS[i]))

    def at_each(self, num: int, total: int, num_steps: int) -> list[float]:
        """Values at the mean of `num` lengths with sum `total`; each step adds 1 to each length."""
        values: list[float] = []
        stop = total + num_steps * num
        while total < stop:
            if total < num:
                values.append(self.at(total / num))
                total += num
                continue
            i = min(bisect_right(LENGTHS, total / num) - 1, len(LENGTHS) - 2)
            left, start, end = self._value(i), LENGTHS[i], LENGTHS[i + 1]
            rise, width = self._value(i + 1) - left, end - start
            # Up to the beginning of the curve's next part.
            last = stop if i == len(LENGTHS) - 2 else min(stop, end * num)
            part = range(total, last, num)
            values += [left + rise * (each / num - start) / width for each in part]
            total = part[-1] + num
        return values

    def at(self, length: float) -> float:
        if length < LENGTHS[0]:
            length = LENGTHS[0]
        # Beyond the last length, in the last part.
        i = bisect_right(LENGTHS, length, 0, len(LENGTHS) - 1) - 1
        left, start = self._value(i), LENGTHS[i]
        return left + (self._value(i + 1) - left) * (length - start) / (LENGTHS[i + 1] - start)


# Pinned, because another version may have other measurements.
AICONFIGURATOR_VERSION = "0.12.0"
# The vLLM release whose kernels were timed.
_VLLM_VERSION = "0.24.0"
_VLLM_VERSION_A100 = "0.14.0"


class NoTablesError(ConfigError):
    """There are no measured tables of a model on a GPU."""


class AiconfiguratorTables:
    """aiconfigurator's measurements of one model on one kind of GPU. A read takes about 15 us."""

    def __init__(self, gpu: Gpu, model: Model, tp: int) -> None:
        """Read the tables: about a second for the first time, and half of it from then on.

        Raises NoTablesError if aiconfigurator-core has no tables for this GPU, model, data type or `tp`, and
        ConfigError if it is missing or has another version.
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
    """The version of aiconfigurator-core in this environment; None if it is not installed."""
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
    config = model.config_path.read_bytes()
    options = {
        "system": gpu.table_system,
        "backend": "vllm",
        "backend_version": _VLLM_VERSION_A100 if gpu.table_system == "a100_sxm" else _VLLM_VERSION,
        "tp_size": tp,
        "moe_tp_size": tp if model.num_experts > 1 else 1,
        "gemm_quant_mode": "fp8" if model.attention_dtype == "fp8" else None,
        "kvcache_quant_mode": "fp8" if model.kv_cache_dtype == "fp8" else None,
    }
    path = _get_spec_path(config, options)
    with suppress(Exception):  # none is kept yet, or it is damaged
        return EngineHandle(path.read_bytes())
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(config)
        try:
            engine = EngineHandle.compile(folder, **options)
        except Exception as error:
            raise _no_tables(gpu, model, tp, error) from error
    with suppress(OSError):  # it only saves time
        path.parent.mkdir(parents=True, exist_ok=True)
        # Other processes may write or read the same file now.
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(engine.spec_bytes)
        Path(file.name).replace(path)
    return engine


def _get_spec_path(config: bytes, options: dict[str, Any]) -> Path:
    """Where the result of compiling a model is kept: compiling takes longer than loading what it made."""
    key = hashlib.sha256(config + json.dumps(options).encode()).hexdigest()
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(folder) / "tenuto" / f"aiconfigurator-{AICONFIGURATOR_VERSION}-{key[:32]}"


def _no_tables(gpu: Gpu, model: Model, tp: int, error: Exception) -> NoTablesError:
    # Its errors have no common base class. Any error before the first step means that it has no such tables.
    return NoTablesError(
        f"no measured tables for {model.name} on {gpu.name}, tp {tp}; choose the roofline: {error}"
    )
