"""vLLM reads what the docs and the exports give it: its argument parser, and its benchmark's trace reader."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tenuto.cli import main
from tenuto.vllm import launch
from tests.docs.examples import PAGES, ROOT, Block, find_blocks
from tests.docs.test_deploy import COMPOSE, VALUES
from tests.workload.test_exports import export, make_jobs

BLOCKS = [block for page in PAGES for block in find_blocks(page)]
LINES = [(block, line) for block in BLOCKS if block.is_commands for line in block.get_lines()]
SERVED = [(block, line) for block, line in LINES if re.search(r"\b(tenuto serve MODEL|vllm serve)\b", line)]


@pytest.fixture(scope="module")
def parser() -> Any:
    """The parser of `vllm serve`."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    made = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(made.add_subparsers())
    return made


@pytest.mark.parametrize(("block", "line"), SERVED, ids=[f"{b.page}:{b.line}" for b, _ in SERVED])
def test_vllm_takes_the_lines_that_start_servers(
    block: Block,
    line: str,
    parser: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [word for word in shlex.split(line) if not re.match(r"[A-Z_]+=", word)]
    monkeypatch.chdir(tmp_path)
    [quick, *_] = [b.text for b in find_blocks(ROOT / "docs/start/researcher.md") if b.language == "python"]
    Path("quick.py").write_text(quick, encoding="utf-8")
    if words[0] == "tenuto":
        assert main([*words[1:], "--dry-run"]) == 0
        words = shlex.split(capsys.readouterr().out)
    check_line(parser, words)


def test_vllm_knows_the_flags_of_engine_settings() -> None:
    from vllm.config.scheduler import SchedulerConfig

    assert set(launch.WANTED) <= set(SchedulerConfig.__dataclass_fields__)


def check_line(parser: Any, words: list[str]) -> None:
    """Check that vLLM takes this command line, and runs Tenuto."""
    given = parser.parse_args(words[1:])
    assert given.model_tag in ("MODEL", "Qwen/Qwen3-8B")
    assert given.scheduler_cls == "tenuto.vllm.Scheduler"
    assert ("tenuto" in given.additional_config) == ("--additional-config" in words)


def test_vllm_takes_the_lines_of_the_deployments(parser: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the container, with what `tenuto serve` adds, and those that the chart gives to vLLM."""
    model, *options = COMPOSE["vllm"]["command"]
    assert main(["serve", model.partition(":-")[2].rstrip("}"), *options, "--dry-run"]) == 0
    check_line(parser, shlex.split(capsys.readouterr().out))
    [chart] = VALUES["servingEngineSpec"]["modelSpec"]
    check_line(
        parser,
        ["vllm", "serve", chart["modelURL"], "--enable-prefix-caching", *chart["vllmConfig"]["extraArgs"]],
    )


class Words:
    """A tokenizer of 100 words, as far as vLLM's trace reader asks for one."""

    all_special_ids = ()

    def get_vocab(self) -> dict[str, int]:
        return {f"w{number}": number for number in range(100)}


def test_vllm_bench_serve_reads_a_mooncake_export(tmp_path: Path) -> None:
    datasets = pytest.importorskip("vllm.benchmarks.datasets.datasets")
    if not hasattr(datasets, "TimedTrace"):
        pytest.skip("this release of vLLM has no timed traces")
    path, _ = export("mooncake", tmp_path, make_jobs())
    trace = datasets.TimedTrace(
        dataset_path=str(path),
        random_seed=0,
        timed_trace_chunk_hash_size=512,
        timed_trace_sec_multiplier=0.001,
        timed_trace_label_timestamp="timestamp",
        timed_trace_label_input_length="input_length",
        timed_trace_label_output_length="output_length",
        timed_trace_label_hash_ids="hash_ids",
    )
    samples = trace.sample(tokenizer=Words(), num_requests=100)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [sample.prompt_len for sample in samples] == [row["input_length"] for row in rows]
    assert [sample.expected_output_len for sample in samples] == [row["output_length"] for row in rows]
    assert [sample.timestamp for sample in samples] == pytest.approx([r["timestamp"] / 1000 for r in rows])
