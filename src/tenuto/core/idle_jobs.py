"""Jobs without a turn in the engine, and which of them to forget when there are too many."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from tenuto.core.indexed_heap import IndexedHeap


class IdleJobs:
    """Idle jobs by tenant. The first to forget is the one idle longest, of the tenant with most idle jobs.

    So a tenant that sends many ids makes the driver forget its own jobs, not those of others. Every change
    takes O(log n) time in the number of tenants.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, str] = {}
        """The tenant of each idle job."""
        self._jobs: dict[str, OrderedDict[str, None]] = {}
        """Each tenant's idle jobs; the one that has been idle longest is first."""
        self._by_number = IndexedHeap()
        """Tenants; the one with most idle jobs is first."""

    def __len__(self) -> int:
        return len(self._tenants)

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._tenants

    def __iter__(self) -> Iterator[str]:
        return iter(self._tenants)

    def add(self, job_id: str, tenant: str | None) -> None:
        """A job became idle now."""
        self.discard(job_id)
        name = tenant or ""
        self._tenants[job_id] = name
        self._jobs.setdefault(name, OrderedDict())[job_id] = None
        self._by_number.push(name, (-len(self._jobs[name]),))

    def discard(self, job_id: str) -> None:
        """A job is not idle any more, if it was."""
        name = self._tenants.pop(job_id, None)
        if name is None:
            return
        own = self._jobs[name]
        del own[job_id]
        if own:
            self._by_number.push(name, (-len(own),))
        else:
            del self._jobs[name]
            self._by_number.discard(name)

    def get_first_to_forget(self) -> str | None:
        """The job to forget first; None if no job is idle."""
        name = self._by_number.get_first()
        return None if name is None else next(iter(self._jobs[name]))
