"""A picture of how far results hang on the options of `tenuto`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.results.row import Row
from experiments.results.rows import DEFAULTS, FACTORS
from experiments.results.tables import OURS, Records, get_mean
from tenuto.records.metrics import get_geometric_mean


def get_ratios(rows: Sequence[Row], records: Records, policy: str) -> list[float]:
    """Mean job time with a policy over that with the defaults, row by row."""
    return [get_mean(records[row.title, policy]) / get_mean(records[row.title, OURS]) for row in rows]


def draw_options(rows: Sequence[Row], records: Records, path: Path) -> None:
    """Write an SVG: a line per option through a quarter of, once and four times its default."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "tenuto"
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for place, (key, default) in enumerate(DEFAULTS.items()):
        means, lows, highs = [1.0], [1.0], [1.0]
        for factor, at in zip(FACTORS, (0, 2), strict=True):
            ratios = get_ratios(rows, records, f"tenuto?{key}={default * factor:g}")
            means.insert(at, get_geometric_mean(ratios))
            lows.insert(at, min(ratios))
            highs.insert(at, max(ratios))
        xs = [at + 0.08 * (place - 1) for at in range(3)]
        errors = [
            [mean - low for mean, low in zip(means, lows, strict=True)],
            [high - mean for mean, high in zip(means, highs, strict=True)],
        ]
        axes.errorbar(xs, means, errors, marker="os^"[place], capsize=3, label=f"{key} ({default:g})")
    axes.set_xticks(range(3), ["a quarter", "default", "four times"])
    axes.set_ylabel("mean job time / with defaults")
    axes.set_ylim(0.85, 1.15)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
