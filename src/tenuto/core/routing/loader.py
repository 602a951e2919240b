"""Finds a router by its name, or a user's own as `file.py:Class`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tenuto.core.class_loader import ClassLoader
from tenuto.core.routing.router import Router
from tenuto.core.settings import check_settings

_LOADER = ClassLoader(Router, "router", "routers", "tenuto.routers")


def get_router_names() -> list[str]:
    """Names of the routers that ship with Tenuto: one file each, the file's name is the router's."""
    return _LOADER.get_names()


def load_router(name: str, options: Mapping[str, Any] | None = None) -> Router:
    """Make a router from its name (`round-robin`), `my.module:Class` or `file.py:Class`, and its options.

    Raises PolicyError if the router cannot be loaded, ConfigError for an unknown option or a bad value.
    """
    cls = _LOADER.find(name)
    return cls(**check_settings(cls, options or {}, f"router {name!r}"))


def get_router_name(cls: type[Router]) -> str:
    """The name by which `load_router` finds this class."""
    return _LOADER.get_name(cls)
