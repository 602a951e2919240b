"""What the runs of scenarios say: distributions of ratios, never single rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from experiments.random_scenarios.draw import AGENTS, Scenario, Seed
from experiments.random_scenarios.runs import (
    CLAIRVOYANT,
    EXPLAINING,
    OURS,
    STOCK,
    UNLIMITED,
    get_scenario,
    get_setting,
)
from experiments.results.row import OURS as OURS_AND_PARTS
from experiments.results.settings import YARDSTICKS, Setting
from experiments.results.tables import format_markdown
from tenuto.records.metrics import get_geometric_mean, get_percentile

MATTERS = 1.1
"""The policy matters where stock as shipped takes more than this much of the best."""
LATE = 1.3
"""A rival is timely where P95 TTFTs, of all turns and of plain requests, are at most this much of stock's."""
SAME = 0.02
"""Ratios that differ from 1 by less say nothing."""
METRICS = {
    "mean job time": ("job_s", "mean"),
    "P95 job time": ("job_s", "p95"),
    "P99 job time": ("job_s", "p99"),
    "mean slowdown": ("slowdown", "mean"),
    "P95 TTFT": ("ttft_s", "p95"),
    "plain P95 TTFT": ("plain_ttft_s", "p95"),
    "longest wait": ("queue_s", "max"),
}
"""By name, where a record has it. All are times: less is better."""
ASKED = "plain P95 TTFT, without agents' jobs of one turn"
FIGURES = {**METRICS, ASKED: ("asked_ttft_s", "p95")}
"""Also what only some runs have: those of rivals may be older."""
MEAN = "mean job time"
ABLATION = "experiments.ablation:"

Record = Mapping[str, Any]
Id = tuple[Seed, int]
"""A scenario's seed and number."""


def get_value(record: Record, metric: str) -> float | None:
    """A metric of a run; None where there is none, such as plain requests."""
    part, name = FIGURES[metric]
    return None if record.get(part) is None else float(record[part][name])


@dataclass(frozen=True)
class Found:
    """The runs of all scenarios; a scenario's figure is the geometric mean over its repeats."""

    records: Sequence[Record]

    @cached_property
    def by_setting(self) -> dict[Setting, dict[Id, list[Record]]]:
        """The runs by setting and scenario, in the order of the repeats."""
        found: dict[Setting, dict[Id, list[Record]]] = {}
        for each in sorted(self.records, key=lambda each: each["repeat"]):
            runs = found.setdefault(get_setting(each), {})
            runs.setdefault((each["seed"], each["number"]), []).append(each)
        return found

    @cached_property
    def scenarios(self) -> list[Id]:
        """Those with a run of stock and one of ours."""
        return sorted(self.by_setting.get(OURS, {}).keys() & self.by_setting.get(STOCK, {}).keys())

    @cached_property
    def rivals(self) -> list[Setting]:
        """What competes: no yardsticks, not ours, whole or without a part."""
        return [
            each
            for each in self.by_setting
            if not each.policy.startswith(OURS_AND_PARTS) and each.policy not in YARDSTICKS
        ]

    @cached_property
    def matters(self) -> list[Id]:
        """The scenarios where the policy matters at all: see `MATTERS`."""
        best = {each: self._get_best_mean(each) for each in self.scenarios}
        return [each for each in self.scenarios if self.get(STOCK, each, MEAN) > MATTERS * best[each]]

    @property
    def groups(self) -> dict[str, list[Id]]:
        """All scenarios, and those where the policy matters, as the tables tell them apart."""
        return {"all": self.scenarios, "policy matters": self.matters}

    def get(self, setting: Setting, scenario: Id, metric: str) -> float:
        """A scenario's figure; raises KeyError if it was not run, or has none."""
        values = [get_value(each, metric) for each in self.by_setting[setting][scenario]]
        known = [each for each in values if each is not None]
        if not known:
            raise KeyError(metric)
        return get_geometric_mean(known)

    def get_ratios(
        self, over: Setting | Mapping[Id, Setting], metric: str, scenarios: Iterable[Id], of: Setting = OURS
    ) -> dict[Id, float]:
        """`of` over another setting, by scenario; those where one of the two has no figure are left out."""
        found = {}
        for scenario in scenarios:
            try:
                base = self.get(over if isinstance(over, Setting) else over[scenario], scenario, metric)
                value = self.get(of, scenario, metric)
            except KeyError:
                continue
            if base > 0:
                found[scenario] = value / base
        return found

    def get_range(self, scenario: Id, metric: str) -> tuple[float, float]:
        """The least and the largest ratio to stock of one repeat."""
        pairs = zip(self.by_setting[OURS][scenario], self.by_setting[STOCK][scenario], strict=False)
        ratios = [(get_value(own, metric) or 0) / (get_value(base, metric) or 1) for own, base in pairs]
        return min(ratios), max(ratios)

    def get_best(self, scenario: Id, settings: Iterable[Setting] | None = None) -> Setting:
        """The setting with the least mean job time in this scenario: what one knows in hindsight."""
        ran = [each for each in (settings or self.rivals) if scenario in self.by_setting[each]]
        return min(ran, key=lambda each: self.get(each, scenario, MEAN))

    def get_best_timely(self, scenario: Id) -> Setting:
        """The best of the settings that delay first tokens no more than `LATE` allows; stock is one."""

        def is_timely(setting: Setting) -> bool:
            ratios = [
                self.get_ratios(STOCK, metric, [scenario], of=setting).get(scenario, 0.0)
                for metric in ("P95 TTFT", "plain P95 TTFT")
            ]
            return max(ratios) <= LATE

        return self.get_best(scenario, filter(is_timely, self.rivals))

    def _get_best_mean(self, scenario: Id) -> float:
        best = self.get_best(scenario)
        return min(self.get(best, scenario, MEAN), self.get(OURS, scenario, MEAN))

    def get_best_for_all(self, policy: str) -> Setting | None:
        """The one setting at which this policy does best over all scenarios. None if it was not run."""
        ran = [
            each
            for each in self.rivals
            if each.policy == policy and set(self.scenarios) <= self.by_setting[each].keys()
        ]
        if not ran:
            return None
        return min(ran, key=lambda each: get_geometric_mean(self.get(each, s, MEAN) for s in self.scenarios))


