"""vLLM runs `register` in each of its processes. It lets our metrics reach `/metrics`.

Without Tenuto's scheduler, nothing is written into the folder and nothing is exported. The plug-in needs no
settings. If `VLLM_PLUGINS` is set, it must include `tenuto`.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from tenuto.vllm.metrics import FOLDER_VARIABLE, OWNER_VARIABLE
from tenuto.vllm.tenants import make_secret

logger = logging.getLogger("vllm.tenuto")


def register() -> None:
    """In a server's first process, make the metrics folder, its collector, and the secret."""
    make_secret()
    # Engine and worker processes inherit the folder. Every server makes its own.
    if FOLDER_VARIABLE in os.environ and multiprocessing.parent_process() is not None:
        return
    if os.environ.get(OWNER_VARIABLE) == str(os.getpid()):
        return
    try:
        folder = tempfile.mkdtemp(prefix="tenuto-metrics-")
    except OSError as error:
        # vLLM runs this in every process, with or without Tenuto's scheduler.
        logger.warning("no folder for Tenuto's metrics: %s", error)
        return
    owner = os.getpid()
    os.environ[FOLDER_VARIABLE] = folder
    os.environ[OWNER_VARIABLE] = str(owner)
    atexit.register(_remove, folder, owner)
    REGISTRY.register(EngineMetrics(Path(folder)))


def _remove(folder: str, owner: int) -> None:
    # A forked child inherits the exit handler, but does not own the folder.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


class EngineMetrics(Collector):
    """Exports the metrics that the engine processes wrote last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterable[Any]:
        """The metrics of all engines; families with the same name are merged."""
        families: dict[str, Any] = {}
        for file in sorted(self._folder.glob("engine-*.prom")):
            try:
                found = list(text_string_to_metric_families(file.read_text()))
            except (OSError, ValueError) as error:
                logger.warning("metrics of %s cannot be read: %s", file.name, error)
                continue
            for family in found:
                # prometheus_client writes creation times as separate families.
                if family.name.endswith("_created"):
                    continue
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        return families.values()
