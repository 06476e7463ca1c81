"""The numbers of the rollout processes of one bank: who holds one, which groups are whose, and who is gone for good.

Invariants
- A group is played by the number in its name, until another number has taken it over.
- Groups change hands in one transaction, with what admission counts from, and only while the taker holds the claim of
  the number that left them. Of several takers one succeeds; the number itself, started again meanwhile, waits for the
  claim and then finds them gone. A kill of the taker leaves them to the taker's number.
- One that lost its claim unnoticed, since its connection was cut, ends at its next look if another process has held
  the number since, even for a moment: it does not play on beside a successor.
- A number whose claim is free for less than the patience keeps its work: somebody may be starting it again.

Blocking, for the ledger's thread.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable

from sqlalchemy.exc import DBAPIError

from megatron_async.bank import Bank
from megatron_async.bank.requests import OLDEST, OWNER
from megatron_async.config.schema import MOST_ROLLOUTS
from megatron_async.errors import PartnerGone
from megatron_async.rollout.prompts import process_of

logger = logging.getLogger(__name__)

_PROBE_S = 5.0
_OLDEST_KEYS = [OLDEST.format(number) for number in range(MOST_ROLLOUTS)]


def claim_name(number: int) -> str:
    """What a rollout process holds in the bank (`Bank.claim`) for as long as it runs."""
    return f"rollout-{number}"


class Numbers:
    """What the rollout process of one number knows of the bank's numbers.

    group_size: members of a complete group. patience_s: seconds for which another number may be free although it left
    work behind; then it is `overdue`. clock: monotonic seconds.
    """

    def __init__(
        self,
        bank: Bank,
        own: int = 0,
        group_size: int = 1,
        patience_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.own = own
        self._bank = bank
        self._group_size = group_size
        self._patience_s, self._clock = patience_s, clock
        self._claimed = False
        self._oldest = ""
        self._next_probe = clock()
        self._free_since: dict[int, float] = {}

    # ------------------------------------------------------------------ its own number

    def claim(self) -> bool:
        """Hold the number until `release`; False while another process does."""
        self._claimed = self._bank.claim(claim_name(self.own))
        return self._claimed

    def release(self) -> None:
        """Give the number back; nothing happens where it is not held."""
        self._bank.release(claim_name(self.own))

    def look(self, oldest: int | None) -> int | None:
        """Tell others from where on the groups of this process count; returns the least of what they tell.

        In updates; None where nothing is played. Raises PartnerGone when the number is another process's by now.
        """
        if self._claimed and not self._bank.keeps(claim_name(self.own)):
            raise PartnerGone(
                f"rollout.process {self.own}: while the database was away, another rollout process took over this "
                "number or its groups; this one ends. Started again, it goes on with what is its own, and new prompts"
            )
        self.tell("" if oldest is None else str(oldest))
        told = {key: value for key, value in self._bank.get_states(_OLDEST_KEYS).items() if value}
        told.pop(OLDEST.format(self.own), None)
        self._probe(map(_OLDEST_KEYS.index, told))
        return min(map(int, told.values()), default=None)

    def tell(self, oldest: str) -> None:
        """Of this process's groups, in updates; empty where there are none."""
        if oldest != self._oldest:
            self._bank.set_state(OLDEST.format(self.own), oldest)
            self._oldest = oldest

    def told(self, oldest: str) -> dict[str, str]:
        """What `tell` writes, for a transaction that does more."""
        return {OLDEST.format(self.own): oldest}

    def was_told(self, oldest: str) -> None:
        """That transaction was committed."""
        self._oldest = oldest

    def leave_nothing(self) -> None:
        """This process ends and nobody will go on with its groups: they hold others back no longer."""
        if self._oldest and self._claimed and self._bank.keeps(claim_name(self.own)):
            self.tell("")

    # ------------------------------------------------------------------ groups

    def mine(self, groups: Iterable[str]) -> set[str]:
        """Those of the named groups that this number plays."""
        return {name for name, number in self._owners(groups).items() if number == self.own}

    def _owners(self, groups: Iterable[str]) -> dict[str, int]:
        keys = {name: OWNER.format(name) for name in groups}
        taken = self._bank.get_states(list(keys.values()))
        return {name: int(taken[key]) if key in taken else process_of(name) for name, key in keys.items()}

    # ------------------------------------------------------------------ numbers that are gone

    @property
    def gone(self) -> tuple[int, ...]:
        """Other numbers that left work behind and that nobody holds at present."""
        return tuple(self._free_since)

    @property
    def overdue(self) -> bool:
        """Whether `take_over` has something to do."""
        return any(self._clock() - since >= self._patience_s for since in self._free_since.values())

    def _probe(self, telling: Iterable[int]) -> None:
        """Every few seconds: which numbers left work behind, and since when nobody was found to hold them."""
        now = self._clock()
        if now < self._next_probe or math.isinf(self._patience_s):
            return
        self._next_probe = now + min(_PROBE_S, self._patience_s / 4)
        working = {*telling, *self._owners(self._bank.unfinished_groups(self._group_size)).values()} - {self.own}
        self._free_since = {
            number: self._free_since.get(number, now) for number in sorted(working) if self._try(number)
        }

    def _try(self, number: int) -> bool:
        try:
            return self._bank.is_free(claim_name(number))
        except DBAPIError:
            return False  # the server is away

    def take_over(self) -> set[str]:
        """Take over the unfinished groups of the numbers that are overdue; their names."""
        names: set[str] = set()
        for number, since in list(self._free_since.items()):
            if self._clock() - since >= self._patience_s:
                del self._free_since[number]
                names |= self._take_over(number)
        return names

    def _take_over(self, number: int) -> set[str]:
        if not self._bank.claim(claim_name(number)):
            return set()
        try:
            left = self._owners(self._bank.unfinished_groups(self._group_size)).items()
            names = {name for name, owner in left if owner == number}
            theirs = self._bank.get_state(OLDEST.format(number)) or ""
            oldest = min(filter(None, (self._oldest, theirs)), key=int, default="") if names else self._oldest
            self._bank.set_states(
                {
                    **{OWNER.format(name): str(self.own) for name in names},
                    **self.told(oldest),
                    OLDEST.format(number): "",
                }
            )
            self.was_told(oldest)
        finally:
            self._bank.release(claim_name(number))
        logger.warning(
            "rollout process %d is gone and was not started again for %g s (rollout.takeover_s): process %d goes on "
            "with its %d unfinished groups", number, self._patience_s, self.own, len(names),
        )  # fmt: skip
        return names
