"""What Tenuto's host memory costs the scheduler, as ratios against vLLM's own OffloadingConnector.

    python -m experiments.benchmarks.tier_step

vLLM's real scheduler and the scheduler's side of its connector, without workers: a copy ends with the step
after the one that began it. Each round sends the same jobs to all arms, which take turns step by step. Jobs
take three turns and come back when the cache has lost them, so there are stores, loads, and chunks that host
memory gives up. Counted is the scheduler's own processor time, so that other processes and the harness do not
count; absolute times depend on the machine, the ratios much less.

    vllm          vLLM's scheduler, its connector, its own order (LRU)
    own order     Tenuto's scheduler and policy above the same connector
    tenuto        Tenuto's scheduler and policy, and host memory in the policy's order (`--host-gb`)
    disk          the same with a disk below (`--disk`), in a folder of the machine's own for such files

Then turns of 6,000 tokens end one by one: what the last step's results take beyond vLLM's. The disk's threads
read and write files beside the scheduler, and do not count.
"""

from __future__ import annotations

import gc
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

import tenuto.vllm
from experiments.benchmarks.scheduler_step import (
    FINISH_TOKENS,
    Spent,
    TimedEngine,
    end_turn,
    report,
    report_difference,
)
from experiments.command_line import make_parser
from tests.vllm.workerless import make_config, make_request, make_scheduler

NUM_RUNNING = 128
STEP_TOKENS = 8192
NUM_BLOCKS = 12_000
NUM_CHUNKS = 20_000
NUM_JOBS = 160
NUM_TURNS = 3
PROMPT_TOKENS = 1024
OUTPUT_TOKENS = 64
TOOL_TOKENS = 128
CHUNK_BYTES = 4096
OURS = {"spec_name": "HostSpec", "spec_module_path": "tenuto.vllm.tiers.worker"}


def make_arms(folder: str) -> dict[str, TieredEngine]:
    """An engine for each arm; the disk's files are in this folder."""
    tier = {"type": "DiskTier", "module_path": "tenuto.vllm.tiers.disk", "folder": folder}
    disk = {**OURS, "spec_name": "DiskSpec", "secondary_tiers": [tier]}
    return {
        "vllm": TieredEngine(AsyncScheduler, {}),
        "own order": TieredEngine(tenuto.vllm.Scheduler, {}),
        "tenuto": TieredEngine(tenuto.vllm.Scheduler, OURS),
        "disk": TieredEngine(tenuto.vllm.Scheduler, disk),
    }


class TieredEngine(TimedEngine):
    """Counts the scheduler's processor time; copies end one step after they began."""

    def __init__(self, cls: type, spec: dict[str, Any]) -> None:
        # Adaptive steps follow the clock, and would differ between the arms.
        settings = {"step_tokens": STEP_TOKENS}
        config = make_config(
            is_async=True,
            tenuto=settings,
            max_num_seqs=NUM_RUNNING,
            max_num_batched_tokens=STEP_TOKENS,
        )
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={
                **spec,
                "cpu_bytes_to_use": CHUNK_BYTES * NUM_CHUNKS,
                "offload_prompt_only": False,
            },
        )
        super().__init__(make_scheduler(cls, config, num_blocks=NUM_BLOCKS), depth=2)
        self.num_steps = self.num_loads = self.num_stores = 0
        self._copies: list[Any] = []

    @property
    def is_busy(self) -> bool:
        """Whether requests are left."""
        return bool(self.scheduler.has_unfinished_requests() or self._in_flight)

    def step(self) -> Any:
        """One step of the scheduler, and the output of an earlier one."""
        self.num_steps += 1
        return super().step()

    def _run(self, output: Any) -> ModelRunnerOutput:
        result = super()._run(output)
        meta = output.kv_connector_metadata
        assert isinstance(meta, OffloadingConnectorMetadata)
        ended, self._copies = self._copies, [meta]
        done = OffloadingWorkerMetadata()
        loaded: set[str] = set()
        for each in ended:
            for job_id, job in each.load_jobs.items():
                done.mark_completed(job_id)
                done.transfer_stats.load.record(CHUNK_BYTES * len(job.src_spec.block_ids), 1e-6)
                loaded.add(job.req_id)
            for job_id, job in each.store_jobs.items():
                done.mark_completed(job_id)
                done.transfer_stats.store.record(CHUNK_BYTES * len(job.dst_spec.block_ids), 1e-6)
            self.num_loads += len(each.load_jobs)
            self.num_stores += len(each.store_jobs)
        result.kv_connector_output = KVConnectorOutput(finished_recving=loaded, kv_connector_worker_meta=done)
        return result


