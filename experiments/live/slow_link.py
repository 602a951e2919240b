"""Host memory behind a slow link, for a CPU build: its copies take as long as beside a fast GPU.

On a CPU a token is copied a hundred times faster than it is computed; on a GPU with long contexts the two are
alike. The environment variable `LINK_GB_S` says the speed. vLLM loads this module by name (`prefetch_ttft`).
"""

from __future__ import annotations

import os
import time
from typing import Any

from tenuto.vllm.compat import specs
from tenuto.vllm.tiers.copies import Array, Copies, Part, read_rows

SPEED = "LINK_GB_S"


def read_slowly(part: Part) -> Array:
    """A copy of the source's rows, after the time that the link takes for them."""
    time.sleep(part.num_bytes / (float(os.environ[SPEED]) * 1e9))
    return read_rows(part)


class HostSpec(specs.HostSpec):
    """Tenuto's own spec, with this worker."""

    def get_worker(self, kv_caches: Any) -> specs.HostWorker:
        """The worker of a CPU build."""
        copies = Copies(read=read_slowly)
        return specs.HostWorker(kv_caches, self.blocks_per_chunk, self.num_chunks, copies=copies)
