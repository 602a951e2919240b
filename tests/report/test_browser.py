"""The page as a reader has it: in a real browser, large and small, light and dark, by mouse and by key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.report.conftest import Look

pytestmark = pytest.mark.slow

POLICIES, LOADS, GPUS = 3, 3, 2

CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const parse = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below, alpha) => below.map((value, index) => top[index] * alpha + value * (1 - alpha));
  const luminance = (rgb) => rgb.slice(0, 3)
    .map((value) => value / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
  const getBackground = (element) => {
    let color = parse(getComputedStyle(document.body).backgroundColor).slice(0, 3);
    const chain = [];
    for (let each = element; each; each = each.parentElement) chain.unshift(each);
    for (const each of chain) {
      const [r, g, b, a] = parse(getComputedStyle(each).backgroundColor);
      color = over([r, g, b], color, a);
    }
    if (element.namespaceURI.endsWith("svg")) { // What was painted under the middle of the text before it.
      const box = element.getBoundingClientRect(), x = box.x + box.width / 2, y = box.y + box.height / 2;
      const all = [...element.ownerSVGElement.querySelectorAll("path, rect")];
      for (const shape of all) {
        if (!(shape.compareDocumentPosition(element) & Node.DOCUMENT_POSITION_FOLLOWING)) continue;
        const style = getComputedStyle(shape), at = shape.getBoundingClientRect();
        if (/^(none|url)/.test(style.fill) || shape.closest("defs, clipPath")) continue;
        if (x < at.left || x > at.right || y < at.top || y > at.bottom) continue;
        const [r, g, b, a] = parse(style.fill);
        color = over([r, g, b], color, a * style.fillOpacity * style.opacity);
      }
    }
    return color;
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || element.closest("script, style, title, .unseen, option")) continue;
    if (!element.getClientRects().length || element.getBoundingClientRect().width === 0) continue;
    const style = getComputedStyle(element);
    const ink = parse(element.namespaceURI.endsWith("svg") ? style.fill : style.color);
    const below = getBackground(element);
    const [light, dark] = [luminance(over(ink, below, ink[3])), luminance(below)].sort((a, b) => b - a);
    found.push([Math.round(((light + 0.05) / (dark + 0.05)) * 100) / 100, walker.currentNode.data.trim()]);
  }
  return found;
}"""


@pytest.fixture
def page(look: Look, sweep_page: Path) -> Any:
    return look(sweep_page)


def count_marks(page: Any, chart: str, gid: str, tag: str = "use") -> int:
    return int(page.locator(f"[id^='{chart}-wide-{gid}'] {tag}").count())


def test_every_chart_draws_every_number(page: Any) -> None:
    assert page.locator("#map-1-wide-axes_1 [id*='wide-cell-']").count() == GPUS * LOADS
    for number in range(1, GPUS + 1):
        assert count_marks(page, f"jct-{number}", "marks-") == POLICIES * LOADS
        assert count_marks(page, f"jct-{number}", "band-", "path") >= POLICIES
        assert count_marks(page, f"speed-up-{number}", "marks-") == (POLICIES - 1) * LOADS
        assert count_marks(page, f"turns-{number}", "marks-") == POLICIES * LOADS * 2
        assert count_marks(page, f"cdf-{number}", "line-", "path") == POLICIES * LOADS
    for state in ("running", "leased", "cached", "free"):
        assert count_marks(page, "kv-1", f"area-{state}", "path") >= 1
    assert page.locator("#kv-1-wide-line-host path, #kv-1-wide-line-disk path").count() == 2


def test_every_drawing_has_a_size_and_something_in_it(page: Any) -> None:
    sizes = page.evaluate(
        "[...document.querySelectorAll('figure .wide svg')].map(svg => {"
        "const box = svg.getBoundingClientRect();"
        "return [svg.closest('figure').id, box.width, box.height, svg.querySelectorAll('path, use').length]})"
    )
    assert len(sizes) == 1 + 5 * GPUS + 2
    assert all(width > 500 and height > 80 and shapes > 10 for _, width, height, shapes in sizes), sizes


