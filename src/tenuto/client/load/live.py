"""The live view: shows the progress of a run on stderr."""

from __future__ import annotations

import asyncio
import shutil
from collections import deque
from typing import TextIO

from tenuto.client.load.runner import Load
from tenuto.records.metrics import get_percentile
from tenuto.records.schema import TurnRecord
from tenuto.workload.schema import Workload

TERMINAL_S = 1.0
"""Seconds between two views on a terminal, where each view replaces the one before it."""
LOG_S = 10.0
"""Seconds between two lines if stderr is not a terminal."""
_NUM_RECENT = 1000
_CLEAR_LINE = "\r\x1b[2K"


class Progress:
    """Counts of the turns that ended so far. Rates and latencies cover the latest 1,000 turns."""

    def __init__(self, workload: Workload) -> None:
        self._num_jobs = len(workload.jobs)
        self._num_turns_left = {job.job_id: len(job.turns) for job in workload.jobs}
        self._num_done_jobs = 0
        self._failed_jobs: set[str] = set()
        self._recent: deque[TurnRecord] = deque(maxlen=_NUM_RECENT)

    def add(self, record: TurnRecord) -> None:
        """Count a turn that ended."""
        if record.status != "ok":
            self._failed_jobs.add(record.job)
            return
        self._num_turns_left[record.job] -= 1
        self._num_done_jobs += self._num_turns_left[record.job] == 0
        self._recent.append(record)

    def format(self, now_s: float, num_started_jobs: int, num_in_flight: int) -> str:
        """The progress as one line of text."""
        num_running = num_started_jobs - self._num_done_jobs - len(self._failed_jobs)
        parts = [
            f"{int(now_s) // 60}:{int(now_s) % 60:02}",
            f"jobs: {self._num_done_jobs} of {self._num_jobs} done, {num_running} running, "
            f"{len(self._failed_jobs)} failed",
            f"turns: {num_in_flight} in flight",
        ]
        if self._recent:
            parts += [self._format_rates(now_s)]
            parts += [self._format_times("ttft", "ttft_s"), self._format_times("turn", "latency_s")]
        return " | ".join(parts)

    def _format_rates(self, now_s: float) -> str:
        # The period starts at the end of the first of these turns. At least 1 s, to avoid misleading rates.
        span_s = max(now_s - (self._recent[0].last_token_s or 0.0), 1.0)
        num_output_tokens = sum(record.output_tokens or 0 for record in self._recent)
        return f"{len(self._recent) / span_s:.1f} turns/s, {num_output_tokens / span_s:.0f} tok/s"

    def _format_times(self, label: str, name: str) -> str:
        values = [value for record in self._recent if (value := getattr(record, name)) is not None]
        return f"{label} p50 {get_percentile(values, 50):.2f} p95 {get_percentile(values, 95):.2f} s"


async def show(progress: Progress, load: Load, stream: TextIO) -> None:
    """Print the view repeatedly until cancelled; on a terminal, each view overwrites the last one."""
    is_terminal = stream.isatty()
    start, end = (_CLEAR_LINE, "") if is_terminal else ("", "\n")
    try:
        while True:
            await asyncio.sleep(TERMINAL_S if is_terminal else LOG_S)
            line = progress.format(load.get_now_s(), load.num_started_jobs, load.num_in_flight)
            width = shutil.get_terminal_size().columns - 1 if is_terminal else None
            print(f"{start}{f'[bench] {line}'[:width]}", end=end, file=stream, flush=True)
    finally:
        if is_terminal:
            print(file=stream, flush=True)
