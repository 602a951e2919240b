"""How well the length of tool calls is predicted: the tables of docs/tool_times.md.

    python experiments/tool_times/accuracy.py            # prints them; --write puts them into the page

Two tests. Held-out commands: those of experiments/tool_times/data whose templates the shipped model was not
trained on.
Recorded agent tasks: tool_calls_agentperf.json, of which only the programs, pipes and lengths of the commands
are known; left out where that file is missing. Everything is computed from files: each run says the same.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import math
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tenuto.core.types import Job, ToolCall, Turn
from tenuto.estimators.commands import MIN_TIME_S, read_command
from tenuto.policies.published.contextserve import MAX_LOG_S, ContextServe, Speed
from tenuto.records.metrics import get_geometric_mean
from tenuto_predict import SHIPPED

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "experiments" / "tool_times" / "data" / "commands.csv.gz"
AGENTPERF = ROOT / "shared" / "reference" / "tool_calls_agentperf.json"
PAGE = ROOT / "docs" / "tool_times.md"
BEGIN, END = "<!-- begin: experiments/tool_times/accuracy.py -->", "<!-- end -->"
SEED = 0
FAST_S, SLOW_S = ContextServe.pin_s, ContextServe.slow_s


@dataclass(frozen=True)
class Call:
    """One tool call with its true time."""

    command: str
    seconds: float


@dataclass(frozen=True)
class Guess:
    """What a predictor said: a class, and seconds where it has any."""

    speed: Speed
    seconds: float | None = None


@dataclass(frozen=True)
class Score:
    """One predictor on one set of calls."""

    predictor: str
    num_calls: int
    right: float
    """Share of calls in their class; one between fast and slow is right as uncertain."""
    uncertain: float
    wrong: float
    """Share called fast that took over 3 s, or called slow that took under 6 s."""
    slow_found: float | None
    """Share of the slow calls that were called slow."""
    log10_error: float | None
    """Mean of |log10(predicted / true)|; times under 0.1 s count as 0.1 s."""
    confusion: dict[str, int]


# Calls.


def read_calls() -> tuple[list[Call], list[Call]]:
    """Those trained on, and those held out; a command that both have is in the first alone."""
    with gzip.open(DATA, "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    calls: dict[str, list[Call]] = {"train": [], "test": []}
    for row in rows:
        calls[row["split"]].append(Call(row["command"], float(row["duration_s"])))
    trained = {call.command for call in calls["train"]}
    return calls["train"], [call for call in calls["test"] if call.command not in trained]


def read_agentperf(path: Path) -> list[Call]:
    """The recorded calls, each as a command made up from what is known of it."""
    calls = json.loads(path.read_text(encoding="utf-8"))["calls"]
    return [Call(make_command(call), call["duration_s"]) for call in calls]


def make_command(call: dict[str, Any]) -> str:
    """Programs joined by && and, towards the end, by pipes; one long word brings it to its length."""
    # Lines of a here-document were counted among the programs where it has one.
    programs = [name for name in call["programs"] if name][: 2 if call["heredoc"] else None] or ["true"]
    num_pipes = min(call["pipes"], len(programs) - 1)
    first = " && ".join(programs[: len(programs) - num_pipes])
    text = " | ".join([first, *programs[len(programs) - num_pipes :]])
    if call["heredoc"]:
        body = "x" * max(0, call["command_chars"] - len(text) - 12)
        return f"{text} << 'END'\n{body}\nEND"
    return f"{text} ".ljust(call["command_chars"], "x").rstrip()


# Predictors: from the training commands alone, and learning as they go.


def get_speed(seconds: float) -> Speed:
    return Speed.FAST if seconds <= FAST_S else Speed.SLOW if seconds >= SLOW_S else Speed.UNCERTAIN


Mean = Callable[[Iterable[float]], float]


class ToolMeans:
    """The mean per tool, over all tools where the tool is new: what the Continuum prototype goes by."""

    def __init__(self, mean: Mean, calls: Iterable[Call] = (), *, first_word: bool = False) -> None:
        self._mean = mean
        self._first_word = first_word
        self._times: dict[str, list[float]] = defaultdict(list)
        for call in calls:
            self.learn(call)

    def guess(self, call: Call) -> Guess:
        times = self._times.get(self._get_tool(call)) or self._times.get("")
        seconds = self._mean(times) if times else 1.0
        return Guess(get_speed(seconds), seconds)

    def learn(self, call: Call) -> None:
        self._times[self._get_tool(call)].append(call.seconds)
        self._times[""].append(call.seconds)

    def _get_tool(self, call: Call) -> str:
        return call.command.split()[0] if self._first_word else read_command(call.command).get_main_program()


class OfPolicy:
    """The policy's own judgement."""

    def __init__(self, **options: Any) -> None:
        self._policy = ContextServe(**options)
        self._num_asked = 0

    def guess(self, call: Call) -> Guess:
        self._num_asked += 1
        prediction = self._policy._predict(make_tool(call), str(self._num_asked))
        return Guess(prediction.speed, self._expect_s(call))

    def learn(self, call: Call) -> None:
        self._policy.on_tool_returned(Turn("t", Job("j", 0.0, 2), 0.0, 100), make_tool(call), call.seconds)

    def _expect_s(self, call: Call) -> float | None:
        """The median that it expects; None while it knows nothing of such a call."""
        text = self._policy._read(call.command)
        belief = self._policy._beliefs.get(text.program)
        if belief is None and text.log_s is None:
            return None
        log_s, _ = self._policy._expect(text)
        return math.exp(min(log_s + (belief.mean if belief else 0.0), MAX_LOG_S))


