"""Jobs and their turns: what an engine reports about them, and what the driver remembers."""

from __future__ import annotations

import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tenuto.core.indexed_heap import IndexedHeap
from tenuto.core.ledger import Account, Ledger
from tenuto.core.requests import Hints, get_bounded_id
from tenuto.core.reuse import PrefixMarks
from tenuto.core.turn_work import FADE, MAX_NAMES, forget_some
from tenuto.core.types import Job, LeaseEnd, LeaseRefusal, TakenBy, ToolCall, Turn, quick
from tenuto.core.wishes import Verdict

NOBODY = ""
"""The tenant of turns without a tenant. They count as one tenant."""
UNVERIFIED = "(unverified)"
"""The tenant of turns whose tenant is not verified, on a server that has tenants. They count as one tenant
with a small weight."""
KIND_CHARS = 32
"""Characters of a block hash that name a kind of job; enough to tell the kinds apart."""
KIND_TOKENS = 128
"""Most tokens of a prompt that name its kind. (The first block always counts.) Chat templates begin with some
30 (Llama 3) to 90 (gpt-oss) tokens of their own."""


@quick
@dataclass(frozen=True, slots=True)
class Arrival:
    """What is known about a turn when it arrives."""

    hints: Hints
    num_prompt_tokens: int
    prompt: Sequence[int] = ()
    """The prompt's token ids. Needed only to recognise jobs by content."""
    hashes: Sequence[Hashable] = ()
    """Chained hashes of the turn's full blocks. This is the engine's own list, so it grows with the output.
    Without hashes, the driver cannot tell what the prompt shares with its job's lease, and the lease ends."""
    priority: int = 0
    is_supported: bool = True
    """Whether the engine can keep the turn's KV."""
    lease_job_id: str | None = None
    """If it cannot: the job that the client named. The turn is not taken into it, but uses its lease up."""


@quick
@dataclass(frozen=True, slots=True)
class Finish:
    """How a turn ended."""

    num_output_tokens: int
    tool: ToolCall | None = None
    is_last: bool | None = None
    """Whether this turn is the job's last, according to the output; None if the output does not tell."""
    aborted: bool = False
    """Whether the client left or the request failed. If so, nothing is retained."""
    num_computed_tokens: int = 0
    """For an aborted turn: how many of its tokens have KV."""


@dataclass(slots=True)
class JobState:
    """The driver's mutable record of one job."""

    job_id: str
    arrival_s: float
    tenant: str | None
    kind: str | None = None
    """See `Job.kind`."""
    num_turns: int = 0
    number: int = 0
    """See `Job.number`."""
    is_named: bool = False
    """Whether the client gave the job an id, as agents do whose requests belong together."""
    is_admitted: bool = False
    """Whether admission has let one of its turns start."""
    live_turn_ids: dict[str, None] | None = None
    """Its waiting and running turns, in order of arrival; None if there are none. (Most jobs are idle, and an
    emptied dict takes 0.2 kB.)"""
    num_short_tokens: Counter[str] | None = None
    """As `DriverStats.num_short_tokens`, for this job's turns."""
    account: Account = field(default_factory=Account)
    """What it used so far."""
    has_finished: bool = False
    """Whether one of its turns finished and was not aborted."""
    paused_s: float | None = None
    """When its last such turn finished; None once another turn has arrived."""
    last_tool: ToolCall | None = None
    awaits_tool: bool = False
    """Whether a turn called a tool and ended while another lived. False again once a turn arrives alone."""
    last_marks: PrefixMarks | None = None
    """What a later prompt can reuse of the job's last finished turn."""
    is_rewritten: bool = False
    """Whether that turn's prompt did not continue the one before."""
    runs_as_stock: bool | None = None
    """Whether the job runs as in stock, because it is not in the canary (`tenuto.core.limits`). None until
    its next turn arrives."""
    group: str | None = None
    """The group that its first turn named for a canary."""
    is_released: bool = False
    """Whether the client said that the job is complete while a turn of it still waited or ran."""
    num_reusable_tokens: int = 0
    """Sums over its started turns: tokens reusable from the turn before, and those of these that were hit."""
    num_reused_tokens: int = 0
    num_kept_tokens: int = 0
    """Those of the reused tokens that a lease of the job held until the turn started."""
    lease_news: LeaseEnd | LeaseRefusal | TakenBy | None = None
    """Why its last finished turn has no lease, or why the lease lost blocks; None if the lease is
    complete."""
    wish_news: Verdict | None = None
    """What became of the latest cache wish of its turns."""

    def enter(self, turn_id: str) -> None:
        """A turn arrived."""
        if self.live_turn_ids is None:
            self.live_turn_ids = {}
        self.live_turn_ids[turn_id] = None

    def leave(self, turn_id: str) -> None:
        """A turn ended."""
        assert self.live_turn_ids is not None
        del self.live_turn_ids[turn_id]
        self.live_turn_ids = self.live_turn_ids or None

    def get_view(self, arrival_s: float | None = None) -> Job:
        """The policy's view of the job. `arrival_s` replaces the job's own arrival."""
        arrival_s = self.arrival_s if arrival_s is None else arrival_s
        return Job(self.job_id, arrival_s, self.num_turns, self.tenant, self.kind, self.number)


