"""The scheduler's JSONL trace (`tenuto serve --trace`) as turns and samples of the KV cache.

The trace has no first tokens: a turn's is taken to be there at the first step after those that computed
its prompt. It has no size of the cache either: the most blocks that were ever free are taken for it, which is
exact for a trace that begins or ends with an idle engine. Which free blocks hold content it does not say.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tenuto.records.fields import Fields, clean
from tenuto.report.html.turns import Sample, Turn

TRACE_NOTE = (
    "From a scheduler's trace: first tokens are taken to be there at the next step, and the most blocks ever "
    "free for the size of the cache."
)


@dataclass(slots=True)
class _Live:
    job: str
    turn: int
    asked_s: float
    prompt_tokens: int | None
    start_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    is_ok: bool = True
    left_tokens: int = 0
    """Prompt tokens not computed yet."""


class _Reader:
    def __init__(self) -> None:
        self.turns: dict[str, _Live] = {}
        self.steps: list[tuple[float, int, int]] = []
        """Time, free and retained blocks."""
        self._computed: list[_Live] = []
        """Turns whose prompts are computed by the last step."""

    def read(self, fields: Fields) -> None:
        kind = fields.text("kind")
        if kind == "job":
            self._read_event(fields)
        elif kind == "step":
            self._read_step(fields)

    def _read_event(self, fields: Fields) -> None:
        event, now_s, turn_id = fields.text("event"), fields.number("now_s"), fields.text("turn")
        if event == "arrived":
            self.turns[turn_id] = _Live(
                clean(fields.text("job")),
                fields.integer("turn_number", 1),
                now_s,
                fields.integer("num_prompt_tokens"),
            )
            return
        turn = self.turns.get(turn_id)
        if turn is None:  # It arrived before the trace began.
            return
        if event == "started" and turn.start_s is None:
            turn.start_s, turn.cached_tokens = now_s, fields.optional(fields.integer, "num_hit_tokens")
            turn.left_tokens = (turn.prompt_tokens or 0) - (turn.cached_tokens or 0)
        elif event == "finished":
            turn.last_token_s, turn.output_tokens = (
                now_s,
                fields.optional(fields.integer, "num_output_tokens"),
            )
            turn.is_ok = not fields.optional(fields.flag, "aborted")

    def _read_step(self, fields: Fields) -> None:
        now_s = fields.number("now_s")
        for turn in self._computed:
            if turn.last_token_s is None:
                turn.first_token_s = now_s
        self._computed = []
        counts = fields.optional_part("num_tokens")
        for turn_id in counts.values:
            live = self.turns.get(turn_id)
            if live is not None and live.left_tokens > 0:
                live.left_tokens -= counts.integer(turn_id)
                if live.left_tokens <= 0:
                    self._computed.append(live)
        free, retained = (
            fields.optional(fields.count, name) for name in ("num_free_blocks", "num_retained_blocks")
        )
        if free is not None:
            self.steps.append((now_s, free, retained or 0))


def read_trace(objects: Iterable[Fields]) -> tuple[list[Turn], list[Sample]]:
    """Turns and samples of a trace; seconds count from its first record with a time. Raises DataError."""
    reader = _Reader()
    for fields in objects:
        reader.read(fields)
    times = [turn.asked_s for turn in reader.turns.values()] + [now_s for now_s, _, _ in reader.steps]
    origin_s = min(times, default=0.0)
    return [_make_turn(turn, origin_s) for turn in reader.turns.values()], _make_samples(
        reader.steps, origin_s
    )


def _make_turn(turn: _Live, origin_s: float) -> Turn:
    def shift(time_s: float | None) -> float | None:
        return None if time_s is None else time_s - origin_s

    return Turn(
        job=turn.job,
        turn=turn.turn,
        is_ok=turn.is_ok,
        asked_s=turn.asked_s - origin_s,
        start_s=shift(turn.start_s),
        first_token_s=shift(turn.first_token_s),
        last_token_s=shift(turn.last_token_s),
        prompt_tokens=turn.prompt_tokens,
        output_tokens=turn.output_tokens,
        cached_tokens=turn.cached_tokens,
        tool=None,
        tool_s=None,
    )


def _make_samples(steps: list[tuple[float, int, int]], origin_s: float) -> list[Sample]:
    num_blocks = max((free for _, free, _ in steps), default=0)
    samples = []
    for now_s, free, retained in steps:
        used = num_blocks - free
        # In traces of 0.1 some leased blocks (keep-last) are free at the same time.
        held = min(retained, used)
        samples.append(Sample(now_s - origin_s, num_blocks, used - held, held, None, free, None, None))
    return samples
