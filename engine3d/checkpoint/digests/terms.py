"""Constants of digests, modulo 2^64."""

from __future__ import annotations

WORD = 8
"""Bytes that are multiplied at a time."""
SPREAD = -7046029254386353131
"""2^64 divided by the golden ratio, as int64: multiples of it look as if drawn at random."""
STEP = 6364136223846793005
"""Multiplier of the value so far before the next chunk is added."""
