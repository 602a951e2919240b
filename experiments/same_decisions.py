"""Checks whether a change of the code changed a decision: a digest for every cell of the result tables.

    python -m experiments.same_decisions --write FILE       before the change
    python -m experiments.same_decisions                    after it: names the cells that differ

A cell's `answers` are the policy's answers to each question, in order. Its `turns` are when each turn
arrived, started and finished, and what it hit. Cells run with short windows, because every policy on every
kind of machine matters here, and not the load. `--tables` and `--policies` select cells.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from experiments.json_lines import append_lines, read_lines
from experiments.published_memory import with_published_kv
from experiments.results.row import ROOT
from experiments.results.rows import TABLES
from tenuto.sim.run import run

KEPT = ROOT / "experiments" / "records" / "decisions.jsonl"
WINDOW_S = {
    "ab8": 8.0,
    "ablation": 8.0,
    "options": 8.0,
    "70b": 10.0,
    "sensitivity": 10.0,
    "swe-bench": 20.0,
    "bfcl": 20.0,
}
LEFT_OUT = ("yields", "strength", "why")
"""Parts of an answer that are not compared: names that changed since 0.1.0, and the reason of a refusal."""
HOOKS = {"gives_way": "may_reclaim", "displaces": "may_preempt"}


def digest_cell(place: tuple[str, str, str]) -> dict[str, Any]:
    table, title, policy = place
    row = next(each for each in TABLES[table].make_rows() if each.title == title)
    setup, load = row.place(policy, 42)
    # The digests were made with synchronous scheduling, and one step in flight is the easier case to read.
    setup = dataclasses.replace(setup, async_scheduling=False)
    if load.jps is not None and not Path(load.workload).exists():
        load = dataclasses.replace(load, window_s=WINDOW_S[table])
    answers = hashlib.sha256()
    num_answers = 0

    def log(record: dict[str, Any]) -> None:
        nonlocal num_answers
        if record["kind"] == "chosen":
            # As the policy's own hook, which it was when the digests were made.
            record = {"kind": "asked", "hook": "step_budget", "answer": record["answer"]}
        if record["kind"] != "asked":
            return
        answer = record["answer"]
        if isinstance(answer, dict):
            answer = {key: value for key, value in answer.items() if key not in LEFT_OUT}
        hook = HOOKS.get(record["hook"], record["hook"])
        answers.update(json.dumps([hook, answer]).encode())
        num_answers += 1

    outcome = run(with_published_kv(setup), load, log=log)
    turns = hashlib.sha256()
    for turn in outcome.turns:
        values = (
            *(turn.job, turn.turn - 1, turn.due_s, turn.start_s, turn.first_token_s, turn.last_token_s),
            *(turn.hit_tokens, turn.preemptions),
        )
        turns.update(json.dumps(values).encode())
    return {
        "table": table,
        "row": title,
        "policy": policy,
        "turns": turns.hexdigest()[:16],
        "answers": answers.hexdigest()[:16],
        "num_turns": len(outcome.turns),
        "num_answers": num_answers,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tables", default="ab8,swe-bench,bfcl,70b,sensitivity,ablation,options")
    parser.add_argument("--policies", help="only these")
    parser.add_argument("--every", type=int, default=1, help="only every Nth cell")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--write", type=Path)
    group.add_argument("--against", type=Path, default=KEPT)
    parsed = parser.parse_args()
    places = [
        (table, row.title, policy)
        for table in parsed.tables.split(",")
        for row in TABLES[table].make_rows()
        for policy in TABLES[table].policies
        if parsed.policies is None or policy in parsed.policies.split(",")
    ][:: parsed.every]
    before = {}
    if not parsed.write:
        for record in read_lines(parsed.against):
            before[record["table"], record["row"], record["policy"]] = record
    found, num_different, num_new = [], 0, 0
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        for number, record in enumerate(pool.map(digest_cell, places), start=1):
            found.append(record)
            was = before.get((record["table"], record["row"], record["policy"]))
            num_new += was is None
            if was is not None and was != record:
                num_different += 1
                print("differs:", json.dumps(was), json.dumps(record), flush=True)
            if number % 20 == 0:
                print(f"{number} of {len(places)}", file=sys.stderr, flush=True)
            if parsed.write:
                append_lines(parsed.write, record)
    print(f"{len(found)} cells, {num_different} differ, {num_new} have no digest to compare with")
    return 1 if num_different else 0


if __name__ == "__main__":
    raise SystemExit(main())