def format_report(found: Found) -> str:
    """The tables, in Markdown."""
    if not found.scenarios:
        return "No scenario has run under both stock and tenuto yet."
    return "\n\n".join(
        part
        for part in (
            _format_answer(found),
            _format_over_stock(found),
            _format_first_tokens(found),
            _format_traffic(found),
            _format_rivals(found),
            _format_bounds(found),
            _format_parts(found),
            _format_worst(found),
        )
        if part
    )


BEGIN, END = "<!-- random scenarios -->", "<!-- end of random scenarios -->"


def write_page(found: Found, path: Path) -> None:
    """Put the report between the marks of a page. Raises ValueError if the page lacks them."""
    head, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{path} has no {BEGIN} and {END}")
    path.write_text(f"{head}{BEGIN}\n\n{format_report(found)}\n\n{END}{tail}", encoding="utf-8")


def _format_answer(found: Found) -> str:
    means = found.get_ratios(STOCK, MEAN, found.scenarios)
    worse = {each: ratio for each, ratio in means.items() if ratio > 1 + SAME}
    tails = found.get_ratios(STOCK, "P95 TTFT", found.scenarios)
    late = sum(ratio > 1.1 for ratio in tails.values())
    best = found.get_ratios({each: found.get_best(each) for each in found.scenarios}, MEAN, found.scenarios)
    where = f"it takes {_mean_of(means, found.matters)}" if found.matters else "there is nothing to say"
    of_plain = "".join(
        f", {whose} in {sum(ratio > 1.1 for ratio in ratios.values())} of {len(ratios)} "
        f"(at most {max(ratios.values()):.1f})"
        for whose, metric in (
            ("that of plain requests", "plain P95 TTFT"),
            ("and without agents' jobs of one turn", ASKED),
        )
        if (ratios := found.get_ratios(STOCK, metric, found.scenarios))
    )
    lines = [
        f"Over {len(means)} scenarios, `tenuto` takes **{get_geometric_mean(means.values()):.2f}** of the "
        f"mean job time of stock vLLM as it ships ({min(means.values()):.2f} to {max(means.values()):.2f}; "
        f"worse by more than {SAME:.0%} in {len(worse)}).",
        f"In the {len(found.matters)} where the policy matters (stock takes more than {MATTERS:g} of the "
        f"best) {where}.",
        f"The P95 time to the first token is more than 1.1 of stock's in {late} of {len(tails)} scenarios "
        f"(at most {max(tails.values()):.1f}){of_plain}.",
        f"Over the best rival in hindsight, at its best setting: "
        f"{get_geometric_mean(best.values()):.3f} ({min(best.values()):.2f} to {max(best.values()):.2f}).",
    ]
    return "\n".join(lines)


