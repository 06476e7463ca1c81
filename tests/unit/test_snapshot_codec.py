"""The delta codec: every bit comes back, in both directions, from either backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.snapshots import DamagedRecordError, TensorSetError
from megatron_async.snapshots.bits import (
    CHUNK,
    Task,
    check_tensors,
    specs_of,
    task_grid,
    word_bytes,
    words_of,
)
from megatron_async.snapshots.codec import Mode, Segment, check_counts, columns_of, compress, decompress
from megatron_async.snapshots.device_backend import DeviceKernels
from megatron_async.snapshots.host_backend import HostKernels

HOST, DEVICE = HostKernels(), DeviceKernels()


def pattern(digest: int | torch.Tensor) -> int:
    """The 64 bits of a digest."""
    return int(digest) % 2**64


DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64)


def pair(
    dtype: torch.dtype, count: int, share: float, highest: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two words tensors that differ in about `share` of the words, by XORs below 2^highest."""
    random = np.random.default_rng(seed)
    old = torch.from_numpy(random.integers(0, 256, count * dtype.itemsize, dtype=np.uint8)).view(dtype)
    new = old.clone()
    words = words_of(new)
    chosen = torch.from_numpy(random.random(words.numel()) < share)
    patterns = torch.from_numpy(
        random.integers(0, 1 << min(highest, 8 * words.element_size()), words.numel())
    )
    words[chosen] ^= patterns[chosen].to(words.dtype)
    return words_of(old), words


@given(
    dtype=st.sampled_from(DTYPES),
    count=st.sampled_from([1, 3, 63, 64, 65, 1000, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 77]),
    share=st.sampled_from([0.0, 0.0005, 0.01, 0.1, 0.24, 0.26, 0.6, 1.0]),
    highest=st.integers(1, 32),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60)
def test_both_backends_write_the_same_record_and_step_both_ways(
    dtype: torch.dtype, count: int, share: float, highest: int, seed: int
) -> None:
    old, new = pair(dtype, count, share, highest, seed)
    task = Task(0, 0, new.numel(), new.element_size())
    segment, payload = HOST.encode(task, old, new)
    payload = None if payload is None else payload.clone()
    other, other_payload = DEVICE.encode(task, old, new)
    assert segment == other
    assert (payload is None) == (other_payload is None) == torch.equal(old, new)
    assert payload is None or torch.equal(payload, other_payload)
    for kernels in (HOST, DEVICE):
        words = old.clone()
        total = kernels.apply(task, words, segment, payload, with_digest=True)
        assert torch.equal(words, new)
        assert pattern(total) == HOST.digest(task, new) == pattern(DEVICE.digest(task, new))
        kernels.apply(task, words, segment, payload, with_digest=False)
        assert torch.equal(words, old)


def test_a_payload_is_never_larger_than_a_copy_and_a_percent() -> None:
    for share in (0.01, 0.2, 0.25, 0.3, 0.5, 1.0):
        for highest in (3, 8, 12, 16):
            old, new = pair(torch.bfloat16, 3 * CHUNK, share, highest, 1)
            segment, payload = HOST.encode(Task(0, 0, new.numel(), 2), old, new)
            assert payload is not None
            assert payload.numel() <= 1.01 * new.numel() * 2, (share, highest, segment)


def test_the_form_follows_the_density() -> None:
    task = Task(0, 0, 2 * CHUNK, 2)
    forms = [
        HOST.encode(task, *pair(torch.bfloat16, 2 * CHUNK, share, 4, 2))[0] for share in (0.0, 0.02, 0.9)
    ]
    assert [form.mode for form in forms] == [Mode.EMPTY, Mode.SPARSE, Mode.DENSE]
    assert forms[2].width == 1, "XORs below 2^4 need one byte of two"
    assert HOST.encode(task, *pair(torch.bfloat16, 2 * CHUNK, 0.9, 16, 2))[0].width == 2


def test_sparse_payload_costs_three_bytes_per_changed_weight() -> None:
    """Offset of two bytes and a value of one, plus eight bytes per chunk and alignment (64 bytes suffice)."""
    old, new = pair(torch.bfloat16, 10 * CHUNK, 0.02, 7, 3)
    changed = int((old != new).sum())
    _, payload = HOST.encode(Task(0, 0, new.numel(), 2), old, new)
    assert payload is not None
    assert abs(payload.numel() - 3 * changed - 10 * 8) < 64


def test_signed_zero_and_nan_payloads_are_kept() -> None:
    patterns = torch.tensor([0x7FC1, 0xFFC1 - 65536, -32768, 0, 0x7F80, 1], dtype=torch.int16)
    old = torch.zeros(6, dtype=torch.int16)
    task = Task(0, 0, 6, 2)
    segment, payload = HOST.encode(task, old, patterns)
    words = old.clone()
    HOST.apply(task, words, segment, payload, with_digest=False)
    assert torch.equal(words, patterns)
    assert torch.isnan(words.view(torch.bfloat16)[0])
    assert torch.signbit(words.view(torch.bfloat16)[2])


