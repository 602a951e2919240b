"""Fuzzes every parser that reads what strangers write.

    python -m experiments.fuzz --inputs 1000000 [--parser NAME] [--seed N] [--workers N] [--out FOLDER]
    python -m experiments.fuzz --parser NAME --input FILE      one input again, such as one that failed

Inputs are made from the sound ones in experiments/fuzz/corpus: values, keys, lines and bytes are changed. For
each, a parser must return a value that keeps its bounds, or raise an error of its own whose message says what
is wrong: within half a second of processor time, without unbounded memory. The smallest input found for each
kind of failure is written to the folder `--out`. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from experiments.fuzz import guard, run
from experiments.fuzz.parsers import PARSERS


def main(arguments: list[str] | None = None) -> int:
    """Run the fuzzing; 0 if nothing failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000, help="inputs for all chosen parsers together")
    parser.add_argument(
        "--parser", action="append", choices=PARSERS, help="only this one; several times for more"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"), help="folder for inputs that failed")
    parser.add_argument("--input", type=Path, help="try this file on --parser, and nothing else")
    parser.add_argument("--json", action="store_true", help="the summary as JSON")
    parsed = parser.parse_args(arguments)
    if arguments is None:  # a process of its own
        guard.limit_memory()
    if parsed.inputs < 1 or parsed.workers < 1:
        parser.error("--inputs and --workers must be at least 1")
    names = parsed.parser or list(PARSERS)
    if parsed.input is not None:
        if len(names) != 1:
            parser.error("--input needs one --parser")
        return _try_one(names[0], parsed.input)
    tallies = run.run_all(names, parsed.seed, parsed.inputs, parsed.workers, parsed.out)
    print(run.to_json(tallies, parsed.seed) if parsed.json else run.format_table(tallies))
    return 1 if any(tally.failures for tally in tallies.values()) else 0


def _try_one(name: str, path: Path) -> int:
    outcome = guard.try_input(PARSERS[name].run, path.read_bytes())
    print(f"{1000 * outcome.cpu_s:.1f} ms of processor time")
    if outcome.failure is not None:
        print(f"{outcome.failure.kind}\n{outcome.failure.text}")
        return 1
    print("refused, with an error that says what is wrong" if outcome.is_refused else "read")
    return 0


if __name__ == "__main__":
    sys.exit(main())