@pytest.mark.parametrize("width", [1280, 400])
def test_no_cell_breaks_a_short_name_or_a_number(look: Look, sweep_page: Path, width: int) -> None:
    page = look(sweep_page, width=width)
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
    cells = page.evaluate(
        """[...document.querySelectorAll("td")].filter(each => each.textContent.length <= 20)
          .map(each => {
            const range = document.createRange();
            range.selectNodeContents(each);
            return [each.textContent, range.getClientRects().length];
          })"""
    )
    assert len(cells) > 100
    assert [text for text, lines in cells if lines != 1] == []


@pytest.mark.parametrize("width", [1280, 400])
def test_the_label_of_stock_stands_beside_the_curves(look: Look, sweep_page: Path, width: int) -> None:
    page = look(sweep_page, width=width)
    shown = "wide" if width > 760 else "narrow"
    label, axes = page.evaluate(
        """shown => {
          const chart = document.querySelector(`#speed-up-1 .${shown} svg`);
          const label = [...chart.querySelectorAll("text")].find(each => each.textContent === "stock");
          const back = chart.querySelector("[id*='patch_2']");
          return [label.getBoundingClientRect().left, back.getBoundingClientRect().right];
        }""",
        shown,
    )
    assert label >= axes


@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_overflows(look: Look, sweep_page: Path, width: int) -> None:
    page = look(sweep_page, width=width)
    page.locator("#timeline-job").select_option(index=1)
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    shown = "wide" if width > 760 else "narrow"
    outside = page.evaluate(
        """shown => [...document.querySelectorAll(`.${shown} svg, #timeline-view svg`)].flatMap(svg => {
          const frame = svg.getBoundingClientRect();
          return [...svg.querySelectorAll("text")].filter(text => {
            const box = text.getBoundingClientRect();
            return box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1;
          }).map(text => [svg.parentElement.parentElement.id, text.textContent]);
        })""",
        shown,
    )
    assert outside == []


@pytest.mark.parametrize("width", [1280, 400])
def test_labels_of_one_axis_do_not_touch(look: Look, sweep_page: Path, width: int) -> None:
    page = look(sweep_page, width=width)
    touching = page.evaluate(
        """shown => [...document.querySelectorAll(`.${shown} g[id*="-matplotlib.axis"]`)].flatMap(axis => {
          const texts = [...axis.querySelectorAll("text")];
          const labels = texts.map(text => [text.textContent, text.getBoundingClientRect()]);
          return labels.flatMap(([name, a], index) => labels.slice(index + 1)
            .filter(([, b]) => a.left < b.right && b.left < a.right)
            .filter(([, b]) => a.top < b.bottom - 2 && b.top < a.bottom - 2)
            .map(([other]) => [axis.id, name, other]));
        })""",
        "wide" if width > 760 else "narrow",
    )
    assert touching == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_text_stands_out_from_what_is_behind_it(
    look: Look, sweep_page: Path, width: int, scheme: str
) -> None:
    page = look(sweep_page, width=width, scheme=scheme)
    page.locator("#timeline-job").select_option(index=1)
    ratios = page.evaluate(CONTRAST)
    assert len(ratios) > 200
    assert [each for each in ratios if each[0] < 4.5] == []


def test_the_dark_scheme_is_dark(look: Look, sweep_page: Path) -> None:
    page = look(sweep_page, scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 29)"
    assert (
        page.evaluate("getComputedStyle(document.querySelector('.wide text')).fill") == "rgb(232, 235, 238)"
    )


