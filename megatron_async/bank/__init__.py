"""The bank: trajectories, versions and steps in a database, so that no process owns what another one needs."""

from megatron_async.bank.bank import Admitted, Bank, Issued, Place
from megatron_async.bank.batches import Places, Step
from megatron_async.bank.errors import BankError, BankOpenError, TokensDiscarded
from megatron_async.bank.filtering import Filtered
from megatron_async.bank.groups import OpenGroup
from megatron_async.bank.ledger import Version
from megatron_async.bank.states import State

__all__ = [
    "Admitted",
    "Bank",
    "BankError",
    "BankOpenError",
    "Filtered",
    "Issued",
    "OpenGroup",
    "Place",
    "Places",
    "State",
    "Step",
    "TokensDiscarded",
    "Version",
]