@dataclass(slots=True)
class TurnState:
    """The driver's mutable record of one turn, from its arrival to its finish."""

    turn_id: str
    job: JobState
    arrival_s: float
    arrival: Arrival
    pause_s: float | None = None
    """Seconds since the job's last turn finished; None if there was none, if it was aborted, or if another is
    alive."""
    num_reusable_tokens: int = 0
    is_parted: bool = False
    """See `Turn.is_parted`."""
    is_beside: bool = False
    """Whether it may be a session's request beside its job: a title, or a page that a tool summarizes."""
    num_hit_tokens: int = 0
    num_missed_tokens: int = 0
    """Reusable tokens that it did not hit when it first started."""
    num_held_tokens: int = 0
    """Tokens that the turn hit when it last started. After a preemption, there may be fewer than before."""
    num_loaded_tokens: int = 0
    """Those of the hit tokens that were loaded from a tier."""
    run_from: int | None = None
    """Tokens with KV when its current run began; None while it does not run."""
    num_added_tokens: int = 0
    """Tokens of its prompt that were streamed in after its arrival; known at its end."""
    num_preemptions: int = 0
    num_computed_tokens: int = 0
    """Tokens that it had computed when it was last preempted."""
    started: bool = False
    is_admitted: bool = False
    number: int = 0
    """Its place in the order of arrival, from 1, since the engine's present policy decides."""
    job_arrival_s: float | None = None
    """The job arrival that a policy sees for this turn; None means the job's real arrival."""
    _facts: tuple[object, ...] = ()
    _view: Turn | None = None
    _view_with_hits: tuple[Turn, Turn] | None = None
    """A view, and the same with `Turn.num_cached_tokens`."""
    _finished: tuple[Finish, Turn] | None = None
    """How it ended, and the policy's view of it then. Cached, because host memory needs it before the
    driver."""

    @property
    def lease_job_id(self) -> str:
        """The job whose lease may wait for the turn."""
        return self.arrival.lease_job_id or self.job.job_id

    def get_view(self, *, has_lease: bool) -> Turn:
        """The policy's view of a waiting or running turn; cached until something changes."""
        facts = (has_lease, self.num_hit_tokens, self.num_preemptions, self.job.num_turns)
        if self._view is None or self._facts != facts:
            self._facts = facts
            self._view = self._make_view(has_lease=has_lease, is_last=self.arrival.hints.is_last)
        return self._view

    def _make_view(self, *, has_lease: bool, is_last: bool | None, **end: Any) -> Turn:
        return Turn(
            turn_id=self.turn_id,
            job=self.job.get_view(self.job_arrival_s),
            arrival_s=self.arrival_s,
            num_prompt_tokens=self.arrival.num_prompt_tokens,
            num_hit_tokens=self.num_hit_tokens,
            priority=self.arrival.priority,
            num_preemptions=self.num_preemptions,
            has_lease=has_lease,
            is_last=is_last,
            expected_tool_s=self.arrival.hints.expected_tool_s,
            is_parted=self.is_parted,
            **end,
        )

    def get_view_with_hits(self, view: Turn, num_cached_tokens: int) -> Turn:
        """This view with `Turn.num_cached_tokens`; cached until one of both changes."""
        known = self._view_with_hits
        if known is None or known[0] is not view or known[1].num_cached_tokens != num_cached_tokens:
            known = self._view_with_hits = view, replace(view, num_cached_tokens=num_cached_tokens)
        return known[1]

    def get_finished_view(self, finish: Finish) -> Turn:
        """The policy's view of a finished turn. The client's hints override what the output shows."""
        if self._finished is None or self._finished[0] is not finish:
            hints, tool, is_last = self.arrival.hints, finish.tool, self.arrival.hints.is_last
            if hints.tool is not None:
                tool = ToolCall(hints.tool, None if tool is None else tool.command)
            if is_last is None:
                # A client that names a tool implies that the job continues.
                is_last = finish.is_last if hints.tool is None else False
            self._finished = (
                finish,
                self._make_view(
                    has_lease=False,
                    is_last=is_last,
                    num_output_tokens=finish.num_output_tokens,
                    tool=tool,
                    is_aborted=finish.aborted,
                ),
            )
        return self._finished[1]

    def is_side_answer(self, finish: Finish) -> bool:
        """Whether it leaves its job as it was: its answer calls no tool, but that of another turn did.

        With `n` above 1, or sub-agents under one id, one answer does not say that the others are done. Nor
        does the answer to a request beside the job.
        """
        hints = self.arrival.hints
        calls_tool = finish.tool is not None or hints.tool is not None
        return (self.is_beside or self.job.awaits_tool) and not calls_tool and hints.is_last is None

    def get_last_reason(self) -> LeaseRefusal:
        """Why this turn counts as its job's last, if it does."""
        if not self.arrival.is_supported:
            return LeaseRefusal.UNSUPPORTED
        is_said = self.arrival.hints.is_last or self.job.is_released
        return LeaseRefusal.LAST_TURN if is_said else LeaseRefusal.NO_TOOL_CALL


