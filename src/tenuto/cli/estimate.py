"""`tenuto estimate`: what Tenuto would gain for one traffic on one GPU."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import MISSING, dataclass, replace
from typing import Any

from tenuto.cli.command import Command, Given, Part
from tenuto.cli.simulations import say_notes
from tenuto.client.address import api_key_option, check_api_key, check_url
from tenuto.core.console import Progress
from tenuto.core.errors import TenutoError
from tenuto.core.settings import Options, option
from tenuto.sim.compare import Cell, check_cells, make_stock
from tenuto.sim.estimate import (
    MAX_JOBS,
    Estimate,
    TimeUpError,
    fill,
    format_estimate,
    make_load,
    suggest_next,
)
from tenuto.sim.hardware.gpus import GPUS
from tenuto.sim.plan import SeedRunner
from tenuto.sim.run import Extras
from tenuto.sim.setup import Setup
from tenuto.sim.steady import take_sample
from tenuto.workload.load import GENERATORS, LoadOptions, seed_option


@dataclass(frozen=True, kw_only=True)
class EstimateOptions(Options):
    """The options of an estimate."""

    GROUP = "the question"

    gpu: str = option(MISSING, f"the GPU: {', '.join(GPUS)}", metavar="NAME")
    workload: str = option(
        "swe-bench",
        "the traffic: a file of `tenuto record`, another trace, or the name of a generator",
        flag="--recording",
        alias="--workload",
        metavar="FILE|NAME",
    )
    url: str | None = option(None, "take the model and the KV cache size from this server", metavar="URL")
    api_key: str | None = api_key_option()
    jps: float | None = option(
        None, "jobs arriving per second, in all", above=0, alias="--request-rate", shown_default="as recorded"
    )
    machines: int = option(1, "servers that share the traffic, each with --tp GPUs", minimum=1)
    seeds: tuple[int, ...] = seed_option((42, 43, 44), "seeds of the arrivals and of generated jobs")
    limit_s: float = option(
        110.0, "leave out parts that are not done after S seconds; if none is, end with an error", above=0
    )
    workers: int | None = option(None, "processes", minimum=1, shown_default="one per core")
    as_json: bool = option(False, "print JSON instead of text", flag="--json")


def run(given: Given) -> int:
    """Simulate, and print the answers."""
    started_s = time.monotonic()
    options = given.read(EstimateOptions)
    seeds = tuple(dict.fromkeys(options.seeds))
    facts = {name: value for name, value in _ask(options).items() if not given.has(name)}
    setup = given.read(Setup, gpu=options.gpu, fleet=None, **facts)
    load = given.read(LoadOptions, workload=options.workload, jps=options.jps, seed=seeds[0])
    load = make_load(setup, load, options.machines)
    sample = Extras(workload=take_sample(load))
    say_notes(
        check_cells(
            [Cell(each, load, sample) for each in (make_stock(setup), replace(setup, policy="tenuto"))]
        )
    )
    estimate = Estimate(setup, load, num_machines=options.machines)
    progress = Progress()
    workers = options.workers or len(os.sched_getaffinity(0))

    def say(make_text: Callable[[], str]) -> None:
        if time.monotonic() > started_s + options.limit_s:
            raise TimeUpError(f"no result after {options.limit_s:g} s; allow more with --limit")
        progress.tell(make_text)

    runner = SeedRunner(seeds, workers=workers, max_jobs=MAX_JOBS, say=say)
    try:
        with progress.cleared(), runner as measure:
            fill(estimate, measure, tell=progress.say, num_at_once=workers)
    except TimeUpError:  # after the worker processes have ended
        if not estimate.cases:
            raise
    next_lines = suggest_next(estimate, has_recording=options.workload not in GENERATORS)
    if options.as_json:
        print(json.dumps({**estimate.to_json(), "next": next_lines}))
    else:
        print("\n".join([format_estimate(estimate), "", "Next:", *(f"  {line}" for line in next_lines)]))
    return 0


def _ask(options: EstimateOptions) -> dict[str, Any]:
    """A server's report on its machine. Raises TenutoError if it does not answer, or is not vLLM."""
    if options.url is None:
        return {}
    import httpx

    from tenuto.client.metrics import connect, explain, read_cache_state
    from tenuto.client.verify import read_model

    check_url(options.url)
    check_api_key(options.api_key)
    try:
        with connect(options.url, options.api_key) as client:
            model, longest = read_model(client)
            cache = read_cache_state(client)
    except httpx.HTTPError as error:
        raise TenutoError(explain(error)) from error
    # vLLM includes its null block in the cache's size.
    kv_tokens = (cache.num_blocks // len(cache.engines) + 1) * cache.block_size
    say_notes([f"{options.url} serves {model} with a KV cache of {kv_tokens:,} tokens"])
    return {"model": model, "max_model_len": longest, "kv_tokens": kv_tokens}


ESTIMATE = Command(
    summary="""\
Estimate what Tenuto would gain for this traffic on this GPU: job times and times to first token with stock as
it is, with stock at its best step size, and with Tenuto. It simulates, and takes two minutes on two cores.
""",
    examples="""\
  tenuto estimate --gpu H200
  tenuto estimate --gpu L40S --recording jobs.jsonl --machines 4
  tenuto estimate --gpu H100 --url http://localhost:8000 --recording jobs.jsonl --json
""",
    options=(
        Part(EstimateOptions),
        Part(
            LoadOptions,
            without=(
                *("workload", "jps", "seed", "users", "max_jobs", "loop", "scale_rate", "goodput"),
                *("random_input_len", "random_output_len", "random_range_ratio", "random_prefix_len"),
            ),
        ),
        Part(Setup, without=("gpu", "step_tokens", "keep_kv")),
    ),
    run=run,
    notes="""\
A recording is a file of `tenuto record`, or any trace that `tenuto convert` reads. Its jobs are repeated in
random order, at the recorded rate or at --jps. Without a recording, SWE-bench jobs arrive at the highest rate
that the GPU could serve if it computed nothing twice.

Then it searches for the smallest load at which Tenuto's mean job time is 2 % better than that of stock at its
best step size, and for the number of GPUs that Tenuto needs where stock needs ten. If there is no time for a
part, the answer says that it is left out. Machines are independent, as behind a router that keeps each job on
one.

With --host-gb, both have so much host memory for KV: stock has vLLM's own. The default is none, as in
`tenuto serve` and `vllm serve`.

--url asks a server for its model, its longest context and the size of its KV cache. No server says which GPU
it has, or what its traffic is.
""",
    main=("gpu", "model", "workload", "url", "jps", "machines", "tp", "seeds", "limit_s", "as_json"),
)
