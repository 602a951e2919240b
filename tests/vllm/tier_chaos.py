"""Random events on vLLM's scheduler with host memory below it.

    python -m tests.vllm.tier_chaos --events 100000 --seed 1

After each step, what a request reads is compared with what it should read (`tests.vllm.tiered`). At the end,
and at every reset, nothing may be left of any request.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter

from experiments.fuzz.hostile import make_request_id
from tests.vllm.slow_copies import SlowCopies
from tests.vllm.tiered import TieredEngine
from tests.vllm.workerless import make_request

POLICIES = ("tenuto", "stock", "infercept", "break-even", "contextserve", "continuum")

CONNECTORS = (("ours",), ("ours", "other"), ("ours",), ("other",), ("ours",), ("other", "ours"), ("ours",))
"""Host memory alone, and beside another's connector; seven, so that each policy meets each of them."""


class Chaos:
    """Jobs that take turns, and everything that can happen to them."""

    def __init__(
        self,
        rng: random.Random,
        policy: str,
        depth: int,
        connectors: tuple[str, ...] = ("ours",),
        disk: str | None = None,
    ) -> None:
        """`disk`: a folder for a disk below host memory; it has room for 100 chunks, or for all."""
        self.rng = rng
        self.depth = depth
        self.counts: Counter[str] = Counter()
        share_failed = rng.choice((0.0, 0.0, 0.05, 0.3))
        copies = SlowCopies(rng, share_done=rng.choice((0.1, 0.4, 1.0)), share_failed=share_failed)
        # The other connector stores by blocks of 16.
        self.block_size = 16 if "other" in connectors else rng.choice((16, 16, 16, 128))
        # Without chunks a step holds a whole prompt.
        chunked = rng.random() < 0.8
        self.caches = "ours" not in connectors or rng.random() < 0.85
        self.engine = TieredEngine(
            num_blocks=rng.choice((24, 40, 80)) if self.block_size == 16 else rng.choice((6, 9)),
            num_chunks=rng.choice((6, 20, 60, 300)),
            blocks_per_chunk=rng.choice((1, 1, 2, 4)),
            copies=copies,
            depth=depth,
            block_size=self.block_size,
            caches=self.caches,
            tenuto={"policy": policy, "strict": True},
            connectors=connectors,
            max_num_seqs=rng.choice((2, 4, 16)),
            max_num_batched_tokens=rng.choice((48, 256)) if chunked else 8192,
            enable_chunked_prefill=chunked,
            num_drafts=rng.choice((0, 0, 0, 3)),
            disk=None if disk is None else {"folder": disk, "max_bytes": rng.choice((None, 400_000))},
        )
        self.prompts: dict[str, list[int]] = {}
        self.live: dict[str, str] = {}
        self.num_jobs = self.num_turns = 0

    def run(self, num_events: int) -> Counter[str]:
        """So many events; returns what happened how often."""
        events = (self.step,) * 12 + (self.arrive,) * 4 + (self.abort, self.reset, self.release, self.rest)
        for number in range(num_events):
            event = self.rng.choice(events)
            if event == self.reset and self.rng.random() < 0.93:
                continue
            event()
            if number % 50 == 0 and self.engine.tier is not None:
                self.engine.assert_host_whole()
        self.engine.drain(20_000)
        self.engine.scheduler.driver.drop_all(1e12)
        self.engine.drain()
        self.engine.assert_clean()
        self.counts["checked"] = self.engine.num_checked
        self.counts["loaded by the other"] = self.engine.num_other_blocks
        if self.engine.tier is not None:
            self.counts["prefetched"] = self.engine.tier.prefetch.num_begun
            self.engine.shutdown()
        return self.counts

    def step(self) -> None:
        """One step, and the turns that ended with it."""
        output = self.engine.step()
        self.counts["preempted"] += len(output.preempted_req_ids or ())
        for name in [each for each in self.live if each not in self.engine.scheduler.requests]:
            self._end(name)

    def arrive(self) -> None:
        """A turn of a new job, or the next turn of one that waits for its tool."""
        busy = set(self.live.values())
        idle = [job for job in self.prompts if job not in busy]
        if not idle or len(self.prompts) < 4 or self.rng.random() < 0.3:
            self.num_jobs += 1
            job = f"job{self.num_jobs}"
            shared = [self.rng.choice((7, 8))] * self.rng.choice((0, 20, 70))
            self.prompts[job] = shared + [
                self.rng.randrange(3, 999) for _ in range(self.rng.randrange(1, 150))
            ]
        else:
            job = self.rng.choice(idle)
            prompt = self.prompts[job]
            if self.rng.random() < 0.1:
                del prompt[self.rng.randrange(len(prompt)) :]
            prompt += [self.rng.randrange(3, 999) for _ in range(self.rng.randrange(1, 30))]
        self.num_turns += 1
        # Clients choose how a request's id begins.
        name = make_request_id(self.rng, self.num_turns)
        limit = self.block_size * (self.engine.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 3)
        hints = {
            "job_id": job,
            "tool": self.rng.choice(("ls", "pytest")),
            "expected_tool_seconds": self.rng.choice((0.01, 0.1)),
            "is_last_step": self.rng.random() < 0.1,
        }
        request = make_request(
            name,
            self.prompts[job][: limit - 60],
            max_tokens=self.rng.randrange(1, 50),
            xargs=hints,
            block_size=self.block_size,
        )
        self.live[name] = job
        self.engine.add(request)

    def rest(self) -> None:
        """All turns end, and tools are about to return."""
        if self.rng.random() < 0.3:
            self.engine.drain()
            self.step()
            time.sleep(0.02)
            for _ in range(3):
                self.step()

    def abort(self) -> None:
        """A client leaves, whatever its turn is doing."""
        if self.live:
            name = self.rng.choice(sorted(self.live))
            self.counts["aborted"] += 1
            self.engine.abort(name)
            del self.live[name]

    def release(self) -> None:
        """A client says that its job is complete."""
        if self.prompts:
            job = self.rng.choice(sorted(self.prompts))
            if job not in self.live.values():
                self.engine.scheduler.release(job)
                del self.prompts[job]

    def reset(self) -> None:
        """An operator resets the cache, with the tier or without."""
        self.counts["reset"] += 1
        # vLLM itself cannot preempt while requests load, nor with two steps in flight and a connector.
        scheduler = self.engine.scheduler
        loading = scheduler.kv_holding_waiting or scheduler.has_finished_requests()
        preempts = self.depth == 1 and not loading and self.rng.random() < 0.5
        with_tier = self.rng.random() < 0.7
        self.engine.scheduler.reset_prefix_cache(reset_running_requests=preempts, reset_connector=with_tier)

    def _end(self, name: str) -> None:
        job = self.live.pop(name)
        self.counts["finished"] += 1
        self.counts["host hits"] += self.engine.hits.get(name, (0, 0))[1]
        if job in self.prompts:
            self.prompts[job] = self.engine.get_prompt(name) + self.engine.outputs.get(name, [])


def run_chaos(
    rng: random.Random,
    *,
    num_events: int,
    policy: str,
    depth: int = 1,
    connectors: tuple[str, ...] = ("ours",),
    disk: str | None = None,
) -> Counter[str]:
    """One engine and so many events; returns what happened. Fails if an invariant does not hold."""
    return Chaos(rng, policy, depth, connectors, disk).run(num_events)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    total: Counter[str] = Counter()
    number = 0
    while total["events"] < given.events:
        rng = random.Random(f"{given.seed}-{number}")
        policy, depth = POLICIES[number % len(POLICIES)], 1 + number // len(POLICIES) % 2
        connectors = CONNECTORS[number % len(CONNECTORS)]
        with tempfile.TemporaryDirectory() as folder:
            disk = folder if number % 2 and "ours" in connectors else None
            total += run_chaos(
                rng, num_events=1000, policy=policy, depth=depth, connectors=connectors, disk=disk
            )
        total["events"] += 1000
        number += 1
    print(dict(total))


if __name__ == "__main__":
    main()
