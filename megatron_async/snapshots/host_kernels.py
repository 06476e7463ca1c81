"""Compiled loops over words in host memory: compare, encode, apply, digest.

What was measured shaped them (one core, a memory copy at 12 GB/s): at 2 % changed words, applying a record touches
half of all cache lines in an order the hardware does not foresee, and costs as much as a full copy. Asking for every
line of the next chunk in order, while this one is worked on, makes it 1.5 times as fast; below 0.7 % and above 5 % that
does not pay. With digests it is the sums of a stripe that read it in order; its entries are toggled right after, and
carry the sums along. Comparing 64 words at a time to a bit mask makes the comparison run at the speed of the memory.

Invariants
- The kernels release the GIL, allocate nothing that grows with the tensor, and never read or write outside their
  arguments, whatever a record holds.
- Encoding only reads the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from megatron_async.snapshots import digest as digest_formula
from megatron_async.snapshots.bits import CHUNK
from megatron_async.snapshots.digest import STRIPE

READ_AHEAD_FROM = 0.007
READ_AHEAD_TO = 0.05
GROUP = 64
KEY = np.uint64(digest_formula.KEY)
MIX_1 = np.uint64(digest_formula.MIX_1)
MIX_2 = np.uint64(digest_formula.MIX_2)
KEYS = digest_formula.stripe_keys()
LOW = np.uint64(0xFFFFFFFF)
ONE = np.uint64(1)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile on first use, and keep the machine code beside the source or in the user's cache directory.

    Where neither can be written (a read-only image without a home) numba refuses to cache; then each process compiles.
    """
    try:
        return numba.njit(nogil=True, boundscheck=False, cache=True)(function)
    except RuntimeError:
        return numba.njit(nogil=True, boundscheck=False)(function)


