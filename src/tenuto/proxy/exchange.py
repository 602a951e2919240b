"""One request and its answer, as they passed through the proxy: bytes and times, not parsed yet."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Literal

MAX_BODY_BYTES = 64 * 2**20
"""Larger bodies are passed through, but they are not kept for reading."""

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
"""POST requests are recorded if their path ends with one of these. All other requests are only passed on."""

End = Literal["whole", "server broke off", "client left", "no server"]


@dataclass(slots=True)
class Exchange:
    """A request and its answer. Times are `time.monotonic()`. Header names are in lower case."""

    path: str
    headers: dict[str, str]
    arrival_s: float
    start_s: float
    """When the first recorded request arrived. This is time 0, so that a replay does not wait for it."""
    body: bytearray = field(default_factory=bytearray)
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    """The answer's body as it arrived, each piece with its time."""
    status: int | None = None
    content_type: str = ""
    content_encoding: str = ""
    end: End = "server broke off"
    end_s: float = 0.0
    """When the answer's last byte arrived, or when it was clear that no more bytes would come."""
    num_request_bytes: int = 0
    num_answer_bytes: int = 0

    def add_request(self, piece: bytes) -> None:
        """Store a piece of the request's body."""
        self.num_request_bytes += len(piece)
        if self.num_request_bytes <= MAX_BODY_BYTES:
            self.body += piece

    def add_answer(self, piece: bytes, now_s: float) -> None:
        """Store a piece of the answer's body."""
        self.num_answer_bytes += len(piece)
        if self.num_answer_bytes <= MAX_BODY_BYTES:
            self.chunks.append((now_s, piece))

    @property
    def endpoint(self) -> str:
        """The matching one of `PATHS`. The part of the path before it is omitted: it may hold a key."""
        return next((path for path in PATHS if self.path.endswith(path)), "")

    @property
    def is_too_large(self) -> bool:
        """Whether a body was too large to be kept whole."""
        return max(self.num_request_bytes, self.num_answer_bytes) > MAX_BODY_BYTES

    def get_chunks(self) -> list[tuple[float, bytes]]:
        """The answer's body, decompressed if it was compressed. Raises ValueError if that fails."""
        if self.content_encoding in ("", "identity"):
            return self.chunks
        if self.content_encoding not in ("gzip", "deflate"):
            raise ValueError(f"the answer is packed as {self.content_encoding}")
        unpack = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # accepts gzip and zlib headers
        unpacked, num_left = [], MAX_BODY_BYTES
        for at_s, piece in self.chunks:
            try:
                plain = unpack.decompress(piece, num_left)
            except zlib.error as error:
                raise ValueError(f"the answer cannot be unpacked: {error}") from None
            num_left -= len(plain)
            if num_left <= 0:
                raise ValueError("the answer unpacks to more than is read")
            unpacked.append((at_s, plain))
        return unpacked


def is_recorded(method: str, path: str) -> bool:
    """Whether a request is for a turn, so that it is recorded."""
    return method == "POST" and path.endswith(PATHS)
