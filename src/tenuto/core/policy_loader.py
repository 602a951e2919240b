"""Finds a policy by its name, or a user's own as `file.py:Class`, and lists them all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tenuto.core.class_loader import ClassLoader
from tenuto.core.policy import Learns, Policy
from tenuto.core.presets import PRESETS, EngineSettings
from tenuto.core.settings import check_settings

POLICIES_PACKAGE = "tenuto.policies"

_LOADER = ClassLoader(Policy, "policy", "policies", POLICIES_PACKAGE)


def get_policy_names() -> list[str]:
    """Names of the policies that ship with Tenuto: one file each, the file's name is the policy's."""
    return _LOADER.get_names()


def load_policy(name: str, options: Mapping[str, Any] | None = None) -> Policy:
    """Make a policy from its name (`continuum`), `my.module:Class` or `file.py:Class`, and its options.

    A preset's name makes the policy of the preset, with the preset's options under those that are given; its
    engine settings are those of `get_engine_settings`.
    Modules are also looked for in the working directory. Raises PolicyError if the policy cannot be loaded,
    ConfigError for an unknown option or a bad value.
    """
    preset = PRESETS.get(name)
    cls = _LOADER.find(preset.policy if preset is not None else name, PRESETS)
    own = {} if preset is None else dict(preset.options)
    return cls(**check_settings(cls, {**own, **(options or {})}, f"policy {name!r}"))


def get_engine_settings(name: str, policy: Policy) -> EngineSettings:
    """The engine settings that belong to a name: the preset's, or else those that the policy needs."""
    preset = PRESETS.get(name)
    return policy.needs.engine if preset is None else preset.engine


def describe_policy(policy: Policy, name: str | None = None) -> dict[str, Any]:
    """A policy's name, its options and what it has learned: enough to make one like it.

    `name` is what it was loaded by, where that is known: a preset's name cannot be told from its policy.
    """
    options = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy) if field.init}
    described = {"policy": name or get_policy_name(type(policy)), "options": options}
    try:
        state = policy.get_state() if isinstance(policy, Learns) else None
    except Exception:  # it is code from outside; who keeps its state says what is wrong with it
        state = None
    return described if state is None else {**described, "state": state}


def get_policy_name(cls: type[Policy]) -> str:
    """The name by which `load_policy` finds this class."""
    return _LOADER.get_name(cls)


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
