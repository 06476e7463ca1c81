"""Sources of old log-probs over a scripted policy: what is forwarded under which version, and what is said of it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.engine.sequences import Sequence
from megatron_async.old_logits import AnchorLogprobs, OldLogitSource
from megatron_async.old_logits.averaged import AveragedSource, exchanged
from megatron_async.old_logits.ewma import ActiveFractionReset, WeightAverage
from megatron_async.old_logits.interrupt import InterruptSource
from megatron_async.old_logits.shards import version_shards
from megatron_async.old_logits.snapshot import SnapshotSource
from megatron_async.snapshots import (
    BudgetExceededError,
    CaptureReport,
    DigestMismatchError,
    FullCopyStore,
    SnapshotConfig,
    SnapshotStore,
    UnknownVersionError,
)
from megatron_async.snapshots.walker import Weights
from megatron_async.training.loss import token_batch

SIZE = 4096


class ScriptedPolicy:
    """A policy whose weights are its version number; log-prob of token t of a sequence = -(version + t / 100)."""

    def __init__(self) -> None:
        self.weight = torch.zeros(SIZE)
        self.forwards: list[tuple[float, list[int]]] = []

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", self.weight

    def masters(self) -> list[torch.Tensor]:
        return [self.weight]

    def exchange_masters(self, values: list[torch.Tensor]) -> None:
        kept = self.weight.clone()
        self.weight.copy_(values[0])
        values[0].copy_(kept)

    def logprobs(self, sequences: list[Sequence]) -> list[np.ndarray]:
        now = self.weight[0].item()
        self.forwards.append((now, [len(sequence) for sequence in sequences]))
        return [-(now + np.arange(len(s)) / 100).astype(np.float32) for s in sequences]


def sequence(versions: list[int], current: int, flagged: tuple[int, ...] = ()) -> Sequence:
    """Token t was sampled by versions[t]; -1 is context."""
    held = np.array(versions)
    mask = held >= 0
    flags = np.zeros(len(held), bool)
    flags[list(flagged)] = True
    arrays = {
        "action_mask": mask,
        "version_gap": np.where(mask, current - held, 0),
        "kv_mismatch": flags,
    }
    return Sequence(np.arange(len(held), dtype=np.int32), arrays=arrays)


def source_at(
    version: int, *, kind: str = "differences", **options: bool
) -> tuple[ScriptedPolicy, SnapshotSource]:
    """A source whose history holds versions 0..version."""
    policy = ScriptedPolicy()
    store = SnapshotStore if kind == "differences" else FullCopyStore
    history = store(
        dict(policy.named_parameters()),
        version=0,
        config=SnapshotConfig(host_bytes=(version + 2) * 4 * SIZE, keep_last=1),
    )
    chosen = {"with_start": False, "reuse_training_forward": False, **options}
    source = SnapshotSource(policy, history, **chosen)  # type: ignore[arg-type]
    for new in range(1, version + 1):
        source.settle()
        policy.weight.fill_(float(new))
        source.updated(new, oldest_needed=0)
    source.settle()
    policy.forwards.clear()
    return policy, source


def score(source: OldLogitSource, sequences: list[Sequence]) -> AnchorLogprobs:
    return source.score(sequences, [f"t{i}" for i in range(len(sequences))])


def check_each_token_has_its_version(values: np.ndarray, versions: list[int]) -> None:
    for t, version in enumerate(versions):
        if version >= 0:
            assert values[t] == np.float32(-(version + t / 100))


@pytest.mark.parametrize("kind", ["differences", "copies"])
def test_newest_first_each_sequence_only_where_it_belongs_and_cut_at_its_last_token(kind: str) -> None:
    rows = [[-1, 7, 7, 8, -1], [-1, -1, 9, 9], [-1, 7, -1, -1, 9, -1]]
    policy, source = source_at(9, kind=kind)
    found = score(source, [sequence(row, 9) for row in rows])
    assert policy.forwards == [(9.0, [4, 5]), (8.0, [4]), (7.0, [3, 2])]
    for values, row in zip(found.values or [], rows, strict=True):
        check_each_token_has_its_version(values, row)
    assert policy.weight[0].item() == 9.0
    assert found.metrics["old_logits/shards_per_trajectory"] == 5 / 3
    assert found.metrics["old_logits/forward_tokens"] == 4 + 5 + 4 + 3 + 2
    assert {"travel", "forward", "restore", "capture"} <= found.seconds.keys()


def test_tokens_of_the_live_version_are_left_to_the_training_forward() -> None:
    policy, source = source_at(3, reuse_training_forward=True)
    found = score(source, [sequence([-1, 2, 3, 3], 3), sequence([-1, 3], 3)])
    assert policy.forwards == [(2.0, [2])]
    assert found.is_current is not None
    assert found.is_current[0].tolist() == [False, False, True, True]
    assert np.isnan((found.values or [])[1]).all()


def test_a_batch_of_the_live_version_alone_travels_nowhere() -> None:
    policy, source = source_at(3, reuse_training_forward=True)
    found = score(source, [sequence([-1, 3, 3], 3)])
    assert policy.forwards == []
    assert found.metrics["old_logits/steps"] == 0
    assert found.seconds["travel"] == 0.0


def test_statistics_of_the_batch_get_a_whole_pass_that_serves_the_live_version_too() -> None:
    policy, source = source_at(2, with_start=True, reuse_training_forward=True)
    rows = [[-1, 1, 2], [-1, 2, 2, -1]]
    found = score(source, [sequence(row, 2) for row in rows])
    assert policy.forwards == [(2.0, [3, 4]), (1.0, [2])]
    assert found.is_current is None
    assert [len(start) for start in found.required_start()] == [3, 4]
    check_each_token_has_its_version((found.values or [])[0], rows[0])


def test_tokens_over_another_versions_kv_are_never_called_exact() -> None:
    _, source = source_at(2)
    found = score(source, [sequence([-1, 1, 2, 2], 2, flagged=(2, 3))])
    assert found.exact is not None
    assert found.exact[0].tolist() == [False, True, False, False]
    assert found.metrics["old_logits/share/exact"] == pytest.approx(1 / 3)
    assert found.metrics["old_logits/share/flagged"] == pytest.approx(2 / 3)


def test_a_version_that_is_not_there_raises_and_leaves_the_weights() -> None:
    policy, source = source_at(3)
    source.history.set_needed([3])
    source.updated(4, oldest_needed=3)
    with pytest.raises(UnknownVersionError, match="version 1 is not"):
        score(source, [sequence([-1, 1, 3], 4)])
    assert policy.weight[0].item() == 3.0
    assert source.history.live_version == 4


def test_a_missing_version_is_found_before_anything_is_forwarded() -> None:
    policy, source = source_at(3)
    source.history.set_needed([3])
    policy.weight.fill_(4.0)
    source.updated(4, oldest_needed=3)
    with pytest.raises(UnknownVersionError, match="version 1 is not in the store.*holds.*Retain"):
        score(source, [sequence([-1, 1, 3, 4], 4)])
    assert policy.forwards == []


@pytest.mark.parametrize("spans", [1, 2, 4, 8])
def test_cutting_at_segment_ends_saves_what_theory_says(spans: int) -> None:
    """k equal stretches of versions: 1 + 2 + ... + k of k stretches are forwarded, of k * k without cutting."""
    policy, source = source_at(spans)
    row = [version for version in range(1, spans + 1) for _ in range(8)]
    found = score(source, [sequence(row, spans)])
    assert found.metrics["old_logits/forward_tokens"] == len(row) * (spans + 1) / 2
    assert found.metrics["old_logits/cut_share"] == pytest.approx((spans - 1) / (2 * spans))


def test_versions_below_the_window_go_and_those_inside_stay() -> None:
    policy, source = source_at(5)
    for new in (6, 7, 8):
        policy.weight.fill_(float(new))
        source.updated(new, oldest_needed=new - 2)
        source.settle()
    assert source.history.versions() == [6, 7, 8]


def test_a_capture_that_does_not_fit_raises_at_the_next_score() -> None:
    policy = ScriptedPolicy()
    history = SnapshotStore({"weight": policy.weight}, version=0, config=SnapshotConfig(host_bytes=0))
    source = SnapshotSource(policy, history, with_start=False, reuse_training_forward=False)  # type: ignore[arg-type]
    policy.weight.normal_()
    source.updated(1, oldest_needed=0)
    with pytest.raises(BudgetExceededError, match="version 1"):
        score(source, [sequence([-1, 0], 1)])


def test_writing_to_the_weights_while_scoring_is_found_and_mended() -> None:
    policy, source = source_at(2)
    forward = policy.logprobs

    def meddling(sequences: list[Sequence]) -> list[np.ndarray]:
        policy.weight[7] += 1.0
        return forward(sequences)

    policy.logprobs = meddling  # type: ignore[method-assign]
    with pytest.raises(DigestMismatchError):
        score(source, [sequence([-1, 0, 1], 2)])
    assert (policy.weight == 2.0).all()


@given(
    rows=st.lists(st.lists(st.integers(-1, 4), min_size=1, max_size=12), min_size=1, max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_every_open_token_is_in_exactly_one_shard(rows: list[list[int]]) -> None:
    versions = [np.array(row) for row in rows]
    shards = version_shards(versions, [held >= 0 for held in versions])
    placed = sorted(
        (i, t) for s in shards for i, tokens in zip(s.members, s.tokens, strict=True) for t in tokens
    )
    assert placed == [(i, t) for i, row in enumerate(rows) for t, version in enumerate(row) if version >= 0]
    order = [shard.version for shard in shards]
    assert order == sorted(set(order), reverse=True)
    for shard in shards:
        for i, end, tokens in zip(shard.members, shard.ends, shard.tokens, strict=True):
            assert end == tokens[-1] + 1
            assert all(rows[i][t] == shard.version for t in tokens)


def test_the_average_scores_and_the_weights_return() -> None:
    policy = ScriptedPolicy()
    average = WeightAverage(policy.masters(), beta=0.5, reset=ActiveFractionReset(0.9, 1))
    source = AveragedSource(policy, average, with_start=True)  # type: ignore[arg-type]
    policy.weight.fill_(3.0)
    source.updated(1, oldest_needed=0)
    # (0.5 * 0 + 1 * 3) / 1.5 = 2
    found = score(source, [sequence([-1, 0, 1], 1)])
    assert [now for now, _ in policy.forwards] == [3.0, 2.0]
    np.testing.assert_allclose((found.values or [])[0], [-2.0, -2.01, -2.02], rtol=1e-6)
    assert found.kind == "approximate"
    assert (policy.weight == 3.0).all()
    source.trained(0.95)
    assert average.resets == 0
    source.trained(0.5)
    assert average.resets == 1
    assert (average.values[0] == 3.0).all()


def test_a_failing_score_still_brings_the_weights_back() -> None:
    policy = ScriptedPolicy()
    other = [torch.full((SIZE,), 9.0)]
    weights = Weights(dict(policy.named_parameters()), task_words=None, threads=1)
    seen: list[float] = []

    def fail_inside() -> None:
        with exchanged(weights, lambda: policy.exchange_masters(other)):
            seen.append(policy.weight[0].item())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert seen == [9.0]
    assert (policy.weight == 0.0).all()


def test_an_exchange_that_does_not_undo_itself_is_found() -> None:
    policy = ScriptedPolicy()
    weights = Weights(dict(policy.named_parameters()), task_words=None, threads=1)
    with pytest.raises(DigestMismatchError, match="weight"):
        with exchanged(weights, lambda: policy.weight.add_(1.0)):
            pass


def test_current_tokens_take_the_forwards_own_values_in_the_loss() -> None:
    count = 4
    arrays = {
        "rollout_logprobs": torch.zeros(count),
        "advantages": torch.ones(count),
        "action_mask": torch.ones(count, dtype=torch.bool),
        "update_gap": torch.tensor([1, 0, 0, 1]),
        "rewards": torch.zeros(count),
        "anchor_logprobs": torch.tensor([-1.0, float("nan"), float("nan"), -4.0]),
        "anchor_is_current": torch.tensor([False, True, True, False]),
    }
    logprobs = torch.tensor([-9.0, -2.0, -3.0, -9.0], requires_grad=True)
    batch = token_batch(arrays, torch.zeros(count, dtype=torch.int64), logprobs)
    assert batch.anchor_logprobs is not None
    assert batch.anchor_logprobs.tolist() == [-1.0, -2.0, -3.0, -4.0]
    assert not batch.anchor_logprobs.requires_grad


def test_what_was_scored_ahead_is_not_scored_again() -> None:
    policy, source = source_at(4, eager=True, reuse_training_forward=True)
    early, late = [-1, 3, 4, 4], [-1, 2, 4]
    source.score_ahead([sequence(early, 4)], ["early"])
    policy.forwards.clear()
    policy.weight.fill_(5.0)
    source.updated(5, oldest_needed=2)
    found = source.score([sequence(early, 5), sequence(late, 5)], ["early", "late"])
    assert policy.forwards == [(4.0, [3]), (2.0, [2])]
    for values, row in zip(found.values or [], (early, late), strict=True):
        check_each_token_has_its_version(values, row)
    assert found.metrics["old_logits/ahead/share"] == pytest.approx(3 / 5)
    assert found.metrics["old_logits/ahead/tokens"] == 3
    assert found.metrics["old_logits/ahead/pool"] == 0


def test_tokens_scored_ahead_that_the_training_forward_serves_are_left_to_it() -> None:
    policy, source = source_at(4, eager=True, reuse_training_forward=True)
    row = sequence([-1, 3, 4, 4], 4)
    source.score_ahead([row], ["t0"])
    policy.forwards.clear()
    found = score(source, [row])
    assert policy.forwards == []
    assert np.isnan((found.values or [])[0]).tolist() == [True, False, True, True]
    assert found.metrics["old_logits/ahead/share_of_needed"] == 1.0


def test_the_pool_forgets_what_is_too_old_to_be_trained_on() -> None:
    policy, source = source_at(4, eager=True)
    source.score_ahead([sequence([-1, 2, 4], 4), sequence([-1, 4], 4)], ["old", "new"])
    policy.weight.fill_(5.0)
    source.updated(5, oldest_needed=3)
    policy.forwards.clear()
    found = source.score([sequence([-1, 4], 5)], ["new"])
    assert policy.forwards == []
    assert found.metrics["old_logits/ahead/pool"] == 0


def interrupted(**options: bool) -> tuple[ScriptedPolicy, InterruptSource]:
    policy = ScriptedPolicy()
    chosen = {"with_start": False, "reuse_training_forward": True, **options}
    source = InterruptSource(policy, **chosen)  # type: ignore[arg-type]
    source.restore(0, {})
    return policy, source


def go_on(policy: ScriptedPolicy, source: InterruptSource, version: int, oldest: int = 0) -> None:
    policy.weight.fill_(float(version))
    source.updated(version, oldest_needed=oldest)
    policy.forwards.clear()


def test_each_version_scores_its_own_tokens_before_it_goes() -> None:
    policy, source = interrupted()
    grown = [[-1, 0, 0], [-1, 0, 0, 1], [-1, 0, 0, 1, -1, 2, 2]]
    for version, row in enumerate(grown[:2]):
        source.score_ahead([sequence(row, version)], ["t0"])
        assert policy.forwards == [(float(version), [len(row)])]
        go_on(policy, source, version + 1)
    found = score(source, [sequence(grown[2], 2)])
    assert policy.forwards == []
    assert found.is_current is not None
    assert found.is_current[0].tolist() == [version == 2 for version in grown[2]]
    check_each_token_has_its_version((found.values or [])[0][:4], grown[2][:4])
    assert found.metrics["old_logits/share/exact"] == 1.0


def test_a_token_that_was_missed_has_no_anchor_and_is_counted() -> None:
    policy, source = interrupted()
    go_on(policy, source, 1)
    found = score(source, [sequence([-1, 0, 1], 1)])
    assert np.isnan((found.values or [])[0]).all()
    assert found.exact is not None and found.exact[0].tolist() == [False, False, True]
    assert found.metrics["old_logits/share/absent"] == 0.5


def test_what_the_pool_has_is_not_scored_again_and_survives_a_restart() -> None:
    policy, source = interrupted()
    rows = [sequence([-1, 0, 0], 0), sequence([-1, 0], 0)]
    source.score_ahead(rows, ["a", "b"])
    policy.forwards.clear()
    source.score_ahead(rows, ["a", "b"])
    assert policy.forwards == []
    kept = source.export(["a", "b", "unknown"])
    other_policy, restarted = interrupted()
    restarted.restore(1, kept)
    found = restarted.score([sequence([-1, 0, 0], 1), sequence([-1, 0], 1)], ["a", "b"])
    check_each_token_has_its_version((found.values or [])[0], [-1, 0, 0])
    check_each_token_has_its_version((found.values or [])[1], [-1, 0])
    assert other_policy.forwards == []


def test_without_the_training_forward_the_resident_version_gets_a_pass() -> None:
    policy, source = interrupted(reuse_training_forward=False)
    source.score_ahead([sequence([-1, 0], 0)], ["t0"])
    go_on(policy, source, 1)
    found = score(source, [sequence([-1, 0, 1, -1], 1)])
    assert policy.forwards == [(1.0, [3])]
    check_each_token_has_its_version((found.values or [])[0], [-1, 0, 1, -1])


def test_scoring_ahead_waits_for_a_capture_that_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """While version 3 is being recorded, gaps already count from 3: a token of version 2 must not be scored as 1."""
    policy, source = source_at(2, eager=True)
    capture = source.history.capture

    def slow(version: int, parent: int | None = None) -> CaptureReport:
        time.sleep(0.3)
        return capture(version, parent)

    monkeypatch.setattr(source.history, "capture", slow)
    policy.weight.fill_(3.0)
    source.updated(3, oldest_needed=0)
    row = [-1, 2, 3]
    source.score_ahead([sequence(row, 3)], ["t0"])
    found = score(source, [sequence(row, 3)])
    check_each_token_has_its_version((found.values or [])[0], row)
    assert found.seconds["capture"] > 0
