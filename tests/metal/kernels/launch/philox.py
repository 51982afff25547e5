"""Philox 4x32 in numpy, by its paper (Salmon et al., 2011), and the stream that Metal's kernels take of it.

Metal's kernels (c10/metal/random.h) do one round fewer than their name says, and put the higher half of a number before
the lower: counters are (0, 0, index's high half, low half), keys (seed's high half, low half).
"""

from __future__ import annotations

import numpy as np

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_STEPS = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))


def philox(counter: np.ndarray, key: tuple[int, int], rounds: int) -> np.ndarray:
    """`rounds` of Philox on counters of shape (..., 4)."""
    x = [counter[..., lane].astype(np.uint32) for lane in range(4)]
    keys = [np.uint32(each) for each in key]
    for _ in range(rounds):
        products = [_MULTIPLIERS[n] * x[2 * n].astype(np.uint64) for n in range(2)]
        high = [(each >> np.uint64(32)).astype(np.uint32) for each in products]
        low = [each.astype(np.uint32) for each in products]
        x = [high[1] ^ x[1] ^ keys[0], low[1], high[0] ^ x[3] ^ keys[1], low[0]]
        with np.errstate(over="ignore"):
            keys = [each + step for each, step in zip(keys, _STEPS, strict=True)]
    return np.stack(x, axis=-1)


def stream(seed: int, offset: int, count: int) -> np.ndarray:
    """Four words each of `count` numbers of a seed's stream from `offset` on, shape (count, 4)."""
    index = np.arange(offset, offset + count, dtype=np.uint64)
    counter = np.zeros((count, 4), dtype=np.uint32)
    counter[:, 2], counter[:, 3] = index >> np.uint64(32), index & np.uint64(0xFFFFFFFF)
    return philox(counter, (seed >> 32, seed & 0xFFFFFFFF), rounds=9)


def uniform(words: np.ndarray) -> np.ndarray:
    """Words as float32 from 0 up to 1: the lower 31 bits, rounded to float32, times a constant below 2**-31."""
    return (words & np.uint32(0x7FFFFFFF)).astype(np.float32) * np.float32(4.6566127342e-10)
