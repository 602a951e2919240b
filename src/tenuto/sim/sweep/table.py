"""A sweep as a table: mean and P95 job time of each cell, the winner marked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tenuto.records.metrics import get_geometric_mean
from tenuto.records.text import is_overloaded
from tenuto.sim.sweep.split import STOCK, Split, Timed, find_best_stock, get_arm, split_gains

TIE = 1.02
"""Policies within 2 % of the best share the cell."""

MARKS = {
    "overloaded": ("o", "more jobs arrive than finish: times depend on how long is simulated"),
    "roofline": ("r", "step times of a roofline, a rougher guess than measured tables"),
    "one seed": ("1", "another seed may change times by some per cent, and one proves nothing"),
}
"""What a reader must know of a row's numbers: the letter in the table, and what it means."""

Row = dict[str, Any]


def make_rows(records: Sequence[dict[str, Any]], arms: Sequence[dict[str, Any]] = ()) -> list[Row]:
    """One row per GPU, load and policy: geometric means over seeds, and who has the lowest.

    `arms`: records of the runs that `make_arms` asks for. With them each cell has a row of stock with its
    best size of steps, and rows say where a policy's gain comes from.
    """
    best: list[dict[str, Any]] = []
    splits: dict[tuple[Any, ...], Split] = {}
    for cell in dict.fromkeys(map(_get_cell, records)):
        asked, beside = ([each for each in some if _get_cell(each) == cell] for some in (records, arms))
        runs, runs_beside = list(map(_get_timed, asked)), list(map(_get_timed, beside))
        found = find_best_stock(runs, runs_beside) if beside else None
        best += [{**each, "policy": found.name} for each in beside if found and get_arm(each) == found]
        for arm, split in split_gains(runs, runs_beside).items():
            splits[*cell, arm.policy] = split
    rows = _make_rows([*records, *best])
    for row in rows:
        known = splits.get((*_get_cell(row), row["policy"]))
        row["best_stock"] = known and known.best.name
        row["over_best_stock"] = known and known.over_best
        row["steps_ratio"] = known and known.steps
        row["order_ratio"] = known and known.order
        row["cache_ratio"] = known and known.cache
    return rows


def _get_timed(record: dict[str, Any]) -> Timed:
    return Timed(get_arm(record), record["seed"], record["job_s"]["mean"])


def _make_rows(records: Sequence[dict[str, Any]]) -> list[Row]:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        key = (record["gpu"], record["model"], record["workload"], record["jps"], record["policy"])
        groups.setdefault(key, []).append(record)
    rows = [
        {
            **dict(zip(("gpu", "model", "workload", "jps", "policy"), key, strict=True)),
            "seeds": len(group),
            "mean_job_s": get_geometric_mean([each["job_s"]["mean"] for each in group]),
            "lowest_mean_job_s": min(each["job_s"]["mean"] for each in group),
            "highest_mean_job_s": max(each["job_s"]["mean"] for each in group),
            "p95_job_s": get_geometric_mean([each["job_s"]["p95"] for each in group]),
            "p99_job_s": _mean_known(each["job_s"].get("p99") for each in group),
            "p95_ttft_s": _mean_known((each.get("ttft_s") or {}).get("p95") for each in group),
            "offered_jps": _mean_known(each.get("offered_jps") for each in group),
            "finished_jps": _mean_known(each.get("finished_jps") for each in group),
            "goodput_turns_per_s": _mean_known(
                (each.get("goodput") or {}).get("turns_per_s") for each in group
            ),
            "overloaded": any(is_overloaded(each) for each in group),
            "best_hits_share": _get_best_share(group),
            "recomputed_share": sum(each["recomputed_tokens"] for each in group)
            / sum(each["prompt_tokens"] for each in group),
            "marks": ", ".join(_find_marks(group)),
            "policy_faults": sum(each.get("policy_faults") or 0 for each in group),
        }
        for key, group in groups.items()
    ]
    for row in rows:
        rivals = [each for each in rows if _get_cell(each) == _get_cell(row)]
        best_s = min(each["mean_job_s"] for each in rivals)
        stock = [each["mean_job_s"] for each in rivals if each["policy"] == "stock"]
        row["wins"] = row["mean_job_s"] <= TIE * best_s
        row["over_stock"] = row["mean_job_s"] / stock[0] if stock else None
    places = {policy: place for place, policy in enumerate(dict.fromkeys(row["policy"] for row in rows))}

    def rank(row: Row) -> tuple[Any, ...]:
        # Stock with other steps stands below stock.
        name = STOCK if row["policy"].startswith(f"{STOCK} @") else row["policy"]
        return (row["gpu"], row["workload"], row["jps"] or 0.0, places.get(name, places[row["policy"]]))

    return sorted(rows, key=rank)


