"""Keeps what a policy learned across restarts, in one JSON file that is replaced atomically."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import threading
from pathlib import Path
from typing import Any

from tenuto.core.errors import ConfigError
from tenuto.core.policy import Learns, Policy
from tenuto.records.files import replacing
from tenuto.records.trace import open_private

FORMAT = "tenuto-state-1"
MAX_BYTES = 64 << 20
"""Larger files are neither read nor written. The states of our policies are far smaller."""

logger = logging.getLogger("vllm.tenuto")


def save_state(path: str | Path, policy_name: str, state: dict[str, Any]) -> None:
    """Write a policy's state. After a crash at any moment, the file is complete, either old or new.

    Raises OSError if it cannot be written, ValueError if the state is not JSON or too large.
    """
    path = Path(path)
    # Only the server's user may read the file, because a state names tenants. "x" follows no link.
    with (
        replacing(path) as partial,
        open(partial, "x", encoding="utf-8", opener=open_private) as file,
    ):
        # `dump` encodes in pieces. `dumps` would hold the interpreter lock for the whole text.
        record = {"format": FORMAT, "policy": policy_name, "state": state}
        json.dump(record, file, allow_nan=False, separators=(",", ":"))
        file.flush()
        os.fsync(file.fileno())
        if file.tell() > MAX_BYTES:
            raise ValueError(f"the state has {file.tell()} bytes, over the limit of {MAX_BYTES}")
    # Make the renaming durable, so that it survives a power failure. Some file systems do not support this.
    with contextlib.suppress(OSError):
        sync_folder(path.parent)


def load_state(path: str | Path, policy_name: str) -> dict[str, Any]:
    """Read what `save_state` wrote for this policy.

    Raises FileNotFoundError or another OSError, or ValueError that says what is wrong with the file.
    """
    # To open a pipe waits for its writer, and the engine would not start.
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("it is not a plain file")
    with open(path, "rb") as file:
        text = file.read(MAX_BYTES + 1)
    if len(text) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES} bytes")
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f"it is not a state file (its format is not {FORMAT!r})")
    if record.get("policy") != policy_name or not isinstance(record.get("state"), dict):
        raise ValueError(f"it holds the state of policy {record.get('policy')!r}, not of {policy_name!r}")
    state: dict[str, Any] = record["state"]
    return state


class StateFile:
    """Restores a policy from its file, saves it at regular intervals, and saves it when the server stops.

    A separate thread writes the file. A file that cannot be used is reported and renamed to `FILE.ignored`.
    If writing fails, this is reported once. Neither error stops the engine.
    """

    def __init__(self, policy: Policy, policy_name: str, path: str, save_every_s: float) -> None:
        """Restore the policy. Raises ConfigError if the folder cannot be written to."""
        self._policy: Policy | None = policy
        self._policy_name = policy_name
        self._path = Path(path)
        self._save_every_s = save_every_s
        self._saved_s: float | None = None
        self._has_run = False
        """Whether the engine has run since the last save of an idle engine: the policy may have learned."""
        self._writer: threading.Thread | None = None
        self._has_failed = False
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"tenuto.state: cannot make the folder of {path!r}: {error}") from error
        if self._path.is_dir() or not os.access(self._path.parent, os.W_OK):
            raise ConfigError(f"tenuto.state: {path!r} must be a file in a folder that can be written to")
        if not isinstance(policy, Learns):
            logger.info("policy %s learns nothing to keep: tenuto.state has no effect", policy_name)
        self._restore()

    def follow(self, policy: Policy, policy_name: str) -> None:
        """Another policy object runs now. It is saved only if the file is for the policy of that name."""
        self._policy = policy if policy_name == self._policy_name else None

    def save_if_due(self, now_s: float, *, idle: bool = False) -> None:
        """Save the state if the interval has passed.

        On an idle engine the interval is ten times shorter, because an idle engine may be killed before its
        next step. When a save is due, the caller pays for one copy of the state; otherwise it pays nothing.
        """
        if self._saved_s is None:
            self._saved_s = now_s
        self._has_run = self._has_run or not idle
        every_s = self._save_every_s / 10 if idle else self._save_every_s
        if not self._has_run or now_s - self._saved_s < every_s:
            return
        self._saved_s = now_s
        if self._writer and self._writer.is_alive():
            return  # the disk is slow: try again after another interval
        self._has_run = not idle
        state = self._get_state()
        if state is not None:
            self._writer = threading.Thread(
                target=self._write, args=(state,), name="tenuto-state", daemon=True
            )
            self._writer.start()

    def get_idle_due_s(self) -> float | None:
        """When an idle engine should save the state next; None if there is nothing new to save."""
        if self._saved_s is None or not self._has_run or not isinstance(self._policy, Learns):
            return None
        return self._saved_s + self._save_every_s / 10

    def close(self) -> None:
        """Save what the policy has learned since the last save."""
        if self._writer is not None:
            self._writer.join()
        state = self._get_state()
        if state is not None:
            self._write(state)

    def _restore(self) -> None:
        try:
            state = load_state(self._path, self._policy_name)
            if isinstance(self._policy, Learns):
                self._policy.set_state(state)
        except FileNotFoundError:
            return
        except Exception as error:  # a policy is code from outside, and the file may hold anything
            aside = self._path.with_name(self._path.name + ".ignored")
            with contextlib.suppress(OSError):
                self._path.replace(aside)
            logger.error(
                "tenuto.state: %s is ignored, policy %s starts with nothing learned: %s (the file is now %s)",
                self._path,
                self._policy_name,
                error or repr(error),
                aside.name,
            )
        else:
            logger.info("policy %s continues with the state in %s", self._policy_name, self._path)

    def _get_state(self) -> dict[str, Any] | None:
        try:
            return self._policy.get_state() if isinstance(self._policy, Learns) else None
        except Exception as error:
            self._report(error)
            return None

    def _write(self, state: dict[str, Any]) -> None:
        try:
            save_state(self._path, self._policy_name, state)
            self._has_failed = False
        except (OSError, TypeError, ValueError, RecursionError) as error:
            self._report(error)

    def _report(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.error(
                "what policy %s learned is not saved in %s: %r", self._policy_name, self._path, error
            )


def sync_folder(folder: Path) -> None:
    """Make renamings in a folder durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
