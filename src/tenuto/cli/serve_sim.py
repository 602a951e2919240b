"""`tenuto serve --engine sim`: a simulated engine behind an OpenAI-compatible server."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Literal

from tenuto.cli.command import Command, Part, needing
from tenuto.cli.options import Given
from tenuto.cli.simulations import PolicyOptions
from tenuto.core.settings import Options, option
from tenuto.sim.server.options import ServerOptions
from tenuto.sim.setup import Setup

_DESCRIPTION = """\
Serve a simulated engine as vLLM would serve a real one: an OpenAI-compatible server whose time is a GPU's,
for clients, routers and benchmarks that need a GPU nobody has. Scheduler, KV cache and policy are those of
`tenuto simulate`; what the model says is made up.

Prompts: text, token ids, chat messages (text only), with a tokenizer of its own unless --tokenizer names a
real one. Answers: meaningless words, `max_tokens` of them (without: 16 for completions, --answer-tokens for
chats); the same ones each time for a prompt at temperature 0 or with a `seed`. `stop` is never met; one
choice per request. A tool is called when `tool_choice` demands it, or when the request says
"vllm_xargs": {"sim_tool": NAME, "sim_arguments": JSON}. Jobs are known, and hints read, as in `tenuto serve`.
"""

_EXAMPLES = """\
examples:
  tenuto serve --engine sim --gpu H200 --model llama-3.1-8b --policy continuum-fixed
      in real time, on port 8000; then: tenuto verify --url http://localhost:8000
  tenuto serve --engine sim --gpu A100-80 --model qwen3-32b --tp 2 --speed 10
      ten simulated seconds a second; clients' own waits, such as tool calls, do not shrink by themselves
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
        from tenuto.sim.server.serve import run_server
    return run_server(build(policy.read_setup(given)), options)


COMMAND = Command(
    _DESCRIPTION, _EXAMPLES, (Part(EngineOptions), Part(PolicyOptions), Part(ServerOptions), Part(Setup)), run
)
