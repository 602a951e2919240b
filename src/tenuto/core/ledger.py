"""What jobs and tenants used: tokens by their source, and blocks times the seconds that they were held.

The driver reports each event once, to the job's account, which also adds it to the accounts above it:

    job ──► tenant ──► all          O(1) per event; nothing is summed at a step or a query

An account ends with its job: the driver forgets both together. The tenant's account continues. If a job has
blocks in a tier, its account stays until the tier has evicted them, so that all of that time is charged.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

PLACES = ("gpu", "host", "disk")
"""Where blocks are held: by leases on the GPU, and by the tiers below it."""
TOKENS = ("prompt", "cached", "loaded", "computed", "recomputed", "output", "stored")
"""The kinds of tokens: fields of `Account`."""
FIGURES = ("turns", *(f"{kind}_tokens" for kind in TOKENS), *(f"{place}_block_seconds" for place in PLACES))
"""The figures of an account."""
OWN_FIGURES = ("turns", "prompt_tokens", "output_tokens", "gpu_block_seconds")
"""Those that depend only on what the job itself sent and held. From the others, a client could tell what else
is in the cache and in the tiers: hits on it are not computed, and what is stored is not stored again."""
MAX_TENANTS = 1000
"""Most tenants with an account of their own, because clients may invent tenants. Others share one account."""
OTHER_TENANTS = "(others)"
"""The name of the account that all other tenants share."""
MAX_CLOSED = 1000
"""Most accounts that stay known after their jobs, because an engine may store a job's last turn later."""


@dataclass(slots=True, eq=False)
class _Held:
    """Blocks that are held in one place, and their block-seconds so far."""

    num_blocks: int = 0
    block_s: float = 0.0
    since_s: float = 0.0


_NONE_HELD: Mapping[str, _Held] = MappingProxyType({})
"""Shared by the many accounts that never hold a block."""


@dataclass(slots=True, eq=False)
class Account:
    """What one job, one tenant or all together used so far."""

    above: Account | None = None
    """The account of which it is a part."""
    held: Mapping[str, _Held] = field(default_factory=lambda: _NONE_HELD)
    """Blocks held, by place."""
    num_held_blocks: int = 0
    """Blocks held in all places."""
    turns: int = 0
    prompt: int = 0
    """Tokens of turns that started."""
    cached: int = 0
    """Those found in the GPU's cache."""
    loaded: int = 0
    """Copied from host memory or disk."""
    computed: int = 0
    """Run through the model, counted when a turn ends or is preempted."""
    recomputed: int = 0
    """Computed before (`tenuto.core.reuse`)."""
    output: int = 0
    """Of ended turns."""
    stored: int = 0
    """Copied to the tiers."""

    def add(self, **numbers: int) -> None:
        """Add these numbers of turns and of tokens, by field, here and in the accounts above."""
        account: Account | None = self
        while account is not None:
            for name, number in numbers.items():
                setattr(account, name, getattr(account, name) + number)
            account = account.above

    def count_held(self, place: str) -> int:
        """Number of blocks that it holds in a place now."""
        held = self.held.get(place)
        return 0 if held is None else held.num_blocks

    def get_figures(self, now_s: float) -> dict[str, float]:
        """All its figures, by the names of `FIGURES`, with block-seconds up to now."""
        found: dict[str, float] = {"turns": self.turns}
        for kind in TOKENS:
            found[f"{kind}_tokens"] = getattr(self, kind)
        for place in PLACES:
            held, block_s = self.held.get(place), 0.0
            if held is not None:
                block_s = held.block_s + held.num_blocks * max(0.0, now_s - held.since_s)
            found[f"{place}_block_seconds"] = block_s
        return found


class Ledger:
    """The accounts of one engine. A new driver continues the ledger of the driver that it replaces."""

    def __init__(self) -> None:
        self.total = Account()
        self.tenants: dict[str, Account] = {}
        """The tenants' accounts by name, in order of arrival; "" stands for no tenant."""
        self.on_closed: Callable[[str, str, Account], object] | None = None
        """Called when an account ends with its job, with the job's id, its tenant, and the account."""
        self._holders: dict[str, Account] = {}
        """The accounts that hold blocks, by job."""
        self._closed: OrderedDict[str, Account] = OrderedDict()
        """The accounts that were closed last, by job."""

    def open(self, job_id: str, tenant: str) -> Account:
        """The account of a job that is new, or that was forgotten and comes back."""
        return self.get_closed(job_id) or Account(self._get_tenant(tenant))

    def get_closed(self, job_id: str) -> Account | None:
        """The account of a forgotten job, if it is still known."""
        return self._holders.get(job_id) or self._closed.get(job_id)

    def close(self, job_id: str, tenant: str, account: Account) -> None:
        """The job was forgotten."""
        self._closed[job_id] = account
        self._closed.move_to_end(job_id)
        if len(self._closed) > MAX_CLOSED:
            self._closed.popitem(last=False)
        if self.on_closed is not None:
            self.on_closed(job_id, tenant, account)

    def hold(self, job_id: str, account: Account | None, place: str, num_blocks: int, now_s: float) -> None:
        """A job holds `num_blocks` in a place from now on. `account`: None for a forgotten job."""
        account = account or self.get_closed(job_id)
        own = None if account is None else account.held.get(place)
        change = num_blocks - (0 if own is None else own.num_blocks)
        if account is None or not change:
            return
        each: Account | None = account
        while each is not None:
            held = each.held.get(place)
            if held is None:
                held = _Held()
                each.held = {**each.held, place: held}
            elif now_s > held.since_s:  # a report from a part of the engine may be slightly late
                held.block_s += held.num_blocks * (now_s - held.since_s)
            held.since_s = now_s if now_s > held.since_s else held.since_s
            held.num_blocks += change
            each.num_held_blocks += change
            each = each.above
        if account.num_held_blocks:
            self._holders[job_id] = account
        else:
            self._holders.pop(job_id, None)

    def move(self, job_id: str, account: Account | None, place: str, change: int, now_s: float) -> None:
        """A tier stored blocks of a job, or evicted them (`change` is negative). Otherwise as `hold`.

        A job that came back may lose blocks that were stored while it was forgotten. These never counted.
        """
        account = account or self.get_closed(job_id)
        if account is not None:
            self.hold(job_id, account, place, max(0, account.count_held(place) + change), now_s)

    def _get_tenant(self, name: str) -> Account:
        if name not in self.tenants and len(self.tenants) >= MAX_TENANTS:
            name = OTHER_TENANTS
        found = self.tenants.get(name)
        if found is None:
            found = self.tenants[name] = Account(self.total)
        return found


def add_figures(figures: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sum of several accounts. It lacks figures that an account does not tell (see `OWN_FIGURES`)."""
    accounts = list(figures)
    told = [name for name in FIGURES if name in OWN_FIGURES or all(name in account for account in accounts)]
    return {name: sum(account[name] for account in accounts) for name in told}
