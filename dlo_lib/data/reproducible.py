"""Random numbers that are the same on every machine and with every version of PyTorch and NumPy.

The k-th number of a stream is a hash of (seed, k) with the finaliser of SplitMix64 (Steele, Lea, Flood: Fast
splittable pseudorandom number generators, OOPSLA 2014), which uses only 64-bit integer arithmetic. The
generators of PyTorch and NumPy may change with a release."""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / the golden ratio: the step between two states


def hashes(count: int, *seeds: int) -> np.ndarray:
    """Generate ``count`` independent uniform 64-bit numbers, (count,) uint64, of the stream with the given
    ``seeds``.
    """
    state = np.zeros(1, dtype=np.uint64)
    for seed in seeds:
        state = _mix(state + np.uint64(seed % 2**64) + _GOLDEN)
    return _mix(state + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN)


def permutation(size: int, *seeds: int) -> np.ndarray:
    """Generate a uniform permutation of range(size), (size,) int64, by sorting hashes."""
    return np.argsort(hashes(size, *seeds), kind="stable")


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
