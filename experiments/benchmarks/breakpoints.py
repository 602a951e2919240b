"""What a cache wish up to a breakpoint costs vLLM's scheduler, over the same request without a wish.

    python -m experiments.benchmarks.breakpoints --tokenizer MODEL_FOLDER

The engine must find the text before the mark among the prompt's tokens while it takes the request up. vLLM's
real scheduler, without workers or a model, and a real tokenizer. Each request has another prompt, whose text
are the pages of the docs; it has 64 output tokens. Its wish is one of these:

    none         no wish
    whole        a wish for the whole prompt: nothing is looked for
    last, again  an agent's: a mark at the prompt's end, and the last prompt's mark, which was there
    new          a mark that no prompt had before
    absent       a mark that the prompt lacks, as if the chat template had changed it

Counted is the scheduler's own processor time, from the request's arrival to its end; and by the clock, the
median of what looking for the marks takes, which is a part of it.
"""

from __future__ import annotations

import gc
import logging
import os
import statistics
import time
from pathlib import Path
from typing import Any

import tenuto.vllm
from experiments.benchmarks.scheduler_step import TimedEngine
from experiments.command_line import make_parser
from tenuto.core.requests import WISH_FIELD
from tenuto.core.wishes import Mark, Span, Wish, write_wish
from tenuto.vllm.requests import OutputReader
from tests.vllm.workerless import make_config, make_request, make_scheduler

DOCS = Path(__file__).resolve().parents[2] / "docs"
KINDS = ("none", "whole", "last, again", "new", "absent")
LENGTHS = (1000, 8000, 64_000)


class Prompts:
    """Prompts of one length, each with marks of its own in its text."""

    def __init__(self, tokenizer: Any, num_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._num_tokens = num_tokens
        text = "\n".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md")))
        self._tokens = tokenizer.encode(text)
        self._tokens *= 2 + num_tokens // len(self._tokens)

    def make(self, number: int, kind: str) -> tuple[list[int], list[Mark], list[int]]:
        """A prompt's tokens, the marks of its wish, and its tokens up to the mark inside."""
        tail = f" This is where the part of prompt {number} that is wanted ends."
        place = self._num_tokens // 4 + number * 997 % (self._num_tokens // 2)
        start = number * 311 % (len(self._tokens) - self._num_tokens)
        rest = self._tokens[start : start + self._num_tokens]
        head = rest[:place] + self._tokenizer.encode(tail, add_special_tokens=False)
        prompt = head + rest[place:]
        share = len(head) / len(prompt)
        last, inside = Mark(1.0, f"the end of {number}"), Mark(share, tail[-48:])
        absent = Mark(share, f"what no prompt has, {number}")
        return (
            prompt,
            {"last, again": [last, inside], "new": [inside], "absent": [absent]}.get(kind, []),
            head,
        )


def measure(tokenizer: Any, num_tokens: int, num_requests: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each request, and of looking for its marks, by the kind of its wish. Kinds take turns."""
    config = make_config(
        is_async=True, tenuto={}, max_model_len=num_tokens + 1000, max_num_batched_tokens=8192
    )
    engine = TimedEngine(make_scheduler(tenuto.vllm.Scheduler, config, num_blocks=20_000), depth=2)
    engine.scheduler._reader = reader = OutputReader(tokenizer)
    prompts = Prompts(tokenizer, num_tokens)
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    looked_s, place = [0.0], reader.place

    def place_timed(wish: Wish, tokens: Any) -> Wish:
        before_s = time.perf_counter()
        placed = place(wish, tokens)
        looked_s[0] = time.perf_counter() - before_s
        return placed

    for number in range(len(KINDS) * num_requests):
        kind = KINDS[number % len(KINDS)]
        prompt, marks, head = prompts.make(number, kind)
        spans = (
            [Span(300.0)]
            if kind == "whole"
            else [Span(300.0 + n, None, mark) for n, mark in enumerate(marks)]
        )
        if kind == "last, again":
            place(Wish("anthropic", (Span(300.0, None, Mark(1.0, marks[1].tail)),)), head)
        reader.place, looked_s[0] = place_timed, 0.0  # type: ignore[method-assign, assignment]
        hints = {WISH_FIELD: write_wish(Wish("anthropic", tuple(spans)))} if spans else {}
        request = make_request(f"r{number}", prompt, max_tokens=64, xargs=hints)
        before_s, started_s = engine.scheduler_s, time.process_time()
        engine.scheduler.add_request(request)
        added_s = time.process_time() - started_s
        placed = engine.scheduler.driver.get_wish(request.request_id)
        if kind not in ("none", "absent"):
            assert placed is not None and all(span.num_tokens != 0 for span in placed.spans), (
                "a mark was lost"
            )
        engine.run()
        found[kind].append((added_s + engine.scheduler_s - before_s, looked_s[0]))
    return found


def main() -> None:
    """Print a line for each length and kind."""
    parser = make_parser(__doc__)
    parser.add_argument("--tokenizer", required=True, help="a model's folder")
    parser.add_argument("--requests", type=int, default=60, help="of each kind, for each length")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # the model is not run
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    measure(tokenizer, LENGTHS[0], 5)
    gc.freeze()
    for num_tokens in LENGTHS:
        found = measure(tokenizer, num_tokens, args.requests)
        none_us = statistics.fmean(each_s for each_s, _ in found["none"]) * 1e6
        for kind, seconds in found.items():
            us = statistics.fmean(each_s for each_s, _ in seconds) * 1e6
            looked_us = statistics.median(each_s for _, each_s in seconds) * 1e6
            print(
                f"{num_tokens} prompt tokens, {kind}: {us:.0f} us, {us / none_us:.3f} of none; "
                f"looking for marks {looked_us:.0f} us",
                flush=True,
            )


if __name__ == "__main__":
    main()
