"""The parsers that read what strangers write, and what holds for each of them on every input."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.fuzz import answers, control, files, requests

CORPUS = Path(__file__).parent / "corpus"


@dataclass(frozen=True)
class Parser:
    """One parser: what it reads, and how it is called."""

    name: str
    reads: str
    run: Callable[[bytes], Any]
    """Parse one input, and check what holds for every input. An error of our own is fine."""
    corpus: str | None = None
    """The folder of its sound inputs; None for one of its own name."""

    def load_corpus(self) -> list[bytes]:
        """The sound inputs that mutations begin with. `.list.json` files hold a list of texts."""
        corpus: list[bytes] = []
        for path in sorted((CORPUS / (self.corpus or self.name)).iterdir()):
            data = path.read_bytes()
            corpus += [text.encode() for text in json.loads(data)] if ".list" in path.suffixes else [data]
        return corpus


PARSERS = {
    parser.name: parser
    for parser in (
        Parser("hints", "hint fields and job headers", requests.read_hint_fields),
        Parser("requests", "the job of a request, from its body, headers and path", requests.read_identity),
        Parser(
            "wishes", "cache wishes in every dialect, and the field that carries them", requests.read_wishes
        ),
        Parser("bodies", "bodies that the server's middleware rewrites", requests.pass_middleware),
        Parser("wished", "cache wishes through the middleware", requests.pass_middleware, corpus="wishes"),
        Parser(
            "simulated-wishes",
            "cache wishes through the simulated server and its engine",
            control.wish_on_simulated_server,
            corpus="wishes",
        ),
        Parser("head-lines", "bodies whose lines an operator drops and moves", requests.edit_head),
        Parser("routed", "requests, for routers and data-parallel ranks", requests.route, corpus="requests"),
        Parser("tool-calls", "the text of answers, for tool calls", requests.read_tool_call),
        Parser("commands", "command lines, for how long they take", requests.read_shell_command),
        Parser(
            "simulated-server",
            "requests to the simulated server",
            answers.ask_simulated_server,
            corpus="bodies",
        ),
        Parser(
            "recorded",
            "requests that the recording proxy sees",
            answers.read_recorded_request,
            corpus="bodies",
        ),
        Parser("answers", "answers and streams of servers", answers.read_answers),
        Parser("metrics-pages", "a server's /metrics", answers.read_metrics_page),
        Parser("options", "KEY=VALUE options of policies", requests.read_options),
        Parser("settings", "the settings in vLLM's additional config", requests.read_config),
        Parser("control", "changes by an operator, and releases of jobs", control.call_control),
        Parser(
            "simulated-control",
            "the same, on the simulated server's engine",
            control.call_simulated_control,
            corpus="control",
        ),
        Parser("tier-files", "files of the disk tier", files.read_tier_file),
        Parser("states", "files of what a policy learned", files.read_state),
        Parser("traces", "traces of a scheduler: analyze, report, replay", files.read_trace),
        Parser("records", "results, turns, samples and all other records", files.read_records),
        Parser("workloads", "workloads in every format", files.read_workload),
    )
}
