"""A run's `events.jsonl`: decisions on the samples that each step trained on, their order, and the results.

The driver is its only writer. The events of a step are written at once, when the step is over; training does not depend
on them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.cluster.processes.termination import termination
from hybridflow.errors.log import log
from hybridflow.roles.model import Update
from hybridflow.rundir.atomic_files import AppendedFile

Event = Mapping[str, Any]
"""An event: its kind as "event", and the fields of this kind."""

_STEP = re.compile(rb'\{"step": (\d{1,18}), ')


class EventLog:
    """The events of one run.

    Args:
        path: of the file.
        steps_done: that the run resumes after: events of later ones are cut off; None for a run that begins.
        enabled: true if any are written.
    """

    def __init__(self, path: Path, steps_done: int | None, *, enabled: bool = True) -> None:
        self._path, self._steps_done, self.enabled = path, steps_done, enabled
        self._file: AppendedFile | None = None
        self._missing: tuple[int, int] | None = None

    def __enter__(self) -> EventLog:
        if not self.enabled:
            return self
        try:
            if self._steps_done is not None and self._path.exists():
                forget_later_events(self._path, self._steps_done)
            self._file = AppendedFile(self._path)
        except OSError as error:
            log.warning(f"events: {self._path} cannot be written: {error.strerror}; the run continues without it")
            self.enabled = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def write(self, step: int, events: Sequence[Event]) -> None:
        """Write the events of a step, all or none of them: on a full disk they are lost, which one line says."""
        if self._file is None or not events:
            return
        lines = [json.dumps({"step": step, **event}, allow_nan=False) for event in events]
        try:
            self._file.add("\n".join(lines) + "\n")
        except OSError as error:
            if self._missing is None:
                continues = termination.unless_ending("; training continues")
                log.warning(f"events: {self._path} lacks those of step {step} on: {error.strerror}{continues}")
            self._missing = (step if self._missing is None else self._missing[0]), step
            return
        if self._missing is not None:
            first, last = self._missing
            of = f"step {first}" if first == last else f"steps {first} to {last}"
            log.info(f"events: written again from step {step} on; those of {of} are missing")
            self._missing = None


def trained_event(
    batch: RemoteBatch,
    recalled: Iterable[int],
    mini_batches: Sequence[RemoteBatch],
    updates: Mapping[int, list[Update]],
) -> Event:
    """The event of what a step has trained on.

    Args:
        batch: in the order that was trained on.
        recalled: ids of the samples among them that an algorithm has kept from an earlier step.
        mini_batches: of each pass, in order.
        updates: of the actor that were requested, by their number in all passes, as each rank reports them.
    """
    return {
        "event": "trained",
        "samples": batch.per_sample["sample_ids"].tolist(),
        "recalled": sorted(recalled),
        "mini_batches": [len(mini_batch) for mini_batch in mini_batches],
        "actor_updates": list(updates),
        "refused": [number for number, ranks in updates.items() if ranks[0].refused],
        "skipped": [number for number, ranks in updates.items() if not (ranks[0].applied or ranks[0].refused)],
    }


def forget_later_events(path: Path, step: int) -> None:
    """Cut off what a run that resumes after `step` will decide again, and what a kill has left half written.

    Raises:
        OSError: it cannot be read or cut.
    """
    end = 0
    with path.open("rb") as file:
        for line in file:
            match = _STEP.match(line)
            if match is None or int(match[1]) > step or not line.endswith(b"\n"):
                break
            end += len(line)
    os.truncate(path, end)
