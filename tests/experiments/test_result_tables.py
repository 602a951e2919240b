"""The tables of docs/lab.md: what runs, and how it is written down."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from experiments.results.__main__ import find_lost
from experiments.results.row import Row
from experiments.results.rows import DEFAULTS, OPTIONS, TABLES
from experiments.results.runs import get_key
from experiments.results.settings import Setting
from experiments.results.tables import format_means, format_ratios, get_marks, put_section
from tenuto.core.loader import PRESETS, get_policy_names, load_policy
from tenuto.policies.tenuto import Tenuto
from tenuto.sim.machine import build
from tenuto.sim.setup import Setup
from tenuto.workload.load import LoadOptions

ROWS = [Row(f"H100, {jps}/s", Setup(), LoadOptions(jps=jps)) for jps in (1, 2)]


def make_records(times: dict[str, tuple[float, float]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    return {
        (row.title, policy): [
            {"job_s": {"mean": each[n]}, "seed": 42, "row": row.title, "jps": 1, "finished_jps": 1}
        ]
        for policy, each in times.items()
        for n, row in enumerate(ROWS)
    }


def test_the_options_are_the_policys() -> None:
    own = {field.name: field.default for field in dataclasses.fields(Tenuto) if field.init}
    assert own == {**DEFAULTS, "plain_share": 0.5}
    for policy in OPTIONS:
        setup, _ = ROWS[0].place(policy, 1)
        load_policy(setup.policy, setup.options)


def test_a_place_names_layer_options_and_seed() -> None:
    setup, load = ROWS[0].place("continuum/async", 7)
    assert (setup.policy, setup.offload, setup.options, load.seed) == ("continuum", "async", {}, 7)
    assert ROWS[0].place("continuum", 7, 512)[0].step_tokens == 512
    setup, _ = ROWS[0].place("tenuto?stretch=125", 7)
    assert (setup.policy, setup.offload, setup.options) == ("tenuto", None, {"stretch": 125.0})


def test_a_place_says_its_host_memory_and_a_key_does_only_where_the_row_does() -> None:
    """The published machine's by default. Records of before a place said it keep their keys."""
    hosts_gb = [row.place("tenuto", 42)[0].host_gb for row in TABLES["small"].make_rows()]
    assert hosts_gb == [0.0, 0.0, 0.0, 0.0, 200.0, 200.0]
    none, given = (dataclasses.replace(ROWS[0], setup=Setup(host_gb=each)) for each in (0.0, 400.0))
    assert none.place("tenuto", 42)[0].host_gb == 0.0
    assert get_key(ROWS[0], Setting("tenuto"), 42) == "f835a3153b7c6f36"
    assert len({get_key(row, Setting("tenuto"), 42) for row in (ROWS[0], none, given)}) == 3


@pytest.mark.parametrize("name", ["mixed", "ab8", "swe-bench", "bfcl", "70b"])
def test_every_row_can_be_built(name: str) -> None:
    table = TABLES[name]
    rows = list(table.make_rows())
    assert len({row.title for row in rows}) == len(rows)
    for policy in table.policies:
        setup, _ = rows[-1].place(policy, 42)
        assert setup.policy in {*get_policy_names(), *PRESETS}
        build(dataclasses.replace(setup, step_cost="roofline"))


def test_the_best_is_bold_and_a_loss_is_red() -> None:
    policies = ["stock", "concur", "tenuto"]
    times = {"stock": (10.0, 20.0), "concur": (9.0, 10.0), "tenuto": (8.0, 11.0)}
    records = make_records(times)
    first, second = format_means(ROWS, policies, records).splitlines()[2:]
    assert first == "| H100, 1/s | 10.0¹ | 9.0¹ | **8.0**¹ |"
    assert second == "| H100, 2/s | 20.0¹ | **10.0**¹ | 🔴 11.0¹ |"
    best = format_ratios(ROWS, policies, records).splitlines()[2]
    # 8 / 9 and 11 / 10; their geometric mean is 0.989.
    assert best == "| the best other of each row | 0.99 | 0.89 | 1.10 | H100, 2/s |"


def test_a_policy_whose_hooks_failed_is_marked() -> None:
    policies = ["stock", "tenuto"]
    records = make_records({"stock": (10.0, 20.0), "tenuto": (8.0, 11.0)})
    assert "!" not in format_means(ROWS, policies, records)
    records["H100, 2/s", "tenuto"][0]["policy_faults"] = 3
    first, second, _, note = format_means(ROWS, policies, records).splitlines()[2:]
    assert first == "| H100, 1/s | 10.0¹ | **8.0**¹ |"
    assert second == "| H100, 2/s | 20.0¹ | **11.0**¹ ! |"
    assert note.startswith("! Hooks of the policy failed (3 times in all)")


@pytest.mark.parametrize(
    ("jps", "finished_jps", "slowdown", "title", "marks"),
    [
        (2.0, 1.7, 3.0, "H100", "ᵒ"),
        (2.0, 1.8, 3.0, "H100", ""),
        (2.0, 1.7, 1.2, "H100", ""),
        (2.0, None, 3.0, "H100", ""),
        (None, 0.096, 2.4, "50 turns, 0.15/s", "ᵒ"),
        (None, 0.14, 2.4, "50 turns, 0.15/s", ""),
        (None, 0.1, 2.4, "a trace", ""),
    ],
)
def test_what_a_reader_must_know_stands_at_the_number(
    jps: float | None, finished_jps: float | None, slowdown: float, title: str, marks: str
) -> None:
    record = {"row": title, "jps": jps, "finished_jps": finished_jps, "slowdown": {"mean": slowdown}}
    steady = {"row": title, "jps": 1.0, "finished_jps": 1.0, "slowdown": None}
    assert get_marks([record, steady]) == marks
    assert get_marks([record]) == f"{marks}¹"


def test_a_section_takes_its_own_place() -> None:
    page = put_section("# Results\n", "a", "first")
    page = put_section(page, "b", "other")
    again = put_section(page, "a", r"second \1")
    assert again == page.replace("first", r"second \1")


def test_writing_a_table_again_names_the_kept_runs_that_would_go(tmp_path: Path) -> None:
    kept = [{"row": "a row", "policy": "stock", "step": None, "seed": seed} for seed in (42, 1)]
    path = tmp_path / "table.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in kept), encoding="utf-8")
    assert find_lost(path, kept) == []
    assert find_lost(path, [*kept[:1], {**kept[1], "step": 512}]) == ["'a row', stock @None, seed 1"]
    assert find_lost(tmp_path / "new.jsonl", kept) == []
