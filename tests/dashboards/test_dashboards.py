"""The dashboard and the alert rules: whole, explained, and about metrics that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.dashboards.exported import (
    ADDED_BY_PROMETHEUS,
    Exported,
    get_tenuto_metrics,
    get_vllm_metrics,
)
from tests.dashboards.promql import find_uses

FOLDER = Path(__file__).parents[2] / "dashboards"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "tenuto.json").read_text(encoding="utf-8"))
ALERTS: dict[str, Any] = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))
ROWS = [panel for panel in DASHBOARD["panels"] if panel["type"] == "row"]
OPEN = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
"""The panels that one sees at first. The others are in rows that are closed."""
PANELS = [*OPEN, *(panel for row in ROWS for panel in row["panels"])]
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
PROMETHEUS_OWN = {"up": ADDED_BY_PROMETHEUS}


def get_expressions() -> Iterator[tuple[str, str]]:
    """Every expression, with where it stands."""
    for panel in PANELS:
        for target in panel["targets"]:
            yield f"{panel['title']}/{target['refId']}", target["expr"]
    for rule in RULES:
        yield rule["alert"], rule["expr"]


EXPRESSIONS = dict(get_expressions())


def find_faults(expression: str, exported: Exported) -> list[str]:
    """What an expression uses that nobody exports."""
    uses = find_uses(expression)
    known = {**exported, **PROMETHEUS_OWN}
    faults = [f"metric {name}" for name in uses.matched if name not in known]
    for name, labels in uses.matched.items():
        own = known.get(name)
        if own is not None:
            faults += [f"label {label} of {name}" for label in labels - own - ADDED_BY_PROMETHEUS]
    labels_of_all = [known.get(name) for name in uses.matched]
    if None not in labels_of_all:
        some = frozenset().union(*(labels for labels in labels_of_all if labels is not None))
        faults += [f"label {label}" for label in uses.grouped - some - ADDED_BY_PROMETHEUS]
    return faults


@pytest.fixture(scope="module")
def tenuto_metrics() -> Exported:
    return get_tenuto_metrics()


@pytest.mark.parametrize("expression", EXPRESSIONS.values(), ids=EXPRESSIONS.keys())
def test_every_metric_of_ours_is_exported(expression: str, tenuto_metrics: Exported) -> None:
    vllm: Exported = {name: None for name in find_uses(expression).matched if name.startswith("vllm:")}
    assert find_faults(expression, {**tenuto_metrics, **vllm}) == []


def test_every_metric_of_vllm_is_exported(tenuto_metrics: Exported) -> None:
    exported = {**tenuto_metrics, **get_vllm_metrics()}
    assert {
        place: faults for place, each in EXPRESSIONS.items() if (faults := find_faults(each, exported))
    } == {}


def test_the_check_sees_what_is_wrong(tenuto_metrics: Exported) -> None:
    assert find_faults("rate(tenuto:leases_granted[5m])", tenuto_metrics) == ["metric tenuto:leases_granted"]
    assert find_faults('tenuto:retained_jobs{pod="a"}', tenuto_metrics) == [
        "label pod of tenuto:retained_jobs"
    ]
    assert find_faults("sum by (reason) (tenuto:retained_jobs)", tenuto_metrics) == ["label reason"]
    deep = "1 - histogram_quantile(0.5, sum by (le) (rate({}[5m]))) / on (engine) (up == 1)"
    assert find_faults(deep.format("tenuto:x_bucket"), tenuto_metrics) == ["metric tenuto:x_bucket"]
    assert find_faults(deep.format("tenuto:hit_tokens_total"), tenuto_metrics) == ["label le"]
    for wrong, why in (
        ("sum(rate(up))", "expected type"),
        ("up{", "unexpected"),
        ("up{a=$pod}", "a variable"),
    ):
        with pytest.raises(ValueError, match=why):
            find_uses(wrong)


def test_all_metrics_of_ours_are_shown(tenuto_metrics: Exported) -> None:
    """A metric nobody looks at is not worth its scrape, or was forgotten here."""
    shown = {name for each in EXPRESSIONS.values() for name in find_uses(each).matched}
    families = {name.removesuffix("_created") for name in tenuto_metrics if not name.endswith("_created")}
    unseen = {name for name in families - shown if not name.endswith(("_sum", "_count"))}
    assert unseen == set()


# The dashboard.


def test_the_dashboard_can_be_imported() -> None:
    """What Grafana asks of a dashboard file, and the data source as a variable."""
    assert DASHBOARD["title"] and DASHBOARD["uid"] and DASHBOARD["schemaVersion"] >= 36
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    ids = [panel["id"] for panel in (*ROWS, *PANELS)]
    assert len(ids) == len(set(ids))
    assert [row["title"] for row in ROWS] == [
        "Is it helping?", "Agents' latency", "Leases", "Cache", "Host memory and disk", "Queue",
        "Policy health", "Trials and changes",
    ]  # fmt: skip


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_panel_is_explained_and_has_a_unit(panel: dict[str, Any]) -> None:
    assert len(panel["description"]) > 20
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert panel["targets"]
    assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
    references = [target["refId"] for target in panel["targets"]]
    assert len(references) == len(set(references))


def test_it_opens_on_one_row_that_says_whether_it_helps() -> None:
    first, *others = ROWS
    assert DASHBOARD["panels"][0] is first and not first["collapsed"]
    assert all(row["collapsed"] and row["panels"] for row in others)
    assert {panel["type"] for panel in OPEN} == {"stat"}
    assert {panel["gridPos"]["y"] for panel in OPEN} == {first["gridPos"]["y"] + 1}
    assert sum(panel["gridPos"]["w"] for panel in OPEN) == 24
    assert all(panel["gridPos"]["y"] > OPEN[0]["gridPos"]["y"] for panel in others)


@pytest.mark.parametrize("panels", [DASHBOARD["panels"], *(row["panels"] for row in ROWS[1:])])
def test_panels_do_not_overlap(panels: list[dict[str, Any]]) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_panel_follows_the_choice_of_model_server_and_engine(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        for name, labels in find_uses(target["expr"]).matched.items():
            assert {"model_name", "instance", "engine"} <= labels, name


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_engines_of_several_servers_are_told_apart(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        grouped = find_uses(target["expr"]).grouped
        # Each server numbers its own engines from 0.
        assert "engine" not in grouped or "instance" in grouped
        assert "{{engine}}" not in target.get("legendFormat", "") or "{{instance}}" in target["legendFormat"]


# The alerts.


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_says_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["for"]
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"].keys() == {"summary", "description", "runbook"}
    assert len(rule["annotations"]["runbook"]) > 60
    assert "$labels.instance" in rule["annotations"]["summary"]


def test_a_runbook_quotes_what_the_log_says() -> None:
    quotes = [
        each for rule in RULES for each in re.findall(r'log \("(.+?)"\)', rule["annotations"]["runbook"])
    ]
    code = "".join(path.read_text() for path in (Path(__file__).parents[2] / "src").rglob("*.py"))
    assert quotes
    assert [each for each in quotes if each not in code] == []


def test_alerts_have_names_of_their_own() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(names) == len(set(names))
    assert all(name.startswith("Tenuto") for name in names)


UNPACKED = Path(__file__).parents[2] / "build" / "prometheus" / "usr" / "bin" / "promtool"
PROMTOOL = shutil.which("promtool") or (str(UNPACKED) if UNPACKED.exists() else None)
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool (Debian: make promtool)")


def run_promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=60, check=False)


@needs_promtool
def test_promtool_accepts_the_alerts() -> None:
    result = run_promtool("check", "rules", str(FOLDER / "alerts.yml"))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@needs_promtool
def test_every_alert_fires_when_it_should_and_not_before() -> None:
    file = Path(__file__).parent / "alerts_test.yml"
    cases = yaml.safe_load(file.read_text(encoding="utf-8"))["tests"]
    expected = [
        sample for case in cases for test in case["promql_expr_test"] for sample in test["exp_samples"]
    ]
    tested = {re.findall('alertname="([^"]+)"', sample["labels"])[0] for sample in expected}
    assert tested == {rule["alert"] for rule in RULES}
    result = run_promtool("test", "rules", str(file))
    assert result.returncode == 0, result.stdout + result.stderr
