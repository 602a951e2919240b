"""What `tenuto policies` lists: every policy with its options, then the presets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tenuto.core.policy_loader import get_policy_names, load_policy
from tenuto.core.presets import PRESETS, EngineSettings


def list_policies() -> list[dict[str, Any]]:
    """Policies, then presets, in JSON types; a preset has `preset_of` and its `engine` settings."""
    listed: list[dict[str, Any]] = []
    for name in get_policy_names():
        policy = load_policy(name)
        options = {
            field.name: {"default": field.default, "help": field.metadata.get("help", "")}
            for field in dataclasses.fields(policy)
            if field.init
        }
        listed.append({"name": name, "help": (policy.__doc__ or "").splitlines()[0], "options": options})
    for name, preset in PRESETS.items():
        about = {"help": preset.help, "source": preset.source, "preset_of": preset.policy}
        listed.append({"name": name, **about, "engine": _get_settings(preset.engine)})
    return listed


def format_policies(listed: Sequence[dict[str, Any]]) -> str:
    """The list as text; presets come last and apart."""
    lines = []
    for each in listed:
        if "preset_of" in each:
            continue
        lines.append(f"{each['name']}\n    {each['help']}")
        lines += [
            f"    {key} = {option['default']}: {option['help']}" for key, option in each["options"].items()
        ]
    lines.append("\nPresets: a policy with settings of the engine; their names go wherever a policy's does.")
    for each in listed:
        if "preset_of" in each:
            engine = ", ".join(f"{key} = {value}" for key, value in each["engine"].items())
            lines.append(f"{each['name']}\n    {each['help']}\n    {each['preset_of']} with {engine}")
    return "\n".join(lines)


def _get_settings(engine: EngineSettings) -> dict[str, Any]:
    """The settings that are not at their default."""
    default = dataclasses.asdict(EngineSettings())
    return {key: value for key, value in dataclasses.asdict(engine).items() if value != default[key]}
