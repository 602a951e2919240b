"""Experiments simulate machines with the KV cache of the published releases, as all kept records have it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from experiments import decision_code, same_decisions
from experiments.figures import points
from experiments.figures.figures import FIGURES
from experiments.published_memory import with_published_kv
from experiments.random_scenarios.draw import draw_scenario, get_cache_tokens
from experiments.results import runs
from experiments.results.rows import TABLES
from experiments.results.settings import Setting
from experiments.tables import mixed_steps, tier_pressure
from tenuto.sim.machine import build
from tenuto.sim.setup import Setup
from tenuto.workload.load import LoadOptions


@pytest.mark.parametrize(
    ("settings", "num_blocks"),
    [
        ({"gpu": "A100-80"}, 28_172),
        ({"gpu": "B200"}, 72_037),
        ({"gpu": "B200", "vllm": "0.33"}, 72_037),
        ({"gpu": "B200", "max_num_batched_tokens": 2048, "max_num_seqs": 16}, 74_389),
        ({"gpu": "H100", "model": "llama-3.1-70b", "tp": 4}, 27_475),
        ({"gpu": "H100", "model": "gpt-oss-120b"}, 5_786),
        # Blocks of 544 tokens.
        ({"gpu": "H200", "model": "qwen3-next-80b-a3b", "dtype": "fp8"}, 3_636),
    ],
)
def test_the_size_is_what_it_was(settings: dict[str, Any], num_blocks: int) -> None:
    setup = Setup(step_cost="roofline", **settings)
    assert build(with_published_kv(setup)).config.kv.num_blocks == num_blocks
    assert build(setup).config.kv.num_blocks != num_blocks


def test_a_size_that_is_given_or_was_reported_stays() -> None:
    for setup in (Setup(gpu="H100"), Setup(gpu="B200", kv_tokens=400_000)):
        assert with_published_kv(setup) is setup


def test_a_drawn_machine_has_it_too() -> None:
    """A scenario depends on its seed and number alone, whatever the releases of today leave."""
    assert get_cache_tokens(Setup(gpu="B200", vllm="0.33")) == 72_037 * 16
    assert get_cache_tokens(Setup(gpu="L40S", model="llama-3.1-70b")) is None
    assert draw_scenario(2027, 0).setup.kv_tokens == 411_892


ROW = "B200, 2/s, no host tier"


class Stopped(Exception):
    """Instead of a simulation."""


def draw_cell() -> None:
    _, cell = next(iter(FIGURES["15"].make_cells(quick=True)))
    assert cell.setup.kv_tokens is None, "the key would change"
    points.run_cell(cell)


@pytest.mark.parametrize(
    ("module", "call", "num_blocks"),
    [
        (runs, lambda: runs.run_place(runs.Place("swe-bench", ROW, Setting("stock"), 42)), 72_037),
        (same_decisions, lambda: same_decisions.digest_cell(("swe-bench", ROW, "stock")), 72_037),
        (points, draw_cell, 72_093),
        (mixed_steps, lambda: list(mixed_steps.simulate("B200", "stock", LoadOptions(), None)), 72_037),
        (
            tier_pressure,
            lambda: tier_pressure.simulate(
                "stock", argparse.Namespace(gpu="B200", workload="ab8", jps=1, window=4), 42, 0.0
            ),
            72_037,
        ),
    ],
    ids=lambda each: each.__name__ if isinstance(each, ModuleType) else "",
)
def test_what_runs_a_machine_gives_it_that_size(
    module: ModuleType, call: Callable[[], object], num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Setup] = []

    def run(setup: Setup, *args: object, **more: object) -> None:
        seen.append(setup)
        raise Stopped

    monkeypatch.setattr(module, "run", run)
    with pytest.raises(Stopped):
        call()
    assert seen[0].kv_tokens == num_blocks * 16


def test_keys_do_not_name_it() -> None:
    """Records that are older than this size as one of its own still count."""
    path = decision_code.ROOT / "experiments" / "records" / "hybrid.jsonl"
    kept = runs.list_records(runs.read_runs(path, list(TABLES["hybrid"].make_rows())))
    assert len(kept) == len(path.read_text(encoding="utf-8").splitlines()) > 0
