"""The picture in docs/report.md: the first screen of `tenuto report` on the kept records of swe-bench.

    python -m experiments.figures.report_picture

Needs playwright and a Chromium. Writes docs/figures/report.png.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from experiments.json_lines import read_lines, write_lines

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "experiments" / "records" / "swe-bench.jsonl"
PICTURE = ROOT / "docs" / "figures" / "report.png"
POLICIES = {"stock", "continuum", "autellix+", "tenuto"}
WIDTH, HEIGHT = 1000, 880
COLOURS = 128


def write_selection(path: Path) -> None:
    """The records of a few policies without a host tier, so that the page is quick to read."""
    shown = []
    for record in read_lines(RECORDS):
        policy = record["policy"].partition("/")[0]
        # One step size for each policy: what it has by default.
        is_default = record["step"] in (None, "adaptive")
        if policy in POLICIES and is_default and "no host tier" in record["row"]:
            # What is kept of a configuration is its digest, which the report cannot show.
            shown.append({**record, "policy": policy, "simulated": True, "config": {}})
    write_lines(path, shown)


def take_picture(page: Path) -> None:
    """The top of the page, in the light scheme, as a PNG of few colours."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        tab = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        tab.goto(page.as_uri())
        screen = io.BytesIO(tab.screenshot())
        browser.close()
    Image.open(screen).convert("RGB").quantize(COLOURS).save(PICTURE, optimize=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        selection, page = Path(folder) / "swe-bench.jsonl", Path(folder) / "report.html"
        write_selection(selection)
        command = [sys.executable, "-m", "tenuto.cli", "report", str(selection), "--out", str(page)]
        subprocess.run(command, check=True)
        take_picture(page)
    print(f"{PICTURE}: {PICTURE.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
