"""The cases of tests/differential with more seeds: does the simulator decide what vLLM decides?

    python -m experiments.differential --seeds 100-119 [--case scheduler --case tiers/native] [--workers N]
    python -m experiments.differential --seeds 7 --case leases/hold/2      one run again
    python -m experiments.differential --list                              the names of the cases

Each run prints a line of JSON: the case, the seed, the number of equal steps, and in `differs` what the first
other step has, or null. Progress goes to stderr. The exit status is 1 if any run differs.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any

from experiments.command_line import make_parser
from tenuto.sim.compare import run_each

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")


def main(arguments: list[str] | None = None) -> int:
    """Compare; 0 if no run differs."""
    from tests.differential.cases import CASES, DRAWN

    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=_read_seeds, default=range(1, 3), help="FIRST-LAST, or one (1-2)")
    parser.add_argument(
        "--case", action="append", default=[], help="only names that begin so; several times for more"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes (%(default)s)")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parsed = parser.parse_args(arguments)
    names = [name for name in (*CASES, *DRAWN) if name.startswith(tuple(parsed.case) or "")]
    if not names or parsed.workers < 1:
        parser.error("--case must be the beginning of a name that --list prints, --workers at least 1")
    if parsed.list:
        print("\n".join(names))
        return 0
    runs = [(name, seed) for seed in parsed.seeds for name in names]
    num_different, started_s, said_s = 0, time.monotonic(), 0.0
    for number, (_, record) in enumerate(run_each(run_one, runs, parsed.workers), 1):
        print(json.dumps(record), flush=True)
        num_different += record["differs"] is not None
        now_s = time.monotonic()
        if record["differs"] or now_s - said_s > 5 or number == len(runs):
            said_s = now_s
            left_s = (now_s - started_s) / number * (len(runs) - number)
            text = f"{number}/{len(runs)} runs, {num_different} differ, {left_s / 60:.0f} min left"
            print(text, file=sys.stderr, flush=True)
    return 1 if num_different else 0


def run_one(place: tuple[str, int]) -> dict[str, Any]:
    """What came of one case and seed."""
    import vllm

    from tests.differential.cases import get_case
    from tests.differential.compare import Differs, compare

    name, seed = place
    case = get_case(name, seed)
    record = {"vllm": vllm.__version__, "case": name, "seed": seed, "equal_steps": 0, "differs": None}
    try:
        for num_steps, _ in enumerate(compare(case, seed), 1):
            record["equal_steps"] = num_steps
    except Differs as error:
        record["differs"] = str(error)
    except Exception:
        # Something raised in one of the two.
        record["differs"] = traceback.format_exc()
    return record


def _read_seeds(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


if __name__ == "__main__":
    # Worker processes find `run_one` by the module's name, which `python -m` does not give it.
    from experiments.differential.__main__ import main as main_by_name

    sys.exit(main_by_name())
