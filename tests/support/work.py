"""How much a call has to do, which a busy machine does not change as it changes the time that it takes."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable


def calls_of(function: Callable[[], object]) -> int:
    """How many functions, of Python and of C, a call of `function` calls in this thread."""
    profile = cProfile.Profile()
    profile.runcall(function)
    calls: int = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    return calls


def growth[T](function: Callable[[T], object], small: T, large: T) -> float:
    """How many times as much a call with `large` has to do as one with `small`."""
    return calls_of(lambda: function(large)) / calls_of(lambda: function(small))
