"""The fleet's compose file: its files exist, its command lines parse, and its parts find each other."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from tenuto.cli import parse

FOLDER = Path(__file__).parents[2] / "dashboards" / "fleet"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yml").read_text(encoding="utf-8"))
SERVICES = COMPOSE["services"]


def read(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    return loaded


def find_line(service: str, command: str) -> list[str]:
    """The words of a command inside a service's shell line."""
    _, _, line = shlex.split(SERVICES[service]["command"])
    return shlex.split(line[line.index(f"exec {command}") :])[1:]


def test_every_file_that_is_mounted_exists() -> None:
    mounts = [mount for service in SERVICES.values() for mount in service.get("volumes", ())]
    missing = [mount for mount in mounts if not (FOLDER / mount.split(":")[0]).exists()]
    assert mounts and missing == []


def test_the_engines_command_line_parses() -> None:
    for engine in ("engine-1", "engine-2"):
        words = find_line(engine, "tenuto serve")
        parse(words[1:])
        assert words[words.index("--limits") + 1] == "plugin"


def test_router_prometheus_and_grafana_name_parts_that_exist() -> None:
    words = find_line("router", "vllm-router")
    urls = [word for word in words if word.startswith("http://")]
    jobs = read("prometheus.yml")["scrape_configs"]
    targets = [target for job in jobs for config in job["static_configs"] for target in config["targets"]]
    assert [url.removeprefix("http://") for url in urls] == ["engine-1:8000", "engine-2:8000"] == targets[:2]
    assert targets[2] == f"router:{words[words.index('--prometheus-port') + 1]}"
    source = read("grafana-source.yml")["datasources"][0]["url"]
    assert re.fullmatch(r"http://(\w+):9090", source).group(1) in SERVICES  # type: ignore[union-attr]
    folder = read("grafana-dashboards.yml")["providers"][0]["options"]["path"]
    assert any(f":{folder}/" in mount for mount in SERVICES["grafana"]["volumes"])
