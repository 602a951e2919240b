"""Records as Markdown: means, ratios, percentiles and fairness, winners."""

from __future__ import annotations

import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.results.row import Row, Table
from experiments.results.verdicts import TIE
from tenuto.records.metrics import get_geometric_mean

OURS, STOCK = "tenuto", "stock"

Records = Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]
"""By row's title and policy: one record per seed."""

BEHIND, SLOWED = 0.9, 1.25
MARKS = (
    f"ᵒ: less than {100 * BEHIND:.0f} % of the row's jobs per second finish, and jobs take {SLOWED} times as "
    "long as alone, or longer: more jobs may arrive than finish, and then the mean depends on how long they "
    "arrive. ¹: one seed, which proves nothing."
)
"""What stands behind numbers. Kept records do not say how job times grow, as `is_overloaded` asks."""


def get_marks(records: Collection[Mapping[str, Any]]) -> str:
    """What to put behind a number that is made of these records, one per seed."""
    return ("ᵒ" if any(map(_is_behind, records)) else "") + ("¹" if len(records) == 1 else "")


def _is_behind(record: Mapping[str, Any]) -> bool:
    offered_jps, finished_jps = record["jps"], record["finished_jps"]
    # A trace keeps its own times; the title of its row says the rate.
    if offered_jps is None and (rate := re.search(r"([\d.]+)/s", record["row"])):
        offered_jps = float(rate[1])
    if not offered_jps or not finished_jps or finished_jps >= BEHIND * offered_jps:
        return False
    return bool(record["slowdown"]["mean"] >= SLOWED)


def format_section(table: Table, rows: Sequence[Row], records: Records) -> str:
    """Everything there is to say of one table."""
    policies = [policy for policy in table.policies if (rows[0].title, policy) in records]
    parts = [format_means(rows, policies, records)]
    if OURS in policies and STOCK in policies:
        parts.append(format_ratios(rows, policies, records))
        parts.append(format_percentiles(rows, policies, records))
    seeds = sorted({record["seed"] for each in records.values() for record in each})
    about = f"{table.about} Seeds: {', '.join(map(str, seeds))}. {MARKS}"
    return "\n\n".join([f"### {table.title}", about, *parts])


def get_mean(records: Sequence[Mapping[str, Any]], statistic: str = "mean") -> float:
    """Geometric mean over the seeds of a statistic of the job times."""
    return get_geometric_mean(record["job_s"][statistic] for record in records)


def format_means(rows: Sequence[Row], policies: Sequence[str], records: Records) -> str:
    lines = []
    for row in rows:
        best_s = min(get_mean(records[row.title, policy]) for policy in policies)
        cells = []
        for policy in policies:
            each = [record["job_s"]["mean"] for record in records[row.title, policy]]
            mean_s = get_mean(records[row.title, policy])
            text = f"{mean_s:.1f}" + (f" ({min(each):.0f}-{max(each):.0f})" if len(each) > 1 else "")
            if mean_s <= TIE * best_s:
                text = f"**{text}**"
            elif policy == OURS:
                text = f"🔴 {text}"
            text += get_marks(records[row.title, policy])
            cells.append(f"{text} !" if count_faults(records[row.title, policy]) else text)
        lines.append([row.title, *cells])
    table = format_markdown(["mean, s", *map(get_label, policies)], lines)
    num_faults = sum(count_faults(records[row.title, policy]) for row in rows for policy in policies)
    if num_faults:
        table += (
            f"\n\n! Hooks of the policy failed ({num_faults} times in all); stock's answer was used there."
        )
    return table


def count_faults(records: Sequence[Mapping[str, Any]]) -> int:
    """How many times hooks of the policy failed. Records of 0.1 do not say."""
    return sum(record.get("policy_faults") or 0 for record in records)


def format_ratios(rows: Sequence[Row], policies: Sequence[str], records: Records) -> str:
    """Tenuto against each of the others, and against the best of them in each row."""
    ratios = {
        policy: [get_mean(records[row.title, OURS]) / get_mean(records[row.title, policy]) for row in rows]
        for policy in policies
        if policy != OURS
    }
    best = [max(each) for each in zip(*ratios.values(), strict=True)]
    lines = []
    for policy, values in [("the best other of each row", best), *ratios.items()]:
        worst = max(range(len(values)), key=values.__getitem__)
        mean = get_geometric_mean(values)
        lines.append(
            [
                get_label(policy),
                f"{mean:.2f}",
                f"{min(values):.2f}",
                f"{values[worst]:.2f}",
                rows[worst].title,
            ]
        )
    return format_markdown(["tenuto over", "geometric mean", "best row", "worst row", ""], lines)


def format_percentiles(rows: Sequence[Row], policies: Sequence[str], records: Records) -> str:
    """Stock, the best other and tenuto: percentiles of job times, and how unevenly jobs were slowed down."""
    keys = ("p50", "p90", "p95", "p99")
    others = [policy for policy in policies if policy not in (OURS, STOCK)]
    lines = []
    for row in rows:
        best = min(others, key=lambda policy: get_mean(records[row.title, policy]))
        cells = [row.title, get_label(best)]
        for policy in (STOCK, best, OURS):
            of_row = records[row.title, policy]
            cells.append(" / ".join(f"{get_mean(of_row, key):.0f}" for key in keys) + get_marks(of_row))
        for policy in (STOCK, best, OURS):
            slowdowns = [record["slowdown"] for record in records[row.title, policy]]
            cells.append(f"{statistics.fmean(each['max'] / each['p50'] for each in slowdowns):.1f}")
        lines.append(cells)
    heads = ["P50 / P90 / P95 / P99, s", "best other", "stock", "best other's", "tenuto"]
    return format_markdown([*heads, "max/median slowdown: stock", "best other's", "tenuto"], lines)


def get_label(policy: str) -> str:
    return policy.rpartition(":")[2].rpartition("?")[2].replace("/", " / ")


def format_markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    out = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    return "\n".join([*out, *("| " + " | ".join(line) + " |" for line in lines)])


def write_section(page: Path, name: str, section: str) -> None:
    """Put a section into a page."""
    page.write_text(put_section(page.read_text(encoding="utf-8"), name, section), encoding="utf-8")


def put_section(page: str, name: str, section: str) -> str:
    """The page with what stands between the marks of this name replaced, or added at its end."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    block = f"{begin}\n\n{section}\n\n{end}"
    if begin in page:
        return re.sub(re.escape(begin) + ".*?" + re.escape(end), lambda _: block, page, flags=re.DOTALL)
    return f"{page.rstrip()}\n\n{block}\n"
