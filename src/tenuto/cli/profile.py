"""`tenuto profile`: fit how long a server's steps take."""

from __future__ import annotations

from tenuto.cli.command import Command, Given, Part, needing
from tenuto.client.options import FitOptions, ProfileOptions
from tenuto.core.errors import ConfigError

_SUMMARY = """\
Fit how long a server's steps take, for --step-cost FILE of `tenuto simulate`, `compare` and `plan`.
With --url a live server is timed; with --observations the times come from a file; both are fitted as one.
"""

_EXAMPLES = """\
examples:
  tenuto profile --url http://localhost:8000 --out costs.json
  tenuto profile --url http://localhost:8000 --step-tokens 8192 --max-batch 64 --out costs.json
  tenuto profile --observations steps.jsonl --out costs.json
  tenuto simulate --step-cost costs.json --gpu H100 --kv-tokens 400000 --policy tenuto --jps 3
"""

_NOTES = """\
A live server should be idle, and have its prefix cache on. Prompts of several lengths after several contexts,
with one token of output each, show its prefill. Several conversations at once, at several contexts, show its
decode. What was measured goes to --save, one step a line.

The table shows how good the fit is. R2: how much of the differences between steps it explains, 1 is all.
off: how far it is from the observed times, on average. worst: the farthest step.
A fit is poor if it is off by more than 15 %, or if R2 is below 0.9 and it is off by more than 5 %. A poor fit
is not written, and the exit status is 1. With --force it is written, and every simulation with it says so.

  prefill step = a + b × tokens + c × pairs            pairs: sum of n × (context + n / 2)
  decode step  = a + b × decodes + c × context tokens
  copy         = a + b × bytes

A line of an observations file is one of these. Copies between GPU and host memory give the bandwidth of the
link; no server tells them over HTTP.

  {"prefills": [[512, 2048]], "decodes": [], "seconds": 0.031}     chunks as [tokens, context tokens]
  {"prefills": [], "decodes": [2048, 300], "seconds": 0.012}       a context for each decode
  {"num_bytes": 33554432, "seconds": 0.00068}
"""


def run(given: Given) -> int:
    """Time a server's steps, fit them, or both."""
    from tenuto.sim.cost.fitted import run_fit

    fit = given.read(FitOptions)
    paths = list(fit.observations)
    if given.has("url"):
        options = given.read(ProfileOptions)
        with needing("bench"):
            from tenuto.client.profile import run_profile
        run_profile(options, fit.save_path)
        paths.append(fit.save_path)
    if not paths:
        raise ConfigError("name a server with --url, or a file with --observations")
    with needing("bench"):
        return run_fit(paths, fit.out, force=fit.force, as_json=fit.as_json)


COMMAND = Command(
    _SUMMARY,
    _EXAMPLES,
    (Part(ProfileOptions, optional=("url",)), Part(FitOptions)),
    run,
    notes=_NOTES,
    main=(
        "url",
        "model",
        "step_tokens",
        "max_batch",
        "repeats",
        "limit_s",
        "observations",
        "out",
        "force",
        "as_json",
    ),
)
