"""Finding a policy: by name, as `my.module:Class`, or as `path/to/file.py:Class`."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from tenuto.core.errors import PolicyError
from tenuto.core.policy import Learns, Policy
from tenuto.core.presets import PRESETS, EngineSettings
from tenuto.core.settings import check_settings
from tenuto.core.suggest import suggest

POLICIES_PACKAGE = "tenuto.policies"

_FILE_MODULE = "tenuto_policy_file_"
"""Modules made from a path to a file begin with this; a hash of the path and its time follows."""


def get_policy_names() -> list[str]:
    """Names of the policies that ship with Tenuto: one file each, the file's name is the policy's."""
    return sorted(_find_modules())


def load_policy(name: str, options: Mapping[str, Any] | None = None) -> Policy:
    """Make a policy from its name (`continuum`), `my.module:Class` or `file.py:Class`, and its options.

    A preset's name makes the policy of the preset, with the preset's options under those that are given; its
    engine settings are those of `get_engine_settings`.
    Modules are also looked for in the working directory. Raises PolicyError if the policy cannot be loaded,
    ConfigError for an unknown option or a bad value.
    """
    if ":" in name:
        cls, own = _import_class(name), {}
    else:
        preset = PRESETS.get(name)
        cls = _find_class(preset.policy if preset is not None else name)
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
    if cls.__module__.startswith(f"{POLICIES_PACKAGE}."):
        return _get_name_of_module(cls.__module__)
    module = sys.modules.get(cls.__module__)
    is_file = module is not None and cls.__module__.startswith(_FILE_MODULE)
    return f"{module.__file__ if module is not None and is_file else cls.__module__}:{cls.__qualname__}"


def _find_modules() -> dict[str, str]:
    """The module of each policy that ships with Tenuto, by the policy's name."""
    package = importlib.import_module(POLICIES_PACKAGE)
    modules = [
        each.name
        for each in pkgutil.walk_packages(package.__path__, f"{POLICIES_PACKAGE}.")
        if not each.ispkg and not each.name.rpartition(".")[2].startswith("_")
    ]
    return {_get_name_of_module(module): module for module in modules}


def _get_name_of_module(module: str) -> str:
    return module.rpartition(".")[2].replace("_", "-")


def _find_class(name: str) -> type[Policy]:
    modules = _find_modules()
    if name not in modules:
        known = sorted({*modules, *PRESETS})
        raise PolicyError(
            f"no policy {name!r}; choose one of: {', '.join(known)}; or name your own as file.py:Class or "
            f"my.module:Class{suggest(name, known)}"
        )
    module_name = modules[name]
    found = _get_policy_classes(importlib.import_module(module_name))
    if len(found) != 1:
        raise PolicyError(f"{module_name} must define exactly one Policy subclass, found {len(found)}")
    return found[0]


def _get_policy_classes(module: ModuleType) -> list[type[Policy]]:
    """The Policy subclasses that a module itself defines."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Policy) and value.__module__ == module.__name__
    ]


def _import_class(path: str) -> type[Policy]:
    module_name, _, class_name = path.rpartition(":")
    try:
        is_file = module_name.endswith(".py")
        module = _import_file(Path(module_name)) if is_file else _import_module(module_name)
    except PolicyError as error:
        raise PolicyError(f"policy {path!r}: {error}") from error
    except Exception as error:  # importing runs the module, and anything can go wrong in it
        raise PolicyError(f"policy {path!r} cannot be imported: {error!r}") from error
    cls = getattr(module, class_name, None)
    if cls is None:
        known = [each.__name__ for each in _get_policy_classes(module)]
        hint = suggest(class_name, known) or f"; its policies are: {', '.join(known) or 'none'}"
        raise PolicyError(f"policy {path!r} cannot be imported: there is no {class_name!r} in it{hint}")
    if not (isinstance(cls, type) and issubclass(cls, Policy)):
        raise PolicyError(f"{path!r} is not a subclass of tenuto.Policy")
    if "__dataclass_fields__" not in vars(cls):  # Policy's own are inherited
        raise PolicyError(f"{path!r} must be a dataclass, so that its parameters can be checked")
    return cls


def _import_module(name: str) -> ModuleType:
    with _working_directory_in_path():
        return importlib.import_module(name)


@contextlib.contextmanager
def _working_directory_in_path() -> Iterator[None]:
    """A command that pip installed does not look for modules in the working directory."""
    here = str(Path.cwd())
    if here in sys.path or "" in sys.path:
        yield
        return
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _import_file(path: Path) -> ModuleType:
    """Run a file as a module; once, as long as the file does not change."""
    path = path.resolve()
    try:
        changed = path.stat().st_mtime_ns
    except OSError as error:
        raise PolicyError(f"cannot read the file: {error.strerror or error}") from error
    name = _FILE_MODULE + hashlib.sha256(f"{path}:{changed}".encode()).hexdigest()[:16]
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks up its module while it is being created.
    sys.modules[name] = module
    try:
        with _working_directory_in_path():
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
