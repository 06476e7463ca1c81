"""Random sequences of operations against a model of the bank that is a few dictionaries.

After every operation the bank's states, counts and queue must equal the model's, and through all of it a trajectory
is in at most one committed step and none that finished disappears. Processes die at random: reopening is an operation.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from megatron_async.bank import Bank, BankError, State
from megatron_async.trajectory import Status
from tests.bank_support import check_consistent, close_view, end, running, states, steps_of
from tests.postgresql_server import PostgreSQLServer

SIZE = 2


@dataclass
class Member:
    name: str
    state: str = "running"
    version: int = 0
    step: int | None = None
    reward: float = 1.0


@dataclass
class Group:
    members: list[Member] = field(default_factory=list)
    closed: bool = False
    done: bool = False

    def having(self, state: str) -> list[Member]:
        return [m for m in self.members if m.state == state]

    @property
    def equal(self) -> bool:
        return len({member.reward for member in self.having("finished")}) == 1

    @property
    def complete(self) -> bool:
        waiting = len(self.having("finished"))
        as_it_is = self.closed and waiting > 0 and not self.having("running")
        return not self.done and (as_it_is or (not self.closed and waiting >= SIZE))

    def retire_if_empty(self) -> None:
        self.done = self.done or (self.closed and not self.having("running") and not self.having("finished"))


class BankMachine(RuleBasedStateMachine):
    new_url: Callable[[], str]
    reached: Counter[str]  # what happened over all examples: a search that never trains proves nothing

    @initialize()
    def setup(self) -> None:
        self.url = type(self).new_url()
        self.bank = Bank.open(self.url)
        self.groups: dict[str, Group] = {}
        self.steps: dict[int, tuple[str, list[str]]] = {}  # state, batch in order
        self.filtered: Counter[int] = Counter()  # groups by step
        self.updates = [0]  # by version id
        self.made = 0

    @property
    def newest(self) -> int:
        return len(self.updates) - 1

    def teardown(self) -> None:
        if hasattr(self, "bank"):
            self.bank.close()
            check_consistent(self.url)
            close_view(self.url)

    # ------------------------------------------------------------ rollout

    @rule(back=st.integers(0, 1), members=st.integers(1, 3), equal=st.booleans())
    def collect_group(self, back: int, members: int, equal: bool) -> None:
        for pick in range(members):
            self.start(min(pick, 1))
        for number in range(members):
            self.finish(-1, Status.OK, back, float(equal or number % 2))

    @rule(pick=st.integers(0, 3))
    def start(self, pick: int) -> None:
        """0: a new group; 1, 2: the youngest ones that take members; 3: any."""
        usable = [k for k, g in self.groups.items() if pick == 3 or not (g.done or g.closed)]
        name = f"t{self.made}"
        group_id = usable[-min(pick, len(usable))] if pick and usable else f"g{len(self.groups)}"
        known = self.groups.get(group_id, Group())
        if known.done or known.closed:
            with pytest.raises(BankError, match="no more members"):
                self.bank.start_trajectory(running(name, group_id))
            return
        self.bank.start_trajectory(running(name, group_id))
        self.groups.setdefault(group_id, known).members.append(Member(name))
        self.made += 1

    @rule(
        pick=st.integers(0, 99),
        status=st.sampled_from([Status.OK] * 4 + [Status.ENGINE_ERROR]),
        back=st.integers(0, 2),
        reward=st.sampled_from([0.0, 1.0]),
    )
    def finish(self, pick: int, status: Status, back: int, reward: float) -> None:
        found = [(k, g, m) for k, g in self.groups.items() for m in g.having("running")]
        if not found:
            return
        key, group, member = found[pick % len(found)]
        member.version = max(0, self.newest - back)
        member.reward = reward
        state = self.bank.finish_trajectory(end(running(member.name, key), member.version, status, reward))
        kept = "filtered" if group.done else "finished"
        member.state = kept if status is Status.OK else "failed"
        group.retire_if_empty()
        assert state == member.state

    @rule()
    def abandon(self) -> None:
        found = [m for g in self.groups.values() for m in g.having("running")]
        assert self.bank.abandon_running("test") == len(found)
        for member in found:
            member.state = "failed"
        for group in self.groups.values():
            group.retire_if_empty()

    @rule(pick=st.integers(1, 4), keep=st.booleans(), fewest=st.integers(1, 2))
    def close_group(self, pick: int, keep: bool, fewest: int) -> None:
        if pick > len(self.groups):
            return
        group_id, group = list(self.groups.items())[-pick]
        self.bank.close_group(group_id, keep=keep, fewest=fewest)
        if group.done:
            return
        group.closed = True
        if not keep or len(group.having("finished")) + len(group.having("running")) < fewest:
            for member in group.having("finished"):
                member.state = "filtered"
            group.done = True

    # ------------------------------------------------------------ training

    @rule(
        wanted=st.integers(1, 2),
        bound=st.integers(0, 3),
        most=st.sampled_from([0, 0, 1, 3]),
        overtaking=st.sampled_from([None, None, None, None, 0, 1]),
    )
    def take(self, wanted: int, bound: int, most: int, overtaking: int | None = None) -> None:
        step = self._next_step()
        min_updates = self.updates[-1] - bound
        batch = self.bank.take_batch(step, wanted, SIZE, min_updates, most, overtaking)
        expected = self._expected_batch(step, wanted, min_updates, most, overtaking)
        assert (None if batch is None else [t.trajectory_id for t in batch]) == expected
        assert self.bank.filtered(step).groups == self.filtered[step]

    @rule(lost=st.sampled_from([0, 0, 0, 0, 0, 1]))
    def record_version(self, lost: int) -> None:
        """lost: versions that a resume has left behind."""
        parent = max(0, self.newest - lost)
        self.bank.record_version(self.newest + 1, parent)
        self.updates.append(self.updates[parent] + 1)

    @rule()
    def commit(self) -> None:
        reserved = [s for s, (state, _) in self.steps.items() if state == "reserved"]
        for step in reserved[:1]:
            self.bank.commit_step(step, self.newest, self.newest)
            self._set_step(step, "committed", "trained")

    @rule()
    def train_one(self) -> None:
        self.take(1, bound=4, most=0)
        self.commit()

    @rule()
    def grow_old(self) -> None:
        self.collect_group(0, members=SIZE, equal=False)
        for _ in range(2):
            self.record_version(lost=0)
        self.take(1, bound=0, most=0)

    @rule()
    def train_a_part(self) -> None:
        self.start(0)
        self.finish(-1, Status.OK, 0, 1.0)
        self.close_group(1, keep=True, fewest=1)
        self.take(1, bound=4, most=0)

    @rule(most=st.sampled_from([0, 2]))
    def train_one_but_crash(self, most: int) -> None:
        self.take(1, bound=4, most=most)
        self.crash_and_resume(None)

    @rule(checkpoint=st.none() | st.integers(-1, 1))
    def crash_and_resume(self, checkpoint: int | None) -> None:
        self.bank.close()
        self.bank = Bank.open(self.url)
        returned = self.bank.rollback_uncommitted(checkpoint)
        expected = 0
        for step, (state, names) in list(self.steps.items()):
            if state == "reserved":
                expected += len(names)
                self._give_back(step)
            elif state == "retaken" or (
                state == "committed" and checkpoint is not None and step > checkpoint
            ):
                self._set_step(step, "redo", "reserved")
        assert returned == expected

    # ------------------------------------------------------------ the model's own arithmetic

    def _next_step(self) -> int:
        redo = [step for step, (state, _) in self.steps.items() if state == "redo"]
        return min(redo) if redo else len(self.steps)

    def _oldest(self, wanted: int, overtaking: int | None) -> list[Group]:
        """Complete groups by age, up to the one that would overtake too many."""
        found, behind = [], 0
        for group in self.groups.values():
            if group.complete and (overtaking is None or behind <= overtaking):
                found.append(group)
            behind += not group.complete and not group.done
        return found[:wanted]

    def _filter(self, step: int, wanted: int, most: int, overtaking: int | None) -> None:
        while self.filtered[step] < most:
            oldest = self._oldest(wanted, overtaking)
            equal = [group for group in oldest if group.equal][: most - self.filtered[step]]
            if not equal:
                return
            for group in equal:
                for member in group.having("finished"):
                    member.state = "filtered"
                group.done = True
            self.filtered[step] += len(equal)
            self.reached["filtered"] += len(equal)

    def _expected_batch(
        self, step: int, wanted: int, min_updates: int, most: int, overtaking: int | None
    ) -> list[str] | None:
        if step in self.steps:
            self._set_step(step, "retaken", "reserved")
            return self.steps[step][1]
        for group in self.groups.values():
            if group.complete and self._least(group) < min_updates:
                for member in group.having("finished"):
                    member.state = "stale"
                    self.reached["stale"] += 1
                group.done = True
        self._filter(step, wanted, most, overtaking)
        chosen = self._oldest(wanted, overtaking)
        if len(chosen) < wanted:
            return None
        names = []
        for group in chosen:
            self.reached["closed group taken" if group.closed else "group taken"] += 1
            for i, member in enumerate(group.having("finished")):
                self.reached["surplus"] += i >= SIZE
                member.state, member.step = ("reserved", step) if i < SIZE else ("filtered", None)
                names += [member.name] if i < SIZE else []
            group.done = True
        self.steps[step] = ("reserved", names)
        return names

    def _least(self, group: Group) -> int:
        return min(self.updates[member.version] for member in group.having("finished"))

    def _set_step(self, step: int, state: str, member_state: str) -> None:
        self.steps[step] = (state, self.steps[step][1])
        self.reached[state] += 1
        for member in self._members_of(step):
            member.state = member_state

    def _give_back(self, step: int) -> None:
        self.reached["given back"] += 1
        for member in self._members_of(step):
            member.state, member.step = "finished", None
        for group in self.groups.values():
            if any(m.name in self.steps[step][1] for m in group.members):
                group.done = False
        del self.steps[step]

    def _members_of(self, step: int) -> list[Member]:
        return [m for g in self.groups.values() for m in g.members if m.step == step]

    # ------------------------------------------------------------ what must hold

    @invariant()
    def bank_equals_model(self) -> None:
        if not hasattr(self, "bank"):
            return
        members = [m for g in self.groups.values() for m in g.members]
        assert states(self.url) == {m.name: m.state for m in members}
        assert steps_of(self.url) == {m.name: m.step for m in members}
        counts = {state: sum(m.state == state for m in members) for state in State}
        assert self.bank.counts() == counts
        assert self.bank.peek_ready(SIZE) == sum(g.complete for g in self.groups.values())
        assert [g.group_id for g in self.bank.open_groups()] == [
            k for k, g in self.groups.items() if not g.done
        ]

    @invariant()
    def no_trajectory_is_in_two_steps(self) -> None:
        batches = [name for _, names in getattr(self, "steps", {}).values() for name in names]
        assert len(batches) == len(set(batches))


def check_machine(new_url: Callable[[], str], examples: int, random: bool = False) -> Counter[str]:
    """Run the machine; returns how often each event was reached."""
    reached: Counter[str] = Counter()
    machine = type("Machine", (BankMachine,), {"new_url": staticmethod(new_url), "reached": reached})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=50,
            derandomize=not random,
            deadline=None,  # a commit waits for the disk, which others use too
            suppress_health_check=list(HealthCheck),
        ),
    )
    return reached


EVENTS = {
    "group taken",
    "filtered",
    "closed group taken",
    "surplus",
    "stale",
    "given back",
    "committed",
    "redo",
    "retaken",
}


def test_random_operations_agree_with_the_model_on_sqlite() -> None:
    memory = Path("/dev/shm")  # where there is one: the disk's syncs are not what is searched here
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        numbers = iter(range(1_000_000))
        reached = check_machine(lambda: f"sqlite:///{Path(folder)}/{next(numbers)}.sqlite", examples=16)
    assert set(reached) >= EVENTS, reached


def test_random_operations_agree_with_the_model_on_postgresql(postgresql_server: PostgreSQLServer) -> None:
    reached = check_machine(postgresql_server.new_database, examples=8)
    assert set(reached) >= {"group taken", "committed", "stale"}, reached


@pytest.mark.slow
def test_many_random_operations_agree_with_the_model(postgresql_server: PostgreSQLServer) -> None:
    reached = check_machine(postgresql_server.new_database, examples=60, random=True)
    assert set(reached) >= EVENTS, reached