@intrinsic  # type: ignore[untyped-decorator]
def _difference_mask(typing_context: Any, left: Any, right: Any, index: Any, shift: Any) -> Any:
    """Bit j is set where (left[index + j] ^ right[index + j]) >> shift is not zero, for 64 consecutive words."""
    width = left.dtype.bitwidth

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(ir.IntType(width), GROUP)

        def load(position: int) -> Any:
            array = context.make_array(signature.args[position])(context, builder, arguments[position])
            pointer = builder.gep(array.data, [arguments[2]])
            return builder.load(builder.bitcast(pointer, vector.as_pointer()), align=1)

        difference = builder.xor(load(0), load(1))
        amount = builder.trunc(arguments[3], ir.IntType(width))
        first = builder.insert_element(
            ir.Constant(vector, ir.Undefined), amount, ir.Constant(ir.IntType(32), 0)
        )
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), GROUP), [0] * GROUP)
        shifted = builder.lshr(difference, builder.shuffle_vector(first, first, lanes))
        mask = builder.icmp_unsigned("!=", shifted, ir.Constant(vector, [0] * GROUP))
        return builder.bitcast(mask, ir.IntType(64))

    return types.uint64(left, right, types.intp, types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _lowest(typing_context: Any, mask: Any) -> Any:
    """Position of the lowest set bit of a mask that is not zero."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _set_bits(typing_context: Any, mask: Any) -> Any:
    """How many bits of the mask are set."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _prefetch(typing_context: Any, words: Any, index: Any) -> Any:
    """Ask for the cache line of words[index], to be written soon."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        octet, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        pointer = builder.bitcast(builder.gep(array.data, [arguments[1]]), octet)
        name = "llvm.prefetch.p0" if getattr(octet, "is_opaque", False) else "llvm.prefetch.p0i8"
        kind = ir.FunctionType(ir.VoidType(), [octet, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        builder.call(function, [pointer, *(ir.Constant(number, value) for value in (1, 3, 1))])
        return context.get_dummy_value()

    return types.void(words, types.intp), generate


@compiled
def _mix(t: np.uint64) -> np.uint64:
    t = (t ^ (t >> np.uint64(30))) * MIX_1
    t = (t ^ (t >> np.uint64(27))) * MIX_2
    return t ^ (t >> np.uint64(31))


@compiled
def _product(word: np.uint64, place: int) -> np.uint64:
    """What a word at this place of its stripe adds to the sum of products."""
    x = word ^ KEYS[place]
    return (x & LOW) * (x >> np.uint64(32))


@compiled
def _sums(stripe: np.ndarray) -> tuple[np.uint64, np.uint64]:
    """The two sums over the words of a stripe, or of its beginning."""
    products = np.uint64(0)
    plain = np.uint64(0)
    for i in range(stripe.size):
        products += _product(stripe[i], i)
        plain += stripe[i]
    return products, plain


@compiled
def _stripe_digest(products: np.uint64, plain: np.uint64, place: int) -> np.uint64:
    return _mix(_mix(products ^ (np.uint64(place) * KEY + MIX_2)) ^ plain)


@compiled
def _last_word(octets: np.ndarray) -> np.uint64:
    """The bytes after the last whole 64-bit word, filled with zeros."""
    last = np.uint64(0)
    for i in range(octets.size - 1, octets.size // 8 * 8 - 1, -1):
        last = (last << np.uint64(8)) | np.uint64(octets[i])
    return last


@compiled
def digest(octets: np.ndarray, first_word: int) -> np.uint64:
    """The formula of the module `digest` over the bits of a task.

    Args:
        octets: uint8[n], the bits.
        first_word: position of its first 64-bit word in the tensor, a multiple of `STRIPE`.
    """
    whole = octets.size // 8
    words = octets[: whole * 8].view(np.uint64)
    short = whole * 8 < octets.size
    total = np.uint64(0)
    for start in range(0, whole + short, STRIPE):
        products, plain = _sums(words[start : start + STRIPE])
        if short and start + STRIPE > whole:
            last = _last_word(octets)
            products += _product(last, whole - start)
            plain += last
        total += _stripe_digest(products, plain, (first_word + start) // STRIPE)
    return total


@compiled
def encode_sparse(
    old: np.ndarray,
    new: np.ndarray,
    limit: int,
    narrow_bits: int,
    counts: np.ndarray,
    offsets: np.ndarray,
    values: np.ndarray,
    wide_offsets: np.ndarray,
    wide_values: np.ndarray,
) -> tuple[int, int]:
    """List the words that differ; those whose XOR fits in `narrow_bits` bits go to the narrow list, others to the wide.

    Args:
        old, new: words[n].
        limit: give up when more words than this differ.
        counts: int32[chunks, 2], filled with the entries per chunk in the two lists.
        offsets, values, wide_offsets, wide_values: room for `limit + 64` entries each.

    Returns:
        Entries in the narrow and the wide list; (-1, -1) after giving up.
    """
    k = 0
    e = 0
    counts[:] = 0
    for c in range(counts.shape[0]):
        o = old[c * CHUNK : (c + 1) * CHUNK]
        w = new[c * CHUNK : (c + 1) * CHUNK]
        k0 = k
        e0 = e
        for j in range(0, o.size, GROUP):
            mask = np.uint64(0)
            if j + GROUP <= o.size:
                mask = _difference_mask(o, w, j, np.uint64(0))
            else:
                for i in range(o.size - j):
                    if o[j + i] != w[j + i]:
                        mask |= ONE << np.uint64(i)
            while mask != 0:
                p = np.int64(j) + np.int64(_lowest(mask))
                x = o[p] ^ w[p]
                if (np.uint64(x) >> np.uint64(narrow_bits)) == 0:
                    offsets[k] = p
                    values[k] = x
                    k += 1
                else:
                    wide_offsets[e] = p
                    wide_values[e] = x
                    e += 1
                mask &= mask - ONE
            if k + e > limit:
                return -1, -1
        counts[c, 0] = k - k0
        counts[c, 1] = e - e0
    return k, e


@compiled
def count_above(old: np.ndarray, new: np.ndarray, shift: int) -> Any:
    """Words whose XOR does not fit in `shift` bits."""
    total = np.int64(0)
    whole = old.size // GROUP * GROUP
    for j in range(0, whole, GROUP):
        total += np.int64(_set_bits(_difference_mask(old, new, j, np.uint64(shift))))
    for j in range(whole, old.size):
        if (np.uint64(old[j] ^ new[j]) >> np.uint64(shift)) != 0:
            total += 1
    return total


@compiled
def sampled_share(old: np.ndarray, new: np.ndarray) -> Any:
    """Share of differing words in every 64th group of 64: enough to choose a form, read from one cache line in 64."""
    total = np.int64(0)
    looked = 0
    for j in range(0, old.size - GROUP + 1, GROUP * GROUP):
        total += np.int64(_set_bits(_difference_mask(old, new, j, np.uint64(0))))
        looked += GROUP
    return total / max(1, looked)


@compiled
def encode_dense(
    old: np.ndarray,
    new: np.ndarray,
    planes: np.ndarray,
    counts: np.ndarray,
    wide_offsets: np.ndarray,
    wide_values: np.ndarray,
) -> int:
    """Write the low bytes of every XOR as planes, and the words that need more bytes to the wide list.

    Args:
        planes: uint8[width, n]; a word in the wide list has zeros here.
        counts: int32[chunks, 2]; column 1 is filled.
        wide_offsets, wide_values: room for the words that `count_above` found.

    Returns:
        Entries in the wide list.
    """
    width = planes.shape[0]
    full = width == old.itemsize
    e = 0
    counts[:] = 0
    for c in range(counts.shape[0]):
        o = old[c * CHUNK : (c + 1) * CHUNK]
        w = new[c * CHUNK : (c + 1) * CHUNK]
        for b in range(width):
            plane = planes[b, c * CHUNK : (c + 1) * CHUNK]
            for j in range(o.size):
                plane[j] = (o[j] ^ w[j]) >> (8 * b)
        e0 = e
        if not full:
            for j in range(0, o.size, GROUP):
                mask = np.uint64(0)
                if j + GROUP <= o.size:
                    mask = _difference_mask(o, w, j, np.uint64(8 * width))
                else:
                    for i in range(o.size - j):
                        if (np.uint64(o[j + i] ^ w[j + i]) >> np.uint64(8 * width)) != 0:
                            mask |= ONE << np.uint64(i)
                while mask != 0:
                    p = np.int64(j) + np.int64(_lowest(mask))
                    wide_offsets[e] = p
                    wide_values[e] = o[p] ^ w[p]
                    e += 1
                    for b in range(width):
                        planes[b, c * CHUNK + p] = 0
                    mask &= mask - ONE
        counts[c, 1] = e - e0
    return e


@compiled
def _toggle(words: np.ndarray, offsets: np.ndarray, values: np.ndarray) -> None:
    if words.size == CHUNK:
        for j in range(offsets.size):
            words[offsets[j]] ^= values[j]
        return
    for j in range(offsets.size):
        if np.int64(offsets[j]) < words.size:
            words[offsets[j]] ^= values[j]


@compiled
def _toggle_ahead(words: np.ndarray, offsets: np.ndarray, values: np.ndarray, following: np.ndarray) -> None:
    """As `_toggle` for a whole chunk, while asking for every line of the chunk that follows, in order."""
    line = 64 // words.itemsize
    stride = max(1, CHUNK // (2 * line) // max(1, offsets.size)) * 2 * line
    position = 0
    for j in range(offsets.size):
        _prefetch(following, position)
        _prefetch(following, position + line)
        position = (position + stride) & (CHUNK - 1)
        words[offsets[j]] ^= values[j]


@compiled
def _ascending(offsets: np.ndarray) -> Any:
    falls = 0
    for j in range(1, offsets.size):
        falls += offsets[j] <= offsets[j - 1]
    return falls == 0


@compiled
def _toggle_stripe(
    stripe: np.ndarray,
    sums: tuple[np.uint64, np.uint64],
    offsets: np.ndarray,
    values: np.ndarray,
    j: int,
    start: int,
    bits: int,
) -> Any:
    """XOR the entries from j on that lie in a stripe, and carry its sums along.

    Args:
        stripe: uint64[STRIPE]. start: its first word in the chunk, of `bits` bits each.

    Returns:
        The first entry beyond the stripe, and the sums of what the stripe now holds.
    """
    products, plain = sums
    shift = np.uint64(_lowest(np.uint64(64 // bits)))
    within = np.uint64(64 // bits - 1)
    limit = start + STRIPE * (64 // bits)
    while j < offsets.size and np.int64(offsets[j]) < limit:
        o = np.uint64(np.int64(offsets[j]) - start)
        p = np.int64(o >> shift) & (STRIPE - 1)
        before = stripe[p]
        after = before ^ (np.uint64(values[j]) << ((o & within) * np.uint64(bits)))
        stripe[p] = after
        products += _product(after, p) - _product(before, p)
        plain += after - before
        j += 1
    return j, (products, plain)


@compiled
def _toggle_summed(
    words: np.ndarray,
    offsets: np.ndarray,
    values: np.ndarray,
    wide_offsets: np.ndarray,
    wide_values: np.ndarray,
    first_stripe: int,
) -> np.uint64:
    """XOR ascending entries into a whole chunk, and return its digest afterwards, in one passage.

    The sums of a stripe are taken as it comes from memory, in order; its entries are toggled while it is in the nearest
    cache, and each carries the sums from the old word to the new one. All bits are read, and counted once.
    """
    total = np.uint64(0)
    bits = 8 * words.itemsize
    each = 64 // bits
    wide = words.view(np.uint64)
    j = 0
    h = 0
    for s in range(wide.size // STRIPE):
        stripe = wide[s * STRIPE : (s + 1) * STRIPE]
        sums = _sums(stripe)
        j, sums = _toggle_stripe(stripe, sums, offsets, values, j, s * STRIPE * each, bits)
        h, sums = _toggle_stripe(stripe, sums, wide_offsets, wide_values, h, s * STRIPE * each, bits)
        total += _stripe_digest(sums[0], sums[1], first_stripe + s)
    return total


@compiled
def apply_sparse(
    words: np.ndarray,
    counts: np.ndarray,
    offsets: np.ndarray,
    values: np.ndarray,
    wide_offsets: np.ndarray,
    wide_values: np.ndarray,
    with_digest: bool,
    first_word: int,
) -> np.uint64:
    """XOR the listed words in place, and return the digest of the task afterwards (0 without `with_digest`)."""
    k = 0
    e = 0
    total = np.uint64(0)
    words_64 = CHUNK // 8 * words.itemsize
    for c in range(counts.shape[0]):
        v = words[c * CHUNK : (c + 1) * CHUNK]
        n = counts[c, 0]
        m = counts[c, 1]
        near, low = offsets[k : k + n], values[k : k + n]
        far, high = wide_offsets[e : e + m], wide_values[e : e + m]
        k += n
        e += m
        density = (n + m) / v.size
        sparse = density < READ_AHEAD_TO and v.size == CHUNK
        if with_digest and sparse and _ascending(near) and _ascending(far):
            total += _toggle_summed(v, near, low, far, high, (first_word + c * words_64) // STRIPE)
            continue
        if sparse and density > READ_AHEAD_FROM and (c + 2) * CHUNK <= words.size:
            _toggle_ahead(v, near, low, words[(c + 1) * CHUNK : (c + 2) * CHUNK])
        else:
            _toggle(v, near, low)
        _toggle(v, far, high)
        if with_digest:
            total += digest(v.view(np.uint8), first_word + c * words_64)
    return total


@compiled
def apply_dense(
    words: np.ndarray,
    planes: np.ndarray,
    counts: np.ndarray,
    wide_offsets: np.ndarray,
    wide_values: np.ndarray,
    with_digest: bool,
    first_word: int,
) -> np.uint64:
    """XOR the planes and the wide list in place, and return the digest afterwards (0 without `with_digest`)."""
    e = 0
    total = np.uint64(0)
    for c in range(counts.shape[0]):
        v = words[c * CHUNK : (c + 1) * CHUNK]
        for b in range(planes.shape[0]):
            plane = planes[b, c * CHUNK : (c + 1) * CHUNK]
            if b == 0:
                for j in range(v.size):
                    v[j] ^= plane[j]
            else:
                for j in range(v.size):
                    v[j] ^= np.uint32(plane[j]) << np.uint32(8 * b)
        m = counts[c, 1]
        _toggle(v, wide_offsets[e : e + m], wide_values[e : e + m])
        e += m
        if with_digest:
            total += digest(v.view(np.uint8), first_word + c * (CHUNK // 8) * words.itemsize)
    return total
