"""`tenuto report` from the command line: what it writes, what it says, what it refuses."""

from __future__ import annotations

import html
import itertools
import json
import os
import re
import shlex
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from PIL import Image

from tenuto.cli import main, parse
from tests.report.conftest import Look
from tests.report.data import make_job, make_record, write_lines, write_run, write_sweep

pytestmark = pytest.mark.slow

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"


def test_a_sweep_becomes_a_page_figures_and_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = write_sweep(tmp_path / "records")
    page, figures, trace = tmp_path / "page.html", tmp_path / "figures", tmp_path / "trace.json"
    options = ["--out", str(page), "--figures", str(figures), "--trace-events", str(trace)]
    assert main(["report", str(records), *options]) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        "Simulated: keep-more is the fastest in 2 of 6 comparisons, nobody in 4. keep-more"
    )
    names = {"map-1", "kv-1", "timeline-1"} | {
        f"{name}-{number}" for name in ("jct", "speed-up", "hits", "turns", "cdf") for number in (1, 2)
    }
    assert (
        {path.stem for path in figures.glob("*.png")}
        == {path.stem for path in figures.glob("*.svg")}
        == names
    )
    for path in figures.glob("*.png"):
        with Image.open(path) as image:
            assert image.width == 1920
            assert len(image.convert("RGB").getcolors(10**6) or []) > 10
    for path in figures.glob("*.svg"):
        assert ET.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert len(json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]) > 300
    assert not list(tmp_path.glob("*.part"))


def test_the_page_names_nothing_to_load(sweep_page: Path) -> None:
    text = sweep_page.read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")
    links = set(re.findall(r'(?:src|href)="([^"#]+)', text))
    assert links == {"data:,"}
    assert len(re.findall(r'\bid="([^"]+)"', text)) == len(set(re.findall(r'\bid="([^"]+)"', text)))


def test_the_same_records_make_the_same_page(tmp_path: Path, run_page: Path) -> None:
    again = tmp_path / "again.html"
    assert main(["report", str(run_page.parent / "run"), "--out", str(again)]) == 0
    assert again.read_bytes() == run_page.read_bytes()


def test_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    means = {"stock": 20, "keep": 10}
    records = [make_record(name, 1, seed, mean_s=s) for name, s in means.items() for seed in (1, 2)]
    path = write_lines(tmp_path / "r.jsonl", records)
    assert main(["report", str(path), "--out", str(tmp_path / "p.html"), "--json"]) == 0
    (cell,) = json.loads(capsys.readouterr().out)["cells"]
    assert (cell["gpu"], cell["jps"], cell["best"], cell["outcome"]) == ("H200", 1.0, ["keep"], "win")
    assert cell["mean_s"] == means
    assert cell["speed_up"]["keep"] == {"middle": 2, "low": 2, "high": 2}
    assert (cell["against"]["other"], cell["against"]["mean"]["ratio"]) == ("stock", 0.5)
    assert (cell["doubts"], cell["split"]) == ([], {})


def test_names_from_outside_are_only_text(tmp_path: Path, look: Look) -> None:
    names = (
        "stock", HOSTILE, "$x^2$ _{", "_hidden", "a" * 300, "日本", "b\x00\ud800\u202e", "{{ 7 * 7 }}"
    )  # fmt: skip
    hostile = {**dict.fromkeys(("model", "gpu", "workload"), HOSTILE), "versions": {HOSTILE: HOSTILE}}
    records = [make_record(name, 1.0, mean_s=11, **hostile) for name in names]
    write_lines(tmp_path / "results.jsonl", records)
    run = write_run(tmp_path / "run", 2)
    write_lines(run / "turns.jsonl", [{**turn, "job": HOSTILE, "tool": HOSTILE} for turn in make_job("j", 0)])
    page_path, figures = tmp_path / "page.html", tmp_path / "figures"
    assert main(["report", str(tmp_path), "--out", str(page_path), "--figures", str(figures)]) == 0
    page = look(page_path, width=400)
    page.locator("#timeline-job").select_option(index=1)
    assert page.title().startswith("Tenuto report: ")
    assert page.locator("img:not([role])").count() == 0
    assert HOSTILE in page.locator("#timeline-turns").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    for path in figures.glob("*.svg"):
        ET.parse(path)