def _mean_of(ratios: Mapping[Id, float], scenarios: Iterable[Id]) -> str:
    return f"{get_geometric_mean(ratios[each] for each in scenarios if each in ratios):.2f}"


HEADS = ("geometric mean", "median", "P95", "range", "better / worse by 2 %")


def _format_ratios(ratios: Mapping[Id, float]) -> list[str]:
    """The cells under `HEADS`."""
    if not ratios:
        return ["–"] * len(HEADS)
    values = list(ratios.values())
    better, worse = sum(each < 1 - SAME for each in values), sum(each > 1 + SAME for each in values)
    return [
        *(f"{get_geometric_mean(values):.3f}", f"{get_percentile(values, 50):.3f}"),
        *(f"{get_percentile(values, 95):.2f}", f"{min(values):.2f} to {max(values):.2f}"),
        f"{better} / {worse} of {len(values)}",
    ]


def _format_over_stock(found: Found) -> str:
    lines = [
        [metric, title, *_format_ratios(found.get_ratios(STOCK, metric, scenarios))]
        for metric in METRICS
        for title, scenarios in found.groups.items()
    ]
    table = format_markdown(["metric", "scenarios", *HEADS], lines)
    return f"### Over stock vLLM as it ships\n\n{table}"


FELT_S = 0.1
"""A later first token that nobody feels: by so many seconds."""


def _format_first_tokens(found: Found) -> str:
    """How often first tokens come later than under stock, and how often by so much that one feels it."""
    lines = []
    for metric in ("P95 TTFT", "plain P95 TTFT", ASKED):
        ratios = found.get_ratios(STOCK, metric, found.scenarios)
        felt = {
            each: ratio
            for each, ratio in ratios.items()
            if found.get(OURS, each, metric) - found.get(STOCK, each, metric) > FELT_S
        }
        counts = [
            sum(ratio > limit for ratio in of.values()) for limit in (1.1, 1.3) for of in (ratios, felt)
        ]
        lines.append([metric, str(len(ratios)), *map(str, counts)])
    felt_s = f"and by over {FELT_S:g} s"
    table = format_markdown(["metric", "scenarios", "over 1.1 of stock's", felt_s, "over 1.3", felt_s], lines)
    return "### First tokens over stock vLLM as it ships: in how many scenarios they come later\n\n" + table


TRAFFIC: Mapping[str, Callable[[Scenario], bool]] = {
    "load under 0.9 of what stock can do": lambda scenario: scenario.load < 0.9,
    "load 0.9 to 1.2": lambda scenario: 0.9 <= scenario.load < 1.2,
    "load over 1.2": lambda scenario: scenario.load >= 1.2,
    "agents only": lambda scenario: all(each.name in AGENTS for each in scenario.kinds),
    "with plain requests": lambda scenario: any(each.name == "plain" for each in scenario.kinds),
    "with people": lambda scenario: any(each.name == "people" for each in scenario.kinds),
    "with host memory": lambda scenario: bool(scenario.setup.host_gb),
    "without host memory": lambda scenario: not scenario.setup.host_gb,
    "no hints": lambda scenario: scenario.hints == "none",
}
"""Groups of scenarios. One scenario can be in several."""
TIGHT = 0.95
"""Memory is tight where unlimited memory would make `tenuto` take less than this much."""


