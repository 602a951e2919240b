"""A real vLLM server with a disk: restarts, resets, other weights, a full disk, and another adapter."""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm", "0.31.0")

from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tenuto.client.ab import LocalServer, run_server
from tenuto.vllm.launch import Tiers
from tests.vllm.live import (
    BLOCK_SIZE,
    ENV_INSIDE,
    MARKS,
    MODEL,
    WORKER_INSIDE,
    get_command,
    get_free_port,
    make_text,
)

pytestmark = [*MARKS, pytest.mark.timeout(2400)]
NUM_WORDS = 120


@contextmanager
def serve(folder: Path, name: str) -> Iterator[LocalServer]:
    """A server of the model in FOLDER/model, with host memory and the disk FOLDER/kv."""
    port = get_free_port()
    tiers = Tiers(0.25, str(folder / "kv"))
    command = get_command(
        port,
        *WORKER_INSIDE,
        *("--scheduler-cls", "tenuto.vllm.Scheduler", "--middleware", "tenuto.vllm.Middleware"),
        *("--kv-transfer-config", json.dumps(tiers.get_transfer_config())),
        *("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"adapter={folder / 'adapter'}"),
    )
    command[command.index(MODEL)] = str(folder / "model")
    env = ENV_INSIDE | {"VLLM_LOGGING_LEVEL": "INFO"}
    with run_server(command, port, folder / f"{name}.log", env=env, limit_s=600) as running:
        yield running


def ask(server: LocalServer, seed: str, model: str = "tiny", **more: Any) -> tuple[str, int]:
    """A greedy answer, and how many tokens of the prompt were hits."""
    body = {"model": model, "prompt": make_text(seed, NUM_WORDS), "max_tokens": 16, "temperature": 0, **more}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).raise_for_status().json()
    return answer["choices"][0]["text"], (answer["usage"]["prompt_tokens_details"] or {})[
        "cached_tokens"
    ] or 0


def post(server: LocalServer, path: str, **body: Any) -> Any:
    return httpx.post(f"{server.url}{path}", json=body, timeout=300).raise_for_status()


def fill_disk(server: LocalServer) -> None:
    """Ask for new texts until the server says that it cannot write; it writes beside its answers."""
    end_s = time.monotonic() + 120
    for number in itertools.count():
        assert len(ask(server, f"new-{number}")[0]) > 0
        if any("cannot write" in line for line in read_disk_lines(server)):
            return
        assert time.monotonic() < end_s, read_disk_lines(server)


def read_disk_lines(server: LocalServer) -> list[str]:
    """What the server has said of its disk."""
    return [line for line in server.log.read_text(errors="replace").splitlines() if "disk tier" in line]


def get_files(folder: Path) -> set[Path]:
    return set((folder / "kv").rglob("*.kv"))


def wait_for_files(folder: Path, num_more: int, before: int = 0) -> None:
    """Until so many chunks more are on the disk; they are written beside the answers."""
    end_s = time.monotonic() + 60
    while len(get_files(folder)) < before + num_more:
        assert time.monotonic() < end_s
        time.sleep(0.05)


def damage(paths: Iterable[Path]) -> None:
    """One bit in each file is wrong."""
    for path in paths:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)


def reset(server: LocalServer) -> None:
    """Reset all tiers; a reset fails while a copy still has blocks."""
    end_s = time.monotonic() + 60
    while not post(server, "/reset_prefix_cache?reset_external=true").json()["success"]:
        assert time.monotonic() < end_s
        time.sleep(0.1)


def change_weights(path: Path) -> None:
    """Other numbers in the same tensors; the file has the size and the time of before."""
    before = path.stat()
    tensors = load_file(path)
    save_file(
        {name: (each * 1.1).to(each.dtype) if each.ndim > 1 else each for name, each in tensors.items()},
        path,
        metadata={"format": "pt"},
    )
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def make_adapter(folder: Path) -> None:
    """A LoRA adapter that changes the values of attention, and so the KV of all layers but the first."""
    import torch

    config = AutoConfig.from_pretrained(MODEL)
    size = config.num_key_value_heads * config.head_dim
    random = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(config.num_hidden_layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.v_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(8, config.hidden_size, generator=random) * 0.1
        tensors[f"{name}.lora_B.weight"] = torch.randn(size, 8, generator=random) * 0.1
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    facts = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(facts))