def test_no_text_from_outside_reaches_the_page_unprintable(tmp_path: Path) -> None:
    text = "x\x1b[31m\0\u202e\ud800\ny"
    folder = tmp_path / os.fsdecode(b"r\xe9sultats\x1b[2J")
    record = make_record(text, config={"policy": text, "options": {text: text}, text: text})
    live = make_record(text, seed=2, jobs_planned=9, client={"url": text})
    terms = {"baseline": text, "threshold": 0.01, "arms": [text], "model": text, "serve_args": [text]}
    ab = make_record(text, seed=3, ab=terms)
    write_lines(folder / "results.jsonl", [record, live, ab])
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path), "--out", str(page)]) == 0
    assert len(commands := read_commands(page)) == 3
    assert all(map(str.isprintable, commands))
    assert not re.search("[\0\x1b\u202e]", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "record",
    [
        make_record("stock", None, None, gpu=None, simulated=False),
        make_record("keep", job_s={"mean": float("nan")}, job_times_s=None, by_turn=None),
        make_record("keep", 0, mean_s=0),
    ],
)
def test_a_set_of_one_record(tmp_path: Path, record: dict[str, object]) -> None:
    path = write_lines(tmp_path / "result.json", [record])
    page = tmp_path / "page.html"
    assert main(["report", str(path), "--out", str(page), "--figures", str(tmp_path / "f")]) == 0
    assert "How to reproduce it" in page.read_text(encoding="utf-8")


def test_turns_alone_make_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "turns.jsonl", make_job("j", 0))
    assert main(["report", str(path), "--out", str(tmp_path / "p.html")]) == 0
    assert "There are no result records here" in capsys.readouterr().out


def test_many_turns_stay_a_small_quick_page(tmp_path: Path, look: Look) -> None:
    run = write_run(tmp_path / "run", 1)
    write_lines(
        run / "turns.jsonl", [turn for job in range(12_500) for turn in make_job(f"j{job}", job / 4, 8)]
    )
    page_path = tmp_path / "page.html"
    assert main(["report", str(run), "--out", str(page_path)]) == 0
    assert page_path.stat().st_size < 3_000_000
    page = look(page_path)
    assert page.locator("#timeline-view .row").count() == 25
    assert page.locator("#timeline-view rect").count() < 1500
    page.get_by_role("button", name="Zoom out").click()
    assert page.locator("#timeline-view rect").count() < 1500
    assert "2,500 of 12,500 jobs" in page.locator("#timeline .note").inner_text()


def read_commands(page: Path) -> list[str]:
    found = re.findall("<pre>(.*?)</pre>", page.read_text(encoding="utf-8"))
    return [html.unescape(re.sub("<.*?>", "", each)) for each in found]


def test_a_run_beside_a_sweep_does_not_hide_it(tmp_path: Path) -> None:
    def make(policy: str, jps: float) -> dict[str, object]:
        config = {"gpu": "H200", "policy": policy, "jps": jps, "seed": 41, "async_scheduling": True}
        return make_record(policy, jps, 41, config=config)

    sweep = [make(policy, jps) for policy in ("stock", "tenuto") for jps in (1.0, 3.0)]
    hostile = make_record("p", 1.0, 41, config={"gpu": [1], "policy": {}, "jps": None, "seed": 41})
    paths = [
        write_lines(tmp_path / "results.jsonl", sweep),
        write_lines(tmp_path / "alone" / "result.json", [make("tenuto", 4.0)]),
        write_lines(tmp_path / "hostile" / "result.json", [hostile]),
    ]
    page = tmp_path / "p.html"
    assert main(["report", *map(str, paths), "--out", str(page)]) == 0
    commands = read_commands(page)
    assert len(commands) == 3
    assert commands[0] == "tenuto compare --gpu H200 --policies stock,tenuto --jps 1,3 --seed 41 --out sweep"
    assert "tenuto simulate --gpu H200 --policy tenuto --jps 4 --seed 41" in commands


