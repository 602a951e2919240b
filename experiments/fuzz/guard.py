"""Runs a parser on one input within bounds of time and memory, and makes a failing input small."""

from __future__ import annotations

import contextlib
import gc
import io
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenuto.core.errors import TenutoError

MAX_CPU_S = 0.5
"""Processor time that one input may take. Sound inputs of the corpus take a few milliseconds."""
MAX_GROWTH_KB = 200_000
"""How much one input may raise the process's largest memory."""
ADDRESS_SPACE = 6 << 30
MAX_MESSAGE_CHARS = 4000
_MINIMISE_S = 3.0

Run = Callable[[bytes], Any]


class TooSlow(BaseException):
    """The time is over. Not an Exception, so that no parser catches it."""


class Wrong(AssertionError):
    """The parser's answer breaks a rule that holds for every input."""


@dataclass(frozen=True)
class Failure:
    """What was wrong with one input."""

    kind: str
    """The same for inputs that fail in the same way: the exception and the line that raised it."""
    text: str


def limit_memory() -> None:
    """Let an allocation without bound fail instead of filling the machine."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = ADDRESS_SPACE if hard == resource.RLIM_INFINITY else min(hard, ADDRESS_SPACE)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


@dataclass(frozen=True)
class Outcome:
    """What became of one input."""

    failure: Failure | None
    is_refused: bool
    """Whether it was refused with an error that says what is wrong."""
    cpu_s: float


def try_input(run: Run, data: bytes) -> Outcome:
    """Run a parser on an input."""
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started_s = time.process_time()
    failure, is_refused = _try(run, data)
    cpu_s = time.process_time() - started_s
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb
    if failure is None and grown_kb > MAX_GROWTH_KB:
        failure = Failure("memory", f"the input of {len(data)} bytes took {grown_kb // 1000} MB")
    return Outcome(failure, is_refused, cpu_s)


def _try(run: Run, data: bytes) -> tuple[Failure | None, bool]:
    try:
        with _time_limit(MAX_CPU_S), contextlib.redirect_stderr(io.StringIO()):
            run(data)
    except TooSlow:
        where = _find_line(sys.exc_info()[2])
        return Failure(f"slow in {where}", f"over {MAX_CPU_S} s of processor time, in {where}"), False
    except TenutoError as error:
        return _check_message(error), True
    except Exception as error:
        where = _find_line(error.__traceback__)
        text = "".join(traceback.format_exception(error)[-12:])
        return Failure(f"{type(error).__name__} in {where}", text), False
    return None, False


def _check_message(error: Exception) -> Failure | None:
    """An error that is meant must say what is wrong, in a form that any terminal can print."""
    message, where = str(error), _find_line(error.__traceback__)
    problem = None
    if not message.strip():
        problem = "no message"
    elif len(message) > MAX_MESSAGE_CHARS:
        problem = "a message of unbounded length"
    elif any(char in message for char in "\x00\x1b\u202e\u2028"):
        problem = "a message with control characters"
    else:
        try:
            message.encode()
        except UnicodeEncodeError:
            problem = "a message that cannot be printed"
    if problem is None:
        return None
    return Failure(f"{problem} in {where}", f"{type(error).__name__}: {message[:500]!r}")


@contextlib.contextmanager
def _time_limit(limit_s: float) -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        raise TooSlow

    # A collection walks over all that the process holds (a whole test run, say): not the parser's time.
    collects = gc.isenabled()
    gc.disable()
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        if collects:
            gc.enable()


def _find_line(trace: Any) -> str:
    """The innermost line of Tenuto's in a traceback; of any code, if there is none."""
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if "tenuto" in Path(frame.filename).parts] or list(frames)
    frame = own[-1]
    parts = Path(frame.filename).parts
    name = "/".join(parts[parts.index("tenuto") :] if "tenuto" in parts else parts[-2:])
    return f"{name}:{frame.lineno}"


def minimise(run: Run, data: bytes, kind: str) -> bytes:
    """A smaller input that fails in the same way: pieces are taken out as long as it still does."""
    end_s = time.monotonic() + _MINIMISE_S
    size = max(1, len(data) // 2)
    while size >= 1:
        start = 0
        while start < len(data):
            if time.monotonic() > end_s:
                return data
            shorter = data[:start] + data[start + size :]
            failure = try_input(run, shorter).failure
            if failure is not None and failure.kind == kind:
                data = shorter
            else:
                start += size
        size //= 2
    return data
