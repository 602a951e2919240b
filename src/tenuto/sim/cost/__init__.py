"""How long an engine step takes: measured operator tables, a roofline, or a fit to observed steps.

step_cost = load_step_cost(default_backend(gpu), gpu, model)
step_cost.seconds(StepBatch.of(prefills=[(2048, 0)], decodes=[8192] * 64))
"""

from __future__ import annotations

from tenuto.core.errors import ConfigError
from tenuto.sim.cost.batch import HostedStepCost, HostOverhead, MixedStepCost, Variant
from tenuto.sim.cost.roofline import RooflineStepCost
from tenuto.sim.cost.tables import AICONFIGURATOR_VERSION, installed_version, load_table_step_cost
from tenuto.sim.hardware.gpus import Gpu
from tenuto.sim.hardware.models import Model

BACKENDS = ("tables", "roofline")


def default_backend(gpu: Gpu) -> str:
    """Measured "tables" if this GPU has them and aiconfigurator-core is installed, else "roofline"."""
    measured = gpu.table_system is not None and installed_version() == AICONFIGURATOR_VERSION
    return "tables" if measured else "roofline"


def load_step_cost(
    backend: str,
    gpu: Gpu,
    model: Model,
    tp: int = 1,
    host: HostOverhead | None = None,
    *,
    variant: Variant | None = None,
) -> HostedStepCost:
    """The step cost of a model on `tp` GPUs of a kind, host time included.

    `variant`: other assumptions on steps that mix prefill with decoding; None for the sum of their operators.
    Raises NoTablesError without tables of this GPU, model and `tp`, ConfigError if the backend is unknown or
    has no step times for these.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"unknown step cost {backend!r}; choose one of {', '.join(BACKENDS)}")
    if model.base_dtype == "float32":
        raise ConfigError(
            f"{model.name} is float32; tensor-core rates are for bfloat16, float16 and fp8: "
            "give --dtype bfloat16"
        )
    pure = load_table_step_cost(gpu, model, tp) if backend == "tables" else RooflineStepCost(gpu, model, tp)
    gpu_cost = pure if variant is None else MixedStepCost(pure, variant, model.num_layers)
    return HostedStepCost(gpu_cost, host or HostOverhead())