def test_the_commands_to_reproduce_it_are_ours(tmp_path: Path) -> None:
    points = itertools.product(("H100", "H200"), ("stock", "tenuto"), (1.0, 2.5), (41, 42))
    grid = [
        make_record(policy, jps, seed, gpu=gpu, config={
            "gpu": gpu, "policy": policy, "jps": jps, "seed": seed, "kv_tokens": 9000,
            "async_scheduling": True,
        })
        for gpu, policy, jps, seed in points
    ]  # fmt: skip
    alone = make_record("tenuto", 1.0, 7, config={
        "gpu": "H200", "policy": "tenuto", "options": {"a": 1}, "max_num_batched_tokens": 64, "window_s": 9.0,
        "async_scheduling": False, "link_gb_s": 25.123456789,
    })  # fmt: skip
    client = {
        "url": "http://x,http://y", "router": "sticky", "run_id": "run-1", "prompts": "ids",
        "answers": "workload", "timeout_s": 3600.0, "retries": 2, "engine_urls": [], "invalid": [],
    }  # fmt: skip
    live = make_record("tenuto", 2.0, 7, simulated=False, client=client, config={"hints": "last"})
    page = tmp_path / "p.html"
    path = write_lines(tmp_path / "r.jsonl", [*grid, alone, live])
    assert main(["report", str(path), "--out", str(page)]) == 0
    commands = read_commands(page)
    assert commands == [
        "tenuto compare --gpu H100,H200 --policies stock,tenuto --jps 1,2.5 --seed 41,42 "
        "--kv-tokens 9000 --out sweep",
        "tenuto simulate --gpu H200 --policy tenuto --option a=1 --max-num-batched-tokens 64 --window 9 "
        "--no-async-scheduling --link-gb-s 25.123456789",
        "tenuto bench --url http://x --url http://y --workload ab8 --jps 2 --seed 7 --router sticky "
        "--answers workload --retries 2 --hints last",
    ]
    for command in commands:
        parse(shlex.split(command)[1:])


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--out", "{file}/p.html"], "--out: cannot write"),
        (["--out", "{file}"], "r.jsonl: it holds something else; name a new file"),
        (["--out", "{folder}/p.html", "--figures", "{file}"], "--figures: cannot write"),
        (["--out", "{folder}/p.html", "--trace-events", "{file}/t"], "--trace-events: cannot write"),
    ],
)
def test_what_cannot_be_written_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: list[str], said: str
) -> None:
    path = write_lines(tmp_path / "r.jsonl", [make_record("a")])
    arguments = [each.format(file=path, folder=tmp_path) for each in option]
    assert main(["report", str(path), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert path.read_text().startswith("{")


def test_without_the_library_it_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [each for each in sys.modules if each.startswith("tenuto.report.html")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(tmp_path)]) == 2
    assert "pip install 'tenuto[report]'" in capsys.readouterr().err


def test_what_the_simulator_writes_is_what_the_report_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    simulate = shlex.split("simulate --gpu H200 --policy stock --jps 1 --window 5 --step-cost roofline")
    assert main([*simulate, "--out", str(run)]) == 0
    capsys.readouterr()
    page = tmp_path / "page.html"
    assert main(["report", str(run), "--out", str(page)]) == 0
    assert capsys.readouterr().out.startswith("Simulated: stock ran alone: mean job time ")
    text = page.read_text(encoding="utf-8")
    assert all(f'id="{name}"' in text for name in ("jct-1", "turns-1", "cdf-1", "kv-1", "timeline"))
    assert read_commands(page)[0].startswith("tenuto simulate --gpu H200")
