"""The same for each of several things, some at the same time: in threads, or in processes."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def each_at_once(function: Callable[[T], R], things: Sequence[T], num_at_once: int) -> Iterator[R]:
    """What a function makes of each thing, in their order; so many are made at a time, in threads.

    After an error nothing more begins, and threads that still work are not waited for.
    """
    if num_at_once == 1 or len(things) < 2:
        yield from map(function, things)
        return
    threads = ThreadPoolExecutor(num_at_once)
    try:
        yield from threads.map(function, things)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


@contextmanager
def open_processes(num: int) -> Iterator[ProcessPoolExecutor]:
    """So many processes, until the context ends. If it ends by an error, they end at once.

    Ctrl-C in a terminal reaches every process of the command. Only this one answers it.
    """
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(num, mp_context=multiprocessing.get_context("spawn"))
    # A process inherits the mask. Each of the first tasks starts a process, as none is idle yet.
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for _ in range(num):
            pool.submit(int)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
    try:
        yield pool
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
