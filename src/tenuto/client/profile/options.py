"""The options of `tenuto profile`."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from tenuto.core.errors import ConfigError

DESCRIPTION = """\
Fit how long a server's steps take, for `tenuto simulate`, `compare` and `plan --step-cost FILE`.

With --url a live server is asked: prompts of several lengths after several contexts, one token each, show its
prefill; several conversations at once, at several contexts, its decode. The server should be idle, and have
its prefix cache on. What was measured goes to --save, one step a line. With --observations such lines come
from a file: steps of your own, and copies between GPU and host memory, which show the link's bandwidth (no
server tells these over HTTP). Both together are fitted as one.

  prefill step = a + b × tokens + c × pairs            pairs: sum of n × (context + n / 2)
  decode step  = a + b × decodes + c × context tokens
  copy         = a + b × bytes

A line of the file is one of:
  {"prefills": [[512, 2048]], "decodes": [], "seconds": 0.031}     chunks as [tokens, context tokens]
  {"prefills": [], "decodes": [2048, 300], "seconds": 0.012}       a context for each decode
  {"num_bytes": 33554432, "seconds": 0.00068}
"""

EPILOG = """\
examples:
  tenuto profile --url http://localhost:8000 --out costs.json
  tenuto profile --url http://localhost:8000 --step-tokens 8192 --max-batch 64 --out costs.json
  tenuto profile --observations steps.jsonl --out costs.json
  tenuto simulate --step-cost costs.json --gpu H100 --kv-tokens 400000 --policy tenuto --jps 3
"""


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """What a live server is asked, checked. Raises ConfigError."""

    url: str
    model: str | None = None
    api_key: str | None = None
    step_tokens: int = 2048
    max_context: int | None = None
    max_batch: int = 16
    repeats: int = 3

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"--url must begin with http:// or https://, got {self.url!r}")
        least = {"step_tokens": 512, "max_batch": 2, "repeats": 1, "max_context": 1024}
        for name, minimum in least.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ConfigError(f"--{name.replace('_', '-')} must be {minimum} or more, got {value}")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the command's parser, whose `description` and `epilog` should be those above."""
    source = parser.add_argument_group("what is fitted: --url, --observations, or both")
    source.add_argument("--url", help="a live server, e.g. http://localhost:8000")
    source.add_argument(
        "--observations",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="observed steps and copies, JSONL as above; may be repeated",
    )
    server = parser.add_argument_group("the server")
    server.add_argument("--model", help="the model to ask for (default: the first that /v1/models names)")
    server.add_argument(
        "--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: $OPENAI_API_KEY"
    )
    server.add_argument(
        "--step-tokens",
        type=int,
        default=2048,
        metavar="N",
        help="longest prefill to time; no more than the server's --max-num-batched-tokens, or it takes "
        "several steps (default 2048)",
    )
    server.add_argument(
        "--max-context",
        type=int,
        metavar="N",
        help="longest context to time (default: 16384, or what the model and half of the KV cache allow)",
    )
    server.add_argument(
        "--max-batch",
        type=int,
        default=16,
        metavar="N",
        help="most decodes at once; no more than the server's --max-num-seqs (default 16)",
    )
    server.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="each is timed N times, the median counts (3)"
    )
    result = parser.add_argument_group("the result")
    result.add_argument("--out", type=Path, default=Path("costs.json"), metavar="FILE", help="(costs.json)")
    result.add_argument(
        "--save",
        type=Path,
        metavar="FILE",
        help="what --url measured, as JSONL (default: beside --out, its name ending in .observations.jsonl)",
    )
    result.add_argument("--json", action="store_true", help="print JSON instead of tables")


def read_options(parsed: argparse.Namespace) -> ProfileOptions | None:
    """What the server is asked; None where only files are fitted. Raises ConfigError."""
    if parsed.url is None:
        if not parsed.observations:
            raise ConfigError("name a server with --url, or a file with --observations")
        return None
    names = ("url", "model", "api_key", "step_tokens", "max_context", "max_batch", "repeats")
    return ProfileOptions(**{name: getattr(parsed, name) for name in names})


def get_save_path(parsed: argparse.Namespace) -> Path:
    """Where the measured steps go."""
    path: Path = parsed.save or parsed.out.with_suffix(".observations.jsonl")
    return path
