"""The metrics that a server with Tenuto exports, with their labels, taken from the code that does it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tenuto.core.requests import Hints
from tenuto.core.types import TierView
from tests.support.small_policies import KeepFor
from tests.support.toy_engine import ToyEngine, make_tokens

ADDED_BY_PROMETHEUS = frozenset({"instance", "job"})
SUFFIXES = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}

OFFLOADING = "distributed/kv_transfer/kv_connector/v1/offloading/metrics.py"

Exported = dict[str, frozenset[str] | None]
"""By sample name its labels; None where they are not known."""


def get_tenuto_metrics() -> Exported:
    """From the registry of the plugin's exporter."""
    from tenuto.vllm.metrics import Metrics

    engine = ToyEngine(KeepFor(), 100)
    engine.arrive("t", 0.0, make_tokens(0, 18), [1], Hints(job_id="j", tool="ls"))
    engine.start_first(0.0)
    engine.finish("t", 0.0)
    config = SimpleNamespace(
        model_config=SimpleNamespace(served_model_name="tiny"), additional_config={"tenuto": {}}
    )
    metrics = Metrics(config, 0)
    metrics.watch_tier(make_tier())
    metrics.refresh(engine.driver, 0.0)
    found: Exported = {}
    for family in metrics._registry.collect():
        for sample in family.samples:
            found[sample.name] = frozenset(sample.labels)
    metrics.close()
    return found


def make_tier() -> Any:
    """A host tier that did nothing yet."""
    link = SimpleNamespace(bytes_per_s=1e9)
    nothing = SimpleNamespace(num_too_many=0, num_held_blocks=0)
    fetched = SimpleNamespace(num_used=0, num_wasted=0, num_skipped=0, num_blocks=0)
    return SimpleNamespace(
        get_views=lambda: [TierView("host", 100, 0, 1e-3, 0.0)], loads=link, stores=link, later=nothing,
        host=SimpleNamespace(num_refused=0, num_evicted=0, num_dropped=0),
        num_declined_loads=0, num_events=0, prefetch=fetched,
    )  # fmt: skip


def get_vllm_metrics() -> Exported:
    """From the source of the installed vLLM, which need not be imported for it; skips where there is none."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    source = Path(spec.submodule_search_locations[0], "v1", "metrics", "loggers.py")
    if not source.exists():
        pytest.skip("this vLLM keeps its metrics elsewhere")
    pattern = re.compile(r'_(gauge|counter|histogram)_cls\(\s*name="(vllm:\w+)"')
    found: Exported = {}
    for kind, name in pattern.findall(source.read_text(encoding="utf-8")):
        for suffix in SUFFIXES[kind]:
            found[name.removesuffix("_total") + suffix if kind == "counter" else name + suffix] = None
    assert len(found) > 30, "vLLM's metrics are written in another way now"
    offloading = Path(spec.submodule_search_locations[0], OFFLOADING)
    if offloading.exists():
        for name in re.findall(r'"(vllm:kv_offload_\w+)"', offloading.read_text(encoding="utf-8")):
            found[f"{name}_total"] = None
    return found
