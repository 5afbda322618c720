"""What a command that fails says last: the first failure, to people, to the run's directory and to the supervisor."""

from __future__ import annotations

import contextlib
from pathlib import Path

from hybridflow.cluster.hosts.checks.gathering import gather_logs
from hybridflow.cluster.hosts.driver_link import lost_host, tell_failure
from hybridflow.errors.rank_failure import Failure
from hybridflow.rundir.first_failure import describe, say_card, write_failure
from hybridflow.rundir.progress import where_now
from hybridflow.workers.failure_diagnosis import Kind, kind_of

_PREFIX = "hybridflow: "


class LastWords:
    """Of this process's command."""

    def __init__(self) -> None:
        self._cause: tuple[str, Failure | None] | None = None
        self.directory: Path | None = None
        """Of the run, once it has begun."""

    def note(self, text: str, failure: Failure | None = None) -> None:
        """Keep what the command failed of, if nothing was kept before.

        Args:
            text: that is said; its first line is the cause.
            failure: of a rank, where it was one.
        """
        if self._cause is None and text.startswith(_PREFIX):
            self._cause = text.splitlines()[0].removeprefix(_PREFIX), failure

    def say(self) -> None:
        """The card of the failure, once, if there was one."""
        if self._cause is None:
            return
        (line, failure), self._cause = self._cause, None
        tell_failure(where_now().partition(",")[0], line)
        if self.directory is None:
            return
        gather_logs()
        # The cause is on stderr already: what keeps the card from being made hides nothing.
        with contextlib.suppress(OSError, ValueError):
            card = describe(
                self.directory,
                line,
                where_now(),
                role=failure.role if failure is not None else None,
                rank=failure.rank if failure is not None else None,
                host=lost_host(),
                since=failure.time if failure is not None else None,
                died=failure is not None and kind_of(failure) == Kind.DIED,
            )
            say_card(card)
            write_failure(self.directory, card)


last_words = LastWords()
"""Those of this process."""
