"""Errors of the bank."""

from __future__ import annotations

from megatron_async.errors import PartnerGone, UserError


class BankError(RuntimeError):
    """A transition or a record the bank must not make; the message names the id, its state and what was wanted."""


class TokensDiscarded(BankError, UserError):
    """What is asked for needs tokens that were deleted; the message says why they were."""


class BankOpenError(BankError, UserError):
    """The database cannot be opened or belongs to another release; the message says how to mend it."""


class BankAway(BankOpenError, PartnerGone):
    """The database does not answer; it may come back."""