class JobTable:
    """All jobs with a turn in the engine, and the most recently active idle jobs."""

    def __init__(self, max_idle: int, hash_block_size: int, *, infers: bool) -> None:
        """`infers`: whether to recognise the job of a turn without a job id by the prompt's content."""
        self.ledger = Ledger()
        """The jobs' accounts."""
        self.jobs: dict[str, JobState] = {}
        self.idle = IdleJobs()
        # It has no bound of its own: a job that is forgotten here is forgotten there too.
        self.lineage = Lineage(hash_block_size)
        self._kinds = _Kinds(hash_block_size)
        self._max_idle = max_idle
        self._infers = infers
        self._num_arrived = 0

    def find(self, turn_id: str, arrival: Arrival, now_s: float) -> JobState:
        """The job of a turn that arrived; a new job if neither an id nor the content names a job."""
        job_id, name = arrival.hints.job_id, arrival.hints.conversation
        if job_id is None and self._infers and arrival.hashes:
            named = None if name is None else self.jobs.get(name)
            preferred = name if named is not None and not named.live_turn_ids else None
            job_id = self.lineage.find(arrival.hashes, arrival.prompt, arrival.hints.tenant, preferred)
            job_id = job_id or self._find_repeated(arrival)
        if job_id is None and self._infers and name not in self.jobs:
            # Another job may have the same conversation name. Then this job needs a name of its own.
            job_id = name
        # Client ids are printable, so an id with a tab never equals a client's id. vLLM lets clients choose
        # how a turn's id begins, at any length.
        job_id = job_id if job_id is not None else f"\tturn:{get_bounded_id(turn_id)}"
        job = self.jobs.get(job_id)
        if job is None:
            tenant = arrival.hints.tenant
            account = self.ledger.open(job_id, tenant or NOBODY)
            is_named = arrival.hints.job_id is not None
            kind = self._kinds.find(tenant, arrival.hashes)
            self._num_arrived += 1
            job = JobState(
                job_id, now_s, tenant, kind, number=self._num_arrived, is_named=is_named, account=account
            )
            self.jobs[job_id] = job
        self.idle.discard(job_id, job.tenant)
        return job

    def _find_repeated(self, arrival: Arrival) -> str | None:
        """The idle job whose last prompt the client sends again, so that the earlier answer is not needed.

        This does not apply to a job's first turn, because two jobs may begin with the same prompt. Later
        prompts contain an answer.
        """
        job_id = self.lineage.find_repeated(arrival.hashes, arrival.prompt, arrival.hints.tenant)
        job = None if job_id is None else self.jobs.get(job_id)
        is_retry = job is not None and job.num_turns > 1 and not job.live_turn_ids
        return job_id if is_retry else None

    def remember(self, job: JobState, arrival: Arrival) -> None:
        """Remember a finished turn, so that a prompt that extends it is assigned to the same job."""
        if arrival.hashes and self._infers:
            self.lineage.remember(job.job_id, arrival.hashes, arrival.prompt, job.tenant)

    def get(self, job_id: str) -> JobState | None:
        """A known job, or None."""
        return self.jobs.get(job_id)

    def take_over(self, other: JobTable) -> None:
        """Take over the jobs of another table. If it has more, some are to be forgotten afterwards."""
        self.jobs, self.idle, self.lineage, self._kinds = other.jobs, other.idle, other.lineage, other._kinds
        self.ledger, self._num_arrived = other.ledger, other._num_arrived

    def mark_idle(self, job: JobState) -> JobState | None:
        """A job has no turn in the engine any more. Return a job that should now be forgotten, or None."""
        if not job.has_finished:
            # None of the job's turns finished, so no later turn can extend one.
            return job
        self.idle.add(job.job_id, job.tenant)
        return self.get_first_to_forget()

    def forget(self, job: JobState) -> None:
        """Forget a job."""
        del self.jobs[job.job_id]
        self.idle.discard(job.job_id, job.tenant)
        self.lineage.forget(job.job_id)
        self.ledger.close(job.job_id, job.tenant or NOBODY, job.account)

    def get_first_to_forget(self) -> JobState | None:
        """The job to forget now; None if the idle jobs are not too many."""
        first = self.idle.get_first_to_forget() if len(self.idle) > self._max_idle else None
        return None if first is None else self.jobs[first]


