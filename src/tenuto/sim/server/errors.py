"""Errors that refuse a request, in OpenAI's format."""

from __future__ import annotations

from typing import Any

from tenuto.core.errors import TenutoError

_TYPES = {401: "AuthenticationError", 404: "NotFoundError", 413: "RequestTooLargeError"}


class RequestError(TenutoError):
    """A request is refused: the HTTP status, the reason, and the field that caused it."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status

    def to_json(self) -> dict[str, Any]:
        """Return the body of the response."""
        kind = _TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.status},
        }
