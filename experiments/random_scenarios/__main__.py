"""Stock, every rival at several settings and `tenuto` on whole scenarios that are drawn at random.

    python -m experiments.random_scenarios --seed 11 --count 30          draw, run and report
    python -m experiments.random_scenarios --seed 11 --count 30 --report report what has run
    python -m experiments.random_scenarios --seed 11 --count 3 --list    what they are
    python -m experiments.random_scenarios --seed people-11 --count 30   most jobs are people's
    python -m experiments.random_scenarios --seed 11 --count 30 --against OLD.jsonl   two codes of tenuto

What has run is kept in --out and not run again, unless the code that decides in it has changed since. A
scenario takes a minute or two of processor time with all rivals; `--policies stock` has ours, stock and the
bounds. docs/random_scenarios.md has the prior, and which seeds were used for choosing something: these are
never reported.
"""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from dataclasses import replace
from pathlib import Path

from experiments.command_line import make_parser
from experiments.decision_code import say_confirmed, take_last
from experiments.random_scenarios.draw import PEOPLE, Seed, draw_scenario
from experiments.random_scenarios.report import (
    Found,
    draw_picture,
    format_codes,
    format_report,
    get_worst,
    write_page,
)
from experiments.random_scenarios.runs import EXPLAINING, RIVALS, Book, confirm, list_settings, run_all
from experiments.results.settings import Step

OUT = Path(__file__).parents[1] / "out" / "random_scenarios.jsonl"
CHOSEN_ON = Path(__file__).with_name("chosen_on.txt")


def read_chosen() -> set[str]:
    """The seeds that something was chosen on, and single scenarios: `SEED/NUMBER`."""
    lines = CHOSEN_ON.read_text(encoding="utf-8").splitlines()
    return {line.split()[0] for line in lines if line and not line.startswith("#")}


def read_seed(text: str) -> Seed:
    """A seed of scenarios."""
    try:
        number = int(text.removeprefix(PEOPLE))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is neither a number nor {PEOPLE}N") from None
    return f"{PEOPLE}{number}" if text.startswith(PEOPLE) else number


def read_step(text: str) -> Step:
    """A step size; `default` is what the policy wants, else the engine's whole budget."""
    return None if text == "default" else int(text)


def confirm_kept(book: Book, per_policy: int, workers: int | None) -> int:
    """Whether older runs come out the same with the present code; then it is written down."""
    flows, records = book.read()
    differ, pairs = confirm(records, flows, per_policy, workers)
    return say_confirmed(differ, pairs, per_policy, book.path.name)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--seed",
        type=read_seed,
        required=True,
        help=f"a seed of scenarios: any number; `{PEOPLE}N`: most jobs are people's and plain requests",
    )
    parser.add_argument("--count", type=int, default=30, help="how many of them (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first (%(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="draws of the jobs of each (%(default)s)")
    parser.add_argument(
        "--template",
        type=int,
        default=0,
        metavar="TOKENS",
        help="all prompts begin with so many equal tokens, as chat templates write",
    )
    parser.add_argument(
        "--closed",
        action="store_true",
        help="a fixed number of agents at work: as one ends, the next begins",
    )
    parser.add_argument("--policies", default=",".join(RIVALS), help="the rivals, with commas")
    parser.add_argument("--steps", default="default,512,2048", help="their step sizes, with commas")
    parser.add_argument("--intervals", default="1,2,4,8", help="and their prefill_schedule_interval")
    parser.add_argument("--out", type=Path, default=OUT, help="the file of what has run (%(default)s)")
    parser.add_argument("--against", type=Path, help="another such file: compare `tenuto` of two codes")
    parser.add_argument("--picture", type=Path, help="write the picture to this SVG file")
    parser.add_argument("--page", type=Path, help="write the report into this page, between its marks")
    parser.add_argument("--workers", type=int, help="processes; default: one per core")
    parser.add_argument("--ray", metavar="ADDRESS", help="run on a Ray cluster: auto, or its address")
    parser.add_argument(
        "--confirm",
        type=int,
        metavar="N",
        help="run N kept runs of each policy anew that older code made; if all are equal, none is older",
    )
    parser.add_argument("--report", action="store_true", help="run nothing, report what has run")
    parser.add_argument("--list", action="store_true", help="print the scenarios, and run nothing")
    args = parser.parse_args()
    if args.count < 1 or args.first < 0 or args.repeats < 1:
        parser.error("--count and --repeats must be at least 1, --first must not be negative")
    chosen_on = read_chosen()
    is_chosen_on = str(args.seed) in chosen_on
    if is_chosen_on and (args.page or args.picture):
        parser.error(f"seed {args.seed} was used to choose something: it is never reported")
    scenarios = [(args.seed, number) for number in range(args.first, args.first + args.count)]
    if args.list:
        for place in scenarios:
            scenario = draw_scenario(*place)
            print(f"{scenario.name}  {scenario.describe()}")
        return 0
    steps = [read_step(text) for text in args.steps.split(",")]
    intervals = [int(text) for text in args.intervals.split(",")]
    settings = list_settings(args.policies.split(","), steps, intervals)
    book = Book(args.out, args.template, args.closed)
    if args.confirm is not None:
        return confirm_kept(book, args.confirm, args.workers)
    if args.report:
        wanted = set(scenarios)
        records = [each for each in book.read()[1] if (each["seed"], each["number"]) in wanted]
        last = list(map(dict, take_last(records)))
        if len(last) < len(records):
            print(f"{len(records) - len(last)} records are of older code and do not count.", file=sys.stderr)
        records = last
    else:
        records = run_all(scenarios, settings, book, repeats=args.repeats, workers=args.workers, ray=args.ray)
        worst = get_worst(Found(records))
        records += [
            each
            for each in run_all(worst, EXPLAINING, book, workers=args.workers, ray=args.ray)
            if each not in records
        ]
    left_out = {each for each in chosen_on if each.startswith(f"{args.seed}/")}
    found = Found([each for each in records if f"{each['seed']}/{each['number']}" not in left_out])
    if left_out:
        print(f"Left out, because something was chosen on them: {', '.join(sorted(left_out))}.\n")
    if is_chosen_on:
        print(f"Seed {args.seed} was used to choose something: not to be reported.\n")
    print(format_report(found))
    if args.against is not None:
        print("\n" + format_codes(records, replace(book, path=args.against).read()[1]))
    if args.page is not None:
        write_page(found, args.page)
    if args.picture is not None:
        draw_picture(found, args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
