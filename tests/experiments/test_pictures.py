"""The commands that draw the pictures of the docs, in a quick form."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from experiments.figures import life_picture, operator_pictures
from experiments.routers.fleet_page import find_prometheus


def read_words(path: Path) -> str:
    """What an SVG with text says, without the blanks that rich puts between its words."""
    return " ".join("".join(ET.parse(path).getroot().itertext()).replace("\xa0", " ").split())


def test_the_life_of_a_few_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "life.svg"
    monkeypatch.setattr(sys, "argv", ["life_picture", "--jobs", "2", "--out", str(out)])
    life_picture.main()
    names = {element.get("id") for element in ET.parse(out).getroot().iter()}
    assert {"bars-prefill", "bars-decode", "bars-held"} <= names


def test_a_value_is_written_and_coloured_as_its_panel_says() -> None:
    steps = [{"color": "red", "value": None}, {"color": "green", "value": 0.9}]
    share = {"unit": "percentunit", "thresholds": {"steps": steps}}
    assert operator_pictures.write_value(0.835, share) == "83.5%"
    assert operator_pictures.choose_colour(0.835, share) == operator_pictures.COLOURS["red"]
    assert operator_pictures.choose_colour(0.9, share) == operator_pictures.COLOURS["green"]
    assert operator_pictures.write_value(1.934, {"unit": "s"}) == "1.93 s"
    assert operator_pictures.write_value(0.25, {"unit": "s"}) == "250 ms"
    assert operator_pictures.write_value(0.98, {"unit": "none", "decimals": 2}) == "0.98"
    assert operator_pictures.write_value(None, share) == "No data"
    assert operator_pictures.choose_colour(None, share) == operator_pictures.SOFT


@pytest.mark.slow
@pytest.mark.skipif(find_prometheus() is None, reason="no Prometheus here; `make promtool` unpacks it")
def test_the_operators_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["operator_pictures", "--seconds", "3", "--out", str(tmp_path)])
    operator_pictures.main()
    said = read_words(tmp_path / "top.svg")
    assert "tenuto top http://" in said and "policy tenuto" in said and "KV cache" in said
    titles = (tmp_path / "dashboard.svg").read_text(encoding="utf-8")
    assert "Is it helping?" in titles and "No data" in titles
