"""Host memory behind a slow link, for a CPU build: its copies take as long as beside a fast GPU.

On a CPU a token is copied a hundred times faster than it is computed; on a GPU with long contexts the two are
alike. The environment variable `LINK_GB_S` says the speed. vLLM loads this module by name (`prefetch_ttft`).
"""

from __future__ import annotations

import os
import time
from typing import Any

from tenuto.vllm.tiers import worker
from tenuto.vllm.tiers.worker import Array, Copies, HostWorker, Part, read_rows

SPEED = "LINK_GB_S"


def read_slowly(part: Part) -> Array:
    """A copy of the source's rows, after the time that the link takes for them."""
    time.sleep(part.num_bytes / (float(os.environ[SPEED]) * 1e9))
    return read_rows(part)


class HostSpec(worker.HostSpec):
    """Tenuto's own spec, with this worker."""

    def make_cpu_worker(self, kv_caches: Any) -> HostWorker:
        """The worker of a CPU build."""
        copies = Copies(read=read_slowly)
        return HostWorker(kv_caches, self.blocks_per_chunk, self.num_chunks, copies=copies)
