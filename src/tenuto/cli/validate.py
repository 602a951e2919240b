"""`tenuto validate`: measure on your own machine what Tenuto gains."""

from __future__ import annotations

from tenuto.cli.command import Command, Given, Part, needing
from tenuto.client.options import ValidateOptions

_SUMMARY = """\
Measure on this machine what Tenuto gains over stock vLLM, and whether the simulator predicts it. It makes one
page with a verdict, and one small record to send in. It takes thirty minutes, and nothing else should run.
"""

_EXAMPLES = """\
examples:
  tenuto validate Qwen/Qwen3-8B
  tenuto validate Qwen/Qwen3-8B --quick --out quick
      the same in minutes: shows that everything works, and proves nothing
  tenuto validate /models/mine --serve-args "--max-model-len 32768 --tensor-parallel-size 2" --minutes 60
  tenuto validate llama-3.1-8b --engine sim --quick \\
      --serve-args "--gpu L40S --max-num-batched-tokens 2048 --max-num-seqs 64"
      on simulated servers: without vLLM and a GPU
"""

_NOTES = """\
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
"""


def run(given: Given) -> int:
    """Validate, and write the page."""
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


COMMAND = Command(
    _SUMMARY,
    _EXAMPLES,
    (Part(ValidateOptions),),
    run,
    notes=_NOTES,
    main=("model", "minutes", "quick", "serve_args", "workload", "out", "despite_noise", "engine"),
)
