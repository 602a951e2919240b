"""Finds policies and routers by name: Tenuto's own, presets, and a user's as `file.py:Class`.

A preset is a named combination of a policy and engine settings. It makes no decisions itself. Its name can be
used like a policy's (`--policy offload-async`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import importlib.util
import json
import pkgutil
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Generic, TypeVar

from tenuto.core.errors import ConfigError, NotFoundError, PolicyError, TenutoError, suggest
from tenuto.core.policy import EngineSettings, Learns, Oracle, Policy
from tenuto.core.router import Router
from tenuto.core.settings import check_settings

T = TypeVar("T", bound=Policy | Router)

FILE_MODULE = "tenuto_policy_file_"
"""Prefix of the names of modules that are made from files. A hash of the path and its time follows."""


@dataclass(frozen=True)
class ClassLoader(Generic[T]):
    """Finds the subclasses of one base class. Methods raise PolicyError for what cannot be loaded."""

    base: type[T]
    noun: str
    """The word for such a class in messages."""
    package: str
    """The package of Tenuto's own classes. Each module has one class, which is found by the module's name."""
    shared: str = ""
    """The module of the package that has several. Each is found by its own name, in words with hyphens."""

    def get_names(self) -> list[str]:
        """Names of the classes in the package."""
        return sorted(self._find_modules())

    def find(self, name: str, further_names: Iterable[str] = ()) -> type[T]:
        """The class with this name: a name from the package, `my.module:Class` or `file.py:Class`.

        `further_names`: other names to list in the message if there is no such class.
        """
        return self._import_class(name) if ":" in name else self._find_class(name, further_names)

    def make(self, cls: type[T], options: Mapping[str, Any], name: str) -> T:
        """An object of a class that `find` found by this name. Raises ConfigError for a bad option too."""
        where = f"{self.noun} {name!r}"
        try:
            made = cls(**check_settings(cls, options, where))
        except TenutoError:
            raise
        except Exception as error:  # it may be user code
            raise PolicyError(f"{where} cannot be made: {error!r}") from error
        wanted = type(self.base.needs)
        if not isinstance(made.needs, wanted):
            raise PolicyError(f"{where}: needs must be a {wanted.__name__}, got {made.needs!r}")
        return made

    def get_name(self, cls: type[T]) -> str:
        """The name by which `find` finds this class."""
        if cls.__module__ == self.shared:
            return _get_name_of_class(cls)
        if cls.__module__.startswith(f"{self.package}."):
            return _get_name_of_module(cls.__module__)
        module = sys.modules.get(cls.__module__)
        is_file = module is not None and cls.__module__.startswith(FILE_MODULE)
        file = module.__file__ if module is not None and is_file else cls.__module__
        return f"{file}:{cls.__qualname__}"

    def _find_modules(self) -> dict[str, str]:
        """The module of each class that ships with Tenuto, by the class's name."""
        package = importlib.import_module(self.package)
        modules = [
            each.name
            for each in pkgutil.walk_packages(package.__path__, f"{self.package}.")
            if not each.ispkg and not each.name.rpartition(".")[2].startswith("_")
        ]
        found = {_get_name_of_module(module): module for module in modules if module != self.shared}
        if self.shared:
            classes = self._get_classes(importlib.import_module(self.shared))
            found |= {_get_name_of_class(cls): self.shared for cls in classes}
        return found

    def _find_class(self, name: str, further_names: Iterable[str]) -> type[T]:
        modules = self._find_modules()
        if name not in modules:
            known = sorted({*modules, *further_names})
            raise NotFoundError(
                f"no {self.noun} {name!r}; choose one of: {', '.join(known)}; or name your own as "
                f"file.py:Class or my.module:Class{suggest(name, known)}"
            )
        module_name = modules[name]
        found = self._get_classes(importlib.import_module(module_name))
        if module_name == self.shared:
            found = [cls for cls in found if _get_name_of_class(cls) == name]
        if len(found) != 1:
            raise PolicyError(
                f"{module_name} must define exactly one {self.base.__name__} subclass, found {len(found)}"
            )
        return found[0]

    def _get_classes(self, module: ModuleType) -> list[type[T]]:
        """The subclasses that a module itself defines."""
        return [
            value
            for value in vars(module).values()
            if isinstance(value, type)
            and issubclass(value, self.base)
            and value.__module__ == module.__name__
        ]

    def _import_class(self, path: str) -> type[T]:
        module_name, _, class_name = path.rpartition(":")
        try:
            is_file = module_name.endswith(".py")
            module = _import_file(Path(module_name)) if is_file else _import_module(module_name)
        except NotFoundError as error:
            raise NotFoundError(f"{self.noun} {path!r}: {error}") from error
        except Exception as error:  # importing runs the module, so any error is possible
            is_missing = isinstance(error, ModuleNotFoundError) and _is_or_contains(error.name, module_name)
            kind = NotFoundError if is_missing else PolicyError
            where = _find_line(error, find_file(path))
            raise kind(f"{self.noun} {path!r} cannot be imported: {where}{error!r}") from error
        cls = getattr(module, class_name, None)
        if cls is None:
            known = [each.__name__ for each in self._get_classes(module)]
            hint = suggest(class_name, known)
            plural = self.package.rpartition(".")[2]
            hint = hint or f"; its {plural} are: {', '.join(known) or 'none'}"
            raise NotFoundError(
                f"{self.noun} {path!r} cannot be imported: there is no {class_name!r} in it{hint}"
            )
        if not (isinstance(cls, type) and issubclass(cls, self.base)):
            raise PolicyError(f"{path!r} is not a subclass of tenuto.{self.base.__name__}")
        if "__dataclass_fields__" not in vars(cls):  # its base class's are inherited
            raise PolicyError(f"{path!r} must be a dataclass, so that its parameters can be checked")
        return cls


