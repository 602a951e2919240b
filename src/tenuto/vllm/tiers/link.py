"""How fast copies between the GPU and host memory are, measured by the copies themselves."""

from __future__ import annotations

FIRST_BYTES_PER_S = 10e9
"""Assumed until the first copy has been measured: PCIe gives 20 GB/s and more, a CPU's memory several."""
DECAY = 0.9
"""Weight of what was measured before, with each report of the workers."""


class LinkSpeed:
    """Seconds per chunk in one direction: bytes over time of the latest copies."""

    def __init__(self, chunk_bytes: int, num_workers: int) -> None:
        """`chunk_bytes`: a chunk's bytes on all workers together; they copy their shares at the same time."""
        self._share_bytes = chunk_bytes / max(1, num_workers)
        self._bytes = 0.0
        self._s = 0.0

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Workers copied so many bytes in so much time, both summed over the workers."""
        if num_bytes > 0 and seconds > 0:
            self._bytes = DECAY * self._bytes + num_bytes
            self._s = DECAY * self._s + seconds

    @property
    def bytes_per_s(self) -> float:
        """Bytes a second of one worker."""
        return self._bytes / self._s if self._s > 0 else FIRST_BYTES_PER_S

    @property
    def s_per_chunk(self) -> float:
        """Seconds that a chunk takes."""
        return self._share_bytes / self.bytes_per_s
