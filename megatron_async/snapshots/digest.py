"""What tells two versions' bits apart: the formula that every backend computes.

The bits of a tensor are 64-bit words w (a short last one filled with zero bytes), in stripes of 1024. For stripe s

    p = Σ lo32(w_i ^ k_i) · hi32(w_i ^ k_i),   q = Σ w_i,   d_s = mix(mix(p ^ c_s) ^ q)        (all modulo 2^64)

with fixed pseudo-random keys k_i and c_s, and mix the finaliser of splitmix64. The digest of the tensor is Σ d_s.

Invariants
- Order and position count: inside a stripe by the keys (p is the NH hash: two given contents collide with probability
  2^-32 over the keys), between stripes by c_s. A sum of values alone cannot tell permuted weights apart.
- A change of a single word always changes q, so that no single damaged word can pass inside its stripe but by chance of
  2^-64.
- Sums of disjoint tasks add up to the tensor's, whatever the cut and the number of threads: tasks begin at stripes.
- One multiplication per 64 bits: it runs at the speed at which memory is read, several times faster than a full mix of
  every word, so that checking every bit costs a walk little.
"""

from __future__ import annotations

import numpy as np

STRIPE = 1024
"""64-bit words per stripe; a chunk of the smallest words holds a whole number of them."""

KEY = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def stripe_keys() -> np.ndarray:
    """uint64[STRIPE]: the keys k_i, splitmix64 of their positions."""
    t = np.arange(1, STRIPE + 1, dtype=np.uint64) * np.uint64(KEY)
    t = (t ^ (t >> np.uint64(30))) * np.uint64(MIX_1)
    t = (t ^ (t >> np.uint64(27))) * np.uint64(MIX_2)
    return t ^ (t >> np.uint64(31))
