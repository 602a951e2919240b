"""The files in deploy/ agree with Tenuto and with each other, as far as that shows without Docker."""

from __future__ import annotations

import json
import re
import shlex
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from tenuto.cli import parse
from tenuto.vllm.launch import build_command

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yml").read_text(encoding="utf-8"))["services"]
VALUES: dict[str, Any] = yaml.safe_load((DEPLOY / "production-stack.yaml").read_text(encoding="utf-8"))


def read_steps() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, each with its argument."""
    lines = [line for line in DOCKERFILE.splitlines() if line and not line.startswith("#")]
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines]


def test_the_image_and_its_tag() -> None:
    steps = read_steps()
    assert {name for name, _ in steps} <= {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENTRYPOINT"}
    tags = dict(text.split("=") for name, text in steps if name == "ARG")
    tag = tags["VLLM_TAG"]
    images = [text.split(" ")[0] for name, text in steps if name == "FROM"]
    assert images == ["python:${PYTHON_TAG}", "vllm/vllm-openai:${VLLM_TAG}"]
    # A release that is checked, the same in all files.
    supported = re.findall(
        r"0\.\d+\.0", (ROOT / "Makefile").read_text(encoding="utf-8").partition("for release")[2]
    )
    assert tag.removeprefix("v") in supported
    # Both images can be pinned by digest from outside, here and in the compose file.
    assert COMPOSE["vllm"]["build"]["args"] == {name: f"${{{name}:-{value}}}" for name, value in tags.items()}
    assert COMPOSE["simulated"]["image"] == f"python:${{PYTHON_TAG:-{tags['PYTHON_TAG']}}}"
    assert VALUES["servingEngineSpec"]["modelSpec"][0]["tag"] == tag


def test_the_entry_point_and_its_arguments_parse() -> None:
    [entry] = [json.loads(text) for name, text in read_steps() if name == "ENTRYPOINT"]
    model, *others = COMPOSE["vllm"]["command"]
    command, given = parse([*entry[1:], model.partition(":-")[2].rstrip("}"), *others])
    assert command is not None
    assert given.passed_on == others
    _, _, line = shlex.split(COMPOSE["simulated"]["command"])
    parse(shlex.split(line[line.index("exec tenuto") :])[2:])


def test_what_the_build_needs_is_copied() -> None:
    """What pyproject.toml names: the sources, the page and the license."""
    rules = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert rules[0] == "**"
    kept = [rule[1:] for rule in rules if rule.startswith("!")]
    assert set(kept) == {"LICENSE", "README.md", "pyproject.toml", "src"}
    assert all((ROOT / name).exists() for name in kept)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = re.findall(r'(?:license-files = \["|path = "|packages = \[")([\w./]+)"', project)
    assert len(named) >= 3
    assert all(any(fnmatch(path, f"{name}*") for name in kept) for path in named)


def test_the_chart_starts_vllm_as_tenuto_would() -> None:
    [model] = VALUES["servingEngineSpec"]["modelSpec"]
    line = build_command(model["modelURL"], {"policy": "tenuto"}, [])
    assert model["vllmConfig"]["extraArgs"] == line[3:]
    # The chart adds --no-enable-prefix-caching otherwise.
    assert model["vllmConfig"]["enablePrefixCaching"] is True
    assert VALUES["routerSpec"] == {"routingLogic": "session", "sessionKey": "x-session-id"}
