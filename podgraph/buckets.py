"""From the axes of a configuration to the buckets of a catalog: integers only, no torch, no GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from podgraph.errors import ConfigError
from podgraph.shapes import FAMILY_AXES, Bucket, count_families


@dataclass(frozen=True)
class BucketSpace:
    """The axes that a config enumerates, each ascending and without duplicates, and the families that are wanted.

    - ``mixed``: every (batch, prefill_len, decode_count) that leaves a slot for prefill: decode_count < batch. The
      largest is made of the largest batch, the largest prefill_len, and the largest decode_count below that batch.
    - ``prefill``: every (batch, prefill_len, 0).
    - ``decode``: (n, 0, n) for every decode_count n. All slots decode, so ``batch`` has no say.

    The one-sided families need no 0 in the axes. A 0 is one more value to combine, nothing else.

    Attributes:
        families: the wanted ones; None is every family that the axes have sizes for.
    """

    batch: tuple[int, ...] = ()
    prefill_len: tuple[int, ...] = ()
    decode_count: tuple[int, ...] = ()
    families: tuple[str, ...] | None = None

    @property
    def wanted(self) -> tuple[str, ...]:
        """The families that have a bucket at least, or `enumerate` fails."""
        if self.families is not None:
            return self.families
        # `prefill_len: [0]` says that nothing prefills, `decode_count: [0]` that nothing decodes
        return tuple(f for f, axes in FAMILY_AXES.items() if all(any(getattr(self, axis)) for axis in axes))

    @property
    def candidates(self) -> int:
        """How many combinations `enumerate` looks at, at most."""
        pairs, decodes = len(self.batch) * len(self.prefill_len), len(self.decode_count)
        return pairs * decodes + pairs * ("prefill" in self.wanted) + decodes * ("decode" in self.wanted)

    def enumerate(self) -> tuple[tuple[Bucket, ...], dict[str, int]]:
        """All wanted buckets, largest first, and how many combinations of the axes were dropped, by reason.

        Raises:
            ConfigError: a wanted family has no bucket, or no bucket has the largest value of an axis.
        """
        wanted = self.wanted
        kept = set(self._one_sided(wanted))
        dropped: dict[str, int] = {}
        for axes in itertools.product(self.batch, self.prefill_len, self.decode_count):
            bucket = Bucket(*axes)
            reason = bucket.unreachable
            if reason is None and bucket.family not in wanted:
                reason = f"no {bucket.family} in families"
            if reason is None:
                kept.add(bucket)
            else:
                dropped[reason] = dropped.get(reason, 0) + 1
        self._check_families(wanted, count_families(kept))
        self._check_maxima(kept)
        return tuple(sorted(kept, key=lambda b: (b.batch, b.prefill_len, b.decode_count), reverse=True)), dropped

    def _one_sided(self, wanted: tuple[str, ...]) -> Iterator[Bucket]:
        if "decode" in wanted:
            yield from (Bucket(n, 0, n) for n in self.decode_count if n)
        if "prefill" in wanted:
            yield from (Bucket(b, p, 0) for b in self.batch for p in self.prefill_len if p)

    def _check_families(self, wanted: tuple[str, ...], counts: dict[str, int]) -> None:
        if not wanted:
            raise ConfigError(
                "buckets: no bucket is reachable: neither prefill_len nor decode_count has a size above 0"
            )
        for family in wanted:
            for axis in FAMILY_AXES[family]:
                if not any(getattr(self, axis)):
                    raise ConfigError(f"buckets.{axis}: no size above 0, allowed: one at least, for {family} buckets")
            if not counts[family]:  # only of mixed ones can every combination be unreachable
                raise ConfigError(
                    f"buckets.batch: no mixed bucket has a slot for prefill, got {max(self.batch)} at most, allowed: "
                    f"more than a decode_count ({min(filter(None, self.decode_count))} is the least), or families "
                    "without mixed"
                )

    def _check_maxima(self, kept: set[Bucket]) -> None:
        families = FAMILY_AXES if self.families is None else self.families
        used = {axis for family in families for axis in FAMILY_AXES[family]}
        for axis, allowed in (
            ("batch", "a decode_count, since nothing prefills"),
            ("decode_count", "less than the largest batch, or decode among the families"),
        ):  # the largest prefill_len is always in a bucket of its families
            largest = max(getattr(self, axis), default=0)
            if axis in used and largest and all(getattr(bucket, axis) != largest for bucket in kept):
                raise ConfigError(f"buckets.{axis}: no bucket has the largest value, got {largest}, allowed: {allowed}")


def arithmetic(start: int, stop: int, step: int) -> tuple[int, ...]:
    """``start``, ``start + step``... below ``stop``, and ``stop``."""
    return (*range(start, stop, step), stop)


def geometric(start: int, stop: int, ratio: float) -> tuple[int, ...]:
    """``start``, ``start * ratio``... below ``stop``, each rounded and once, and ``stop``."""
    values, value = [], float(start)
    while value < stop:
        values.append(round(value))
        value *= ratio
    return tuple(dict.fromkeys((*values, stop)))
