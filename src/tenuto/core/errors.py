"""Every error Tenuto raises on purpose.

TenutoError
├── ConfigError       a setting is unknown, of the wrong type or out of range
├── PolicyError       a policy cannot be loaded, or breaks the policy contract
├── IntegrityError    an invariant of the block pool or of the leases does not hold (a bug)
├── IncompatibleError this vLLM is not one Tenuto fits
└── DataError         an input file is malformed (file, line and field are named)
"""

from __future__ import annotations

from tenuto.core.messages import bound_message


class TenutoError(Exception):
    """Base of all errors raised on purpose; its message says what to do."""

    def __str__(self) -> str:
        """The message, safe to print and of bounded length, whatever input it quotes."""
        return bound_message(super().__str__())


class ConfigError(TenutoError):
    """A setting is unknown, of the wrong type or out of range."""


class PolicyError(TenutoError):
    """A policy cannot be loaded, or breaks the policy contract."""


class IntegrityError(TenutoError):
    """An invariant does not hold; always a bug, never caused by input."""


class IncompatibleError(TenutoError):
    """Tenuto does not support this vLLM; the message lists what differs."""


class DataError(TenutoError):
    """An input file is malformed; the message names file, line and field."""
