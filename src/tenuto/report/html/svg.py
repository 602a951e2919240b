"""A matplotlib figure as SVG inside the page: ids of its own, colours from the page's scheme, real text."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from collections import Counter

import matplotlib as mpl
from matplotlib.figure import Figure

from tenuto.report.html.colors import LIGHT

_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"
_COLORS = {color: f"var(--{name})" for name, color in LIGHT.items()}
_HEX = re.compile("#[0-9a-f]{6}")
_LOCAL_URL = re.compile(r"url\(#")


def to_inline_svg(figure: Figure, name: str) -> str:
    """Return SVG markup. All ids begin with `name`, because ids must be unique in a page."""
    text = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none"}):
        figure.savefig(text, format="svg", facecolor="none", metadata={"Date": None, "Creator": None})
    root = ET.fromstring(text.getvalue())
    for metadata in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(metadata)
    counts: Counter[str] = Counter()
    for element in root.iter():
        _rename(element, name, counts)
        if style := element.get("style"):
            element.set("style", _HEX.sub(lambda match: _COLORS.get(match[0], match[0]), style))
        for attribute in ("fill", "stroke"):
            if (color := element.get(attribute)) in _COLORS:
                element.set("style", f"{element.get('style', '')};{attribute}:{_COLORS[color]}")
    for attribute in ("width", "height"):  # The page says how large it is; the view box keeps the shape.
        root.attrib.pop(attribute, None)
    # Described by the figure around it: its parts alone mean nothing to a screen reader.
    root.set("aria-hidden", "true")
    root.set("focusable", "false")
    ET.register_namespace("", _SVG)
    ET.register_namespace("xlink", _XLINK)
    return ET.tostring(root, encoding="unicode")


def _rename(element: ET.Element, name: str, counts: Counter[str]) -> None:
    """Put the figure's name before ids and references to them; panels repeat ids that nothing refers to."""
    for attribute, value in element.attrib.items():
        if attribute == "id":
            counts[value] += 1
            number = f"-{counts[value]}" if counts[value] > 1 else ""
            element.set(attribute, f"{name}-{value}{number}")
        elif attribute.endswith("href") and value.startswith("#"):
            element.set(attribute, f"#{name}-{value[1:]}")
        elif "url(#" in value:
            element.set(attribute, _LOCAL_URL.sub(f"url(#{name}-", value))
