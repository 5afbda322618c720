"""The outcome of a run in one sentence, from the files of its directory."""

from __future__ import annotations

from pathlib import Path

from hybridflow.rundir.first_failure import read_failure
from hybridflow.rundir.kept_recipe import kept_setting, read_kept_recipe
from hybridflow.rundir.run_record import RunRecord
from hybridflow.rundir.watching import Place, goes_on, read_place


def read_outcome(directory: Path, record: RunRecord | None) -> str:
    """The sentence, and below it a line for each measurement of a finished run; empty where the phase is not known.

    Args:
        directory: of the run.
        record: of its starts and its end, if it has one.

    Raises:
        UserError: a file of the run is damaged.
    """
    place = read_place(directory)
    if place is None:
        return ""
    began = record.starts[0].at if record is not None else None
    steps = kept_setting(read_kept_recipe(directory), "trainer.steps")
    if goes_on(directory):
        return f"Running: {_where(place, steps)}."
    if place.phase == "end":
        ended = record.ended if record is not None and record.ended is not None else place.since
        results = "".join(f"\n{line}" for line in (record.results if record is not None else ()))
        done = f" all {steps:,} steps" if isinstance(steps, int) else ""
        return f"Finished{done}{_span('in', began, ended)}.{results}"
    failure = read_failure(directory)
    if failure is not None:
        return f"Failed in {failure.phase}{_span('after', began, failure.at)}: {failure.cause}"
    return f"Stopped in {_where(place, steps)}{_span('after', began, place.since)}."


def _where(place: Place, steps: object) -> str:
    of = f" of {steps:,}" if isinstance(steps, int) else ""
    return f"step {place.step:,}{of}, {place.phase}" if place.step else f"phase {place.phase}"


def _span(word: str, began: float | None, now: float) -> str:
    if began is None:
        return ""
    seconds = max(0.0, now - began)
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f" {word} {seconds / size:.1f} {unit}"
    return f" {word} {seconds:.0f} s"