class _Kinds:
    """Names the kind of a new job: the longest beginning of its prompt that an earlier job of its tenant had.

    Jobs of one application begin with its system prompt. Before it may be a chat template, which all
    applications share. So the first block does not tell applications apart, but the first `KIND_TOKENS` do.
    The system prompt may end before that, so shorter beginnings count too: those of 1, 2, 4, … blocks. A
    prompt that begins like none before is of a kind of its own.

    A job takes O(log `KIND_TOKENS`) time.
    """

    def __init__(self, block_size: int) -> None:
        self._ends = [0]
        """The last blocks of the beginnings that count."""
        while 2 * (self._ends[-1] + 1) * block_size <= KIND_TOKENS:
            self._ends.append(2 * self._ends[-1] + 1)
        self._beginnings: dict[int, float] = {}
        """How many jobs had each beginning; it decides which is forgotten. By its hash, because most prompts
        have several beginnings that no other has."""

    def find(self, tenant: str | None, hashes: Sequence[Hashable]) -> str | None:
        """The name for a job with these hashes of its first prompt; None if the prompt has no full block."""
        names = [_name_block(hashes[end]) for end in self._ends if end < len(hashes)]
        if not names:
            return None
        keys = [hash((tenant, name)) for name in names]
        known = [name for name, key in zip(names, keys, strict=True) if key in self._beginnings]
        for key in keys:
            count = self._beginnings.pop(key, None)
            self._beginnings[key] = 1.0 if count is None else FADE * count + 1
            if len(self._beginnings) > MAX_NAMES:
                forget_some(self._beginnings, float)
        return known[-1] if known else names[-1]


def _name_block(block: Hashable) -> str:
    return block.hex()[:KIND_CHARS] if isinstance(block, bytes) else str(block)[:KIND_CHARS]


