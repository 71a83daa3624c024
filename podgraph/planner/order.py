"""Longest first, by size class: a counting sort that one thread block can do in one pass (kernels/plan.h)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]

STEPS = 16  # classes between two powers of two: lengths of one class differ by 6 % at most
CLASSES = 256  # enough for lengths below 2^19: 2^24 tokens in chunks of 64


def size_class(lengths: Int64) -> Int64:
    """The class of each length, growing with it; lengths below ``2 * STEPS`` are classes of their own."""
    lengths = np.asarray(lengths, np.int64)
    exponent = np.frexp(np.maximum(lengths, 1).astype(np.float64))[1].astype(np.int64) - 1  # floor(log2)
    shift = np.maximum(exponent - 4, 0)
    return np.where(lengths < 2 * STEPS, lengths, STEPS * (exponent - 3) + (lengths >> shift) % STEPS)


def longest_first(lengths: Int64) -> Int64:
    """Indices in falling order of size class, those of one class in the order given."""
    return np.argsort(-size_class(lengths), kind="stable")
