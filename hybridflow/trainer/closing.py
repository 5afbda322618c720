"""The last lines of a run: where its results are, and how an interrupted one resumes."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from engine3d.checkpoint.manifest import read_manifest
from engine3d.errors import UserError
from hybridflow.checkpoint.resume import find_sound
from hybridflow.config.run import CheckpointConfig
from hybridflow.errors.redaction import redacted_words
from hybridflow.rundir.file_names import EXPORT, RECIPE, REPORT
from hybridflow.rundir.run_record import started_from

_READ_AT_END = 1 << 30
"""Shards that are no larger in all are compared with their checksums when a run has ended: who waits for a prompt waits
less than a second."""


def results(directory: Path, settings: CheckpointConfig, checkpoints: Path, *, exports: bool) -> list[str]:
    """One line for the model, the checkpoints and the report of a run that has done all its steps.

    Args:
        directory: of the run.
        settings: of checkpoints.
        checkpoints: directory of the run's checkpoints.
        exports: `trainer.export`.
    """
    checkpoint = newest_checkpoint(settings, checkpoints)
    if exports:
        model = f"{shown(directory / EXPORT)} (a HuggingFace directory)"
    elif checkpoint is not None:
        model = f"not exported; hybridflow checkpoint export {_quoted(checkpoint)} OUT does so"
    else:
        model = "not kept (trainer.export=false, checkpoint.save_interval=null)"
    saved = "none (checkpoint.save_interval=null)" if settings.save_interval is None else "none is whole"
    return [
        f"model        {model}",
        f"checkpoints  {shown(checkpoint) if checkpoint is not None else saved}",
        f"report       hybridflow report {_quoted(directory)} draws {shown(directory / REPORT)}",
    ]


def how_to_resume(
    directory: Path,
    settings: CheckpointConfig,
    checkpoints: Path,
    arguments: Sequence[str],
    damaged: Path | None = None,
) -> list[str]:
    """Say what is left of a run that ended early, and the command that resumes it.

    Args:
        directory: of the run, which it has begun to write; see `has_begun`.
        settings: of checkpoints.
        checkpoints: directory of the run's checkpoints.
        arguments: of `hybridflow train`: the recipe's file, overrides and options.
        damaged: the checkpoint in which ranks found damage.
    """
    kept = f"hybridflow: metrics and logs are in {shown(directory)}"
    checkpoint = newest_checkpoint(settings, checkpoints, damaged)
    first = _started_from(directory, checkpoints) if checkpoint is None else None
    if first not in (None, damaged):
        return [
            kept,
            f"hybridflow: no checkpoint of this run is complete yet; to resume from {first}, as it did:",
            f"  {resume_command(arguments)}",
        ]
    if checkpoint is None:
        every = settings.save_interval
        reason = (
            "this run saves no checkpoints (checkpoint.save_interval=10 saves one every ten steps)"
            if every is None
            else f"{damaged} is damaged, and there is no other checkpoint"
            if damaged is not None
            else "the first checkpoint was not complete yet"
        )
        return [kept, f"hybridflow: nothing to resume from: {reason}"]
    return [
        kept,
        f"hybridflow: the newest checkpoint is of step {read_manifest(checkpoint).step}; to resume after it:",
        f"  {resume_command(arguments)}",
    ]


def has_begun(directory: Path, settings: str) -> bool:
    """True if the run of a recipe, as YAML, has begun to write its directory."""
    try:
        return (directory / RECIPE).read_text() == settings
    except OSError:
        return False


def resume_command(arguments: Sequence[str]) -> str:
    """The command line that resumes a run of these arguments, quoted for a shell, without its secrets."""
    kept = [word for word in arguments if not word.startswith("resume=") and word != "--again"]
    return shlex.join(["hybridflow", "train", *redacted_words(kept), "resume=auto"])


def newest_checkpoint(settings: CheckpointConfig, directory: Path, damaged: Path | None = None) -> Path | None:
    """Find the newest checkpoint that can be resumed from; None if there is none, or the run saves none.

    Args:
        settings: of checkpoints.
        directory: of the run's checkpoints.
        damaged: one that it is not.
    """
    if settings.save_interval is None:
        return None
    try:
        complete, _ = find_sound(directory, most_bytes=_READ_AT_END)
    except UserError:
        return None
    return next(
        (checkpoint for checkpoint in complete if damaged is None or checkpoint.resolve() != damaged.resolve()), None
    )


def _started_from(run: Path, checkpoints: Path) -> Path | None:
    try:
        return started_from(run, checkpoints)
    except UserError:
        return None


def shown(path: Path) -> str:
    """A path as short as the directory where the command runs allows."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _quoted(path: Path) -> str:
    return shlex.quote(shown(path))
