"""Running trajectories are written down when asked for, with every token of the requests that were under way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, ItemsView
from pathlib import Path

import pytest

from megatron_async.bank import Bank
from megatron_async.bank.requests import WRITE_DOWN, WRITTEN_DOWN
from megatron_async.rollout import writing_down
from megatron_async.rollout.agent_loop import EpisodeProgress
from megatron_async.rollout.ledger import Ledger
from megatron_async.rollout.writing_down import GRACE_S, PartialWriter, Played
from megatron_async.trajectory import VersionSpan
from tests.bank_support import running

LONG_S = 120.0
"""Longer than any test waits: what takes it was waited for in vain."""


class Playing(dict[str, Played]):
    """`looked` is set when the writer has begun to answer: it looks which requests are under way."""

    def __init__(self) -> None:
        super().__init__()
        self.looked = asyncio.Event()

    def items(self) -> ItemsView[str, Played]:
        self.looked.set()
        return super().items()


Scenario = Callable[[Bank, Playing], Awaitable[None]]


def play(tmp_path: Path, scenario: Scenario) -> None:
    async def go() -> None:
        with Bank.open(f"sqlite:///{tmp_path / 'bank.sqlite'}") as bank:
            ledger, playing = Ledger(bank), Playing()
            for name in ("a", "b"):
                playing[name] = Played(running(name, f"group-{name}"), EpisodeProgress())
            await ledger.start([played.trajectory for played in playing.values()])
            writer = asyncio.create_task(PartialWriter(ledger, playing, poll_s=0.01).run())
            try:
                await scenario(bank, playing)
            finally:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
                ledger.close()

    asyncio.run(go())


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    for _ in range(int(seconds / 0.01)):
        if condition():
            return True
        await asyncio.sleep(0.01)
    return False


def sample(played: Played, token: int) -> None:
    played.trajectory.append_action([token], [-0.5], [VersionSpan(0, 0, 1)])


def send(played: Played) -> None:
    played.progress.requests_sent += 1
    played.progress.request_sent_at = time.time()


def ask(bank: Bank) -> str:
    question = str(time.time_ns())
    bank.set_state(WRITE_DOWN, question)
    return question


def test_an_answer_under_way_is_waited_for_and_is_in_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing_down, "GRACE_S", LONG_S)

    async def scenario(bank: Bank, playing: Playing) -> None:
        sample(playing["a"], 10)
        send(playing["b"])
        question = ask(bank)
        await playing.looked.wait()
        assert not await until(lambda: bank.get_state(WRITTEN_DOWN) == question, seconds=0.2)
        sample(playing["b"], 20)
        playing["b"].progress.requests_returned = 1
        assert await until(lambda: bank.get_state(WRITTEN_DOWN) == question)
        assert [t.token_ids.tolist() for t in bank.list_running()] == [[1, 2, 3, 10], [1, 2, 3, 20]]

    play(tmp_path, scenario)
    assert (tmp_path / "bank.sqlite").exists()


def test_every_question_is_answered_once_with_what_there_is_by_then(tmp_path: Path) -> None:
    async def scenario(bank: Bank, playing: Playing) -> None:
        for token in (10, 11):
            sample(playing["a"], token)
            question = ask(bank)
            assert await until(lambda question=question: bank.get_state(WRITTEN_DOWN) == question)
        assert bank.list_running()[0].token_ids.tolist() == [1, 2, 3, 10, 11]

    play(tmp_path, scenario)
    assert (tmp_path / "bank.sqlite").exists()


def test_an_episode_that_ends_meanwhile_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing_down, "GRACE_S", LONG_S)

    async def scenario(bank: Bank, playing: Playing) -> None:
        send(playing["b"])
        question = ask(bank)
        await playing.looked.wait()
        del playing["b"]
        assert await until(lambda: bank.get_state(WRITTEN_DOWN) == question)

    play(tmp_path, scenario)
    assert (tmp_path / "bank.sqlite").exists()


def test_a_request_that_met_stopped_engines_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing_down, "GRACE_S", LONG_S)

    async def scenario(bank: Bank, playing: Playing) -> None:
        question = str(time.time_ns())
        send(playing["b"])
        bank.set_state(WRITE_DOWN, question)
        assert await until(lambda: bank.get_state(WRITTEN_DOWN) == question)

    play(tmp_path, scenario)
    assert (tmp_path / "bank.sqlite").exists()


def test_one_sent_at_the_moment_of_the_stop_is_waited_for_a_moment_only(tmp_path: Path) -> None:
    async def scenario(bank: Bank, playing: Playing) -> None:
        send(playing["b"])
        asked = time.monotonic()
        question = ask(bank)
        assert await until(lambda: bank.get_state(WRITTEN_DOWN) == question)
        assert time.monotonic() - asked >= GRACE_S

    play(tmp_path, scenario)
    assert (tmp_path / "bank.sqlite").exists()