def test_the_digest_sees_order_position_and_single_bits() -> None:
    words = torch.arange(100_000, dtype=torch.int16)
    task = Task(0, 0, words.numel(), 2)
    reference = HOST.digest(task, words)
    changes = {
        "reversed": words.flip(0),
        "rows swapped": torch.cat([words[50_000:], words[:50_000]]),
        "neighbours swapped": words.reshape(-1, 2).flip(1).reshape(-1),
        "far words swapped": words[torch.tensor([4, 1, 2, 3, 0, *range(5, 100_000)])],
    }
    flipped = words.clone()
    flipped[77_777] ^= 1
    changes["one bit"] = flipped
    digests = {name: HOST.digest(task, changed.contiguous()) for name, changed in changes.items()}
    assert reference not in digests.values()
    assert len(set(digests.values())) == len(digests)


def test_digests_of_tasks_add_up_to_the_digest_of_the_whole() -> None:
    """Modulo 2^64, whatever the cut: this is what makes the digest independent of threads."""
    words = torch.randint(-30_000, 30_000, (3 * CHUNK + 5,), dtype=torch.int16)
    whole = HOST.digest(Task(0, 0, words.numel(), 2), words)
    cuts = [(0, CHUNK), (CHUNK, 2 * CHUNK), (3 * CHUNK, 5)]
    parts = [HOST.digest(Task(0, start, size, 2), words[start : start + size]) for start, size in cuts]
    assert sum(parts) % 2**64 == whole


def test_tensors_that_start_anywhere_in_a_flat_buffer() -> None:
    """Trainers keep parameters in one buffer: a tensor may begin at any element, and end at any."""
    buffer = torch.randint(-30_000, 30_000, (3 * CHUNK,), dtype=torch.int16)
    for start in (0, 1, 2, 3, 5):
        for size in (CHUNK, CHUNK + 1, 40, 7):
            words = buffer[start : start + size]
            task = Task(0, 0, size, 2)
            assert (
                HOST.digest(task, words)
                == HOST.digest(task, words.clone())
                == pattern(DEVICE.digest(task, words))
            )
            new = words.clone()
            new[::50] ^= 3
            segment, payload = HOST.encode(task, words, new)
            before = buffer.clone()
            for kernels in (HOST, DEVICE):
                kernels.apply(task, words, segment, payload, with_digest=False)
                assert torch.equal(words, new)
                kernels.apply(task, words, segment, payload, with_digest=False)
                assert torch.equal(buffer, before)


def mixed(t: int) -> int:
    """The finaliser of splitmix64."""
    mask = 2**64 - 1
    t = ((t ^ (t >> 30)) * 0xBF58476D1CE4E5B9) & mask
    t = ((t ^ (t >> 27)) * 0x94D049BB133111EB) & mask
    return t ^ (t >> 31)


@pytest.mark.parametrize("size", [1, 8, 31, 8 * 1024, 8 * 1024 + 3, 20_000])
def test_digest_against_an_independent_computation(size: int) -> None:
    """The formula in plain Python integers, for sizes around words and stripes."""
    octets = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
    weyl, mask, total = 0x9E3779B97F4A7C15, 2**64 - 1, 0
    for stripe, start in enumerate(range(0, size, 8 * 1024)):
        products = plain = 0
        for i, place in enumerate(range(start, min(start + 8 * 1024, size), 8)):
            word = int.from_bytes(octets[place : place + 8].tobytes().ljust(8, b"\0"), "little")
            keyed = word ^ mixed(((i + 1) * weyl) & mask)
            products += (keyed & 0xFFFFFFFF) * (keyed >> 32)
            plain += word
        inner = mixed((products & mask) ^ ((stripe * weyl + 0x94D049BB133111EB) & mask))
        total = (total + mixed(inner ^ (plain & mask))) & mask
    words, task = torch.from_numpy(octets), Task(0, 0, size, 1)
    assert HOST.digest(task, words) == pattern(DEVICE.digest(task, words)) == total


@given(st.integers(1, 5_000), st.data())
@settings(max_examples=50)
def test_the_digest_sees_any_single_changed_byte_and_any_two_words_that_trade_places(
    size: int, data: st.DataObject
) -> None:
    octets = torch.from_numpy(np.random.default_rng(size).integers(0, 256, 8 * size).astype(np.uint8))
    task = Task(0, 0, 8 * size, 1)
    changed = octets.clone()
    changed[data.draw(st.integers(0, 8 * size - 1))] ^= data.draw(st.integers(1, 255))
    assert HOST.digest(task, changed) != HOST.digest(task, octets)
    first, second = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
    rows = octets.reshape(-1, 8).clone()
    rows[[first, second]] = rows[[second, first]]
    traded = HOST.digest(task, rows.reshape(-1))
    assert (traded == HOST.digest(task, octets)) == torch.equal(rows.reshape(-1), octets)


