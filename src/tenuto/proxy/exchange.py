"""One request and its answer as they passed through the proxy: bytes and times, nothing read yet."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Literal

MAX_BODY_BYTES = 64 * 2**20
"""Bodies are kept up to here for reading; larger ones pass through all the same."""

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
"""What is recorded when posted to, at the end of any path; everything else only passes."""

End = Literal["whole", "server broke off", "client left", "no server"]


@dataclass(slots=True)
class Exchange:
    """Times are `time.monotonic()`. Header names are in lower case."""

    path: str
    headers: dict[str, str]
    arrival_s: float
    start_s: float
    """When the recording's first request came: its time 0, so that a replay need not wait for it."""
    body: bytearray = field(default_factory=bytearray)
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    """The answer's body as it came, each piece with its time."""
    status: int | None = None
    content_type: str = ""
    content_encoding: str = ""
    end: End = "server broke off"
    end_s: float = 0.0
    """When the last byte of the answer came, or when it was clear that none would."""
    num_request_bytes: int = 0
    num_answer_bytes: int = 0

    def add_request(self, piece: bytes) -> None:
        """A piece of the request's body passed."""
        self.num_request_bytes += len(piece)
        if self.num_request_bytes <= MAX_BODY_BYTES:
            self.body += piece

    def add_answer(self, piece: bytes, now_s: float) -> None:
        """A piece of the answer's body came."""
        self.num_answer_bytes += len(piece)
        if self.num_answer_bytes <= MAX_BODY_BYTES:
            self.chunks.append((now_s, piece))

    @property
    def endpoint(self) -> str:
        """Which of `PATHS` it was posted to; what stands before that may hold a key."""
        return next((path for path in PATHS if self.path.endswith(path)), "")

    @property
    def is_too_large(self) -> bool:
        """Whether a body was not kept whole."""
        return max(self.num_request_bytes, self.num_answer_bytes) > MAX_BODY_BYTES

    def get_chunks(self) -> list[tuple[float, bytes]]:
        """The answer's body, unpacked if it was packed. Raises ValueError if that cannot be done."""
        if self.content_encoding in ("", "identity"):
            return self.chunks
        if self.content_encoding not in ("gzip", "deflate"):
            raise ValueError(f"the answer is packed as {self.content_encoding}")
        unpack = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # either header
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
    """Whether a request asks for a turn."""
    return method == "POST" and path.endswith(PATHS)
