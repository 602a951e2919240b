"""The pictures in docs/watch.md: `tenuto top`, and the first row of the Grafana dashboard, under load.

    make promtool
    python -m experiments.figures.operator_pictures

Runs a simulated server with host memory for about a minute, and agent jobs on it. An example, not a measure
of the gain. Writes docs/figures/top.svg (exported by rich, which draws `tenuto top`) and
docs/figures/dashboard.svg. Grafana is not needed: titles, queries, units and thresholds of the second picture
are those of dashboards/tenuto.json, Prometheus evaluates the queries, and matplotlib draws the answers.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import matplotlib as mpl
import yaml
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from experiments.command_line import make_parser
from experiments.results.row import ROOT
from experiments.routers.fleet_page import ask_panels, run_prometheus, send_jobs
from experiments.routers.processes import ENGINE, run_engine
from tenuto.report.top import WIDTH, Watch, make_screen

PICTURES = ROOT / "docs" / "figures"
DASHBOARD = ROOT / "dashboards" / "tenuto.json"
SERVER = (*ENGINE, "--kv-tokens", "100000", "--policy", "tenuto", "--offload", "async", "--host-gb", "4")
"""Room for about ten whole jobs."""
JPS = 1.0
SCRAPE_S = 2
COLOURS = {"red": "#f2495c", "orange": "#ff9830", "green": "#73bf69", "blue": "#5794f2"}
"""Grafana's colours of these names."""
BACK, PANEL, TEXT, SOFT = "#111217", "#1f2229", "#ccccdc", "#9a9aa8"
COLUMNS = 24
"""Of a dashboard's grid."""


def draw_top(watched: Watch, seconds: float, path: Path) -> None:
    """Watch for so long, and write the next screen with a running request. Its fonts are the reader's."""
    for number in range(max(2, round(1.2 * seconds))):
        time.sleep(1.0)
        if watched.look()["requests"]["running"] and number >= seconds:
            break
    states = [{**each, "server": {**each["server"], "url": watched.where}} for each in watched.states]
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True)
        console.print(make_screen(states))
    template = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    console.save_svg(str(path), title="tenuto top", code_format=template, unique_id="top")


def write_value(value: float | None, defaults: Mapping[str, Any]) -> str:
    """A value in its panel's unit."""
    if value is None:
        return "No data"
    if defaults["unit"] == "percentunit":
        return f"{value:.1%}"
    if defaults["unit"] == "s":
        return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.0f} ms"
    return f"{value:.{defaults.get('decimals', 2)}f}"


def choose_colour(value: float | None, defaults: Mapping[str, Any]) -> str:
    """The colour of the last threshold that the value reaches."""
    steps = defaults["thresholds"]["steps"]
    reached = [each["color"] for each in steps if value is not None and value >= (each["value"] or 0)]
    return COLOURS[reached[-1]] if reached else SOFT


def draw_dashboard(found: Mapping[str, list[dict[str, Any]]], path: Path) -> None:
    """Write the dashboard as it opens: the panels of its first row, and the names of the closed rows."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    rows = [each for each in panels if each["type"] == "row"]
    opened = [each for each in panels if each["type"] != "row"]
    height = max(each["gridPos"]["y"] + each["gridPos"]["h"] for each in opened)
    settings: dict[Any, Any] = {"font.size": 9.5, "svg.hashsalt": "tenuto", "text.parse_math": False}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(12, 0.28 * (height + len(rows))), facecolor=BACK)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set_xlim(-0.1, COLUMNS + 0.1)
        axes.set_ylim(height + len(rows) - 0.8, -0.2)
        axes.text(0.1, 0.5, f"⌄ {rows[0]['title']}", color=TEXT, weight="bold", va="center")
        for panel in opened:
            x, y, w, h = (panel["gridPos"][name] for name in "xywh")
            defaults = panel["fieldConfig"]["defaults"]
            samples = found.get(panel["title"], [])
            value = float(samples[0]["value"][1]) if samples else None
            value = None if value != value else value  # Prometheus' NaN
            axes.add_patch(Rectangle((x + 0.06, y + 0.06), w - 0.12, h - 0.12, color=PANEL))
            axes.text(x + 0.25, y + 0.6, panel["title"], color=TEXT, fontsize=8.5, va="center")
            axes.text(
                x + w / 2, y + h / 2 + 0.4, write_value(value, defaults), fontsize=26,
                color=choose_colour(value, defaults), weight="bold", ha="center", va="center",
            )  # fmt: skip
        for number, row in enumerate(rows[1:]):
            y = height + number + 0.5
            axes.text(0.1, y, f"› {row['title']}", color=TEXT, weight="bold", va="center")
            axes.text(4.2, y, f"({len(row['panels'])} panels)", color=SOFT, va="center")
        figure.savefig(path, facecolor=BACK, metadata={"Date": None, "Title": "The dashboard's first row"})


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path, default=PICTURES, help="a folder")
    parser.add_argument("--seconds", type=float, default=30.0, help="of load before the picture of top")
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, run_engine(Path(name), *SERVER) as server:
        target = {
            "job_name": "engines",
            "static_configs": [{"targets": [server.url.removeprefix("http://")]}],
        }
        config = {"global": {"scrape_interval": f"{SCRAPE_S}s"}, "scrape_configs": [target]}
        with (
            run_prometheus(Path(name), yaml.safe_dump(config)) as prometheus,
            httpx.Client(base_url=server.url) as client,
        ):
            began_s = time.monotonic()
            # What `tenuto top --url http://localhost:8000` would have shown.
            watched = Watch([client], "http://localhost:8000", window_s=60.0)
            watch = threading.Thread(target=draw_top, args=(watched, parsed.seconds, parsed.out / "top.svg"))
            watch.start()
            num_jobs = round(1.3 * JPS * parsed.seconds)  # the load goes on while top is drawn
            # Without the names of tools, Tenuto would take turns for those of a chat.
            send_jobs(server.url, [server.url], num_jobs, jps=JPS, hints="tool")
            watch.join()
            time.sleep(2 * SCRAPE_S)
            found = ask_panels(prometheus, int(time.monotonic() - began_s))
            draw_dashboard(found, parsed.out / "dashboard.svg")
    for path in (parsed.out / "top.svg", parsed.out / "dashboard.svg"):
        print(f"{path}: {path.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
