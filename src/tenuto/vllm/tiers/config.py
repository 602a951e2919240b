"""What `tenuto serve --host-gb` tells vLLM's connector."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenuto.core.errors import ConfigError

MODULE = "tenuto.vllm.tiers.spec"
DISK_MODULE = "tenuto.vllm.tiers.disk"
GIB = 2**30
_OURS = re.compile(r"[\w.-]*-[0-9a-f]{8}-dp[0-9]+-[0-9]+|lost\+found")
"""What may be in a folder whose rights Tenuto changes: engines' folders, and what file systems put there."""


def get_engine_name(model: str, rank: int, number: int) -> str:
    """The name of an engine's folder: `number` tells apart those of one model and data-parallel rank."""
    digest = hashlib.blake2b(model.encode(errors="replace"), digest_size=4).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', model)[-80:]}-{digest}-dp{rank}-{number}"


def prepare_folder(folder: Path) -> None:
    """Make a folder that nobody else can open, or make an existing one so. Raises ConfigError.

    KV tells what was in the prompts, and whoever can write here can plant KV. A folder of another user is
    refused, and so is one that others can open and that has files of others, which may be there for them.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.geteuid():
            raise ConfigError(
                f"--disk: {str(folder)!r} belongs to another user; name a folder of your own, "
                "such as a new one in it"
            )
        if found.st_mode & 0o077:
            others = sorted(each.name for each in folder.iterdir() if not _OURS.fullmatch(each.name))
            if others:
                raise ConfigError(
                    f"--disk: other users can open {str(folder)!r}, and {others[0]!r} in it is not Tenuto's; "
                    "name a folder for KV only, or run chmod 700 on this one"
                )
            folder.chmod(0o700)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"--disk: cannot write into {str(folder)!r}: {error}") from error


@dataclass(frozen=True)
class Tiers:
    """The tiers below the GPU: host memory, and a folder on a disk behind it."""

    host_gb: float
    disk: str | None = None
    disk_gb: float | None = None

    def get_transfer_config(self) -> dict[str, Any]:
        """The value of vLLM's `--kv-transfer-config`."""
        extra: dict[str, Any] = {
            "spec_name": "HostSpec" if self.disk is None else "DiskSpec",
            "spec_module_path": MODULE,
            "cpu_bytes_to_use": int(self.host_gb * GIB),
            # An agent's answer is a part of its next prompt.
            "offload_prompt_only": False,
        }
        if self.disk is not None:
            tier: dict[str, Any] = {
                "type": "DiskTier",
                "module_path": DISK_MODULE,
                "folder": str(Path(self.disk).absolute()),
            }
            if self.disk_gb is not None:
                tier["max_bytes"] = int(self.disk_gb * GIB)
            extra["secondary_tiers"] = [tier]
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            # A load that fails costs its computation, and not the request.
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }

    def check(self) -> None:
        """Make the folder, and check that files can be written there. Raises ConfigError."""
        if self.disk is not None:
            prepare_folder(Path(self.disk))
