"""Runs many inputs in several processes, keeps what failed with its smallest input, and sums it up."""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from experiments.fuzz import guard
from experiments.fuzz.mutate import Mutator
from experiments.fuzz.parsers import PARSERS
from tenuto.sim.compare import run_each

CHUNK = 1000
"""Inputs that one seed makes; the unit of work."""


@dataclass
class Tally:
    """What one parser did."""

    inputs: int = 0
    refused: int = 0
    cpu_s: float = 0.0
    slowest_ms: float = 0.0
    failures: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By kind: the text of the first, how many there were, and the smallest input; later its file."""


class Chunk(NamedTuple):
    """Inputs of one parser that are made together."""

    name: str
    seed: int
    number: int
    num_inputs: int


def run_chunk(chunk: Chunk) -> Tally:
    """One chunk's tally, with the inputs that failed."""
    parser = PARSERS[chunk.name]
    mutator = Mutator(random.Random(f"{chunk.seed}/{chunk.name}/{chunk.number}"), parser.load_corpus())
    tally = Tally()
    for data in parser.load_corpus():
        guard.try_input(parser.run, data)  # what is loaded or cached now is not measured
    for _ in range(chunk.num_inputs):
        data = mutator.make()
        outcome = guard.try_input(parser.run, data)
        tally.inputs += 1
        tally.refused += outcome.is_refused
        tally.cpu_s += outcome.cpu_s
        tally.slowest_ms = max(tally.slowest_ms, 1000 * outcome.cpu_s)
        failure = outcome.failure
        if failure is None:
            continue
        known = tally.failures.setdefault(failure.kind, {"count": 0, "text": failure.text})
        known["count"] += 1
        if known["count"] == 1:
            known["input"] = guard.minimise(parser.run, data, failure.kind)
    return tally


def run_all(names: Sequence[str], seed: int, num_inputs: int, workers: int, out: Path) -> dict[str, Tally]:
    """Spread the inputs evenly over the parsers; write each failing input into the folder `out`."""
    chunks = list(_split(names, seed, num_inputs))
    tallies = {name: Tally() for name in names}
    started_s = said_s = time.monotonic()
    for number, (chunk, found) in enumerate(run_each(run_chunk, chunks, workers), 1):
        _add(tallies[chunk.name], found, chunk.name, out)
        if time.monotonic() - said_s > 5 or number == len(chunks):
            said_s = time.monotonic()
            _say(tallies, number, len(chunks), said_s - started_s)
    return tallies


def _split(names: Sequence[str], seed: int, num_inputs: int) -> Iterator[Chunk]:
    """The chunks, of the parsers in turn."""
    left = {name: num_inputs // len(names) + (n < num_inputs % len(names)) for n, name in enumerate(names)}
    number = 0
    while any(left.values()):
        for name in names:
            size = min(CHUNK, left[name])
            left[name] -= size
            if size:
                yield Chunk(name, seed, number, size)
        number += 1


def _add(tally: Tally, found: Tally, name: str, out: Path) -> None:
    tally.inputs += found.inputs
    tally.refused += found.refused
    tally.cpu_s += found.cpu_s
    tally.slowest_ms = max(tally.slowest_ms, found.slowest_ms)
    for kind, failure in found.failures.items():
        known = tally.failures.setdefault(kind, {"count": 0, "text": failure["text"]})
        known["count"] += failure["count"]
        data = failure["input"]
        path = Path(known["input"]) if "input" in known else None
        if path is None or len(data) < path.stat().st_size:
            out.mkdir(parents=True, exist_ok=True)
            digest = hashlib.blake2b(kind.encode(), digest_size=4).hexdigest()
            path = path or out / f"{name}-{digest}"
            path.write_bytes(data)
            known["input"] = str(path)
            again = f"python -m experiments.fuzz --parser {name} --input {path}"
            print(f"FAILED {kind}: {again}\n{failure['text']}", file=sys.stderr, flush=True)


def _say(tallies: dict[str, Tally], number: int, num_chunks: int, elapsed_s: float) -> None:
    inputs = sum(tally.inputs for tally in tallies.values())
    kinds = sum(len(tally.failures) for tally in tallies.values())
    left_s = elapsed_s / number * (num_chunks - number)
    text = f"{inputs:,} inputs, {inputs / elapsed_s:,.0f} per second, {left_s / 60:.0f} min left"
    print(f"{text}, {kinds} kinds of failure", file=sys.stderr, flush=True)


def format_table(tallies: dict[str, Tally]) -> str:
    """A line per parser."""
    lines = [f"{'parser':18} {'inputs':>9} {'refused':>8} {'mean':>9} {'slowest':>9}  failures  reads"]
    for name, tally in tallies.items():
        mean_ms = 1000 * tally.cpu_s / max(1, tally.inputs)
        lines.append(
            f"{name:18} {tally.inputs:>9,} {tally.refused / max(1, tally.inputs):>8.0%} {mean_ms:>6.2f} ms "
            f"{tally.slowest_ms:>6.0f} ms"
            f"  {sum(each['count'] for each in tally.failures.values()):>8}  {PARSERS[name].reads}"
        )
    return "\n".join(lines)


def to_json(tallies: dict[str, Tally], seed: int) -> str:
    """The tallies as JSON."""
    parsers = {name: vars(tally) for name, tally in tallies.items()}
    return json.dumps({"seed": seed, "max_cpu_s": guard.MAX_CPU_S, "parsers": parsers}, indent=1)
