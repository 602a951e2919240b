"""The options of `tenuto serve --engine sim`, those of the simulated machine apart."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass

from tenuto.core.errors import ConfigError
from tenuto.sim.hardware.gpus import GPUS

DESCRIPTION = """\
Serve a simulated engine as vLLM would serve a real one: an OpenAI-compatible server whose time is a GPU's,
for clients, routers and benchmarks that need a GPU nobody has. Scheduler, KV cache and policy are those of
`tenuto simulate`; what the model says is made up.

Prompts: text, token ids, chat messages (text only), with a tokenizer of its own unless --tokenizer names a
real one. Answers: meaningless words, `max_tokens` of them (without: 16 for completions, --answer-tokens for
chats); the same ones each time for a prompt at temperature 0 or with a `seed`. `stop` is never met; one
choice per request. A tool is called when `tool_choice` demands it, or when the request says
"vllm_xargs": {"sim_tool": NAME, "sim_arguments": JSON}. Jobs are known, and hints read, as in `tenuto serve`.
"""

EPILOG = """\
examples:
  tenuto serve --engine sim --gpu H200 --model llama-3.1-8b --policy continuum-fixed
      in real time, on port 8000; then: tenuto verify --url http://localhost:8000
  tenuto serve --engine sim --gpu A100-80 --model qwen3-32b --tp 2 --speed 10
      ten simulated seconds a second; clients' own waits, such as tool calls, do not shrink by themselves
"""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """All of them, checked. Raises ConfigError."""

    policy: str = "tenuto"
    """What the machine was built with; for those who ask."""
    host: str = "127.0.0.1"
    port: int = 8000
    speed: float = 1.0
    served_model_name: str | None = None
    api_key: str | None = None
    tokenizer: str | None = None
    answer_tokens: int = 256
    trace: str | None = None

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 0 < self.speed < math.inf:
            raise ConfigError(f"--speed must be a finite number above 0, got {self.speed}")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"--port must be 0 to 65535, got {self.port}")
        if self.answer_tokens < 1:
            raise ConfigError(f"--answer-tokens must be 1 or more, got {self.answer_tokens}")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the command's parser, whose `description` and `epilog` should be those above."""
    parser.add_argument("--gpu", default="H100", help=f"one of {', '.join(GPUS)} (default H100)")
    parser.add_argument("--policy", default="tenuto", help="see `tenuto policies` (default tenuto)")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a policy's option; may be repeated",
    )
    parser.add_argument(
        "--block-size", type=int, default=16, metavar="N", help="tokens per KV block (default 16)"
    )
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    server.add_argument("--port", type=int, default=8000, help="default 8000; 0 takes any that is free")
    server.add_argument(
        "--speed", type=float, default=1.0, metavar="X", help="simulated seconds per real second (default 1)"
    )
    server.add_argument("--served-model-name", metavar="NAME", help="default: the model's own name")
    server.add_argument(
        "--api-key",
        default=os.environ.get("VLLM_API_KEY"),
        metavar="KEY",
        help="that requests to /v1 must carry (default: $VLLM_API_KEY, else none)",
    )
    server.add_argument(
        "--tokenizer", metavar="DIR", help="a Hugging Face model folder with a tokenizer.json"
    )
    server.add_argument(
        "--answer-tokens",
        type=int,
        default=256,
        metavar="N",
        help="tokens of a chat answer whose request has no max_tokens (default 256)",
    )
    server.add_argument("--trace", metavar="FILE", help="write a JSONL trace of steps and decisions")


def read_options(parsed: argparse.Namespace) -> ServerOptions:
    """The options as parsed. Raises ConfigError."""
    values = vars(parsed)
    return ServerOptions(**{name: values[name] for name in ServerOptions.__dataclass_fields__})
