"""What the client reports about sampled tokens, against transformers on the same weights (float32)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_bridge import EngineClient, Generation, SamplingOptions
from tests.live.policies import Policy
from tests.live.under_way import with_client

pytestmark = pytest.mark.live

PROMPTS = [[10 + 7 * k + j for j in range(3 + 9 * k)] for k in range(6)]
# float32 on both sides, log-probs down to -10: the bound on engine noise.
ENGINE_NOISE = 1e-5


def test_logprobs_are_transformers_logprobs(url: str, policy: Policy) -> None:
    options = SamplingOptions(max_new_tokens=48, ignore_eos=True)

    async def sample(client: EngineClient) -> list[Generation]:
        return [await client.generate(prompt, options) for prompt in PROMPTS]

    differences = []
    for prompt, generation in zip(PROMPTS, with_client(url, sample)):
        reference = policy.logprobs(prompt + generation.output_ids)[len(prompt):]
        differences += [abs(a - b) for a, b in zip(generation.logprobs, reference, strict=True)]
        assert [(s.version, s.start, s.end, s.kv_version) for s in generation.spans] == [(0, 0, 48, None)]
        assert generation.finish_reason == "length"
    assert float(np.mean(differences)) <= ENGINE_NOISE
    assert max(differences) <= 10 * ENGINE_NOISE  # no outlier hides in the mean


def test_logprobs_are_those_of_the_tempered_distribution(url: str, policy: Policy) -> None:
    options = SamplingOptions(max_new_tokens=32, temperature=0.6, ignore_eos=True)
    generation = with_client(url, lambda client: client.generate(PROMPTS[1], options))
    sequence = PROMPTS[1] + generation.output_ids
    tempered, plain = policy.logprobs(sequence, 0.6)[len(PROMPTS[1]):], policy.logprobs(sequence)[len(PROMPTS[1]):]
    assert np.abs(np.subtract(generation.logprobs, tempered)).mean() <= ENGINE_NOISE
    assert np.abs(np.subtract(generation.logprobs, plain)).mean() > 0.1


def test_scores_of_a_prompt_are_token_aligned(url: str, policy: Policy) -> None:
    prompt = PROMPTS[3]
    whole = with_client(url, lambda client: client.score(prompt))
    tail = with_client(url, lambda client: client.score(prompt, start=20))
    reference = policy.logprobs(prompt)
    assert len(whole) == len(tail) == len(prompt)
    assert np.abs(np.subtract(whole, reference)).max() <= 10 * ENGINE_NOISE
    assert tail[:21] == [0.0] * 21
    assert np.abs(np.subtract(tail[21:], reference[21:])).max() <= 10 * ENGINE_NOISE


def test_a_stream_brings_every_token_once_and_in_order(url: str) -> None:
    options = SamplingOptions(max_new_tokens=40, temperature=0.0, ignore_eos=True)
    chunks = []

    async def take(chunk: object) -> None:
        chunks.append(chunk)

    streamed = with_client(url, lambda client: client.generate(PROMPTS[2], options, on_chunk=take))
    whole = with_client(url, lambda client: client.generate(PROMPTS[2], options))
    assert streamed.output_ids == whole.output_ids
    assert [token for chunk in chunks for token in chunk.output_ids] == streamed.output_ids
    assert [logprob for chunk in chunks for logprob in chunk.logprobs] == streamed.logprobs
    ends = np.cumsum([len(chunk.output_ids) for chunk in chunks])
    assert [chunk.start for chunk in chunks] == [0, *ends[:-1]]
    assert len(chunks) > 10


def test_routed_experts_are_transformers_experts(url: str, policy: Policy) -> None:
    options = SamplingOptions(max_new_tokens=20, ignore_eos=True)
    generation = with_client(
        url, lambda client: client.generate(PROMPTS[1], options, return_routed_experts=True),
        routed_experts_shape=(3, 2),
    )
    sequence = PROMPTS[1] + generation.output_ids
    assert generation.routed_experts is not None
    assert generation.routed_experts.shape == (len(sequence) - 1, 3, 2)
    ours = torch.from_numpy(generation.routed_experts).sort(-1).values
    assert torch.equal(ours, policy.routed_experts(sequence, top_k=2)[:-1].int())


def test_a_stop_token_ends_the_answer_and_belongs_to_it(url: str) -> None:
    greedy = SamplingOptions(max_new_tokens=30, temperature=0.0, ignore_eos=True)
    free = with_client(url, lambda client: client.generate(PROMPTS[0], greedy)).output_ids
    stop = free[12]
    options = SamplingOptions(max_new_tokens=30, temperature=0.0, stop_token_ids=(stop,))
    stopped = with_client(url, lambda client: client.generate(PROMPTS[0], options))
    assert stopped.finish_reason == "stop"
    assert stopped.output_ids == free[: free.index(stop) + 1]


def test_an_id_outside_the_vocabulary_never_reaches_the_engine(url: str) -> None:
    options = SamplingOptions(max_new_tokens=2)
    with pytest.raises(ValueError, match=r"token id 512 is outside the vocabulary \[0, 512\)"):
        with_client(url, lambda client: client.generate([1, 512], options), vocab_size=512)
    assert with_client(url, lambda client: client.health())