def test_compression_is_lossless_and_refused_where_it_does_not_pay() -> None:
    low = np.random.default_rng(0).integers(0, 3, 100_000).astype(np.uint8)
    packed = compress(low, 1)
    assert packed is not None
    assert len(packed) < low.size / 3, "two bits of information in eight"
    assert np.array_equal(decompress(packed, low.size), low)
    assert compress(np.random.default_rng(0).integers(0, 256, 100_000).astype(np.uint8), 1) is None
    with pytest.raises(DamagedRecordError, match="cannot be read"):
        decompress(packed[:-9], low.size)
    with pytest.raises(DamagedRecordError, match="record says"):
        decompress(packed, low.size + 1)


def test_counts_that_do_not_add_up_are_refused() -> None:
    old, new = pair(torch.bfloat16, 2 * CHUNK, 0.02, 4, 5)
    task = Task(0, 0, new.numel(), 2)
    segment, payload = HOST.encode(task, old, new)
    assert payload is not None
    counts = payload.numpy()[columns_of(task, segment).counts].view(np.int32).reshape(-1, 2)
    check_counts(segment, counts)
    counts[0, 0] += 1
    with pytest.raises(DamagedRecordError, match="add up"):
        check_counts(segment, counts)


def test_a_record_with_wild_offsets_never_leaves_the_tensor() -> None:
    """A short last chunk: offsets beyond it are skipped, and words around the task stay as they are."""
    memory = torch.zeros(CHUNK, dtype=torch.int16)
    task, segment = Task(0, 0, 100, 2), Segment(Mode.SPARSE, 1, 50, 0)
    layout = columns_of(task, segment)
    payload = torch.zeros(layout.nbytes, dtype=torch.uint8)
    payload.numpy()[layout.counts].view(np.int32)[0] = 50
    payload[layout.offsets] = 0xFF
    payload[layout.values] = 1
    HOST.apply(task, memory[:100], segment, payload, with_digest=False)
    assert not memory.any()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
@pytest.mark.parametrize("order", ["ascending", "descending", "twice"])
def test_any_order_of_entries_gives_the_digest_of_what_is_there(dtype: torch.dtype, order: str) -> None:
    """An encoder writes them in ascending order; what a damaged record holds is toggled, summed and undone alike."""
    words = torch.arange(CHUNK, dtype=torch.int32).to(dtype)
    task, count = Task(0, 0, CHUNK, dtype.itemsize), 1_000
    places = np.linspace(0, CHUNK - 1, count).astype(np.uint16)
    if order != "ascending":
        places = places[::-1] if order == "descending" else np.repeat(places[::2], 2)
    segment = Segment(Mode.SPARSE, max(1, dtype.itemsize // 2), count, 0)
    layout = columns_of(task, segment)
    payload = torch.ones(layout.nbytes, dtype=torch.uint8)
    payload.numpy()[layout.counts].view(np.int32)[:] = [count, 0]
    payload.numpy()[layout.offsets] = np.ascontiguousarray(places).view(np.uint8)
    before = words.clone()
    total = HOST.apply(task, words, segment, payload, with_digest=True)
    assert total == HOST.digest(task, words)
    assert torch.equal(words, before) == (order == "twice")
    HOST.apply(task, words, segment, payload, with_digest=False)
    assert torch.equal(words, before)


def test_tensors_that_cannot_be_stepped_are_refused_by_name() -> None:
    base = torch.zeros(6, 8)
    with pytest.raises(TensorSetError, match=r"'w' of shape \(8, 6\).*not contiguous"):
        check_tensors({"w": base.t()})
    with pytest.raises(TensorSetError, match="'embedding' and 'head' share memory"):
        check_tensors({"embedding": base, "head": base[2:]})
    with pytest.raises(TensorSetError, match="several devices"):
        check_tensors({"a": base, "b": torch.zeros(3, device="meta")})
    check_tensors({"rows": base[:3], "other rows": base[3:], "none": torch.zeros(0)})


def test_the_grid_covers_every_word_once() -> None:
    tensors = {
        "a": torch.zeros(200_000, dtype=torch.bfloat16),
        "none": torch.zeros(0),
        "b": torch.zeros(9, dtype=torch.float64),
    }
    grid = task_grid(specs_of(tensors), CHUNK)
    assert [(task.tensor, task.start, task.length) for task in grid] == [
        (0, 0, CHUNK), (0, CHUNK, CHUNK), (0, 2 * CHUNK, CHUNK), (0, 3 * CHUNK, 3_392), (2, 0, 18),
    ]  # fmt: skip
    assert word_bytes(tensors["b"]) == 4
    with pytest.raises(TensorSetError, match="multiple of 65536"):
        task_grid(specs_of(tensors), 1000)
