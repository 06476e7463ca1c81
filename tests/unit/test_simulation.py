"""The simulated loop against closed forms, and its parts against arithmetic done by hand."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.simulation import (
    EngineModel,
    Episode,
    OldLogitModel,
    PublishModel,
    RolloutPolicy,
    Scenario,
    TrainerModel,
    Turn,
    Workload,
    fully_asynchronous_staleness,
    simulate,
)
from megatron_async.simulation.engines import Engine, Request
from megatron_async.simulation.errors import ScenarioError
from megatron_async.simulation.events import Clock, Work
from megatron_async.simulation.old_logits import stale_forward_tokens, step_cost
from megatron_async.simulation.playing import Group, Play
from megatron_async.simulation.scenario import SOURCES
from megatron_async.simulation.workload import constant, maximum_over_mean
from tools.simulation_checks import CASES, CLOSED_FORM_TOLERANCE, staleness

# 100 tokens at 10 ms: an episode takes one second whatever else runs.
SCENARIO = Scenario(
    constant(100),
    EngineModel(step_base=0.01),
    TrainerModel(update_fixed=0.5, overhead=0.05),
    PublishModel(seconds=0.2, paused=0.1),
    rollout=RolloutPolicy(bound=0, concurrency=16, groups=4, group_size=4),
)


def with_rollout(scenario: Scenario, **changes: object) -> Scenario:
    return replace(scenario, rollout=replace(scenario.rollout, **changes))  # type: ignore[arg-type]


TAILED = Workload((tuple(Episode((Turn(0, tokens),)) for tokens in (50, 60, 80, 90, 100, 120, 400)),))


# ---------------------------------------------------------------- the whole loop


def test_synchronous_is_the_sum_of_the_parts() -> None:
    result = simulate(SCENARIO, steps=20)
    assert result.step_seconds == pytest.approx(1.0 + 0.5 + 0.2 + 0.05)
    assert result.gap_shares == {0: 1.0}
    assert result.engine_busy == pytest.approx(1.0 / 1.75)
    assert result.trainer_busy == pytest.approx(0.75 / 1.75)


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        (0.5, 1.0 + 0.1),  # generation is slower: one batch a second, and the engines' pause
        (3.0, 3.0 + 0.2 + 0.05),  # the trainer is slower
    ],
)
def test_fully_asynchronous_is_the_slower_side(update: float, expected: float) -> None:
    scenario = with_rollout(replace(SCENARIO, trainer=TrainerModel(update_fixed=update, overhead=0.05)), bound=4)
    assert simulate(scenario, steps=30).step_seconds == pytest.approx(expected)


def test_generation_scales_with_engines_until_the_trainer_is_slower() -> None:
    """With a decoding step proportional to the requests, an engine makes 100 tokens a second however many run."""
    scenario = replace(SCENARIO, engines=EngineModel(step_base=1e-9, step_per_request=0.01), publish=PublishModel())
    scenario = with_rollout(scenario, bound=8, concurrency=64)

    def step_seconds(count: int) -> float:
        engines = replace(scenario.engines, count=count)
        return simulate(replace(scenario, engines=engines), steps=64, warm_up=64).step_seconds

    seconds = {count: step_seconds(count) for count in (1, 2, 4, 64)}
    # 16 trajectories of 100 tokens; four batches end at once, and a count may begin between them, hence 2 %.
    assert [seconds[1], seconds[2], seconds[4]] == pytest.approx([16.0, 8.0, 4.0], rel=0.02)
    assert seconds[64] == pytest.approx(0.55, rel=0.02)


def test_lag_n_publishing_lets_versions_grow_old() -> None:
    """Generation keeps ahead, so a batch is sampled by the last published version: gaps 0..n-1 and what waits."""
    base = with_rollout(replace(SCENARIO, trainer=TrainerModel(update_fixed=4.0), publish=PublishModel()), bound=4)
    result = simulate(replace(base, publish=PublishModel(every=4)), steps=40)
    assert 1.0 <= result.gap_mean <= 4.0
    assert result.gap_max <= 4
    assert result.gap_mean > simulate(with_rollout(base, bound=1), steps=40).gap_mean


def test_one_server_with_poisson_arrivals_waits_as_m_d_1() -> None:
    """Pollaczek-Khinchine: mean wait = rho / (2 (1 - rho)) service times; 30,000 arrivals give it within 6 %."""
    rho = 0.7
    scenario = Scenario(
        constant(100),
        EngineModel(step_base=0.01),
        rollout=RolloutPolicy(
            bound=10**6, concurrency=1, groups=1, group_size=1, admission="drop", arrivals_per_second=rho
        ),
    )
    result = simulate(scenario, steps=30_000, warm_up=100, seed=3)
    assert result.waited_mean == pytest.approx(rho / (2 * (1 - rho)), rel=0.06)
    assert result.engine_busy == pytest.approx(rho, rel=0.03)


@pytest.mark.parametrize(("group_size", "update", "window"), CASES)
def test_mean_staleness_of_a_fully_asynchronous_loop(group_size: int, update: float, window: int) -> None:
    """The closed form, both regimes. It takes groups to start at once and batches to fill evenly; 8 % is for that."""
    simulated, expected = staleness(group_size, update, window)
    assert simulated == pytest.approx(expected, rel=CLOSED_FORM_TOLERANCE, abs=0.08)


def test_closed_form_is_continuous_where_the_queue_is_one_batch() -> None:
    """At rho = 1 and Q = B both branches say C M / B + 1."""
    common = {"trainer_rate": 1.0, "concurrency": 32, "batch": 16, "queue": 16, "spread": 1.5}
    below = fully_asynchronous_staleness(rollout_rate=1 - 1e-9, **common)
    above = fully_asynchronous_staleness(rollout_rate=1 + 1e-9, **common)
    assert below == pytest.approx(32 * 1.5 / 16 + 1)
    assert above == pytest.approx(below)


@settings(max_examples=40)
@given(
    bound=st.integers(0, 4),
    every=st.integers(1, 4),
    concurrency=st.integers(1, 48),
    groups=st.integers(1, 5),
    update=st.floats(0.01, 5.0),
    turnaround=st.floats(0.0, 0.5),
    source=st.sampled_from(SOURCES),
    seed=st.integers(0, 5),
)
def test_throttled_staleness_never_exceeds_its_bound(
    bound: int, every: int, concurrency: int, groups: int, update: float, turnaround: float, source: str, seed: int
) -> None:
    every = min(every, bound + 1)
    scenario = Scenario(
        Workload.parametric(
            turns=3, actions_per_turn=30, actions_spread=1.2, prompt=40, observation=10, tool_seconds=0.2,
            tool_spread=1.0, stock=200,
        ),
        EngineModel(2, 0.005, 0.001, 0.02, 0.05, interference=0.5),
        TrainerModel(2, update, 1e-5, overhead=0.01, interference=1.5),
        PublishModel(0.1, 0.05, every),
        OldLogitModel(source, 0.1, 0.05, 0.2),  # type: ignore[arg-type]
        RolloutPolicy(bound, concurrency, groups, 3, turnaround=turnaround),
    )  # fmt: skip
    result = simulate(scenario, steps=12, warm_up=2, seed=seed)
    assert result.gap_max <= bound
    assert result.stale == 0
    assert 0 < result.engine_busy <= 1 + 1e-9
    assert 0 <= result.trainer_busy <= 1 + 1e-9
    for step in result.steps:  # the stages fill the step
        assert sum(step.stages.values()) == pytest.approx(step.seconds, abs=1e-6)


def test_a_seed_decides_everything() -> None:
    scenario = with_rollout(
        replace(SCENARIO, workload=Workload.parametric(
            turns=3, actions_per_turn=50, actions_spread=1.0, prompt=10, observation=5, tool_seconds=0.1
        )), bound=2,
    )  # fmt: skip
    first, again, other = (simulate(scenario, steps=10, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_without_admission_old_groups_are_thrown_away() -> None:
    """Far more is sampled than trained: "drop" bounds the gap by waste, "throttle" without."""
    busy = with_rollout(replace(SCENARIO, trainer=TrainerModel(update_fixed=6.0)), bound=1, concurrency=64)
    dropped, throttled = simulate(with_rollout(busy, admission="drop"), steps=20), simulate(busy, steps=20)
    assert dropped.gap_max <= 1
    assert dropped.stale > 0
    assert throttled.stale == 0


@settings(max_examples=20)
@given(
    mode=st.sampled_from(["wait", "window"]),
    bound=st.integers(0, 3),
    window=st.integers(0, 3),
    every=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_every_mode_keeps_the_bound_without_waste_and_goes_on(
    mode: str, bound: int, window: int, every: int, seed: int
) -> None:
    bound = max(bound, every - 1)
    scenario = with_rollout(SCENARIO, bound=bound, admission=mode, window=window)
    scenario = replace(scenario, workload=TAILED, publish=PublishModel(every=every))
    result = simulate(scenario, steps=6, seed=seed)
    assert result.gap_max <= bound and result.stale == 0


def test_the_modes_meet_at_their_ends() -> None:
    """Rounds of one batch are synchronous; a window that is never full is no window, an empty one waits longer."""
    busy = with_rollout(replace(SCENARIO, workload=TAILED), bound=2, concurrency=64)

    def seconds(**policy: object) -> float:
        return simulate(with_rollout(busy, **policy), steps=20).step_seconds

    assert seconds(admission="wait", bound=0) == pytest.approx(seconds(bound=0))
    assert seconds(admission="window", window=99) == pytest.approx(seconds())
    assert seconds(admission="window", window=0) >= seconds()


def test_a_loop_that_cannot_go_on_says_so() -> None:
    scenario = with_rollout(SCENARIO, admission="queue", queue=16, arrivals_per_second=1e-9)
    with pytest.raises(ValueError, match="scenario"):
        with_rollout(scenario, queue=3)
    with pytest.raises(ValueError, match="too small for publishing every 4"):
        replace(SCENARIO, publish=PublishModel(every=4))
    with pytest.raises(ValueError, match="at least one must score"):
        replace(SCENARIO, old_logits=OldLogitModel("dedicated"))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"engines": EngineModel(count=0)}, "must be at least 1"),
    ({"engines": EngineModel(step_base=-1.0)}, "EngineModel.step_base is -1, not a number of at least 0"),
    ({"engines": EngineModel(step_base=math.nan)}, "EngineModel.step_base is nan"),
    ({"engines": EngineModel(step_base=0.0)}, "a decoding step must take time"),
    ({"trainer": TrainerModel(update_fixed=-100.0)}, "TrainerModel.update_fixed is -100"),
    ({"trainer": TrainerModel(update_fixed=math.inf)}, "TrainerModel.update_fixed is inf"),
    ({"trainer": TrainerModel(trained_share=1.5)}, "trained_share 1.5 is more than all"),
    ({"publish": PublishModel(seconds=2.0, paused=3.0)}, "takes 2 s, but the engines pause 3 s of it"),
    ({"publish": PublishModel(every=0)}, "must be at least 1"),
    ({"engines": EngineModel(interference=-0.5)}, "EngineModel.interference is -0.5"),
    ({"rollout": RolloutPolicy(bound=-1)}, "RolloutPolicy.bound is -1"),
    ({"rollout": RolloutPolicy(admission="drop", bound=0), "publish": PublishModel(every=3)}, "too small for publish"),
    ({"rollout": RolloutPolicy(admission="sometimes")}, "admission 'sometimes' is none of"),
    ({"rollout": RolloutPolicy(arrivals_per_second=0.0)}, "no prompt ever arrives"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_numbers_that_describe_no_loop_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=re.escape(message)):
        replace(SCENARIO, **changes)


@pytest.mark.parametrize("steps", [0, -3])
def test_no_steps_are_no_result(steps: int) -> None:
    with pytest.raises(ScenarioError, match="is not at least 1"):
        simulate(SCENARIO, steps=steps)


def test_a_single_step_is_a_result() -> None:
    result = simulate(SCENARIO, steps=1)
    assert len(result.steps) == 1 and result.step_seconds > 0


def test_engines_beyond_the_episodes_that_run_change_nothing_and_cost_nothing() -> None:
    places = SCENARIO.rollout.concurrency
    enough, many = (
        simulate(replace(SCENARIO, engines=replace(SCENARIO.engines, count=count)), steps=10)
        for count in (places, 1_000_000 * places)
    )
    assert many.steps == enough.steps
    assert many.engine_busy == pytest.approx(enough.engine_busy / 1e6)


@pytest.mark.parametrize("wrong", [{"turns": 0.5}, {"turns": math.nan}, {"prompt": -1}, {"tool_seconds": math.inf}])
def test_episodes_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    shape = {"turns": 2, "actions_per_turn": 9, "actions_spread": 0.1, "prompt": 5, "observation": 5, "tool_seconds": 1}
    with pytest.raises(ScenarioError, match="workload: the mean of turns is at least 1"):
        Workload.parametric(**{**shape, **wrong})


# ---------------------------------------------------------------- shared processors


def test_interference_stretches_both_sides_while_both_compute() -> None:
    """Synchronous: never together, nothing changes. Asynchronous: always together, and the slower side decides, by what
    the other slows it down."""
    shared = replace(
        SCENARIO, publish=PublishModel(), engines=replace(SCENARIO.engines, interference=0.25),
        trainer=replace(SCENARIO.trainer, interference=0.5),
    )  # fmt: skip
    assert simulate(shared, steps=10).step_seconds == pytest.approx(1.0 + 0.5 + 0.05)

    def seconds(update: float, concurrency: int) -> float:
        trainer = TrainerModel(update_fixed=update, interference=0.5)
        loop = with_rollout(replace(shared, trainer=trainer), bound=8, concurrency=concurrency)
        return simulate(loop, steps=40, warm_up=20).step_seconds

    # 64 places give four batches in a second alone: the trainer decides, and an engine always computes beside it.
    assert seconds(0.8, 64) == pytest.approx(0.8 * 1.5, rel=0.05)
    # 8 places give a batch in two seconds; the trainer computes 0.9 of them, in which they come to 1 / 1.25.
    assert seconds(0.6, 8) == pytest.approx(2.0 + 0.9 * 0.2, rel=0.05)


def test_work_at_a_changing_speed() -> None:
    clock, ended = Clock(), []
    work = Work(clock, 2.0, 1.0, lambda: ended.append(clock.now))
    clock.after(1.0, lambda: work.set_speed(0.25))
    clock.after(3.0, lambda: work.set_speed(1.0))
    assert clock.run(lambda: bool(ended))
    assert ended == [pytest.approx(1.0 + 2.0 + 0.5)]


# ---------------------------------------------------------------- engines


def _run_engine(engine: Engine, clock: Clock, requests: list[tuple[float, Request]]) -> None:
    """Submit each request at its time, and let everything happen."""
    for at, request in requests:
        clock.after(at, partial(engine.submit, request))
    assert not clock.run(lambda: False)


def test_requests_share_an_engine() -> None:
    """Steps of 1 + k seconds: two of 10 and 30 tokens run 10 steps together (3 s each), then 20 alone (2 s each)."""
    clock, ends = Clock(), {}
    engine = Engine(clock, EngineModel(step_base=1.0, step_per_request=1.0), lambda: None)
    requests = [
        (0.0, Request(0, 0, n, lambda spans, n=n: ends.update({n: (clock.now, spans)})))  # type: ignore[misc]
        for n in (10, 30)
    ]
    _run_engine(engine, clock, requests)
    assert ends[10] == (pytest.approx(30.0), [(0, pytest.approx(10.0))])
    assert ends[30] == (pytest.approx(70.0), [(0, pytest.approx(30.0))])
    assert engine.busy_seconds == pytest.approx(70.0)
    assert engine.running_seconds == pytest.approx(30 * 2 + 40)


def test_a_publishing_splits_tokens_at_the_version_and_recomputes_the_context() -> None:
    """One token a second after 5 s of prefill; at 15 s new weights: 20 context + 10 sampled tokens are recomputed."""
    clock, ends = Clock(), []
    engine = Engine(clock, EngineModel(step_base=1.0, prefill=0.5), lambda: None)
    clock.after(15.0, lambda: engine.set_version(1, retract=True))
    request = Request(10, 10, 30, lambda spans: ends.append((clock.now, spans)))
    _run_engine(engine, clock, [(0.0, request)])
    when, spans = ends[0]
    assert spans == [(0, pytest.approx(10.0)), (1, pytest.approx(20.0))]
    assert when == pytest.approx(5 + 10 + 0.5 * (10 + 10 + 10) + 20)


def test_a_paused_engine_makes_nothing() -> None:
    clock, ends = Clock(), []
    engine = Engine(clock, EngineModel(step_base=1.0), lambda: None)
    clock.after(4.0, lambda: engine.set_speed(0.0))
    clock.after(9.0, lambda: engine.set_speed(0.5))
    _run_engine(engine, clock, [(0.0, Request(0, 0, 10, lambda spans: ends.append(clock.now)))])
    assert ends == [pytest.approx(4 + 5 + 6 / 0.5)]
    assert engine.paused_seconds == pytest.approx(5.0)


# ---------------------------------------------------------------- old log-probs


def _play(*spans: tuple[int, float]) -> Play:
    play = Play(Episode((Turn(0, 1),)), Group(0, 0), 0.0)
    play.spans, play.tokens = list(spans), spans[-1][1]
    return play


def test_a_stale_trajectory_is_forwarded_once_per_version_up_to_its_last_token() -> None:
    batch = [_play((3, 100.0), (4, 150.0), (5, 200.0)), _play((5, 80.0)), _play((4, 60.0))]
    assert stale_forward_tokens(batch, 5) == (100 + 150 + 60, 3)
    assert stale_forward_tokens(batch[1:2], 5) == (0.0, 5)


def test_the_cost_of_every_source() -> None:
    """700 tokens, 2 nodes: update 1 + 700/2 * 0.01 = 4.5, forward 0.5 * 700/2 * 0.01 = 1.75."""
    trainer = TrainerModel(2, 1.0, 0.01, forward_share=0.5)
    batch = [_play((3, 200.0), (5, 400.0)), _play((5, 300.0))]
    costs = {
        source: step_cost(trainer, OldLogitModel(source, 0.3, 0.2, 0.7), batch, 5, 1000.0) for source in SOURCES
    }
    assert {source: cost.score for source, cost in costs.items()} == pytest.approx({
        "start": 0.0, "rollout": 0.0, "start_pass": 1.75, "ewma": 2 * 0.7 + 1.75,
        "snapshot": 2 * 0.2 * 2 + 0.5 * 200 / 2 * 0.01, "dedicated": 0.0, "interrupt": 0.0,
    })  # fmt: skip
    assert [cost.update for source, cost in costs.items() if source != "dedicated"] == pytest.approx([4.5] * 6)
    dedicated = costs["dedicated"]  # one node trains (1 + 7), one scores (3.5) beside it
    assert (dedicated.update, dedicated.beside) == pytest.approx((8.0, 3.5))
    assert costs["interrupt"].pausing == pytest.approx(0.5 * 1000 / 2 * 0.01)
    assert costs["snapshot"].capture == pytest.approx(0.3)


def test_sources_cost_what_they_cost_where_the_trainer_decides() -> None:
    """Trainer-bound and lag 0 within the batch: step time differs by exactly the cost of the source."""
    slow = with_rollout(replace(SCENARIO, trainer=TrainerModel(1, 2.0, 1e-3), publish=PublishModel()), bound=3)
    seconds = {
        source: simulate(replace(slow, old_logits=OldLogitModel(source, switch=0.25)), steps=20).step_seconds  # type: ignore[arg-type]
        for source in ("start", "start_pass", "ewma")
    }
    forward = 1600 * 1e-3 / 3
    assert seconds["start_pass"] - seconds["start"] == pytest.approx(forward)
    assert seconds["ewma"] - seconds["start"] == pytest.approx(forward + 0.5)


# ---------------------------------------------------------------- workload


def test_maximum_over_mean() -> None:
    """Uniform on 1..1000: E[max of 2] = 2/3; exponential: the harmonic number."""
    assert maximum_over_mean(list(range(1, 1001)), 2) == pytest.approx(4 / 3, rel=2e-3)
    lengths = np.random.default_rng(0).exponential(1.0, 200_000).tolist()
    assert maximum_over_mean(lengths, 4) == pytest.approx(1 + 1 / 2 + 1 / 3 + 1 / 4, rel=0.02)
    assert maximum_over_mean(lengths, 1) == pytest.approx(1.0)


def test_groups_of_the_stock_stay_together() -> None:
    short, long = Episode((Turn(1, 5),)), Episode((Turn(1, 50),))
    workload = Workload(((short, short), (long, long)))
    random = np.random.default_rng(0)
    drawn = [workload.group(size, random) for size in (2, 2, 2, 5, 5, 5)]
    assert {len(group) for group in drawn} == {2, 5}
    assert all(len({episode.actions for episode in group}) == 1 for group in drawn)


def test_parametric_workload_has_the_means_asked_for() -> None:
    """20,000 draws: means within 3 %."""
    workload = Workload.parametric(
        turns=4, actions_per_turn=50, actions_spread=0.8, prompt=100, observation=20, tool_seconds=1.5, tool_spread=0.5,
        stock=20_000,
    )  # fmt: skip
    turns = [len(episode.turns) for episode in workload.episodes]
    tools = [turn.tool_seconds for episode in workload.episodes for turn in episode.turns]
    assert np.mean(turns) == pytest.approx(4, rel=0.03)
    assert workload.mean_actions == pytest.approx(200, rel=0.03)
    assert np.mean(tools) == pytest.approx(1.5, rel=0.03)
    assert np.mean([e.tokens - e.actions for e in workload.episodes]) == pytest.approx(100 + 3 * 20, rel=0.03)