def _find_marks(group: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What a reader must know of these runs' numbers, of `MARKS`."""
    if any(is_overloaded(each) for each in group):
        yield "overloaded"
    if any((each.get("step_cost") or "").startswith("roofline") for each in group):
        yield "roofline"
    if len({each["seed"] for each in group}) == 1:
        yield "one seed"


def format_rows(rows: Sequence[Row]) -> str:
    """The table as text. A star marks the best policy of a cell and all policies within 2 % of it."""
    has_goodput = any(row["goodput_turns_per_s"] is not None for row in rows)
    lines = [
        f"{'gpu':11} {'jobs/s':>6}  {'policy':18} {'mean':>9} {'':3} {'spread':>15} {'P95':>9} "
        f"{'/stock':>7} {'recomp.':>7} {'hits':>6} {'done/s':>7}{'   goodput' if has_goodput else ''}"
    ]
    cell = None
    for row in rows:
        same = _get_cell(row) == cell
        cell = _get_cell(row)
        if not same and len(lines) > 1:
            lines.append("")
        spread = f"{row['lowest_mean_job_s']:.1f}-{row['highest_mean_job_s']:.1f}" if row["seeds"] > 1 else ""
        over = "" if row["over_stock"] is None else f"{row['over_stock']:.2f}"
        load = "" if row["jps"] is None else f"{row['jps']:g}"
        place = ("", "") if same else (row["gpu"], load)
        lines.append(
            f"{place[0]:11} {place[1]:>6}  {row['policy']:18} {row['mean_job_s']:8.2f}s"
            f"{'*' if row['wins'] else ' '} {_get_letters(row):3} {spread:>15} "
            f"{row['p95_job_s']:8.1f}s {over:>7} "
            f"{row['recomputed_share']:6.1%} {_format(row['best_hits_share'], '.1%'):>6} "
            f"{_format(row['finished_jps'], '.3g'):>7}{'+' if row['overloaded'] else ' '}"
            f"{_format_goodput(row) if has_goodput else ''}"
            f"{'  !' if row['policy_faults'] else ''}".rstrip()
        )
    lines.append(
        "\n*: the lowest mean, and what is within 2 % of it; `tenuto report` says whether that is sure\n"
        "hits: share of the reusable tokens; done/s: jobs finished per second, + where more arrive"
    )
    if has_goodput:
        lines.append("goodput: turns per second that keep the limits")
    lines += [f"{sign}: {words}" for mark, (sign, words) in MARKS.items() if _has_mark(rows, mark)]
    lines += _format_splits(rows)
    num_faults = sum(row["policy_faults"] for row in rows)
    if num_faults:
        lines.append(
            f"\n! hooks of the policy failed ({num_faults} times in all); stock's answer was used there"
        )
    return "\n".join(lines)


def _format_splits(rows: Sequence[Row]) -> list[str]:
    """Where each policy's gain over stock comes from."""
    split = [row for row in rows if row["steps_ratio"] is not None]
    if not split:
        return []
    lines = [
        "\nmean job time over stock's, and where the difference comes from",
        f"{'gpu':11} {'jobs/s':>6}  {'policy':18} {'/stock':>7} {'':3} = {'steps':>6} × {'order':>5} × "
        f"{'cache':>5}    over stock at its best size of steps",
    ]
    for row in split:
        load = "" if row["jps"] is None else f"{row['jps']:g}"
        lines.append(
            f"{row['gpu']:11} {load:>6}  {row['policy']:18} {row['over_stock']:7.2f} {_get_letters(row):3} = "
            f"{row['steps_ratio']:6.2f} × {row['order_ratio']:5.2f} × {row['cache_ratio']:5.2f}    "
            f"{row['over_best_stock']:.2f} of {row['best_stock']}"
        )
    lines.append(
        "steps: stock with the policy's size of steps, over stock; order: the policy without the KV that it "
        "keeps, over that;\ncache: the policy, over that"
    )
    return lines


def _get_letters(row: Row) -> str:
    return "".join(sign for mark, (sign, _) in MARKS.items() if _has_mark([row], mark))


def _has_mark(rows: Sequence[Row], mark: str) -> bool:
    return any(mark in row["marks"].split(", ") for row in rows)


def _get_cell(row: Row) -> tuple[Any, ...]:
    return (row["gpu"], row["model"], row["workload"], row["jps"])


def _get_best_share(group: Sequence[dict[str, Any]]) -> float | None:
    """Hits as a share of the reusable tokens: 1 is the best possible."""
    known = [each for each in group if each.get("reused_tokens") is not None and each["reusable_tokens"]]
    if not known:
        return None
    reusable = sum(each["reusable_tokens"] for each in known)
    return float(sum(each["reused_tokens"] for each in known) / reusable)


def _mean_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value]
    return get_geometric_mean(known) if known else None


def _format_goodput(row: Row) -> str:
    return f" {_format(row['goodput_turns_per_s'], '.3g'):>8}"


def _format(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
