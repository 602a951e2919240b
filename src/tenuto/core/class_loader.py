"""Finds classes by name, those of a package or a user's own as `file.py:Class`, and checks their hooks."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from tenuto.core.errors import PolicyError
from tenuto.core.messages import suggest

T = TypeVar("T")

FILE_MODULE = "tenuto_policy_file_"
"""Modules made from a path to a file begin with this; a hash of the path and its time follows."""


@dataclass(frozen=True)
class ClassLoader(Generic[T]):
    """The subclasses of one base class. Every method raises PolicyError for what cannot be loaded."""

    base: type[T]
    noun: str
    """What messages call such a class."""
    plural: str
    package: str
    """The package whose modules have one class each; the module's name is the class's."""

    def get_names(self) -> list[str]:
        """Names of the classes in the package."""
        return sorted(self._find_modules())

    def find(self, name: str, further_names: Iterable[str] = ()) -> type[T]:
        """The class with this name: one of the package, `my.module:Class` or `file.py:Class`.

        `further_names` are listed in the message if there is none.
        """
        return self._import_class(name) if ":" in name else self._find_class(name, further_names)

    def get_name(self, cls: type[T]) -> str:
        """The name by which `find` finds this class."""
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
        return {_get_name_of_module(module): module for module in modules}

    def _find_class(self, name: str, further_names: Iterable[str]) -> type[T]:
        modules = self._find_modules()
        if name not in modules:
            known = sorted({*modules, *further_names})
            raise PolicyError(
                f"no {self.noun} {name!r}; choose one of: {', '.join(known)}; or name your own as "
                f"file.py:Class or my.module:Class{suggest(name, known)}"
            )
        module_name = modules[name]
        found = self._get_classes(importlib.import_module(module_name))
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
        except PolicyError as error:
            raise PolicyError(f"{self.noun} {path!r}: {error}") from error
        except Exception as error:  # importing runs the module, and anything can go wrong in it
            raise PolicyError(f"{self.noun} {path!r} cannot be imported: {error!r}") from error
        cls = getattr(module, class_name, None)
        if cls is None:
            known = [each.__name__ for each in self._get_classes(module)]
            hint = suggest(class_name, known)
            hint = hint or f"; its {self.plural} are: {', '.join(known) or 'none'}"
            raise PolicyError(
                f"{self.noun} {path!r} cannot be imported: there is no {class_name!r} in it{hint}"
            )
        if not (isinstance(cls, type) and issubclass(cls, self.base)):
            raise PolicyError(f"{path!r} is not a subclass of tenuto.{self.base.__name__}")
        if "__dataclass_fields__" not in vars(cls):  # the base class's own are inherited
            raise PolicyError(f"{path!r} must be a dataclass, so that its parameters can be checked")
        return cls


def _get_name_of_module(module: str) -> str:
    return module.rpartition(".")[2].replace("_", "-")


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


def check_arguments(cls: type, name: str, hook: Callable[..., Any]) -> None:
    """Refuse a class's own version of a hook that cannot be called with the hook's arguments.

    Raises PolicyError.
    """
    wanted = list(inspect.signature(hook).parameters)
    try:
        inspect.signature(vars(cls)[name]).bind(*wanted)
    except (TypeError, ValueError):
        raise PolicyError(f"{cls.__qualname__}.{name} must be a method {name}({', '.join(wanted)})") from None
