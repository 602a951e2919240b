"""`tenuto bench`, `ab`, `validate` and `profile`: what servers take for a load, or for single steps."""

from __future__ import annotations

from tenuto.cli.command import Command, Given, Part, needing
from tenuto.client.options import (
    AbOptions,
    ArmOptions,
    BenchOptions,
    FitOptions,
    ProfileOptions,
    SweepOptions,
    ValidateOptions,
)
from tenuto.core.errors import ConfigError
from tenuto.workload.load import LoadOptions


def _run_bench(given: Given) -> int:
    with needing("bench"):
        from tenuto.client.bench import run_bench, run_sweep
    loads = given.read(SweepOptions).jps
    runs = [given.read(BenchOptions, load=given.read(LoadOptions, jps=jps)) for jps in loads or (None,)]
    return run_bench(runs[0]) if len(runs) == 1 else run_sweep(runs)


BENCH = Command(
    summary="""\
Run agent jobs against any OpenAI-compatible server and measure them.
A job is a conversation of several turns; between two turns its tool runs (a sleep, or a real command).
""",
    examples="""\
  tenuto bench --url http://localhost:8000 --jps 6
      the 8-turn workload of the published sweeps, 255 jobs arriving within 45 s
  tenuto bench --url http://localhost:8000 --workload swe-bench --jps 0.5 --hints tool --out runs/swe
      each turn names its tool to Tenuto; result.json, turns.jsonl and metrics.jsonl go to runs/swe
  tenuto bench --url http://localhost:8000 --jps 1,2,4 --out runs/sweep
      three loads, one after the other; tenuto report runs/sweep draws them
  tenuto bench --url http://localhost:8000 --users 32 --max-jobs 200
      32 users; each begins a job when the user's last job has ended
  tenuto bench --url http://a:8000 --url http://b:8000 --router tenuto --jps 2 --retries 5
      two engines without a router in front: the bench says where each turn goes
  tenuto bench --url http://localhost:8000 --workload trace.jsonl --loop open --scale-rate 2
      a recorded trace at its own times, twice as fast
""",
    options=(Part(SweepOptions), Part(BenchOptions, without=("jps",))),
    run=_run_bench,
    notes="""\
Every turn is due when the workload says, even if the client is late, and its latency counts from that
moment. Prompts are token ids: they have exactly the planned length and share exactly what the workload says,
on any server whose /v1/completions takes ids (vLLM, SGLang, the simulated server). For other servers there is
--prompts words.

stderr shows the progress. Ctrl-C ends the run early and keeps its results. A sweep (--jps 1,2,4) has a folder
for each load in DIR, and DIR/results.jsonl. The same command again continues there.

The result shows percentiles of the job time (tools included), and for turns: the whole time (e2e), the time
to the first token (ttft), the mean time per further token (tpot) and the gaps between tokens (itl). "cache"
is the share of a job's reusable tokens that were hit; "client lag" is the delay of this client.

The result begins with INVALID, and says why, if the figures do not describe the server: if the client's own
delay in sending or reading, or the lag of a simulated server, is more than 10 ms and more than 5 % of the
time to first token. Then give the client a machine of its own, or the simulated server a lower --speed.

Exit status: 0 if every turn was answered, 1 if not, 2 if nothing could be run, 3 if the figures are INVALID,
130 if interrupted.
""",
    main=("urls", "workload", "jps", "users", "window_s", "max_jobs", "seed", "model", "out", "as_json"),
)


def _run_ab(given: Given) -> int:
    options = read_ab_options(given)
    with needing("bench"):
        from tenuto.client.ab import run_ab
    return run_ab(options)


def read_ab_options(given: Given) -> AbOptions:
    """The comparison's options, with those of `tenuto bench` for its runs."""
    arms = given.read(ArmOptions)
    url = next((arm.target for arm in arms.arms if not arm.is_local), "http://127.0.0.1")
    bench = given.read(
        BenchOptions,
        urls=tuple(url.split(",")),
        model=None,
        out=None,
        csv=None,
        as_json=False,
        engine_urls=(),
    )
    return given.read(AbOptions, bench=bench)


