"""What says of a member's bytes whether they are the same: hashes of stripes, and one of all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from outlast.recover.parity.combine import Bytes
from outlast.recover.parity.layout import Layout


def hash_stripe(data: Bytes) -> int:
    """XXH3 (64 bits) of one stripe: against damage and mix-ups, not against an adversary."""
    return xxhash.xxh3_64_intdigest(data.data)


def hash_stripes(layout: Layout, data: Bytes) -> list[int]:
    """`hash_stripe` of every stripe."""
    spans = (layout.span(data.nbytes, stripe) for stripe in range(layout.stripes(data.nbytes)))
    return [hash_stripe(data[begin:end]) for begin, end in spans]


def digest(hashes: Sequence[int], nbytes: int) -> int:
    """One number for data of `nbytes` bytes with these hashes of stripes."""
    return xxhash.xxh3_64_intdigest(np.array([nbytes, *hashes], np.uint64).tobytes())