class IdleJobs:
    """Idle jobs by tenant. The first to forget is the longest idle job of the tenant with the most idle jobs.

    So a tenant that sends many ids makes the driver forget its own jobs, not those of others. Jobs may have
    sizes: then the sum of these counts. Every change takes O(log n) amortised time in the number of tenants.
    """

    def __init__(self) -> None:
        self._num_jobs = 0
        self._jobs: dict[str, OrderedDict[str, int]] = {}
        """Each tenant's idle jobs, with their sizes; the one that has been idle longest is first."""
        self._sizes: dict[str, int] = {}
        """Of each tenant's idle jobs together."""
        self._by_size: IndexedHeap[str] = IndexedHeap()
        """Tenants; the one with the largest size is first. Those in `_changed` may be in a wrong place."""
        self._changed: dict[str, None] = {}

    def __len__(self) -> int:
        return self._num_jobs

    def __iter__(self) -> Iterator[str]:
        return itertools.chain.from_iterable(self._jobs.values())

    def add(self, job_id: str, tenant: str | None, size: int = 1) -> None:
        """A job became idle now."""
        name = tenant or ""
        own = self._jobs.get(name)
        if own is None:
            own = self._jobs[name] = OrderedDict()
            self._sizes[name] = 0
        self._num_jobs += job_id not in own
        self._sizes[name] += size - own.get(job_id, 0)
        own[job_id] = size
        own.move_to_end(job_id)
        self._changed[name] = None

    def discard(self, job_id: str, tenant: str | None) -> None:
        """A job is not idle any more, if it was."""
        name = tenant or ""
        own = self._jobs.get(name)
        if own is None or job_id not in own:
            return
        self._sizes[name] -= own.pop(job_id)
        self._num_jobs -= 1
        if own:
            self._changed[name] = None
            return
        # Not only at the next look: there may be none, and clients may invent any number of tenants.
        del self._jobs[name], self._sizes[name]
        self._changed.pop(name, None)
        self._by_size.discard(name)

    def get_first_to_forget(self) -> str | None:
        """The job to forget first; None if no job is idle."""
        for name in self._changed:
            self._by_size.push(name, (-self._sizes[name],))
        self._changed.clear()
        first = self._by_size.get_first()
        return None if first is None else next(iter(self._jobs[first]))


# A job's next turn by its content alone, so that clients need not send a job id.
#
# A finished turn is remembered by *marks*: the hashes of the last full block of its output and of its prompt.
# A new prompt that contains one of these blocks extends that turn. The prompt's mark is needed for chat
# templates that drop earlier reasoning: there, the next prompt shares only the previous prompt.

GENERATION_PROMPT_SLACK = 4
"""Tokens at a prompt's end that the next prompt may lack. Chat templates that switch reasoning off add an
empty reasoning span there (`<think>`, blank, `</think>`, blank) and drop it from the history. The slack is
so short that it never covers text of the user: end-of-message markers come before these tokens."""


MAX_TRIED = 64
"""About as many keys are tried for one prompt. A job's own mark is the last one in its next prompt, or nearly
so. Without a bound, jobs that end at each block of a long text would make each prompt slow that begins with
it, those of other tenants too."""

_Span = tuple[int, int]
"""(end of the prompt's second-to-last full block, the prompt's length). The tokens between are compared."""
_OUTPUT: _Span = (0, 0)
"""The span of an output's mark. The mark covers the whole prompt, so no tokens are left to compare."""
_NO_TOKENS = hash(())
_Key = tuple[Hashable, _Span, int, str | None]
"""A mark, a span, the hash of the prompt's tokens there, and the tenant: a turn never joins another tenant's
job."""


@dataclass(slots=True)
class _Finished:
    number: int
    """A counter; a turn that is remembered later has a larger number."""
    keys: tuple[_Key, ...]


