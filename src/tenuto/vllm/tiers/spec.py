"""What vLLM's OffloadingConnector loads by name: host memory, and host memory with a disk behind it.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "HostSpec", "spec_module_path": "tenuto.vllm.tiers.spec",
        "cpu_bytes_to_use": …}}'

`tenuto serve --host-gb` writes this line. The disk is used under Tenuto's scheduler only, which says what KV
depends on. On a GPU vLLM's own worker copies, into vLLM's own memory; on a CPU
build, `tenuto.vllm.tiers.worker`.
"""

from __future__ import annotations

from typing import Any

from tenuto.vllm.compat_specs import DiskSpecBase, HostSpecBase
from tenuto.vllm.tiers.worker import HostWorker


class HostSpec(HostSpecBase):
    """Host memory."""

    def make_cpu_worker(self, kv_caches: Any) -> HostWorker:
        """The worker of a CPU build."""
        return HostWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)


class DiskSpec(DiskSpecBase):
    """Host memory, and the tiers of `secondary_tiers` behind it (`tenuto.vllm.tiers.disk`)."""

    def make_cpu_worker(self, kv_caches: Any) -> HostWorker:
        """The worker of a CPU build; the scheduler's process sees its memory too."""
        memory = self.open_shared_memory()
        return HostWorker(kv_caches, self.blocks_per_chunk, self.num_chunks, memory=memory)
