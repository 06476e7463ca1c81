"""Weights reach a real engine: what it samples before, across and after an update is what transformers computes."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from sglang_bridge import Canary, EngineClient, Generation, Publisher, PublishError, SamplingOptions, Span
from sglang_bridge.client import PauseMode
from sglang_bridge.publisher import PublishReport
from tests.live.conftest import BUCKET_BYTES
from tests.live.policies import Policy
from tests.live.under_way import generate_around, with_client

pytestmark = pytest.mark.live

PROMPTS = [[20 + 5 * k + j for j in range(8)] for k in range(4)]
LONG = SamplingOptions(max_new_tokens=160, ignore_eos=True)
CANARY_IDS = list(range(40, 72))
NOISE = 1e-4  # largest single float32 difference; an update of these weights moves log-probs by far more


def canary(policy: Policy) -> Canary:
    """What an engine that holds ``policy`` must report."""
    return Canary(CANARY_IDS, policy.logprobs(CANARY_IDS))


def publisher(url: str, mode: PauseMode = "retract", **options: object) -> Publisher:
    """A publisher with small buckets and a short deadline."""
    return Publisher([url], pause_mode=mode, bucket_bytes=BUCKET_BYTES, deadline_s=20, **options)  # type: ignore[arg-type]


def differences(generation: Generation, prompt: list[int], policy: Policy) -> np.ndarray:
    """|engine - transformers| for each output token, all under ``policy``."""
    reference = policy.logprobs(prompt + generation.output_ids)[len(prompt):]
    return np.abs(np.subtract(generation.logprobs, reference))


def publish_around(url: str, mode: PauseMode, update: Policy) -> tuple[list[Generation], PublishReport]:
    """Publish ``update`` as version 1 while four requests run."""
    reports = []

    def publish() -> None:
        with publisher(url, mode) as sender:
            reports.append(sender.publish(1, update.tensors.items(), canary(update), checksum=True))

    return generate_around(url, PROMPTS, LONG, 20, publish), reports[0]


def test_retract_every_token_is_labelled_with_the_weights_that_sampled_it(
    url: str, policy: Policy, updates: list[Policy]
) -> None:
    generations, report = publish_around(url, "retract", updates[0])
    assert report.verified == "checksum+canary"
    assert report.buckets > 2
    assert report.bytes == sum(tensor.nbytes for tensor in updates[0].tensors.values())
    assert report.aborted_requests == report.aborted_tokens == 0
    for prompt, generation in zip(PROMPTS, generations):
        (before, after) = generation.spans
        assert (before.version, before.start, after.version, after.end) == (0, 0, 1, 160)
        assert 20 <= before.end == after.start < 160
        assert before.kv_version is after.kv_version is None
        assert generation.num_retractions == 1
        old, new = differences(generation, prompt, policy), differences(generation, prompt, updates[0])
        assert old[: before.end].max() <= NOISE
        assert new[after.start:].max() <= NOISE
        # The boundary is exact: one token further on either side the other version's weights do not fit.
        assert old[after.start] > 10 * NOISE
        assert new[before.end - 1] > 10 * NOISE


def test_abort_requests_end_with_valid_tokens_and_are_counted(
    url: str, policy: Policy, updates: list[Policy]
) -> None:
    generations, report = publish_around(url, "abort", updates[0])
    assert report.aborted_requests == len(PROMPTS)
    assert report.aborted_tokens > 0
    for prompt, generation in zip(PROMPTS, generations):
        length = len(generation.output_ids)
        assert generation.finish_reason == "abort"
        assert 20 <= length < 160
        assert generation.spans == [Span(0, 0, length)]
        assert differences(generation, prompt, policy).max() <= NOISE


def test_in_place_tokens_over_old_keys_say_so(url: str, policy: Policy, updates: list[Policy]) -> None:
    generations, _ = publish_around(url, "in_place", updates[0])
    for prompt, generation in zip(PROMPTS, generations):
        before, after = generation.spans
        assert (before.version, before.kv_version) == (0, None)
        assert (after.version, after.kv_version) == (1, 0)
        assert generation.num_retractions == 0
        assert differences(generation, prompt, policy)[: before.end].max() <= NOISE
        # That is why they are flagged: no version alone explains them.
        assert differences(generation, prompt, updates[0])[after.start:].max() > 10 * NOISE


def test_setting_the_version_aborts_nothing(url: str) -> None:
    def set_version() -> None:
        with_client(url, lambda client: client.set_version(7))

    generations = generate_around(url, PROMPTS, LONG, 20, set_version)
    for generation in generations:
        assert (generation.finish_reason, len(generation.output_ids)) == ("length", 160)
        assert [span.version for span in generation.spans] == [0, 7]


def test_old_cached_keys_show_in_the_canary_and_are_flushed(url: str, policy: Policy, updates: list[Policy]) -> None:
    half = len(CANARY_IDS) // 2
    expected = updates[0].logprobs(CANARY_IDS)[half + 1:]

    async def error_over_cached_prefix(client: EngineClient) -> float:
        scores = await client.score(CANARY_IDS, start=half)
        return float(np.abs(np.subtract(scores[half + 1:], expected)).max())

    with_client(url, lambda client: client.score(CANARY_IDS))  # the prompt is cached under version 0
    with publisher(url, "in_place") as sender:  # keeps the cache
        sender.publish(1, updates[0].tensors.items())
    assert with_client(url, error_over_cached_prefix) > 10 * NOISE
    with publisher(url, "retract") as sender:
        report = sender.publish(2, updates[0].tensors.items(), canary(updates[0]))
    assert report.verified == "canary"
    assert with_client(url, error_over_cached_prefix) <= NOISE


def test_disk_transport(url: str, updates: list[Policy]) -> None:
    with publisher(url, transport="disk") as sender:
        report = sender.publish_from_disk(1, updates[1].path, canary(updates[1]), checksum=True)
        assert report.verified == "checksum+canary"
        with pytest.raises(ValueError, match="transport is disk"):
            sender.publish(2, updates[1].tensors.items())
    assert with_client(url, lambda client: client.version()) == 1


def test_one_group_serves_many_versions_and_no_version_twice(url: str, updates: list[Policy]) -> None:
    with publisher(url) as sender:
        for version, update in enumerate(updates, 1):
            assert sender.publish(version, update.tensors.items(), canary(update)).version == version
            assert with_client(url, lambda client: client.version()) == version
        with pytest.raises(ValueError, match="version 3 was not after 3"):
            sender.publish(3, updates[0].tensors.items())


def test_a_tensor_the_engine_ignores_is_found_by_the_checksum(url: str, updates: list[Policy]) -> None:
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    misnamed = {(f"{key}_" if key == name else key): tensor for key, tensor in updates[0].tensors.items()}
    with publisher(url) as sender:
        with pytest.raises(PublishError, match=r"does not hold version 1.*(w2_weight|down_proj)"):
            sender.publish(1, misnamed.items(), checksum=True)
        assert with_client(url, lambda client: client.version()) == 0  # never labelled 1
        assert sender.publish(1, updates[0].tensors.items(), checksum=True).verified == "checksum"


def test_swapped_experts_are_found_by_the_canary_and_the_engine_is_stopped(url: str, updates: list[Policy]) -> None:
    swapped = dict(updates[0].tensors)
    for part in ("gate", "up", "down"):
        one, other = (f"model.layers.0.mlp.experts.{number}.{part}_proj.weight" for number in (0, 5))
        swapped[one], swapped[other] = swapped[other], swapped[one]
    with publisher(url) as sender:
        with pytest.raises(PublishError, match="does not sample as version 1: the canary's token"):
            sender.publish(1, swapped.items(), canary(updates[0]))
        waiting = threading.Event()

        def ask() -> None:
            with_client(url, lambda client: client.generate(PROMPTS[0], SamplingOptions(max_new_tokens=1)))
            waiting.set()

        thread = threading.Thread(target=ask)
        thread.start()
        assert not waiting.wait(0.5)  # nothing is sampled under unproven weights
        sender.publish(1, updates[0].tensors.items(), canary(updates[0]))
        assert waiting.wait(10)
        thread.join()
