"""Why a call failed on one rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call failed on one rank."""

    role: str
    rank: int
    method: str
    error: str
    """The exception as one line: its type and message, or the message alone where the user can put it right."""
    user_error: bool
    time: float
    """When it was caught, in seconds since the epoch."""
    stack: str