def _format_traffic(found: Found) -> str:
    groups = {
        name: [each for each in found.scenarios if belongs(get_scenario(*each))]
        for name, belongs in TRAFFIC.items()
    }
    if UNLIMITED in found.by_setting:
        bounds = found.get_ratios(OURS, MEAN, found.scenarios, of=UNLIMITED)
        groups["memory is tight"] = [each for each, ratio in bounds.items() if ratio < TIGHT]
    lines = []
    for name, scenarios in groups.items():
        means = found.get_ratios(STOCK, MEAN, scenarios).values()
        if not means:
            continue
        tails = (
            found.get_ratios(STOCK, metric, scenarios).values() for metric in ("P95 TTFT", "plain P95 TTFT")
        )
        shown = [f"{get_geometric_mean(each):.2f}" if each else "–" for each in tails]
        mean, span = f"{get_geometric_mean(means):.2f}", f"{min(means):.2f} to {max(means):.2f}"
        lines.append([name, str(len(means)), mean, span, *shown])
    heads = ["scenarios", "number", "mean job time", "range", "P95 TTFT", "plain P95 TTFT"]
    return "### By kind of traffic, over stock vLLM as it ships\n\n" + format_markdown(heads, lines)


def _format_rivals(found: Found) -> str:
    policies = list(dict.fromkeys(each.policy for each in found.rivals))
    settings = [each for policy in policies if (each := found.get_best_for_all(policy)) is not None]
    lines = [
        [f"`{setting.label}`", title, *_format_ratios(found.get_ratios(setting, MEAN, scenarios))]
        for setting in settings
        for title, scenarios in found.groups.items()
    ]
    hindsight = {each: found.get_best(each) for each in found.scenarios}
    timely = {each: found.get_best_timely(each) for each in found.scenarios}
    for title, scenarios in found.groups.items():
        for metric in (MEAN, "P95 job time", "P95 TTFT"):
            ratios = found.get_ratios(hindsight, metric, scenarios)
            lines.append([f"the best in hindsight: {metric}", title, *_format_ratios(ratios)])
        ratios = found.get_ratios(timely, MEAN, scenarios)
        lines.append([f"the best timely one in hindsight: {MEAN}", title, *_format_ratios(ratios)])
    return (
        "### Over each rival, at its best setting\n\n"
        f"*Timely* are runs in which P95 TTFTs, of all turns and of plain requests, are at most {LATE:g} of "
        "stock's. Some that are fast in the mean are not.\n\n"
        + format_markdown(["rival", "scenarios", *HEADS], lines)
    )


def _format_bounds(found: Found) -> str:
    bounds = {"`clairvoyant @512`": CLAIRVOYANT, "`tenuto` with unlimited memory": UNLIMITED}
    lines = [
        [f"{name}: {metric}", title, *_format_ratios(found.get_ratios(setting, metric, scenarios))]
        for name, setting in bounds.items()
        if setting in found.by_setting
        for title, scenarios in found.groups.items()
        for metric in (MEAN, "P95 TTFT")
    ]
    table = format_markdown(["bound", "scenarios", *HEADS], lines)
    return f"### Over bounds: a policy that knows the future, and unlimited memory\n\n{table}"


def _format_parts(found: Found) -> str:
    """The ablation: `tenuto` without one part over the whole, so above 1 is what the part is worth."""
    parts = [each for each in found.by_setting if each.policy.startswith(ABLATION)]
    if not parts:
        return ""
    metrics = (MEAN, "P95 job time", "P95 TTFT", "plain P95 TTFT")
    lines = []
    for part in parts:
        ratios = [found.get_ratios(OURS, metric, found.scenarios, of=part) for metric in metrics]
        shown = [f"{get_geometric_mean(each.values()):.3f}" if each else "–" for each in ratios]
        means = ratios[0].values()
        name = part.policy.removeprefix(ABLATION)
        lines.append([name, str(len(means)), *shown, f"{min(means):.2f} to {max(means):.2f}"])
    table = format_markdown(["without", "scenarios", *metrics, "range of the mean"], lines)
    return f"### What each part is worth: `tenuto` without it, over `tenuto`\n\n{table}"


def get_worst(found: Found, number: int = 5) -> list[Id]:
    """The scenarios with the largest ratio of the mean job time to the best rival's."""
    ratios = found.get_ratios({each: found.get_best(each) for each in found.scenarios}, MEAN, found.scenarios)
    return sorted(ratios, key=lambda each: -ratios[each])[:number]


