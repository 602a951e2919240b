"""The options of `tenuto top`."""

from __future__ import annotations

from dataclasses import MISSING, dataclass

from tenuto.client.http.address import check_api_key, check_url
from tenuto.core.settings import Options, option


@dataclass(frozen=True, kw_only=True)
class TopOptions(Options):
    """All options, checked. Raises ConfigError."""

    url: str = option(MISSING, "the server, e.g. http://localhost:8000", metavar="URL")
    interval_s: float = option(2.0, "seconds between two looks", minimum=0.1)
    window_s: float = option(60.0, "rates and percentiles are over the last S seconds", minimum=0.1)
    once: bool = option(False, "look twice, an interval apart, print one picture and exit")
    as_json: bool = option(False, "print JSON, one object a line for each look", flag="--json")
    api_key: str | None = option(None, "the key to send", environment="OPENAI_API_KEY", metavar="KEY")

    def __post_init__(self) -> None:
        """Check them."""
        super().__post_init__()
        check_url(self.url)
        check_api_key(self.api_key)
