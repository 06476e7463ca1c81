"""The small parts of the rollout: prompts, sampling, counters, engine versions."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_async.bank import State
from megatron_async.config.schema import EngineConfig, ModelConfig, RolloutConfig, RunConfig
from megatron_async.errors import UserError
from megatron_async.rollout.agent_loop import EpisodeProgress
from megatron_async.rollout.counters import LoopLag, RolloutCounters, Running, describe_waiting
from megatron_async.rollout.engines import EngineVersions, build_pool, engine_urls, moe_layers
from megatron_async.rollout.episode_limits import EpisodeLimits
from megatron_async.rollout.prompts import PromptStream, group_id
from megatron_async.rollout.sampling import evaluation_sampling, training_sampling, turn_options
from megatron_async.trajectory import SamplingParams, Status, Trajectory, VersionSpan
from sglang_bridge import EnginePool
from tests.unit.scripted_engine import ScriptedEngine
from tests.unit.scripted_rollout import ScriptedSource


def finished(
    length: int, version: int, status: Status = Status.OK, info: dict[str, str] | None = None
) -> Trajectory:
    trajectory = Trajectory(f"t{length}", "g", "p", SamplingParams())
    trajectory.append_context([1])
    trajectory.append_action([9] * length, [-0.5] * length, [VersionSpan(version, 0, length)], "stop")
    trajectory.finish(status, 1.0 if status.trainable else None, info)
    return trajectory


def test_a_cursor_means_the_same_task_in_every_process() -> None:
    stream, backwards = (PromptStream(ScriptedSource(size=5), seed=3) for _ in range(2))
    walk = [stream.index(cursor) for cursor in range(15)]
    assert walk == [backwards.index(cursor) for cursor in reversed(range(15))][::-1]
    epochs = [walk[i : i + 5] for i in (0, 5, 10)]
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs) and len({tuple(e) for e in epochs}) > 1
    assert walk != [PromptStream(ScriptedSource(size=5), seed=4).index(cursor) for cursor in range(15)]


def test_an_endless_source_is_read_in_order() -> None:
    assert [PromptStream(ScriptedSource(), seed=9).task(c).data["index"] for c in range(4)] == [0, 1, 2, 3]


def test_group_ids_sort_like_their_cursors() -> None:
    ids = [group_id(cursor) for cursor in (0, 9, 10, 123_456)]
    assert ids == sorted(ids) and len(set(ids)) == 4


def test_a_request_asks_for_what_the_trajectory_says(caplog: pytest.LogCaptureFixture) -> None:
    config = RolloutConfig(temperature=0.7, max_new_tokens=99)
    sampling = training_sampling(config)
    options = turn_options(sampling, 5, [7, 8])
    assert sampling == SamplingParams(0.7, 1.0, -1, 99) and not caplog.records
    assert (options.max_new_tokens, options.temperature, options.stop_token_ids) == (5, 0.7, (7, 8))
    assert evaluation_sampling(config, 0.0) == SamplingParams(0.0, 1.0, -1, 99)


def test_a_cut_distribution_warns(caplog: pytest.LogCaptureFixture) -> None:
    """Field bug 22."""
    with caplog.at_level(logging.WARNING):
        training_sampling(RolloutConfig(top_p=0.9))
    assert "rollout.top_p=0.9" in caplog.text and "ratios are biased" in caplog.text


def test_limits_come_from_the_configuration() -> None:
    rollout = RolloutConfig(
        max_turns=3, max_tokens=77, turn_deadline_s=1, trajectory_deadline_s=2, max_retries=9
    )
    config = RunConfig(
        name="r", model=ModelConfig(path="m"), rollout=rollout, engines=EngineConfig(routed_experts=True)
    )
    assert EpisodeLimits.from_config(config) == EpisodeLimits(
        3, 77, 1, 2, 9, stale_kv=False, routed_experts=True
    )


def test_counters_tell_failures_from_results() -> None:
    counters = RolloutCounters()
    counters.record(finished(10, version=3), np.full(10, 2))
    counters.record(finished(30, version=4), np.full(30, 1))
    counters.record(
        finished(90, 4, Status.ENGINE_ERROR, {"ending": "engine_timeout", "failure": "silent"}), np.full(90, 1)
    )
    counters.record_abandoned([30])
    numbers = counters.as_dict(now=0.0)
    assert (numbers["finished"], numbers["failed"], numbers["failed/engine_timeout"]) == (2, 1, 1)
    assert (numbers["staleness_mean"], numbers["staleness_max"]) == (1.5, 2)
    assert (numbers["length/kept_mean_tokens"], numbers["length/dropped_mean_tokens"]) == (10.0, 60.0)
    assert counters.last_failure == "silent" and counters.consecutive_abandoned == 1
    counters.record_dropped([10], [5, 7])
    assert (counters.groups_dropped, counters.consecutive_abandoned) == (1, 1)
    assert (counters.lengths.kept, counters.lengths.dropped, counters.lengths.dropped_tokens) == (0, 5, 142)


def test_lengths_of_what_the_bank_set_aside_are_dropped() -> None:
    counters = RolloutCounters()
    for length in (10, 20, 30, 40):
        counters.record(finished(length, version=0), np.zeros(length, np.int64))
    assert counters.waiting() == ["t10", "t20", "t30", "t40"]
    counters.settle({"t10": State.TRAINED, "t20": State.STALE, "t30": State.RESERVED, "t40": State.FILTERED})
    counters.settle({"t30": State.TRAINED})
    numbers = counters.as_dict(now=0.0)
    assert (numbers["length/kept_mean_tokens"], numbers["length/dropped_mean_tokens"]) == (20.0, 30.0)
    assert counters.waiting() == []
    counters.record(finished(50, version=0), np.zeros(50, np.int64))
    counters.record_abandoned([50])
    counters.forget("g")
    counters.settle({"t50": State.FILTERED})
    assert (counters.lengths.kept, counters.lengths.dropped) == (2, 3)


def test_the_token_rate_is_that_of_the_last_seconds() -> None:
    counters = RolloutCounters()
    rates = []
    for second in range(60):
        rates.append(counters.tokens_per_second(float(second)))
        counters.add_tokens(100 if second < 30 else 10)
    assert rates[0] == 0.0 and rates[20] == pytest.approx(100) and rates[59] == pytest.approx(10)


def test_waiting_is_described_by_kind() -> None:
    running = [
        Running(EpisodeProgress(waiting_for=what), since)
        for what, since in (("engine", 5.0), ("engine", 9.0))
    ]
    assert (
        describe_waiting(running, 15.0, "") == "2 wait for engine; the oldest runs for 10 s; admission: open"
    )
    assert describe_waiting([], 1.0, "the trainer") == "no episode is running; admission: the trainer"


def test_a_blocked_loop_is_measured() -> None:
    async def scenario() -> None:
        lag = LoopLag()
        task = asyncio.create_task(lag.measure())
        await asyncio.sleep(0)  # it sleeps
        time.sleep(0.3)  # the very thing that is measured
        async with asyncio.timeout(30):
            while lag.p99_ms() == 0.0:
                await asyncio.sleep(0.01)
        assert lag.p99_ms() > 150
        task.cancel()

    asyncio.run(scenario())


def test_engine_versions_are_asked_for_only_while_they_lag() -> None:
    async def scenario() -> None:
        async with ScriptedEngine() as engine, EnginePool([engine.url]) as pool:
            versions = EngineVersions(pool)
            assert await versions.refresh(0) == 0
            engine.version = 3
            assert await versions.refresh(0) == 0  # nobody recorded a version above 0: no need to ask
            assert await versions.refresh(3) == 3

    asyncio.run(scenario())


def test_the_oldest_engine_counts_and_a_dead_one_is_named() -> None:
    async def scenario() -> None:
        async with ScriptedEngine() as first, ScriptedEngine() as second:
            async with EnginePool([first.url, second.url], retries=0) as pool:
                first.version, second.version = 7, 6
                versions = EngineVersions(pool)
                assert await versions.refresh(7) == 6
                await second._runner.cleanup()
                assert await versions.refresh(7) == 6  # unknown: it may come back with what it had
                assert second.url in versions.problem

    asyncio.run(scenario())


def test_engine_addresses_and_the_pools_knowledge_of_the_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="engines.json is missing"):
        engine_urls(tmp_path)
    (tmp_path / "engines.json").write_text(json.dumps({"engines": []}))
    with pytest.raises(UserError, match="lists no engine"):
        engine_urls(tmp_path)
    (tmp_path / "engines.json").write_text(
        json.dumps({"engines": [{"url": "http://h:1"}, {"url": "http://h:2"}]})
    )
    assert engine_urls(tmp_path) == ["http://h:1", "http://h:2"]
    model = {"vocab_size": 512, "num_experts_per_tok": 2, "num_experts": 8, "num_hidden_layers": 6,
             "mlp_only_layers": [0], "decoder_sparse_step": 1}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(model))
    config = RunConfig(
        name="r", model=ModelConfig(path=str(tmp_path)), engines=EngineConfig(routed_experts=True)
    )
    client = build_pool(config, ["http://h:1"]).clients[0]
    assert (client.vocab_size, client.routed_experts_shape) == (512, (5, 2))


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        ({"num_hidden_layers": 4}, 0),
        ({"num_hidden_layers": 4, "num_experts": 8}, 4),
        ({"num_hidden_layers": 6, "num_experts": 8, "decoder_sparse_step": 2, "mlp_only_layers": [3]}, 2),
    ],
)
def test_moe_layers(model: dict[str, object], layers: int) -> None:
    assert moe_layers(model) == layers
