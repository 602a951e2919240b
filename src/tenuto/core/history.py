"""What happened to a job's turns and leases, as `job` records of the decision log."""

from __future__ import annotations

from tenuto.core.jobs import TurnState
from tenuto.core.leases import LeaseEnded, LeaseGranted, LeaseRefused, LeaseTruncated
from tenuto.core.policy_caller import DecisionLog, LogRecord


class History:
    """Writes one record per event; nothing without a log."""

    def __init__(self, log: DecisionLog | None, *, is_shadow: bool = False) -> None:
        """`is_shadow`: leases are not real; their records say so."""
        self._log = log
        self._shadow: LogRecord = {"shadow": True} if is_shadow else {}

    def record(self, event: str, turn: TurnState, now_s: float, **facts: object) -> None:
        """Something happened to a turn."""
        if self._log is not None:
            record: LogRecord = {"kind": "job", "event": event, "job": turn.job.job_id, "turn": turn.turn_id}
            self._log({**record, "turn_number": turn.job.num_turns, "now_s": now_s, **facts})

    def record_refusal(self, refused: LeaseRefused) -> None:
        """A finished turn got no lease."""
        if self._log is not None:
            turn = refused.turn
            place: LogRecord = {"kind": "job", "event": "lease-refused", "job": turn.job.job_id}
            facts: LogRecord = {"turn": turn.turn_id, "now_s": refused.now_s, "reason": refused.reason.value}
            self._log({**place, **facts, **self._shadow})

    def record_lease(self, happened: LeaseGranted | LeaseTruncated | LeaseEnded) -> None:
        """A lease began, lost its last blocks, or ended."""
        if self._log is None:
            return
        lease = happened.lease
        facts: LogRecord
        match happened:
            case LeaseGranted():
                event, num_blocks = "lease-granted", len(lease.blocks)
                facts = {"until_s": lease.terms.until_s}
            case LeaseTruncated():
                event, num_blocks = "lease-truncated", happened.num_blocks
                facts = {"taken_by": happened.taken_by.value}
            case LeaseEnded():
                event, num_blocks = "lease-ended", happened.num_blocks
                facts = {"reason": happened.reason.value, "held_s": happened.now_s - lease.granted_s}
                if happened.taken_by is not None:
                    facts["taken_by"] = happened.taken_by.value
        place: LogRecord = {"kind": "job", "event": event, "job": lease.job_id, "turn": lease.turn.turn_id}
        self._log({**place, "now_s": happened.now_s, "num_blocks": num_blocks, **facts, **self._shadow})