def find_file(name: str) -> str:
    """The file of a policy or router that a user names; empty for Tenuto's own and for what is not found."""
    module_name = name.rpartition(":")[0]
    if not module_name or module_name.endswith(".py"):
        return module_name
    try:
        with _working_directory_in_path():
            # A script that runs is such a module, and has no spec.
            module = sys.modules.get(module_name)
            spec = None if module is not None else importlib.util.find_spec(module_name)
    except Exception:  # a package around it may be user code; who loads the class says what is wrong
        return ""
    found = getattr(module, "__file__", None) if spec is None else spec.origin
    return found or ""


def _get_name_of_module(module: str) -> str:
    return module.rpartition(".")[2].replace("_", "-")


def _get_name_of_class(cls: type) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", cls.__name__).lower()


def _is_or_contains(package: str | None, module: str) -> bool:
    """Whether this is the module's name, or that of a package around it."""
    return package is not None and f"{module}.".startswith(f"{package}.")


def _find_line(error: Exception, file: str) -> str:
    """The last line of a file that was running, to be put before the error; empty if none was."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if file and Path(frame.filename) == Path(file).resolve()]
    return f"line {lines[-1]}: " if lines else ""


def _import_module(name: str) -> ModuleType:
    with _working_directory_in_path():
        return importlib.import_module(name)


@contextlib.contextmanager
def _working_directory_in_path() -> Iterator[None]:
    """In this context, modules are also found in the working directory, even by an installed command."""
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
    """Import a file as a module. It runs once, as long as the file does not change."""
    path = path.resolve()
    try:
        changed = path.stat().st_mtime_ns
    except OSError as error:
        raise NotFoundError(f"cannot read the file: {error.strerror or error}") from error
    name = FILE_MODULE + hashlib.sha256(f"{path}:{changed}".encode()).hexdigest()[:16]
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


# Policies and presets.


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named combination of a policy and engine settings."""

    policy: str
    engine: EngineSettings
    help: str
    source: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """The preset's options for its policy. The user's options override them."""


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "priority": Preset(
            policy="stock",
            engine=EngineSettings(order="priority"),
            help="vLLM's own priority scheduling: smaller priority first, then earlier arrival.",
            source="vllm/v1/core/sched/request_queue.py@0.32; as `--scheduling-policy priority`",
        ),
        # Steps have 2,048 or 8,192 tokens, so a cap of 512 tokens per prompt leaves the rest to others. A
        # watermark of 0.01 was vLLM's default before V1; it avoids nearly all preemptions. Known weakness:
        # the cap is per prompt, not per step. Sixteen long prompts still fill a step of 8,192, and each
        # prompt needs 16 times as many steps.
        "stock-tuned": Preset(
            policy="stock",
            engine=EngineSettings(long_prefill_token_threshold=512, watermark=0.01, offload="async"),
            help="Stock vLLM as a good operator sets it: capped prompts, a small reserve, KV in host memory.",
            source="vLLM 0.32's --long-prefill-token-threshold, --watermark and --kv-offloading-size",
        ),
        # Every turn that fits starts, as in stock. Under overload, turns evict each other's blocks, and the
        # tier fills with the blocks of all turns.
        "offload-async": Preset(
            policy="stock",
            engine=EngineSettings(offload="async"),
            help="Stock vLLM with its own offloading: KV is copied to host memory beside the steps.",
            source="vllm/v1/kv_offload and the offloading connector@0.32",
        ),
        # It works well until the link saturates. Then every step waits for the link.
        "offload-sync": Preset(
            policy="stock",
            engine=EngineSettings(offload="sync"),
            help="Stock vLLM with LMCache: every step waits for its copies to and from host memory.",
            source="LMCache 0.3.7 behind vLLM (`start_load_kv` and `wait_for_save` around the forward pass)",
        ),
        # The paper's engine swaps preempted turns to the CPU, so this preset is closer to it than `autellix`.
        # Known weakness: under overload, the tier cannot hold all active jobs; then everything is recomputed.
        "autellix+": Preset(
            policy="autellix",
            engine=EngineSettings(offload="async"),
            help="Autellix with KV in host memory: a preempted turn loads what it lost.",
            source="arXiv 2502.13965, section 4.2.2",
        ),
        # This is what the published sweeps measured. The prototype pins only if an answer has exactly one
        # ```bash block, from which it reads the tool call. The sweeps' answers have 20 tokens and no such
        # block, so nothing was pinned, and only the order by jobs remains. The policy `continuum-fixed` does
        # what the prototype does if it knows the tool.
        "continuum-prototype": Preset(
            policy="continuum-fixed",
            engine=EngineSettings(scheduler="continuum-fork"),
            help="The public Continuum prototype as its sweeps ran it: no pin without a call in the answer.",
            source="estimate_with_func.py and sched/scheduler.py in vllm/v1/core of the fork of vLLM 0.10.2 "
            "that accompanies arXiv 2511.02230",
            options=MappingProxyType({"tools": "shown"}),
        ),
        # With this cache, no work is wasted. A policy that is slower wastes work; a policy that is faster has
        # a better order. No real server has such a cache.
        "unbounded": Preset(
            policy="job-order",
            engine=EngineSettings(unbounded_kv=True),
            help="An oracle: jobs in the order of their arrival, with a KV cache that never fills.",
            source="this project",
        ),
    }
)
"""The presets: a policy with settings of the engine, under a name of their own."""


