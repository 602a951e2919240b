"""`tenuto serve --engine sim`: a simulated engine behind an OpenAI-compatible server."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Literal

from tenuto.cli.command import Command, Given, Part, needing
from tenuto.cli.simulations import PolicyOptions
from tenuto.core.settings import Options, option
from tenuto.sim.server import ServerOptions
from tenuto.sim.setup import Setup

_SUMMARY = """\
Serve a simulated engine behind an OpenAI-compatible server, as vLLM would serve a real one.
It is for tests of clients, routers and benchmarks without a GPU. The model's answers are made up.
"""

_EXAMPLES = """\
examples:
  tenuto serve --engine sim --gpu H200 --model llama-3.1-8b --policy continuum-fixed
      in real time, on port 8000; then: tenuto verify --url http://localhost:8000
  tenuto serve --engine sim --gpu A100-80 --model qwen3-32b --tp 2 --speed 10
      ten simulated seconds a second; waits of the clients, such as tool calls, do not shrink by themselves
"""

_NOTES = """\
Scheduler, KV cache and policy are those of `tenuto simulate`. Jobs are known, and hints are read, as in
`tenuto serve MODEL`.

Prompts: text, token ids, or chat messages (text only). The tokenizer is made up too, unless --tokenizer names
a real one.
Answers: words without meaning, as many as `max_tokens` says (without it: 16 in a completion, --answer-tokens
in a chat). A prompt gets the same answer each time at temperature 0 or with a `seed`. `stop` is never met. A
request has one choice.
Tools: one is called when `tool_choice` demands it, or when the request says
"vllm_xargs": {"sim_tool": NAME, "sim_arguments": JSON}, or the headers X-Sim-Tool and X-Sim-Arguments.
"""


@dataclass(frozen=True, kw_only=True)
class EngineOptions(Options):
    """Which engine."""

    engine: Literal["sim"] = option(MISSING, "the simulated engine")


def run(given: Given) -> int:
    """Serve until Ctrl-C."""
    from tenuto.sim.machine import build

    given.read(EngineOptions)
    policy = given.read(PolicyOptions)
    options = given.read(ServerOptions, policy=policy.policy)
    with needing("sim"):
        from tenuto.sim.server.app import run_server
    return run_server(build(policy.read_setup(given)), options)


SERVE_SIM = Command(
    _SUMMARY,
    _EXAMPLES,
    (Part(EngineOptions), Part(PolicyOptions), Part(ServerOptions), Part(Setup)),
    run,
    notes=_NOTES,
    main=(
        "engine",
        "policy",
        "gpu",
        "model",
        "host",
        "port",
        "speed",
        "served_model_name",
        "api_key",
        "trace",
    ),
)