def _format_worst(found: Found) -> str:
    lines = ["### The worst five against the best rival, and why\n", LEGEND]
    for scenario in get_worst(found):
        best = found.get_best(scenario)
        own, base = found.by_setting[OURS][scenario][0], found.by_setting[best][scenario][0]
        ratio = found.get(OURS, scenario, MEAN) / found.get(best, scenario, MEAN)
        what = get_scenario(*scenario)
        lines.append(f"- **{what.name}**: {ratio:.3f} of `{best.label}`. {what.describe()}.")
        lines.append(f"  {_compare_work(own, base)}")
        changes = {
            each: found.get(each, scenario, MEAN) / found.get(OURS, scenario, MEAN)
            for each in EXPLAINING
            if scenario in found.by_setting.get(each, {})
        }
        if changes:
            order = sorted(changes, key=changes.__getitem__)
            words = ", ".join(f"{each.step}: {changes[each]:.3f}" for each in order)
            lines.append(f"  `tenuto` with one thing changed: {words}.")
    return "\n".join(lines)


LEGEND = """\
`load` is a multiple of what stock can do. `a + b + c a turn → d` are tokens: of the shared prompt, of the first prompt, added in each turn, of an answer. The last
line of each entry has the ratio of `tenuto` with one thing changed to `tenuto` as it is: 512 and 2048 are step sizes.
"""  # noqa: E501


def _compare_work(own: Record, base: Record) -> str:
    parts = []
    for name, key in (("computed again", "recomputed_tokens"), ("loaded", "loaded_tokens")):
        parts.append(f"{name} {own[key] or 0:,} tokens, the rival {base[key] or 0:,}")
    parts.append(f"preemptions {own['preemptions']}, {base['preemptions']}")
    return "; ".join(parts) + "."


def draw_picture(found: Found, path: Path) -> None:
    """The ratios to stock of three metrics, sorted, with the range of the repeats, as SVG."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    metrics = (MEAN, "P95 job time", "P95 TTFT")
    figure, panels = pyplot.subplots(1, len(metrics), figsize=(10, 3.6), sharey=True, layout="constrained")
    for panel, metric in zip(panels, metrics, strict=True):
        ratios = found.get_ratios(STOCK, metric, found.scenarios)
        order = list(enumerate(sorted(ratios, key=lambda each: ratios[each])))
        for color, matters in (("tab:blue", True), ("silver", False)):
            drawn = {at: each for at, each in order if (each in found.matters) == matters}
            ranges = [found.get_range(each, metric) for each in drawn.values()]
            panel.vlines(
                [*drawn], [low for low, _ in ranges], [high for _, high in ranges], color=color, linewidth=1
            )
            panel.plot([*drawn], [ratios[each] for each in drawn.values()], "o", markersize=3, color=color)
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set_yscale("log")
        ticks = (0.25, 0.5, 0.75, 1, 1.5, 2, 4, 8)
        panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.minorticks_off()
        panel.set_title(metric)
        panel.set_xlabel("scenarios, sorted")
    panels[0].set_ylabel("tenuto / stock vLLM as it ships")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def compare_codes(records: Iterable[Record], other: Iterable[Record], metric: str) -> dict[Id, float]:
    """By scenario, `tenuto` of the first records over `tenuto` of the others: two codes."""
    before = Setting("of the other code")
    renamed = [{**each, "policy": before.policy} for each in other if get_setting(each) == OURS]
    found = Found([*records, *renamed])
    return found.get_ratios(before, metric, sorted(found.by_setting.get(OURS, ())))


def format_codes(records: Iterable[Record], other: Iterable[Record]) -> str:
    """The present code over another one, metric by metric."""
    ratios = {metric: compare_codes(records, other, metric) for metric in METRICS}
    table = format_markdown(
        ["metric", *HEADS], [[metric, *_format_ratios(each)] for metric, each in ratios.items()]
    )
    means = ratios[MEAN]
    worst = sorted(sorted(means, key=lambda each: -means[each])[:5])
    named = ", ".join(f"{seed}/{number} {means[seed, number]:.3f}" for seed, number in worst)
    return f"### `tenuto` of this code over `tenuto` of the other\n\n{table}\n\nWorst means: {named}"
