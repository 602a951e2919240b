"""`tenuto record`: record the requests of agents to a server."""

from __future__ import annotations

from tenuto.cli.command import Command, Given, Part, needing
from tenuto.proxy import RecordOptions

_SUMMARY = """\
Record the requests of agents to a server, without their text: a proxy that passes everything on unchanged.
Point the agents at the proxy instead of the server. Ctrl-C or SIGTERM ends the recording.
"""

_EXAMPLES = """\
examples:
  tenuto record --url http://localhost:8000 --out trace.jsonl
      agents use http://localhost:8001/v1; then: tenuto replay trace.jsonl --url http://localhost:8000
  tenuto record --url https://api.example.com --out trace.jsonl --port 9000 --ask-usage
  tenuto record --url http://localhost:8000 --out trace.jsonl --salt "$SECRET"
      recordings with one salt have the same hashes, so that they can be compared or put together
  tenuto record --url http://router:9000 --out trace.jsonl --name-jobs
      agents that send no id, before a router that pins sessions by X-Session-ID
"""

_NOTES = """\
Every answered turn becomes a line of Tenuto's JSONL: session, arrival, tool gap, prompt and output length,
the tool called, latencies, and salted hashes that say which prompts begin alike. No text, no header and no
key is written, unless --keep-text asks for the text.

Prompt lengths and hashes are of the server's own tokens if it has /tokenize (vLLM, SGLang) or gets token ids.
Otherwise they are of whole messages, with lengths estimated from the server's usage.
"""


def run(given: Given) -> int:
    """Record until Ctrl-C or SIGTERM."""
    options = given.read(RecordOptions)
    with needing("bench"):
        from tenuto.proxy.proxy import run_recording
    return run_recording(options)


COMMAND = Command(_SUMMARY, _EXAMPLES, (Part(RecordOptions),), run, notes=_NOTES)
