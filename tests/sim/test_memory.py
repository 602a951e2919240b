"""The memory calculator: figures by hand, and what the simulated cache really holds."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tenuto.cli import main
from tenuto.core.errors import ConfigError
from tenuto.sim.cost.fitted import FittedStepCost, Line
from tenuto.sim.hardware.gpus import GIB
from tenuto.sim.memory import format_memory, measure_memory
from tenuto.sim.run import Extras, run
from tenuto.sim.setup import Setup
from tenuto.workload import Job, LoadOptions, Span, TurnSpec, Workload


def test_a_context_by_hand() -> None:
    memory = measure_memory(
        Setup(gpu="H100", kv_tokens=160_000, host_gb=100.0, step_cost="roofline"), (30_000,)
    )
    [context] = memory.contexts
    # 32 layers x 8 heads x 128 x 2 (key and value) x 2 bytes are 128 KiB a token, 2 MiB a block of 16.
    assert memory.groups[0].bytes_per_token == 128 * 1024
    assert (memory.num_blocks, memory.kv_bytes) == (10_000, 10_000 * 2 * 1024**2)
    assert (context.blocks_running, context.blocks_leased) == (1875, 1874)
    assert context.leased_bytes == 1874 * 2 * 1024**2
    assert (context.jobs_leased, context.jobs_running) == (5, 5)  # 9,999 blocks beside the null block
    assert context.leased_share == pytest.approx(1874 / 9999)
    assert context.load_s == pytest.approx(context.leased_bytes / 52.8e9)
    assert context.jobs_in_host == int(100 * GIB) // context.leased_bytes
    assert memory.source == "as given"
    plain = measure_memory(Setup(gpu="H100", step_cost="roofline"), (30_000,))
    assert (plain.host_bytes, plain.contexts[0].jobs_in_host) == (0, None)
    assert memory.budget is None


def test_loads_take_the_link_that_was_measured_with_the_steps(tmp_path: Path) -> None:
    steps, path = Line((0.01, 1e-4, 1e-9), 3, 1.0, 0.0), tmp_path / "fit.json"
    FittedStepCost(steps, steps, link=Line((0.001, 1e-9), 2, 1.0, 0.0)).save(path)
    [context] = measure_memory(Setup(gpu="H100", step_cost=str(path)), (8_000,)).contexts
    assert context.load_s == pytest.approx(0.001 + 1e-9 * context.leased_bytes)


def test_the_size_that_a_server_reported_is_said_to_be_one() -> None:
    memory = measure_memory(Setup(gpu="H100", step_cost="roofline"), (1000,))
    assert memory.kv_tokens == 434_000
    assert "reported it" in memory.source
    # One size in the text: parts that add up to another one are not its parts.
    text = format_memory(memory)
    assert "= KV cache" not in text
    assert "52.98 GiB of each GPU" in text
    assert "(--gpu-memory-utilization 0.92 would compute 54.96 GiB instead)" in text
    assert "CUDA graphs" not in text
    memory = measure_memory(Setup(gpu="H100", gpu_memory_utilization=0.8, step_cost="roofline"), (1000,))
    assert "computed" in memory.source
    assert memory.budget is not None
    assert memory.num_blocks == memory.budget.num_blocks(16)
    assert f"{'= KV cache':<18}{memory.kv_bytes / GIB:8.2f} GiB" in format_memory(memory)


@pytest.mark.parametrize(
    ("model", "where"),
    [
        ("qwen3-8b", 'the line "GPU KV cache size" of its log'),
        # There the log has the tokens of the longest requests that fit, which are fewer.
        ("gemma-3-12b", "num_gpu_blocks x block_size on its page /metrics"),
    ],
)
def test_a_computed_size_says_what_is_estimated_and_where_a_servers_own_is(model: str, where: str) -> None:
    setup = Setup(gpu="H100", model=model, step_cost="roofline")
    text = format_memory(measure_memory(setup, (1000,)))
    assert "CUDA graphs are an estimate" in text
    assert f"\n{where}: give it with --kv-tokens\n" in text
    given = measure_memory(replace(setup, kv_tokens=100_000), (1000,))
    assert "CUDA graphs" not in format_memory(given)


def test_fp8_caches_hold_twice_as_much_and_gpus_share_heads() -> None:
    setup = Setup(gpu="B200", model="llama-3.1-70b", tp=4, step_cost="roofline")
    plain = measure_memory(setup, (30_000,))
    half = measure_memory(replace(setup, kv_cache_dtype="fp8"), (30_000,))
    assert half.groups[0].bytes_per_token * 2 == plain.groups[0].bytes_per_token == 80 * 2 * 2 * 128 * 2
    assert half.contexts[0].jobs_leased == pytest.approx(2 * plain.contexts[0].jobs_leased, abs=2)


def test_few_seats_bound_what_runs() -> None:
    [context] = measure_memory(Setup(gpu="H100", max_num_seqs=3, step_cost="roofline"), (1000,)).contexts
    assert context.jobs_running == 3


@pytest.mark.parametrize(
    ("model", "num_output_tokens"), [("llama-3.1-8b", 20), ("gemma-3-12b", 1), ("gpt-oss-20b", 1)]
)
@pytest.mark.parametrize("num_tokens", [700, 5_000])
def test_a_lease_holds_what_the_calculator_says(model: str, num_output_tokens: int, num_tokens: int) -> None:
    """One job whose first turn has this context, then a tool call, in the simulator.

    Where windows slide, vLLM caches them at the end of the prompt by default, so the answer is not held.
    """
    setup = Setup(
        gpu="H100", model=model, policy="continuum-fixed", host_gb=0.0, offload="none", step_cost="roofline"
    )
    first = TurnSpec(
        (Span("a", num_tokens - num_output_tokens),), Span("out", num_output_tokens), tool="ls", tool_s=1.0
    )
    last = TurnSpec(first.followed_by(Span("b", 50)), Span("end", 5))
    leased = []
    run(
        setup,
        LoadOptions(jps=1.0),
        extras=Extras(workload=Workload("one", (Job("j", 0.0, (first, last)),))),
        watch=lambda now_s, scheduler: leased.append(scheduler.kv.pool.num_leased_blocks),
    )
    [context] = measure_memory(setup, (num_tokens,)).contexts
    assert max(leased) == context.blocks_leased


def test_hybrid_models_say_their_groups() -> None:
    memory = measure_memory(Setup(gpu="H100", model="gemma-3-12b", step_cost="roofline"), (30_000,))
    assert [group.window for group in memory.groups] == [None, *[1024] * 5]
    [context] = memory.contexts
    assert context.blocks_leased == 29_999 // 16 + 5 * 64
    assert (context.load_s, context.jobs_in_host) == (None, None)
    text = format_memory(memory)
    assert "5 groups of 8 layers, a window of 1,024 tokens: 64 KiB a token" in text
    assert "Layers differ" in text


def test_lengths_with_which_vllm_does_not_start_are_said() -> None:
    small = Setup(gpu="RTX5090", step_cost="roofline")
    [note] = [note for note in measure_memory(small).notes if "does not start" in note]
    assert note.endswith("the KV cache holds 86,416; add --max-model-len 86416 or less")
    assert not any("vLLM" in note for note in measure_memory(replace(small, max_model_len=86_416)).notes)
    scaled = Setup(gpu="H200", step_cost="roofline", max_model_len=200_000)
    assert any("llama-3.1-8b has 131,072" in note for note in measure_memory(scaled).notes)


def test_a_context_that_the_model_does_not_take() -> None:
    with pytest.raises(ConfigError, match="--context 200000: llama-3"):
        measure_memory(Setup(gpu="H100", step_cost="roofline"), (200_000,))


@pytest.mark.parametrize(
    ("given", "contexts"),
    [
        (["--model", "llama-3.1-8b"], [8_000, 30_000, 100_000]),
        (["--model", "qwen3-8b"], [8_000, 30_000, 40_960]),
        (["--max-model-len", "6000"], [6_000]),
    ],
)
def test_by_default_no_context_is_above_the_models_maximum(
    capsys: pytest.CaptureFixture[str], given: list[str], contexts: list[int]
) -> None:
    assert main(["memory", "--gpu", "H200", "--step-cost", "roofline", "--json", *given]) == 0
    memory = json.loads(capsys.readouterr().out)
    assert [context["num_tokens"] for context in memory["contexts"]] == contexts


def test_the_memory_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["memory", "--gpu", "l40s", "--step-cost", "roofline", "--context", "4000,8000"]
    assert main([*arguments, "--json", "--csv", str(tmp_path / "m.csv")]) == 0
    memory = json.loads(capsys.readouterr().out)
    assert memory["gpu"] == "L40S"
    assert [context["num_tokens"] for context in memory["contexts"]] == [4000, 8000]
    assert memory["budget"]["kv_bytes"] > 0
    with (tmp_path / "m.csv").open() as file:
        assert [row["num_tokens"] for row in csv.DictReader(file)] == ["4000", "8000"]
    assert main([*arguments, "--gpu-memory-utilization", "0.9"]) == 0
    assert "= KV cache" in capsys.readouterr().out
    assert main([*arguments, "--context", ""]) == 2
    assert "--context is empty" in capsys.readouterr().err
    assert main([*arguments, "--model", "qwen3-32b", "--gpu", "RTX5090"]) == 2
    assert "leaves no KV cache on RTX5090" in capsys.readouterr().err
