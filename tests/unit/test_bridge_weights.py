"""Buckets and checksums of published weights: layout, completeness, position."""

from __future__ import annotations

import hashlib
import random

import pytest
import torch
from torch import Tensor

from sglang_bridge import Canary, Publisher, PublishError
from sglang_bridge.buckets import pack
from sglang_bridge.checksum import EngineChecksums, engine_place

CPU = torch.device("cpu")


def named(count: int, dtype: torch.dtype = torch.float32) -> list[tuple[str, Tensor]]:
    """Tensors of 3 * (k + 1) elements."""
    return [(f"t{k}", torch.randn(3, k + 1).to(dtype)) for k in range(count)]


@pytest.mark.parametrize("bucket_bytes", [1, 40, 100, 10_000])
def test_buckets_hold_every_bit_in_order(bucket_bytes: int) -> None:
    tensors = named(7) + named(3, torch.bfloat16) + [("scalar", torch.tensor(3.0))] + named(2, torch.float64)
    tensors[1] = ("transposed", tensors[1][1].T)  # not contiguous
    unpacked = []
    for bucket in pack(tensors, bucket_bytes, CPU):
        offset = 0
        for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes):
            size = getattr(torch, dtype).itemsize
            assert offset % size == 0  # the engine views the bytes in place
            length = int(torch.Size(shape).numel()) * size
            view = bucket.flat[offset:offset + length].view(getattr(torch, dtype)).reshape(shape)
            unpacked.append((name, view))
            offset += length
        assert offset == bucket.nbytes
        assert bucket.nbytes <= bucket_bytes or len(bucket.names) == 1
    assert [name for name, _ in unpacked] == [name for name, _ in tensors]
    for (_, ours), (_, theirs) in zip(unpacked, tensors):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_buckets_are_streamed() -> None:
    taken = []

    def source() -> object:
        for name, tensor in named(10):
            taken.append(name)
            yield name, tensor

    next(pack(source(), 60, CPU))  # type: ignore[arg-type]
    assert len(taken) < 5


def test_an_empty_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tensor x with shape \[0, 4\] is empty"):
        list(pack([("x", torch.zeros(0, 4))], 100, CPU))


def test_names_find_their_place_in_the_engine() -> None:
    layer = "model.layers.3"
    assert engine_place(f"{layer}.self_attn.k_proj.weight") == (f"{layer}.self_attn.qkv_proj.weight", 1)
    assert engine_place(f"{layer}.self_attn.q_norm.weight") == (f"{layer}.self_attn.q_norm.weight", 0)
    assert engine_place(f"{layer}.self_attn.o_proj.weight") == (f"{layer}.self_attn.o_proj.weight", 0)
    assert engine_place(f"{layer}.mlp.up_proj.weight") == (f"{layer}.mlp.gate_up_proj.weight", 1)
    assert engine_place(f"{layer}.mlp.down_proj.weight") == (f"{layer}.mlp.down_proj.weight", 0)
    assert engine_place(f"{layer}.mlp.gate.weight") == (f"{layer}.mlp.gate.weight", 0)
    assert engine_place(f"{layer}.mlp.experts.10.up_proj.weight") == (f"{layer}.mlp.experts.w13_weight", 21)
    assert engine_place(f"{layer}.mlp.experts.10.down_proj.weight") == (f"{layer}.mlp.experts.w2_weight", 10)


def experts(count: int) -> dict[str, Tensor]:
    """One layer's experts."""
    torch.manual_seed(0)
    return {f"m.mlp.experts.{e}.{part}_proj.weight": torch.randn(4, 6) for e in range(count) for part in
            ("gate", "up", "down")}


def sums(tensors: dict[str, Tensor], order: list[str] | None = None) -> EngineChecksums:
    """Checksums of ``tensors``, given in ``order``."""
    checksums = EngineChecksums()
    for name in order or list(tensors):
        checksums.add(name, tensors[name])
    return checksums


def test_fused_hashes_are_those_of_the_stacked_parameter_whatever_the_order() -> None:
    tensors = experts(12)
    stacked = torch.stack([torch.cat([tensors[f"m.mlp.experts.{e}.{part}_proj.weight"] for part in ("gate", "up")])
                           for e in range(12)])
    expected = hashlib.sha256(stacked.numpy().tobytes()).hexdigest()[:16]
    shuffled = sorted(tensors)
    random.Random(0).shuffle(shuffled)
    for order in (sorted(tensors), shuffled):
        assert sums(tensors, order).digests()["m.mlp.experts.w13_weight"] == expected


def test_vocabularies_are_padded_as_the_engine_pads_them() -> None:
    table = torch.randn(100, 8)
    padded = torch.cat([table, torch.zeros(28, 8)])
    expected = hashlib.sha256(padded.numpy().tobytes()).hexdigest()[:16]
    assert sums({"model.embed_tokens.weight": table}).digests() == {"model.embed_tokens.weight": expected}


def test_permuted_weights_do_not_pass() -> None:
    tensors = experts(4)
    reported = sums(tensors).digests()
    sums(tensors).compare(reported)
    one, other = "m.mlp.experts.0.down_proj.weight", "m.mlp.experts.2.down_proj.weight"
    swapped = tensors | {one: tensors[other], other: tensors[one]}
    rows = tensors | {one: tensors[one].flip(0)}
    for wrong in (swapped, rows):
        with pytest.raises(ValueError, match=r"1 of 2 parameters differ: m.mlp.experts.w2_weight"):
            sums(wrong).compare(reported)


def test_parts_only_one_side_has_do_not_pass() -> None:
    tensors = experts(3)
    reported = sums(tensors).digests()
    with pytest.raises(ValueError, match="lm_head.weight: in the engine, not published"):
        sums(tensors).compare(reported | {"lm_head.weight": "00"})
    with pytest.raises(ValueError, match="m.norm.weight: published, unknown to the engine"):
        sums(tensors | {"m.norm.weight": torch.ones(3)}).compare(reported)
    incomplete = {name: tensor for name, tensor in tensors.items() if ".1.up" not in name}
    with pytest.raises(ValueError, match="w13_weight: part 3 was not published"):
        sums(incomplete).compare(reported)


def test_publishing_to_nobody_is_an_error() -> None:
    with Publisher([]) as publisher, pytest.raises(PublishError, match="no engine to publish to"):
        publisher.publish(1, iter(()))


def test_publishers_and_canaries_refuse_what_cannot_work() -> None:
    for arguments, message in [
        ({"urls": ["http://x"], "transport": "pigeon"}, "unknown transport 'pigeon'"),
        ({"urls": ["http://x"], "pause_mode": "nap"}, "pause mode 'nap'"),
        ({"urls": ["http://x"], "bucket_bytes": 0}, "bucket_bytes must be positive"),
    ]:
        with pytest.raises(ValueError, match=message):
            Publisher(**arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 4 tokens"):
        Canary([1, 2, 3, 4], [0.0, -1.0])
