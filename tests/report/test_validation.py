"""The page and the docs from records of `tenuto validate`, which strangers send."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.tables import field_results
from tenuto.cli import main
from tenuto.records.codec import Fields
from tenuto.records.load import read_validation
from tenuto.records.schema import (
    ValidatedArm,
    ValidatedLoad,
    ValidatedMachine,
    ValidatedRatio,
    ValidatedServer,
    ValidationRecord,
)
from tenuto.records.text import format_validation
from tenuto.report.html.sources import read_sources
from tenuto.report.html.verdict import describe

HOSTILE = "</script><img src=x onerror=alert(1)>|`x` [a](http://b)\n# h"
RATIO = ValidatedRatio(
    arm="tenuto", baseline="stock", measure="mean_job_s", ratio=0.61, low=0.5, high=0.7, pairs=6,
    differs=True, words="39 % shorter", simulated=0.66,
)  # fmt: skip
RECORD = ValidationRecord(
    verdict="faster",
    day="2026-11-25",
    minutes=29.5,
    machine=ValidatedMachine(gpu="H100", driver="1.2", cpu="c", cores=2, load_before=0.2),
    server=ValidatedServer(
        version="0.32.0", model="m", block_size=16, kv_tokens=1000, max_model_len=500,
        max_num_batched_tokens=512, max_num_seqs=8, flags=("--max-num-seqs=8",),
    ),
    load=ValidatedLoad(workload="ab8", jps=2.0, window_s=30.0, scale_lengths=0.5, seed=42),
    arms=(
        ValidatedArm(name="stock", mean_job_s=(10.0, 12.0), simulated_job_s=(11.0, 12.1), reused_share=0.5),
        ValidatedArm(name="stock-well-set", step_tokens=512, mean_job_s=(9.0, 9.0)),
        ValidatedArm(name="tenuto", mean_job_s=(6.0, 8.0), simulated_job_s=(7.0, 7.7)),
    ),
    ratios=(RATIO, replace(RATIO, measure="plain_itl_s", ratio=1.01, words="1.0 % longer", simulated=None)),
    pairs_planned=6,
    verify="held",
    noise=0.04,
    fit_error={"prefill": 0.05},
)  # fmt: skip


def write(path: Path, record: ValidationRecord) -> Path:
    path.write_text(json.dumps(record.to_json()), encoding="utf-8")
    return path


def test_a_record_is_read_as_it_was_written() -> None:
    for record in (RECORD, replace(RECORD, load=None, arms=(), ratios=(), stopped="noise: much")):
        values = json.loads(json.dumps(record.to_json()))
        assert read_validation(Fields("f", values)) == record


def test_the_sentences() -> None:
    lines = format_validation(RECORD)
    assert lines[0] == (
        "Tenuto is faster on H100 with m: mean job time 0.61 of stock as it is (95 % interval 0.50 to 0.70), "
        "simulated 0.66."
    )
    text = "\n".join(lines)
    # 23.1 s over 22 s, and 14.7 s over 14 s; of stock at its best step size there is no prediction.
    assert "off by (below 0: too fast): stock as it is +5%, Tenuto +5%, over 6 pairs." in text
    assert "Cost of the hook, by the time between tokens of plain requests: 1.0 % longer." in text
    assert "held through its tool call" in text and "differed by 4%" in text


def test_no_verdict_says_why() -> None:
    few = replace(RATIO, pairs=2, differs=False)
    lines = format_validation(replace(RECORD, verdict="no verdict", ratios=(few,), stopped="time was up"))
    assert lines[0].startswith("No verdict on H100")
    assert lines[0].endswith("it takes 6 pairs of runs, and 2 ran.")
    assert "ended early: time was up" in lines[1]
    # Ratios of few pairs are not even named.
    assert not any("0.61" in line or "39 % shorter" in line for line in lines)
    wide = replace(RATIO, low=0.5, high=1.1, differs=False)
    lines = format_validation(replace(RECORD, verdict="no verdict", ratios=(wide,)))
    assert "0.61 of stock as it is" in lines[0] and "the interval holds 1" in lines[1]


def test_of_several_records_each_sentence_names_its_own_and_copies_count_once(tmp_path: Path) -> None:
    other = replace(RECORD, machine=replace(RECORD.machine, gpu="L40S"), day="2026-11-26")
    for number, record in enumerate((RECORD, other, RECORD)):
        write(tmp_path / f"{number}.json", record)
    sources = read_sources([tmp_path])
    assert sources.validations == [RECORD, other]
    assert sources.notes == ["Found more than once, counted once: 1 record."]
    lines = describe([], [], sources.validations).sentences
    assert "H100, m, 2026-11-25: Noise: identical requests to an idle server differed by 4%." in lines
    assert all("H100" in line or "L40S" in line for line in lines)
    assert describe([], [], [RECORD]).sentences == format_validation(RECORD)


@pytest.mark.slow
def test_a_page_is_drawn_from_the_record_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["report", str(write(tmp_path / "validation.json", RECORD)), "--out", str(page)]) == 0
    assert capsys.readouterr().out.startswith("Tenuto is faster on H100")
    text = page.read_text()
    for seen in (
        "Measured and simulated",
        "Mean job time on H100",
        "stock at its best step size,</text>",  # "measured" is on the next line
        "+5.0%",
    ):
        assert seen in text, seen


@pytest.mark.slow
def test_a_hostile_record_makes_no_markup(tmp_path: Path) -> None:
    hostile = replace(
        RECORD,
        machine=replace(RECORD.machine, gpu=HOSTILE),
        arms=(replace(RECORD.arms[0], name=HOSTILE),),
        ratios=(replace(RATIO, baseline=HOSTILE, words=HOSTILE),),
        stopped=HOSTILE,
    )
    page = tmp_path / "page.html"
    assert main(["report", str(write(tmp_path / "validation.json", hostile)), "--out", str(page)]) == 0
    assert "<img" not in page.read_text()
    text = field_results.format_page({"x": hostile})
    assert "<img" not in text and "\n# h" not in text and "](http" not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {11}


def test_the_docs_page_is_what_the_kept_records_say() -> None:
    """If it is not: `python -m experiments.tables.field_results --write`."""
    page = field_results.PAGE.read_text(encoding="utf-8")
    kept = page.partition("<!-- records -->")[2].partition("<!-- end of records -->")[0].strip()
    assert kept == field_results.format_page(field_results.read_records())
    assert field_results.read_records()


def test_the_docs_page_says_whether_a_record_is_from_a_gpu() -> None:
    assert "Records come from 1 kind of GPU." in field_results.format_page({"a": RECORD})
    cpu = replace(RECORD, machine=replace(RECORD.machine, gpu=None))
    assert "**No record comes from a GPU.**" in field_results.format_page({"a": cpu})
    simulated = replace(RECORD, server=replace(RECORD.server, engine="sim"))
    assert "**No record comes from a GPU.**" in field_results.format_page({"a": simulated})
