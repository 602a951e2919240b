"""What jobs and tenants used: tokens by where they came from, and blocks by how long they were held.

The driver tells each event once to the job's account, which adds it to the accounts above it:

    job ──► tenant ──► all          O(1) an event; nothing is added up at a step or at a question

An account ends with its job: the driver forgets both together. Its tenant's goes on. Whoever left blocks in a
tier keeps the account until the tier has given them up, so that the time is charged to the end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

PLACES = ("gpu", "host", "disk")
"""Where blocks are held: by leases on the GPU, and by the tiers below it."""
TOKENS = ("prompt", "cached", "loaded", "computed", "recomputed", "output", "stored")
"""The kinds of tokens. prompt: of turns that started. cached: those found in the GPU's cache. loaded: copied
from host memory or disk. computed: run through the model, counted when a turn ends or is preempted.
recomputed: computed before (`tenuto.core.reuse`). output: of ended turns. stored: copied to the tiers."""
FIGURES = ("turns", *(f"{kind}_tokens" for kind in TOKENS), *(f"{place}_block_seconds" for place in PLACES))
"""What an account shows."""
MAX_TENANTS = 1000
"""Clients may make tenants up: those that come later share an account."""
OTHER_TENANTS = "(others)"
"""The account of all tenants without one of their own."""
MAX_CLOSED = 1000
"""Accounts that are still known after their jobs: an engine may store the end of a turn after the job's."""


class _Held:
    """Blocks that are held in one place, and the seconds for which they were."""

    __slots__ = ("block_s", "num_blocks", "since_s")

    def __init__(self) -> None:
        self.num_blocks = 0
        self.block_s = self.since_s = 0.0

    def get_block_s(self, now_s: float) -> float:
        return self.block_s + self.num_blocks * max(0.0, now_s - self.since_s)


class Account:
    """What one job, one tenant or all used so far."""

    __slots__ = ("_above", "_held", *(f"num_{kind}_tokens" for kind in TOKENS), "num_turns")

    num_turns: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_loaded_tokens: int
    num_computed_tokens: int
    num_recomputed_tokens: int
    num_output_tokens: int
    num_stored_tokens: int

    def __init__(self, above: Account | None = None) -> None:
        """`above`: the account that it is a part of."""
        self._above = above
        self._held: dict[str, _Held] = {}
        self.num_turns = 0
        for kind in TOKENS:
            setattr(self, f"num_{kind}_tokens", 0)

    @property
    def holds_blocks(self) -> bool:
        """Whether it holds blocks anywhere now."""
        return any(held.num_blocks for held in self._held.values())

    def start(self, num_prompt_tokens: int, num_cached_tokens: int, num_missed_tokens: int) -> None:
        """A turn got its first step: so much of its prompt was cached, and so much is computed again."""
        account: Account | None = self
        while account is not None:
            account.num_turns += 1
            account.num_prompt_tokens += num_prompt_tokens
            account.num_cached_tokens += num_cached_tokens
            account.num_recomputed_tokens += num_missed_tokens
            account = account._above

    def stop(self, num_computed_tokens: int, num_output_tokens: int = 0) -> None:
        """A turn ended or was preempted: so many tokens were computed since it last started."""
        account: Account | None = self
        while account is not None:
            account.num_computed_tokens += num_computed_tokens
            account.num_output_tokens += num_output_tokens
            account = account._above

    def copy(self, *, num_loaded: int = 0, num_stored: int = 0, num_lost: int = 0) -> None:
        """Tokens were loaded, stored, or lost by a preemption and will be computed again."""
        account: Account | None = self
        while account is not None:
            account.num_loaded_tokens += num_loaded
            account.num_stored_tokens += num_stored
            account.num_recomputed_tokens += num_lost
            account = account._above

    def hold(self, place: str, num_blocks: int, now_s: float) -> None:
        """It holds so many blocks there from now on."""
        held = self._held.get(place)
        change = num_blocks - (0 if held is None else held.num_blocks)
        account: Account | None = self if change else None
        while account is not None:
            held = account._held.get(place)
            if held is None:
                held = account._held[place] = _Held()
            # Clocks of engines only go forward; a part of one may be told a moment late.
            held.block_s = held.get_block_s(now_s)
            held.since_s = max(held.since_s, now_s)
            held.num_blocks += change
            account = account._above

    def count_held(self, place: str) -> int:
        """Blocks that it holds there now."""
        held = self._held.get(place)
        return 0 if held is None else held.num_blocks

    def get_figures(self, now_s: float) -> dict[str, float]:
        """All its figures, by the names of `FIGURES`; block-seconds up to now."""
        found: dict[str, float] = {"turns": self.num_turns}
        for kind in TOKENS:
            found[f"{kind}_tokens"] = getattr(self, f"num_{kind}_tokens")
        for place in PLACES:
            held = self._held.get(place)
            found[f"{place}_block_seconds"] = 0.0 if held is None else held.get_block_s(now_s)
        return found


class Ledger:
    """The accounts of one engine. A driver that takes another's place goes on with its ledger."""

    def __init__(self) -> None:
        self.total = Account()
        self.tenants: dict[str, Account] = {}
        """By name, in the order in which they came; "" is no tenant."""
        self.on_closed: Callable[[str, str, Account], object] | None = None
        """Told of each account that ends with its job: the job's id, its tenant, and the account."""
        self._holders: dict[str, Account] = {}
        """The accounts that hold blocks, by job."""
        self._closed: OrderedDict[str, Account] = OrderedDict()
        """Those that were closed last, by job."""

    def open(self, job_id: str, tenant: str) -> Account:
        """The account of a job that is new, or was forgotten and comes back."""
        return self.get_closed(job_id) or Account(self._get_tenant(tenant))

    def get_closed(self, job_id: str) -> Account | None:
        """The account of a job that is forgotten, if it is still known."""
        return self._holders.get(job_id) or self._closed.get(job_id)

    def close(self, job_id: str, tenant: str, account: Account) -> None:
        """The job is forgotten."""
        self._closed[job_id] = account
        self._closed.move_to_end(job_id)
        if len(self._closed) > MAX_CLOSED:
            self._closed.popitem(last=False)
        if self.on_closed is not None:
            self.on_closed(job_id, tenant, account)

    def hold(self, job_id: str, account: Account | None, place: str, num_blocks: int, now_s: float) -> None:
        """A job holds so many blocks in a place from now on; None: the account of a job that is forgotten."""
        account = account or self.get_closed(job_id)
        if account is None:
            return
        account.hold(place, num_blocks, now_s)
        if num_blocks:
            self._holders[job_id] = account
        elif not account.holds_blocks:
            self._holders.pop(job_id, None)

    def move(self, job_id: str, account: Account | None, place: str, change: int, now_s: float) -> None:
        """A tier took so many blocks of a job, or gave them up; as `hold`."""
        account = account or self.get_closed(job_id)
        if account is not None:
            self.hold(job_id, account, place, account.count_held(place) + change, now_s)

    def _get_tenant(self, name: str) -> Account:
        if name not in self.tenants and len(self.tenants) >= MAX_TENANTS:
            name = OTHER_TENANTS
        found = self.tenants.get(name)
        if found is None:
            found = self.tenants[name] = Account(self.total)
        return found


def add_figures(figures: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sum of what several accounts show."""
    total: dict[str, float] = dict.fromkeys(FIGURES, 0)
    for each in figures:
        for name in FIGURES:
            total[name] += each[name]
    return total
