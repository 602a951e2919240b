"""What `tenuto serve --host-gb` tells vLLM's connector."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenuto.core.errors import ConfigError

MODULE = "tenuto.vllm.tiers.spec"
DISK_MODULE = "tenuto.vllm.tiers.disk"
GIB = 2**30


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
        if self.disk is None:
            return
        try:
            Path(self.disk).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.disk):
                pass
        except OSError as error:
            raise ConfigError(f"--disk: cannot write into {self.disk!r}: {error}") from error