def limit_files(server: LocalServer) -> None:
    """From here on no process of the server can write a chunk of KV, as on a full disk."""
    config = AutoConfig.from_pretrained(MODEL)
    num_values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    # In float32. Three quarters of it are more than any other file of the server has.
    num_bytes = 4 * BLOCK_SIZE * num_values * 3 // 4
    for each in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(each.name)) == server.process.pid:
                resource.prlimit(int(each.name), resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
        except ProcessLookupError:
            continue


def test_only_kv_of_the_same_weights_comes_back(tmp_path: Path) -> None:
    """Three servers on one folder: one that is killed, one of the same weights, and one of others."""
    shutil.copytree(MODEL, tmp_path / "model")
    make_adapter(tmp_path / "adapter")
    with serve(tmp_path, "first") as server:
        answers = [ask(server, seed)[0] for seed in ("a", "b")]
        adapted = [ask(server, seed, "adapter")[0] for seed in ("a", "b")]
        assert adapted != answers
        num_tokens = ask(server, "a")[1]
        assert num_tokens > 10 * BLOCK_SIZE
        wait_for_files(tmp_path, 4 * num_tokens // BLOCK_SIZE)
        whole = get_files(tmp_path)
        damaged, most_hits = ask(server, "damaged")[0], ask(server, "damaged")[1]
        wait_for_files(tmp_path, most_hits // BLOCK_SIZE, len(whole))
        later = get_files(tmp_path) - whole
        # Killed with answers under way, and while the last one's chunks are written.
        with ThreadPoolExecutor() as pool:
            cut = [pool.submit(ask, server, seed, max_tokens=400, ignore_eos=True) for seed in "xy"]
            half = ask(server, "half")[0]
            server.signal(signal.SIGKILL)
            server.process.wait()
        assert all(isinstance(each.exception(), httpx.HTTPError) for each in cut)
    damage(sorted(later)[::4])

    with serve(tmp_path, "second") as server:
        assert ask(server, "a") == (answers[0], num_tokens)
        assert ask(server, "a", "adapter") == (adapted[0], num_tokens)
        # What is damaged is computed again, and so is what was not written to its end.
        answer, num_hits = ask(server, "damaged")
        assert answer == damaged and num_hits < most_hits
        assert ask(server, "half")[0] == half
        assert ".kv is not used" in server.log.read_text(errors="replace")
        # An adapter of this name and place with other weights is another one.
        change_weights(tmp_path / "adapter" / "adapter_model.safetensors")
        assert ask(server, "b", "adapter")[1] == 0
        # After a reset nothing comes back, of no tier; afterwards they are filled again.
        reset(server)
        assert ask(server, "a") == (answers[0], 0)
        assert ask(server, "b") == (answers[1], 0)
        wait_for_files(tmp_path, 2 * num_tokens // BLOCK_SIZE)
        # On a full disk the server goes on, and says so once a minute.
        limit_files(server)
        fill_disk(server)
        assert all(len(ask(server, seed)[0]) > 0 for seed in "cdef")
        assert sum("cannot write" in line for line in read_disk_lines(server)) < 4

    change_weights(tmp_path / "model" / "model.safetensors")
    with serve(tmp_path, "third") as server:
        found = [ask(server, seed) for seed in ("a", "b")]
        assert [num_hits for _, num_hits in found] == [0, 0]
        computed = [ask(server, seed, cache_salt="nothing is hit")[0] for seed in ("a", "b")]
        assert [answer for answer, _ in found] == computed
        assert computed != answers
        assert ask(server, "b", "adapter")[1] == 0
        # Weights that are loaded while the server runs begin anew too.
        reset(server)
        ask(server, "a")
        post(server, "/collective_rpc", method="reload_weights")
        assert ask(server, "a") == (computed[0], 0)