@pytest.mark.parametrize(("name", "scheme"), [("sweep_page", "light"), ("run_page", "dark")])
def test_axe_finds_nothing(look: Look, request: pytest.FixtureRequest, name: str, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = look(request.getfixturevalue(name), scheme=scheme)
    page.locator("#timeline-job").select_option(index=1)
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
    violations = axe.Axe().run(page).response["violations"]
    assert [(each["id"], [node["html"][:120] for node in each["nodes"]]) for each in violations] == []


def test_every_control_and_picture_has_a_name(page: Any) -> None:
    page.locator("#timeline-job").select_option(index=1)
    snapshot = page.locator("body").aria_snapshot()
    nameless = [
        line.strip()
        for line in snapshot.splitlines()
        if line.strip().removesuffix(":")
        in {f"- {role}" for role in ("button", "combobox", "img", "region", "link")}
    ]
    assert nameless == []
    assert '- img "Which policy wins where Winners"' in snapshot
    for gpu in ("H100", "H200"):
        assert f'- img "Job completion time against load {gpu}, llama, ab8 (simulated)"' in snapshot
    for control in ('combobox "Run"', 'combobox "Job"', 'button "All jobs"', 'button "Zoom in"'):
        assert control in snapshot


def get_status(page: Any) -> str:
    return str(page.locator("#timeline-status").text_content())


def test_the_timeline_shows_a_window_of_rows_and_their_states(page: Any) -> None:
    run = page.locator("#timeline-run option").all_text_contents()
    assert run == ["keep, H200, 4 jobs/s, seed 3 (simulated)"]
    assert get_status(page) == "Jobs 1–25 of 30, 0 s to 66 s"
    assert page.locator("#timeline-view .row").count() == 25
    row = page.locator("#timeline-view .row").nth(0)
    assert row.get_attribute("aria-label") == "job job-0: 3 turns, 18 s, 0 missed the cache"
    assert [row.locator(f".{state}").count() for state in ("queue", "prefill", "decode", "tool")] == [
        3,
        3,
        3,
        2,
    ]
    assert row.locator(".verdict-hit, .verdict-part").count() == 2
    page.get_by_role("button", name="Rows below").click()
    assert get_status(page).startswith("Jobs 6–30 of 30")


def test_a_keyboard_walks_into_a_job_and_back(page: Any) -> None:
    page.get_by_role("button", name="Rows below").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('data-row')") == "0"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert get_status(page) == "job-2: turns 1–3 of 3, 4 s to 22 s"
    assert page.locator("#timeline-view .row").count() == 3
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith(
        "turn 1: queue 1 s, prefill 1 s"
    )
    rows = page.locator("#timeline-turns tbody tr").all_text_contents()
    assert rows == [
        "14 s1 s1 s2 sshell, 3 s–100020first turn",
        "211 s1 s1 s2 sshell, 3 s–20010020partly hit",
        "318 s1 s1 s2 s––30020020hit",
    ]
    page.keyboard.press("+")
    assert get_status(page).endswith("8.5 s to 17.5 s")
    page.keyboard.press("ArrowRight")
    assert get_status(page).endswith("10.8 s to 19.8 s")
    page.keyboard.press("0")
    assert get_status(page).endswith("4 s to 22 s")
    page.keyboard.press("Escape")
    assert get_status(page).startswith("Jobs 1–25 of 30")
    assert page.evaluate("document.activeElement.getAttribute('data-row')") == "2"
    assert page.locator("#timeline-turns").inner_text() == ""


def test_the_focus_is_seen(page: Any) -> None:
    page.get_by_role("button", name="Rows below").focus()
    page.keyboard.press("Tab")
    stroke = page.evaluate("getComputedStyle(document.activeElement.querySelector('.back')).strokeWidth")
    assert stroke == "2px"
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_a_mouse_opens_a_job_and_drags_a_stretch_of_time(page: Any) -> None:
    box = page.locator("#timeline-view").bounding_box()
    page.locator("#timeline-view").scroll_into_view_if_needed()
    box = page.locator("#timeline-view").bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + 500, box["y"] + 120, steps=4)
    assert page.locator("#timeline-view .selection").count() == 1
    page.mouse.up()
    assert get_status(page).startswith("Jobs 1–25 of 30, 12")
    page.get_by_role("button", name="Fit rows").click()
    page.locator("#timeline-view .row").nth(4).click()
    assert get_status(page).startswith("job-4: turns 1–3 of 3")
    page.get_by_role("button", name="All jobs").click()
    assert get_status(page).startswith("Jobs")


def test_without_javascript_all_else_is_there(look: Look, sweep_page: Path) -> None:
    page = look(sweep_page, javascript=False)
    assert page.locator("noscript p").count() or "needs JavaScript" in page.content()
    assert page.locator("figure .wide svg").count() == 1 + 5 * GPUS + 2


def test_it_prints_light_and_whole(look: Look, sweep_page: Path) -> None:
    page = look(sweep_page, scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(254, 254, 254)"
    assert not page.locator(".controls").first.is_visible()
    assert len(page.pdf()) > 20_000
