"""A real browser, and pages to look at with it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tenuto.cli import main
from tests.report.data import write_run, write_sweep

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

Look = Callable[..., Any]


# Not for the whole session: an event loop runs as long as the browser, and other tests run their own.
@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Chromium without a window; skips where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium on this machine; on Debian: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, headless=True, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def sweep_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of `write_sweep`."""
    folder = tmp_path_factory.mktemp("sweep")
    page = folder / "report.html"
    assert main(["report", str(write_sweep(folder / "records")), "--out", str(page)]) == 0
    return page


@pytest.fixture(scope="session")
def run_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of one run, with its turns and occupancy; smaller, so quicker to look through."""
    folder = tmp_path_factory.mktemp("run")
    page = folder / "report.html"
    assert main(["report", str(write_run(folder / "run")), "--out", str(page)]) == 0
    return page


@pytest.fixture
def look(browser: Any) -> Iterator[Look]:
    """Opens a page; at the end it must have logged nothing, failed nowhere and asked nobody for anything."""
    contexts: list[Any] = []
    complaints: list[str] = []

    def open_page(path: Path, *, width: int = 1280, scheme: str = "light", javascript: bool = True) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, java_script_enabled=javascript
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: _note_request(request.url, path, complaints))
        page.goto(path.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def _note_request(url: str, path: Path, complaints: list[str]) -> None:
    if url.split("#")[0] != path.as_uri() and not url.startswith("data:"):
        complaints.append(f"asked for {url}")
