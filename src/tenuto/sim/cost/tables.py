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
    """aiconfigurator's measurements of one model on one kind of GPU.

    To open them takes about a second for the first time on a machine, and half of it from then on. So what
    was read is kept for later processes, which open them only for what is missing.
    """

    def __init__(self, gpu: Gpu, model: Model, tp: int) -> None:
        """Raises NoTablesError if aiconfigurator-core has no tables for this GPU, model, data type or `tp`.

        Raises ConfigError if it is missing or has another version.
        """
        config, options = model.config_path.read_bytes(), _get_options(gpu, model, model.check_tp(tp))
        path = _get_cache_path(config, options)
        self._get_engine = cache(lambda: _compile(path, config, options))
        # A row with another meaning needs another name.
        self._path = path.with_name(f"{path.name}.jsonl")
        self._times = _read_times(self._path)
        """By phase, batch size, new and cached tokens: two times in seconds. The second is attention. The
        first is all but attention and the output head; of a decoding step, the output head."""
        try:
            self._read("prefill", 1, 1, 0)
            self._read("decode", 1, 1)
        except Exception as error:
            # Its errors have no common base class. Any error before the first step means that there are none.
            raise NoTablesError(
                f"no measured tables for {model.name} on {gpu.name}, tp {tp}; choose the roofline: {error}"
            ) from error

    def linear_s(self, num_tokens: int) -> float:
        """Everything but attention and the output head, for that many tokens in a step."""
        return self._read("prefill", 1, num_tokens, 0)[0]

    def head_s(self, num_requests: int) -> float:
        """The output head for that many requests."""
        return self._read("decode", num_requests, 1)[0]

    def prefill_attention_s(self, num_chunks: int, num_tokens: int, num_context_tokens: int) -> float:
        """Attention of equal prefill chunks: their tokens, each after that much context."""
        return self._read("prefill", num_chunks, num_tokens, num_context_tokens)[1]

    def decode_attention_s(self, num_decodes: int, num_context_tokens: int) -> float:
        """Attention of decodes at equal contexts."""
        return self._read("decode", num_decodes, num_context_tokens)[1]

    def _read(self, phase: str, batch_size: int, num_tokens: int, num_cached: int = 0) -> tuple[float, float]:
        row = phase, batch_size, num_tokens, num_cached
        known = self._times.get(row)
        if known is None:
            known = self._times[row] = self._measure(*row)
            with suppress(OSError), self._path.open("a", encoding="utf-8") as file:  # it only saves time
                file.write(json.dumps([*row, *known]) + "\n")
        return known

    def _measure(self, phase: str, batch_size: int, num_tokens: int, num_cached: int) -> tuple[float, float]:
        read = partial(self._get_engine().run_static_per_op, batch_size=batch_size)
        if phase == "prefill":
            # aiconfigurator counts the cached prefix into the input length.
            ops, _ = read(isl=num_cached + num_tokens, osl=1, prefix=num_cached, mode="static_ctx")
            others = [each for each in ops if not each[0].endswith(("_attention", "_logits_gemm"))]
        else:
            # The first decode follows the first output token, so it attends to one token more than the input.
            _, ops = read(isl=max(1, num_tokens - 1), osl=2, mode="static_gen")
            others = [each for each in ops if each[0].endswith("_logits_gemm")]
        attention = [each for each in ops if each[0].endswith("_attention")]
        others_s, attention_s = (sum(ms / 1000 for _, ms, *_ in some) for some in (others, attention))
        return others_s, attention_s


_Times = dict[tuple[str, int, int, int], tuple[float, float]]


def _read_times(path: Path) -> _Times:
    """What earlier processes read. A damaged file is removed."""
    try:
        rows = json.loads(f"[{','.join(path.read_text(encoding='utf-8').splitlines())}]")
        return {
            (phase, batch_size, num_tokens, num_cached): (float(others_s), float(attention_s))
            for phase, batch_size, num_tokens, num_cached, others_s, attention_s in rows
        }
    except OSError:
        return {}
    except (ValueError, TypeError):
        with suppress(OSError):
            path.unlink()
        return {}


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


def _get_options(gpu: Gpu, model: Model, tp: int) -> dict[str, Any]:
    """What aiconfigurator compiles a model for."""
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
    return {
        "system": gpu.table_system,
        "backend": "vllm",
        "backend_version": _VLLM_VERSION_A100 if gpu.table_system == "a100_sxm" else _VLLM_VERSION,
        "tp_size": tp,
        "moe_tp_size": tp if model.num_experts > 1 else 1,
        "gemm_quant_mode": "fp8" if model.attention_dtype == "fp8" else None,
        "kvcache_quant_mode": "fp8" if model.kv_cache_dtype == "fp8" else None,
    }


def _compile(path: Path, config: bytes, options: dict[str, Any]) -> Any:
    """Compile a model, or load what was compiled. `path`: where it is kept."""
    from aiconfigurator_core.sdk import EngineHandle

    # Its loader warns about every table that the model does not use.
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    with suppress(Exception):  # none is kept yet, or it is damaged
        return EngineHandle(path.read_bytes())
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(config)
        engine = EngineHandle.compile(folder, **options)
    with suppress(OSError):  # it only saves time
        path.parent.mkdir(parents=True, exist_ok=True)
        # Other processes may write or read the same file now.
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(engine.spec_bytes)
        Path(file.name).replace(path)
    return engine


def _get_cache_path(config: bytes, options: dict[str, Any]) -> Path:
    """Where what is known of a model is kept: compiling takes longer than loading what it made."""
    key = hashlib.sha256(config + json.dumps(options).encode()).hexdigest()
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(folder) / "tenuto" / f"aiconfigurator-{AICONFIGURATOR_VERSION}-{key[:32]}"
