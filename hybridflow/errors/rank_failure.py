"""Why a call failed on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from engine3d.errors import EngineError, UserError


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
    """Time at which it was caught, in seconds since the epoch."""
    stack: str

    def exception(self, kind: type[EngineError] = EngineError, what: str = "") -> EngineError | UserError:
        """Return the error to raise where the call was awaited.

        Args:
            kind: of an error that is not the user's.
            what: the call in the message; the method's name if empty.
        """
        return (UserError if self.user_error else kind)(
            f"{self.role} rank {self.rank}, {what or self.method}: {self.error}"
        )