class Lineage:
    """The latest finished turn of each job, indexed by content.

    Beyond `max_jobs` jobs, the least recent one is forgotten.
    """

    def __init__(self, block_size: int, max_jobs: float = math.inf) -> None:
        self._block_size = block_size
        self._max_jobs = max_jobs
        self._num_remembered = 0
        self._finished: OrderedDict[str, _Finished] = OrderedDict()
        self._jobs_by_key: dict[_Key, str | OrderedDict[str, None]] = {}
        """The job of each key, or several. Nearly all keys have one, and a dict would take 0.4 kB."""
        # Many jobs may share a mark (a system prompt), but a mark has at most 2 × block_size spans.
        self._spans_by_mark: dict[Hashable, _Span | dict[_Span, int]] = {}
        """The span of each mark that has one key, else the number of the mark's keys by span."""

    def __len__(self) -> int:
        return len(self._finished)

    def remember(
        self, job_id: str, hashes: Sequence[Hashable], prompt: Sequence[int], tenant: str | None = None
    ) -> None:
        """Remember a job's finished turn.

        `hashes`: hashes of its full blocks (prompt and output). `prompt`: its prompt's token ids.
        """
        self.forget(job_id)
        if not hashes:
            return
        num_prompt_blocks = min(len(prompt) // self._block_size, len(hashes))
        span = (max(0, num_prompt_blocks - 1) * self._block_size, len(prompt))
        compared = _get_compared(span, prompt)
        ends = (num_prompt_blocks, num_prompt_blocks - 1)
        keys: list[_Key] = [(hashes[end - 1], span, compared, tenant) for end in ends if end > 0]
        if len(hashes) > num_prompt_blocks:
            keys.append((hashes[-1], _OUTPUT, _NO_TOKENS, tenant))
        self._num_remembered += 1
        turn = self._finished[job_id] = _Finished(self._num_remembered, tuple(keys))
        for key in turn.keys:
            jobs = self._jobs_by_key.setdefault(key, job_id)
            if isinstance(jobs, OrderedDict):
                jobs[job_id] = None
            elif jobs != job_id:
                self._jobs_by_key[key] = OrderedDict.fromkeys((jobs, job_id))
            mark, span = key[:2]
            spans = self._spans_by_mark.get(mark)
            if spans is None:
                self._spans_by_mark[mark] = span
                continue
            if isinstance(spans, tuple):
                spans = self._spans_by_mark[mark] = {spans: 1}
            spans[span] = spans.get(span, 0) + 1
        if len(self._finished) > self._max_jobs:
            self.forget(next(iter(self._finished)))

    def forget(self, job_id: str) -> None:
        """Forget a job, if it is remembered."""
        turn = self._finished.pop(job_id, None)
        for key in turn.keys if turn is not None else ():
            mark, span = key[:2]
            jobs = self._jobs_by_key[key]
            if isinstance(jobs, OrderedDict):
                del jobs[job_id]
            if not jobs or jobs == job_id:
                del self._jobs_by_key[key]
            spans = self._spans_by_mark[mark]
            if isinstance(spans, dict):
                spans[span] -= 1
                if not spans[span]:
                    del spans[span]
            if not spans or isinstance(spans, tuple):
                del self._spans_by_mark[mark]

    def find(
        self,
        hashes: Sequence[Hashable],
        prompt: Sequence[int],
        tenant: str | None = None,
        preferred: str | None = None,
    ) -> str | None:
        """The tenant's job that this prompt continues, or None.

        A prompt continues a job if it extends the job's last finished turn. If there are several such jobs,
        the preferred one is chosen, else the most recent one. Jobs whose turns had the same prompt and no
        full block of an answer are chosen in rotation, so that each of several such prompts continues another
        job.

        The cost is one dict look-up per block of the prompt, from its end, in C; this is far cheaper than
        computing the block hashes.
        """
        spans_by_mark, num_tried = self._spans_by_mark, 0
        for mark in filter(spans_by_mark.__contains__, reversed(hashes)):
            known = spans_by_mark[mark]
            spans = (known,) if isinstance(known, tuple) else known
            fitting = [each for each in spans if each == _OUTPUT or len(prompt) > each[1]]
            keys = [_get_key(mark, span, prompt, tenant) for span in fitting]
            sets = [self._jobs_by_key[key] for key in keys if key in self._jobs_by_key]
            if sets:
                found = [_choose(jobs, preferred) for jobs in sets]
                job_id = max(found, key=lambda each: (each == preferred, self._finished[each].number))
                jobs = sets[found.index(job_id)]
                if isinstance(jobs, OrderedDict):
                    jobs.move_to_end(job_id, last=False)
                return job_id
            num_tried += len(keys)
            if num_tried > MAX_TRIED:
                break
        return None

    def find_repeated(
        self, hashes: Sequence[Hashable], prompt: Sequence[int], tenant: str | None = None
    ) -> str | None:
        """The tenant's job whose last finished turn had exactly this prompt, or None."""
        num_blocks = min(len(prompt) // self._block_size, len(hashes))
        if not num_blocks or hashes[num_blocks - 1] not in self._spans_by_mark:
            return None
        span = ((num_blocks - 1) * self._block_size, len(prompt))
        jobs = self._jobs_by_key.get(_get_key(hashes[num_blocks - 1], span, prompt, tenant))
        return _choose(jobs, None) if jobs else None


def _choose(jobs: str | OrderedDict[str, None], preferred: str | None) -> str:
    """The only job, the preferred one if it is there, or the latest."""
    if isinstance(jobs, str):
        return jobs
    return preferred if preferred is not None and preferred in jobs else next(reversed(jobs))


def _get_key(mark: Hashable, span: _Span, prompt: Sequence[int], tenant: str | None) -> _Key:
    return mark, span, _get_compared(span, prompt), tenant


def _get_compared(span: _Span, prompt: Sequence[int]) -> int:
    boundary, num_prompt_tokens = span
    certain = max(boundary, num_prompt_tokens - GENERATION_PROMPT_SLACK)
    return hash(tuple(prompt[boundary:certain]))
