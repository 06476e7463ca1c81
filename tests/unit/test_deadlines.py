"""One slow task does not end a run, nobody waits for ever, and deadlines that contradict each other are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_async.bank import Bank
from megatron_async.config import ConfigError, check, load
from megatron_async.config.deadlines import deadline_problems, longest_batch_wait_s
from megatron_async.config.schema import BatchConfig, ModelConfig, RolloutConfig, RunConfig, TrainerConfig
from megatron_async.training import batch as training_batch
from megatron_async.training.batch import BatchDeadline, BatchFeed
from megatron_async.training.batch_wait import BatchWait
from tests.bank_support import end, running
from tests.unit.configs import make_checkpoint, write_config

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "recipes" / "configs").glob("*.yaml"))
DEFAULTS = RunConfig(name="run", model=ModelConfig(path=""))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def waits(config: RunConfig, signs: Any, until: float) -> tuple[float, str]:
    """When the trainer stops to wait, and why; signs: a function of the second."""
    clock = Clock()
    wait = BatchWait(config, lambda: signs(clock.now), clock)
    while clock.now < until and not wait.over():
        clock.now += 1.0
    return clock.now, wait.over()


def test_a_task_that_hangs_at_every_attempt_is_waited_for_and_a_silence_is_not() -> None:
    """Its tool server hangs: four attempts end after 300 s each, and then its group is given up (defaults)."""
    assert waits(DEFAULTS, lambda second: second // 300, 4 * 300) == (1200, "")
    at, why = waits(DEFAULTS, lambda second: min(second, 50), 1e5)
    assert at == 50 + DEFAULTS.trainer.deadline_s + 1
    assert "no sign of life of the rollouts for 1801 s (trainer.deadline_s=1800)" in why


def test_rollouts_that_only_keep_busy_are_not_waited_for_without_end() -> None:
    at, why = waits(DEFAULTS, lambda second: second, 1e6)
    assert at == longest_batch_wait_s(DEFAULTS.rollout) + 1 == 2 * 4 * 2100 + 1
    assert "(rollout.max_retries 3 + 1) * (trajectory_deadline_s 1800 + turn_deadline_s 300)" in why


def test_the_bank_shows_every_attempt_and_every_token(tmp_path: Path) -> None:
    with Bank.open(f"sqlite:///{tmp_path / 'bank.sqlite'}") as bank:
        trajectory, seen = running("t", "g"), [bank.signs_of_life()]
        bank.start_trajectory(trajectory)
        seen.append(bank.signs_of_life())
        trajectory.append_context([4, 5])
        bank.checkpoint_trajectory(trajectory)
        seen.append(bank.signs_of_life())
        bank.finish_trajectory(end(trajectory))
        seen.append(bank.signs_of_life())
        assert len(set(seen)) == 4 and bank.signs_of_life() == seen[-1]


class Rank0:
    """The control channel of a trainer with one rank, which counts what the others would hear."""

    heard = 0

    def from_rank_zero(self, produce: Any) -> bytes:
        self.heard += 1
        return produce()  # type: ignore[no-any-return]


def test_the_other_ranks_hear_of_rank_0_while_it_waits_and_the_end_says_what_was_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_batch, "_SPEAK_S", 0.01)
    config = replace(
        DEFAULTS, batch=BatchConfig(groups=1, group_size=2), rollout=RolloutConfig(poll_s=0.002),
        trainer=TrainerConfig(deadline_s=0.3),
    )  # fmt: skip
    control = Rank0()
    with Bank.open(f"sqlite:///{tmp_path / 'bank.sqlite'}") as bank:
        feed = BatchFeed(config, control, bank, lambda what: None)  # type: ignore[arg-type]
        with pytest.raises(BatchDeadline, match=r"step 0: no batch: no sign of life .*: 0 of 1 groups of 2 are"):
            feed.take(0, 0)
    assert control.heard > 1


@pytest.mark.parametrize(
    ("trainer_s", "rollout", "refused"),
    [
        (1800, {}, ""),
        (600, {}, "300 + 300 (a call of the environment that hangs, then its close) + flush_s 2 = 602 s"),
        (603, {}, ""),
        (1800, {"flush_s": 0.0}, "1800 (flush_s 0 writes nothing down before) + turn_deadline_s 300 = 2100 s"),
        (1800, {"turn_deadline_s": 3600.0}, "= 7202 s, so that one slow task would end"),
    ],
)
def test_a_trainer_that_is_less_patient_than_an_episode_may_be_silent_is_refused(
    trainer_s: float, rollout: dict[str, Any], refused: str
) -> None:
    config = replace(DEFAULTS, trainer=TrainerConfig(deadline_s=trainer_s), rollout=RolloutConfig(**rollout))
    problems = deadline_problems(config)
    assert [refused in problem for problem in problems] == ([True] if refused else [])


def test_the_command_line_refuses_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer.deadline_s: 60 s is not more than .* raise it above 602"):
        check(load(write_config(tmp_path, trainer={"deadline_s": 60.0})))


@pytest.mark.parametrize(("limit_s", "refused"), [(0.0, False), (5.0, True), (10.0, False)])
def test_a_limit_that_a_busy_process_would_miss_is_refused(limit_s: float, refused: bool) -> None:
    problems = deadline_problems(replace(DEFAULTS, trainer=TrainerConfig(health_deadline_s=limit_s)))
    assert ["trainer.health_deadline_s: 5 s is too short" in problem for problem in problems] == [True] * refused


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_shipped_configurations_have_deadlines_that_fit(file: Path, tmp_path: Path) -> None:
    """As they are, without the script of their recipe."""
    assert not deadline_problems(load(file, [f"model.path={make_checkpoint(tmp_path / 'model')}"]))