def make_turn(round_number: int, turn: int, job: int) -> Any:
    """A turn of a job, which extends the turn before; its answer is the same in all arms."""
    tokens = [(job * 31 + round_number * 17 + i * 7) % 1000 for i in range(PROMPT_TOKENS)]
    for before in range(turn):
        tokens += [5 + i % 50 for i in range(OUTPUT_TOKENS)]
        tokens += [(job * 13 + before * 29 + i * 11) % 1000 for i in range(TOOL_TOKENS)]
    hints = {"job_id": f"{round_number}-{job}", "tool": "ls", "is_last_step": turn == NUM_TURNS - 1}
    name = f"{round_number}-{job}-{turn}"
    return make_request(name, tokens, max_tokens=OUTPUT_TOKENS, xargs=hints, ignore_eos=True)


def run_round(engines: dict[str, TieredEngine], number: int) -> dict[str, Spent]:
    """Seconds of processor time per step of each arm's scheduler, requests included."""
    before = {name: (each.scheduler_s, each.beside_s, each.num_steps) for name, each in engines.items()}
    for turn in range(NUM_TURNS):
        for engine in engines.values():
            for job in range(NUM_JOBS):
                engine.add(make_turn(number, turn, job))
        while any(each.is_busy for each in engines.values()):
            for engine in engines.values():
                if engine.is_busy:
                    engine.step()
    spent = {}
    for name, each in engines.items():
        waited_s, beside_s, num_steps = before[name]
        num_steps = each.num_steps - num_steps
        spent[name] = Spent((each.scheduler_s - waited_s) / num_steps, (each.beside_s - beside_s) / num_steps)
    return spent


def run_ends(engines: dict[str, TieredEngine], number: int, num_ends: int) -> dict[str, Spent]:
    """Seconds of processor time of each arm's scheduler for the ends of so many turns."""
    sums = dict.fromkeys(engines, Spent(0.0, 0.0))
    for turn in range(number * num_ends, (number + 1) * num_ends):
        for name, engine in engines.items():
            spent = end_turn(engine, turn)
            sums[name] = Spent(*(sum(each) for each in zip(sums[name], spent, strict=True)))
    return sums


def main() -> None:
    """Measure, and print the ratios."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ends", type=int, default=12, help="ends of turns per round")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        engines = make_arms(folder)
        run_round(engines, 0)
        gc.collect()
        gc.freeze()
        rounds = [run_round(engines, number + 1) for number in range(args.rounds)]
        for name, engine in engines.items():
            print(f"{name}: {engine.num_steps} steps, {engine.num_stores} stores, {engine.num_loads} loads")
        figures = []
        for arm, to in (("tenuto", "vllm"), ("tenuto", "own order"), ("disk", "vllm"), ("disk", "tenuto")):
            figures += report("scheduler time per step", rounds, 1, arm, to)
        ends = [run_ends(engines, number, args.ends) for number in range(args.rounds)]
        for arm in ("own order", "tenuto", "disk"):
            what = f"a finish at {FINISH_TOKENS} tokens"
            figures += report_difference(what, ends, args.ends, arm, to="vllm")
        for engine in engines.values():
            engine.scheduler.shutdown()
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
