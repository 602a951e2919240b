"""The options of `tenuto top`."""

from __future__ import annotations

from dataclasses import MISSING, dataclass

from tenuto.client.http.address import check_api_key, check_url
from tenuto.core.settings import Options, option


@dataclass(frozen=True, kw_only=True)
class TopOptions(Options):
    """All options, checked. Raises ConfigError."""

    urls: tuple[str, ...] = option(
        MISSING,
        "a server, e.g. http://localhost:8000. May be repeated. The engines of a router that names them at "
        "/list_workers are found",
        flag="--url",
        metavar="URL",
        is_repeatable=True,
    )
    interval_s: float = option(2.0, "seconds between two looks", minimum=0.1)
    window_s: float = option(60.0, "rates and percentiles are over the last S seconds", minimum=0.1)
    once: bool = option(False, "look twice, an interval apart, print one picture and exit")
    as_json: bool = option(False, "print JSON, one object a line for each look", flag="--json")
    api_key: str | None = option(None, "the key to send", environment="OPENAI_API_KEY", metavar="KEY")

    def __post_init__(self) -> None:
        """Check them."""
        super().__post_init__()
        for url in self.urls:
            check_url(url)
        check_api_key(self.api_key)

    @property
    def where(self) -> str:
        """The servers, in words."""
        return ", ".join(self.urls)