def make_tool(call: Call) -> ToolCall:
    return ToolCall(call.command.split()[0], call.command)


# Scores.


def score(name: str, predictor: Any, calls: list[Call], *, learns: bool) -> Score:
    """Guess each call; if it learns, then tell it the time, so that later guesses know of it."""
    confusion: Counter[str] = Counter()
    errors = []
    for call in calls:
        guess = predictor.guess(call)
        confusion[f"{get_speed(call.seconds).value} as {guess.speed.value}"] += 1
        if guess.seconds is not None:
            errors.append(abs(math.log10(max(guess.seconds, MIN_TIME_S) / max(call.seconds, MIN_TIME_S))))
        if learns:
            predictor.learn(call)
    num = len(calls)
    right = sum(confusion[f"{speed.value} as {speed.value}"] for speed in Speed)
    uncertain = sum(confusion[f"{speed.value} as uncertain"] for speed in Speed)
    wrong = num - right - sum(confusion[f"{speed} as uncertain"] for speed in ("fast", "slow"))
    num_slow = sum(confusion[f"slow as {speed.value}"] for speed in Speed)
    return Score(
        name,
        num,
        right / num,
        uncertain / num,
        wrong / num,
        confusion["slow as slow"] / num_slow if num_slow else None,
        statistics.fmean(errors) if errors else None,
        dict(sorted(confusion.items())),
    )


def score_all(calls: list[Call], train: list[Call]) -> dict[str, list[Score]]:
    """All predictors: as trained, and learning as they go from nothing (means) or from the model (policy)."""

    def make_means(known: Iterable[Call]) -> dict[str, Any]:
        return {
            "mean of the first word": ToolMeans(statistics.fmean, known, first_word=True),
            "mean of the main program": ToolMeans(statistics.fmean, known),
            "geometric mean of the main program": ToolMeans(get_geometric_mean, known),
        }

    trained = make_means(train) | {
        "trees": OfPolicy(explore=False, trusted_calls=0),
        "contextserve (rules, then trees)": OfPolicy(explore=False),
    }
    learning = make_means([]) | {
        "contextserve, without draws": OfPolicy(explore=False),
        "contextserve (Thompson sampling)": OfPolicy(explore=True),
    }
    return {
        "As trained": [score(name, each, calls, learns=False) for name, each in trained.items()],
        "Learning as they go": [score(name, each, calls, learns=True) for name, each in learning.items()],
    }


# Words.


def show(title: str, tables: dict[str, list[Score]]) -> str:
    first = tables["As trained"][0]
    truth: Counter[str] = Counter()
    for cell, count in first.confusion.items():
        truth[cell.split()[0]] += count
    lines = [
        f"### {title}",
        "",
        f"{first.num_calls} calls: {truth['fast']} fast (≤ {FAST_S:g} s), {truth['uncertain']} between, "
        f"{truth['slow']} slow (≥ {SLOW_S:g} s).",
    ]
    for name, scores in tables.items():
        lines += [
            "",
            f"| {name} | right | uncertain | wrong | slow found | error of log10 s |",
            "|---|---|---|---|---|---|",
        ]
        for one in scores:
            cells = (one.right, one.uncertain, one.wrong, one.slow_found)
            shares = [f"{100 * cell:.1f} %" if cell is not None else "–" for cell in cells]
            error = "–" if one.log10_error is None else f"{one.log10_error:.3f}"
            lines.append(f"| {one.predictor} | {' | '.join(shares)} | {error} |")
    lines += ["", *show_confusion(tables["As trained"][-1])]
    return "\n".join(lines)


def show_training() -> str:
    """What the training says of itself."""
    model = json.loads((ROOT / "src" / "tenuto_predict" / SHIPPED).read_text(encoding="utf-8"))
    errors = "; ".join(f"{name} {error}" for name, error in model["cross_validated_log10_error"].items())
    return (
        f"{len(model['trees'])} trees from {model['num_commands']} commands. Error of log10 seconds within "
        f"the training's commands, each template left out in turn: {errors}."
    )


def show_confusion(one: Score) -> list[str]:
    names = [speed.value for speed in Speed]
    lines = [
        f"| {one.predictor}, as trained | " + " | ".join(f"called {name}" for name in names) + " |",
        "|---|---|---|---|",
    ]
    for truth in names:
        label = "between" if truth == "uncertain" else truth
        lines.append(
            f"| {label} | " + " | ".join(str(one.confusion.get(f"{truth} as {n}", 0)) for n in names) + " |"
        )
    return lines


def write_between(begin: str, end: str, text: str) -> None:
    """Put a text into the page, between these marks."""
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.split(begin)[0], page.split(end)[1]
    PAGE.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--agentperf", type=Path, default=AGENTPERF, help="the recorded tasks; left out if missing"
    )
    parser.add_argument("--json", type=Path, help="also write all numbers, confusions included, to this file")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/tool_times.md")
    options = parser.parse_args()
    train, held_out = read_calls()
    random.Random(SEED).shuffle(held_out)
    results = {"Held-out commands": score_all(held_out, train)}
    if options.agentperf.exists():
        results["Recorded agent tasks"] = score_all(read_agentperf(options.agentperf), train)
    text = "\n\n".join([show_training(), *(show(title, tables) for title, tables in results.items())])
    print(text)
    if options.json:
        numbers = {
            title: {k: [asdict(s) for s in v] for k, v in each.items()} for title, each in results.items()
        }
        options.json.write_text(json.dumps(numbers, indent=1) + "\n")
    if options.write:
        write_between(BEGIN, END, text)


if __name__ == "__main__":
    main()
