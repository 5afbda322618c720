"""Work of a call, counted in function calls: unlike its time, it is the same on a busy machine."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable


def calls_of(function: Callable[[], object]) -> int:
    """Count the functions, of Python and of C, that `function` calls in this thread."""
    profile = cProfile.Profile()
    profile.runcall(function)
    calls: int = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    return calls


def growth[T](function: Callable[[T], object], small: T, large: T) -> float:
    """Return the work of a call with `large`, divided by that of one with `small`."""
    return calls_of(lambda: function(large)) / calls_of(lambda: function(small))