_POLICIES = ClassLoader(Policy, "policy", "tenuto.policies")


def get_policy_names() -> list[str]:
    """Names of the policies that ship with Tenuto. Each is in a file of the same name."""
    return _POLICIES.get_names()


def load_policy(name: str, options: Mapping[str, Any] | None = None) -> Policy:
    """Make a policy from its name (`continuum`), `my.module:Class` or `file.py:Class`, and its options.

    A preset's name makes the preset's policy, with the preset's options. `options` override them. For the
    preset's engine settings, see `get_engine_settings`. Modules are also searched in the working directory.
    Raises PolicyError if the policy cannot be loaded, ConfigError for an unknown option or a bad value.
    """
    preset = PRESETS.get(name)
    own = {} if preset is None else dict(preset.options)
    return _POLICIES.make(_find_policy(name), {**own, **(options or {})}, name)


def find_file_options(name: str) -> list[str]:
    """The options of a policy that name files, by the policy's name. Raises PolicyError as `load_policy`."""
    return [each.name for each in dataclasses.fields(_find_policy(name)) if each.metadata.get("is_file")]


def _find_policy(name: str) -> type[Policy]:
    preset = PRESETS.get(name)
    return _POLICIES.find(preset.policy if preset is not None else name, PRESETS)


def get_engine_settings(name: str, policy: Policy) -> EngineSettings:
    """The engine settings for a name: the preset's, or else those that the policy needs."""
    preset = PRESETS.get(name)
    return policy.needs.engine if preset is None else preset.engine


def get_server_settings(name: str, policy: Policy) -> EngineSettings:
    """As `get_engine_settings`. Raises ConfigError for what only the simulator can run."""
    wanted = get_engine_settings(name, policy)
    if isinstance(policy, Oracle) or wanted.unbounded_kv or wanted.scheduler != "vllm":
        raise ConfigError(f"policy {name} works only in the simulator")
    return wanted


def describe_policy(policy: Policy, name: str | None = None) -> dict[str, Any]:
    """A policy's name, its options and what it has learned: all that is needed to make an equal one.

    `name`: the name by which it was loaded, if known, because a preset's name does not follow from its
    policy. A state that is not JSON is left out.
    """
    options = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy) if field.init}
    described = {"policy": name or get_policy_name(type(policy)), "options": options}
    try:
        state = policy.get_state() if isinstance(policy, Learns) else None
        json.dumps(state)
    except Exception:  # it may be user code; the code that keeps its state reports the error
        state = None
    return described if state is None else {**described, "state": state}


def get_policy_name(cls: type[Policy]) -> str:
    """The name by which `load_policy` finds this class."""
    return _POLICIES.get_name(cls)


def list_policies() -> list[dict[str, Any]]:
    """Policies, then presets, in JSON types. A preset has `preset_of` and its `engine` settings."""
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
    """The list as text, with the presets in a section of their own at the end."""
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
    """The settings that differ from their defaults."""
    default = dataclasses.asdict(EngineSettings())
    return {key: value for key, value in dataclasses.asdict(engine).items() if value != default[key]}


# Routers.

ROUTERS = ClassLoader(Router, "router", "tenuto.routers", shared="tenuto.routers.published")


def load_router(name: str, options: Mapping[str, Any] | None = None) -> Router:
    """Make a router from its name (`round-robin`), `my.module:Class` or `file.py:Class`, and its options.

    Raises PolicyError if the router cannot be loaded, ConfigError for an unknown option or a bad value.
    """
    return ROUTERS.make(ROUTERS.find(name), options or {}, name)
