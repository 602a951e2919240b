"""The simulated engine behind an OpenAI-compatible server.

app ─► generate ─► request ─► tokens           a request's bytes become the engine's request
          │
          └─► engine ─► event_loop             a clock advances the engine; tokens are sent as they come
control, metrics                               what operators can change and see

The options of `tenuto serve --engine sim`, except those of the simulated machine, are here.
"""

from __future__ import annotations

from dataclasses import dataclass

from tenuto.core.settings import Options, option


@dataclass(frozen=True, kw_only=True)
class ServerOptions(Options):
    """The server's options, checked. Raises ConfigError."""

    GROUP = "the server"

    host: str = option("127.0.0.1", "address to listen on", metavar="ADDRESS")
    port: int = option(8000, "port to listen on; 0: any free", minimum=0, maximum=65535)
    speed: float = option(1.0, "simulated seconds per real second", above=0)
    served_model_name: str | None = option(
        None, "what clients call the model", metavar="NAME", shown_default="the model's own name"
    )
    api_key: str | None = option(
        None, "the key that requests to /v1 must carry", environment="VLLM_API_KEY", metavar="KEY"
    )
    tokenizer: str | None = option(
        None, "a Hugging Face model folder with a tokenizer.json", metavar="DIR", shown_default="its own"
    )
    answer_tokens: int = option(256, "tokens of a chat answer whose request has no max_tokens", minimum=1)
    trace: str | None = option(None, "write a JSONL trace of steps and decisions", metavar="FILE")