_EACH_RUNS_OWN = ("urls", "engine_urls", "run_id", "policy")
"""Options of the bench that a comparison sets for each of its runs."""
AB = Command(
    summary="""\
Compare servers or policies under the same load, and print a verdict in words.
Every repeat runs the same jobs once on each arm: that makes a pair. The verdict has a 95 % interval.
""",
    examples="""\
  tenuto ab --arm stock=vllm --arm hold=policy:continuum-fixed --model Qwen/Qwen3-8B --jps 6 --out ab1
  tenuto ab --arm a=http://10.0.0.1:8000 --arm b=http://10.0.0.2:8000 --workload swe-bench --jps 0.5 --out ab2
  tenuto ab --arm short=policy:continuum-fixed,ttl_s=1 --arm long=policy:continuum-fixed,ttl_s=10 \\
      --model Qwen/Qwen3-8B --serve-args "--max-model-len 32768 --max-num-seqs 64" \\
      --hints tool --jps 2 --out ab3
  tenuto ab --arm stock=sim:stock --arm hold=sim:continuum-fixed --model llama-3.1-8b --jps 1 --out ab4
""",
    options=(Part(ArmOptions), Part(AbOptions, without=_EACH_RUNS_OWN)),
    run=_run_ab,
    notes="""\
An arm is NAME=URL, a server that already runs, or a server that is started here before each of its runs and
stopped afterwards: NAME=vllm is plain vLLM, NAME=policy:POLICY is vLLM with Tenuto's scheduler, and
NAME=sim:POLICY is a simulated GPU. With more than two arms, each is compared with the first.

The order alternates from repeat to repeat (A B, B A, …), so that a machine that slows down affects all arms
alike; the seed changes too. Each pair gives one ratio per measure (job time, time to first token, turn time,
throughput). Their geometric mean has a 95 % interval. If the interval includes 1, no difference was seen.
Fewer than 6 pairs prove nothing, and the verdict says so.

The prefix cache is emptied before each run if the server allows it (vLLM with VLLM_SERVER_DEV_MODE=1,
which servers started here have). The verdict says if it could not be emptied.

The first line says how many runs there are, and the least time that they take. By default, a server
that is started here starts anew for each run; with --runs-per-start 6, each server starts once.

Each run is saved when it ends (DIR/runs). The same command again continues there. Ctrl-C prints the verdict
of the pairs so far. `tenuto report DIR` draws the results.

If a run is INVALID (tenuto bench --help), nothing is proved: remove that run's folder, and run it again.

A comparison has one load. For several loads, run several commands, each with its own DIR.

Exit status: 0 if every turn was answered, 1 if not, 2 if an arm could not be run, 130 if interrupted.
""",
    main=("arms", "model", "serve_args", "workload", "jps", "window_s", "repeats", "out", "gpu", "as_json"),
)


def _run_validate(given: Given) -> int:
    options = given.read(ValidateOptions)
    with needing("bench"):
        from tenuto.client.validate import RECORD, run_validate
    with needing("report"):
        from tenuto.report.html.page import run_report
    record, is_interrupted = run_validate(options)
    page = options.out / "validation.html"
    runs = options.out / "ab"
    sources = [options.out / RECORD, *([runs] if (runs / "results.jsonl").exists() else [])]
    run_report(sources, out=page)
    print(f"{options.out / RECORD}: the record, to send in as docs/field-results.md says")
    return 130 if is_interrupted else 1 if record.stopped else 0


VALIDATE = Command(
    summary="""\
Measure on this machine what Tenuto gains over stock vLLM, and whether the simulator predicts it. It makes one
page with a verdict, and one small record to send in. It takes thirty minutes, and nothing else should run.
""",
    examples="""\
  tenuto validate Qwen/Qwen3-8B
  tenuto validate Qwen/Qwen3-8B --quick --out quick
      the same in minutes: shows that everything works, and proves nothing
  tenuto validate /models/mine --serve-args "--max-model-len 32768 --tensor-parallel-size 2" --minutes 60
  tenuto validate llama-3.1-8b --engine sim --quick \\
      --serve-args "--gpu L40S --max-num-batched-tokens 2048 --max-num-seqs 64"
      on simulated servers: without vLLM and a GPU
""",
    options=(Part(ValidateOptions),),
    run=_run_validate,
    notes="""\
It starts the vLLM that is installed here in two or three arms: as it is; at the step size that the simulator
finds best for it (--max-num-batched-tokens), unless that is its own; and with Tenuto. One server runs at a
time, on 127.0.0.1. First it times identical requests, which show the noise, and a server's steps, as `tenuto
profile` does. With these times, the simulator chooses a load that stock can just about serve. Then all arms
run the same jobs alternately, six times or more, as in `tenuto ab`. The page also has the simulator's
prediction for each arm.

The verdict is that of `tenuto ab`: Tenuto is faster or slower only if the 95 % interval of at least six pairs
excludes 1. It stops early if noise makes a verdict impossible, and says what disturbs the machine.

The record (DIR/validation.json) has times, sizes and names of GPU, processor and model. It has no text of
requests, no paths and no host names. `tenuto report DIR/validation.json` draws it again, and
docs/field-results.md says how to send it in.

Ctrl-C stops the servers and makes the page from the runs so far. The same command again continues from there.

Exit status: 0 if all runs were made, 1 if it ended early, 2 if it could not run, 130 if interrupted.
""",
    main=("model", "minutes", "quick", "serve_args", "workload", "out", "despite_noise", "engine"),
)


def _run_profile(given: Given) -> int:
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


PROFILE = Command(
    summary="""\
Fit how long a server's steps take, for --step-cost FILE of `tenuto simulate`, `compare` and `plan`.
With --url a live server is timed; with --observations the times come from a file; both are fitted as one.
""",
    examples="""\
  tenuto profile --url http://localhost:8000 --out costs.json
  tenuto profile --url http://localhost:8000 --step-tokens 8192 --max-batch 64 --out costs.json
  tenuto profile --observations steps.jsonl --out costs.json
  tenuto simulate --step-cost costs.json --gpu H100 --kv-tokens 400000 --policy tenuto --jps 3
""",
    options=(Part(ProfileOptions, optional=("url",)), Part(FitOptions)),
    run=_run_profile,
    notes="""\
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
""",
    main=(
        *("url", "model", "step_tokens", "max_batch", "repeats"),
        *("limit_s", "observations", "out", "force", "as_json"),
    ),
)
