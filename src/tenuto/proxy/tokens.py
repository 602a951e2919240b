"""Gets token ids from the server's own /tokenize (vLLM, SGLang), after the answer has been passed on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import httpx

from tenuto.proxy.asked import are_ids

LIMIT_S = 30.0
_CREDENTIALS = ("authorization", "api-key", "x-api-key")
"""Headers of the client's request that this request needs too. They are not stored."""
_MISSING = frozenset({404, 405, 501})


class Tokenizer:
    """Asks one server for token ids. Stops asking when it is clear that the server does not support this."""

    def __init__(self, url: str, say: Callable[[str], None]) -> None:
        self.is_there = True
        self._url = f"{url}/tokenize"
        self._say = say
        self._client = httpx.Client(timeout=LIMIT_S, trust_env=False)
        self._has_complained = False

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def try_tokenize(self, ask: Mapping[str, Any], headers: Mapping[str, str]) -> list[int] | None:
        """The token ids of a prompt or a text. None if the server does not provide them."""
        if not self.is_there:
            return None
        credentials = {name: headers[name] for name in _CREDENTIALS if name in headers}
        try:
            answer = self._client.post(self._url, json=dict(ask), headers=credentials)
            if answer.status_code in _MISSING:
                self.is_there = False
                self._say("the server has no /tokenize: prompts are told apart by messages, not by tokens")
                return None
            tokens = answer.json().get("tokens") if answer.status_code == 200 else None
            problem = f"http {answer.status_code}"
        except httpx.TimeoutException:
            # Give up: every later prompt would wait just as long.
            self.is_there = False
            self._say("/tokenize hangs: from here on prompts are told apart by messages, not by tokens")
            return None
        except (httpx.HTTPError, ValueError, AttributeError) as error:
            tokens, problem = None, type(error).__name__
        if tokens and are_ids(tokens):
            return list(tokens)
        if not self._has_complained:
            self._has_complained = True
            self._say(f"/tokenize fails ({problem}): such prompts are told apart by messages, not by tokens")
        return None
