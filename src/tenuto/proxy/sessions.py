"""Decides which job a recorded turn belongs to, and which turn of that job came before it.

A job is recognised by the id that the client sends, and without an id by its content, as in
`tenuto.core.driver`. The turns of a job in a recording must not overlap in time. Overlapping turns become
separate jobs. Their names end with ~2, ~3, … and their parent is the job that they are part of.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tenuto.core.jobs import Lineage
from tenuto.workload.formats.conversations import BLOCK_TOKENS, Pieces

MAX_JOBS = 100_000
"""Number of jobs remembered between turns; the oldest are forgotten first."""


@dataclass(slots=True)
class Lane:
    """One job of the recording: a sequence of turns that do not overlap."""

    session: str
    tenant: str | None
    parent: str | None = None
    num_turns: int = 0
    last_arrival_s: float = 0.0
    last_end_s: float = 0.0
    last_hashes: list[bytes] = field(default_factory=list)
    after: tuple[str, int, float] | None = None
    """Session and index of the turn in flight when this job began, and for how many seconds it had been."""


class Sessions:
    """All jobs of a recording."""

    def __init__(self) -> None:
        self._lanes: OrderedDict[str, list[Lane]] = OrderedDict()
        self._names: set[str] = set()
        self._num_inferred = 0
        self._by_tokens = Lineage(BLOCK_TOKENS, MAX_JOBS)
        self._by_texts: OrderedDict[bytes, str] = OrderedDict()

    def find(
        self,
        job: tuple[str | None, str | None],
        arrival_s: float,
        pieces: Pieces,
        token_ids: Sequence[int] | None,
    ) -> tuple[str, Lane]:
        """The job's key, and the sequence of turns that a turn joins. `job` is the tenant and the job id."""
        tenant, job_id = job
        # Neither id contains a tab, because both are printable.
        key = f"{tenant or ''}\t{job_id}" if job_id is not None else self._recognise(pieces, token_ids)
        if key is None:
            self._num_inferred += 1
            job_id = f"job-{self._num_inferred}"
            key = f"\t\t{job_id}"
        lanes = self._lanes.setdefault(key, [])
        self._lanes.move_to_end(key)
        if len(self._lanes) > MAX_JOBS:
            self._lanes.popitem(last=False)
        idle = [lane for lane in lanes if lane.last_end_s <= arrival_s]
        if idle:
            return key, max(idle, key=lambda lane: _count_common(lane.last_hashes, pieces.hashes))
        lanes.append(self._make_lane(lanes, job_id or "job", tenant, arrival_s))
        return key, lanes[-1]

    def count_same(self, lane: Lane, pieces: Pieces) -> int:
        """Number of leading pieces that a prompt shares with the lane's previous turn."""
        return _count_common(lane.last_hashes, pieces.hashes)

    def remember(
        self, key: str, pieces: Pieces, token_ids: Sequence[int] | None, output: Sequence[bytes]
    ) -> None:
        """Remember an answered turn: the job's next turn begins with the prompt's pieces or tokens."""
        if token_ids is not None:
            full = pieces.hashes[: len(token_ids) // BLOCK_TOKENS]
            self._by_tokens.remember(key, [*full, *output], token_ids)
            return
        self._by_texts[pieces.hashes[-1]] = key
        self._by_texts.move_to_end(pieces.hashes[-1])
        if len(self._by_texts) > MAX_JOBS:
            self._by_texts.popitem(last=False)

    def _recognise(self, pieces: Pieces, token_ids: Sequence[int] | None) -> str | None:
        if token_ids is not None:
            return self._by_tokens.find(pieces.hashes[: len(token_ids) // BLOCK_TOKENS], token_ids)
        known = (self._by_texts.get(each) for each in reversed(pieces.hashes[:-1]))
        return next((key for key in known if key is not None), None)

    def _make_lane(self, lanes: list[Lane], job_id: str, tenant: str | None, arrival_s: float) -> Lane:
        name = base = lanes[0].session if lanes else job_id
        number = len(lanes) + 1
        while name in self._names:
            name, number = f"{base}~{max(2, number)}", number + 1
        self._names.add(name)
        if not lanes:
            return Lane(name, tenant)
        first = lanes[0]
        lane = Lane(name, first.tenant, parent=first.session)
        if first.last_arrival_s <= arrival_s:
            lane.after = (first.session, first.num_turns - 1, arrival_s - first.last_arrival_s)
        return lane


def _count_common(a: Sequence[bytes], b: Sequence[bytes]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
