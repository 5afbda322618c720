"""Saves a run's checkpoints: at most one at a time, during training, and never at the cost of an older one."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import platform as machine
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

from engine3d.checkpoint.hf import copy_model_files
from engine3d.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    RoleSummary,
    file_entry,
    find_checkpoints,
    prune,
    remove_checkpoint,
    remove_partial,
    step_directory,
    write_manifest,
)
from engine3d.errors import EngineError, UserError
from hybridflow.checkpoint.driver_state import Measurements, RunState
from hybridflow.checkpoint.set_results import RESULTS, Best, best_of, write_results
from hybridflow.cluster.processes.termination import termination
from hybridflow.config.reading.yaml_loader import public_settings
from hybridflow.config.recipe import Recipe
from hybridflow.errors.log import log
from hybridflow.metrics import names as metrics
from hybridflow.metrics.logger import Metrics, Timer
from hybridflow.roles.groups import ModelGroup
from hybridflow.roles.model import CheckpointBegun, CheckpointFailure
from hybridflow.rundir.status.lock import hold, move_aside
from hybridflow.workers.future import Future

_POLL_S = 0.02
_SOFTWARE = ("hybridflow", "torch", "megatron-core", "sglang", "ray", "transformers")


class _SaveError(Exception):
    """Why a checkpoint did not become whole."""


@dataclass
class _Save:
    """A save in flight.

    Args:
        directory: the checkpoint's.
        trained: the roles whose ranks write, by name.
        state: the driver's, as it was when the save began.
        values: metrics that are logged of it.
        started: when it began, by `time.perf_counter`.
        made: whether the directory is this save's: what it did not make it does not remove.
        roles: summary of each role for the manifest.
    """

    directory: Path
    trained: Mapping[str, ModelGroup]
    state: RunState
    values: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)
    made: bool = False
    roles: dict[str, RoleSummary] = field(default_factory=dict)

    def role(self, name: str) -> Path:
        """The directory of a role's state."""
        return self.directory / name

    def abandon(self) -> None:
        """Give up what any role has begun.

        Raises:
            EngineError: a role is dead; the others have given up all the same.
        """
        calls: dict[str, Future[list[None]]] = {}
        dead: list[EngineError | UserError] = []
        for name, group in self.trained.items():
            try:
                calls[name] = group.abandon_checkpoint()
            except (EngineError, UserError) as error:
                dead.append(error)
        _collect(calls)
        if dead:
            raise dead[0]

    def remove(self) -> None:
        """Remove what was written, as far as that is possible."""
        if self.made:
            with contextlib.suppress(OSError):
                remove_checkpoint(self.directory)


class Checkpoints:
    """The checkpoints of one run.

    To be entered before the roles start, so that it is left when they are gone: a save that is then in flight will
    never be complete, and its directory is removed.

    Args:
        recipe: with the settings of checkpoints.
        model_directory: HuggingFace directory of the initial weights, whose other files every checkpoint gets.
        sinks: get a record of phase "checkpoint" for each, with the step that was saved.
        resumed: the checkpoint that the run resumes from.
    """

    def __init__(self, recipe: Recipe, model_directory: Path, sinks: Metrics, resumed: Path | None = None) -> None:
        self._recipe, self._model_directory, self._sinks = recipe, model_directory, sinks
        self._settings, self._resumed = recipe.checkpoint, resumed
        self._root = recipe.checkpoint_directory
        self._save: _Save | None = None
        self._lock: TextIO | None = None
        self.after: Callable[[int], bool] = lambda step: True
        """Whether a checkpoint of this step may become whole; asked again later where not."""
        self.best: Best | None = None
        """The best whole checkpoint of this directory."""

    def resume(self, best: Best | None) -> None:
        """Keep the best checkpoint if this directory has it: a run may be resumed under another name."""
        self.best = best if best is not None and self.has(best.step) else None

    def __enter__(self) -> Checkpoints:
        """Make the directory; remove what saves that were killed left in it.

        Raises:
            UserError: it cannot be made, or another run saves there.
        """
        if self._settings.save_interval is not None:
            try:
                self._root.mkdir(parents=True, exist_ok=True)
                self._lock = hold(self._root, "checkpoint.dir")
                for partial in remove_partial(self._root):
                    log.info(f"checkpoint: removed {partial.directory}: {partial.reason}")
                self._move_damaged()
            except OSError as error:
                raise UserError(f"checkpoint.dir: cannot use {self._root}: {error.strerror}") from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._save is not None and not (self._save.directory / MANIFEST).is_file():
            self._save.remove()
        if self._lock is not None:
            self._lock.close()

    def _move_damaged(self) -> None:
        """Put what is damaged, and was skipped, out of the way of the checkpoints that will be made.

        Older ones than the one that the run resumes from are in nobody's way.
        """
        complete, skipped = find_checkpoints(self._root)
        if self._resumed is not None and self._resumed.parent.resolve() == self._root.resolve():
            directories = (*complete, *(skip.directory for skip in skipped))
            damaged = [directory for directory in directories if directory.name > self._resumed.name]
        else:
            damaged = [skip.directory for skip in skipped if not complete or skip.directory.name > complete[0].name]
        for directory in sorted(damaged):
            log.info(f"checkpoint: {directory} is damaged; now {move_aside(directory)}")

    def due(self, step: int) -> bool:
        """True if a checkpoint is due after this step; 0 is the end of the warm-up."""
        interval = self._settings.save_interval
        if interval is None:
            return False
        if step == 0:
            return self._recipe.warmup is not None
        return step % interval == 0 or step == self._recipe.trainer.steps

    def has(self, step: int) -> bool:
        """True if the checkpoint of this step is complete."""
        directory = step_directory(self._root, step)
        return not self.begun(step) and directory in find_checkpoints(self._root)[0]

    def begun(self, step: int) -> bool:
        """True if the checkpoint of this step is being written."""
        return self._save is not None and self._save.state.step == step

    def save(self, trained: Mapping[str, ModelGroup], state: RunState) -> None:
        """Begin to save; wait for the previous save, if it is still in flight.

        Args:
            trained: every role that is trained, by the name that its directory and its facts get.
            state: the driver's.

        Raises:
            EngineError: a save failed, and the recipe says that the run is to stop then.
        """
        self.wait()
        state = replace(state, best=best_of(self._settings.keep_best, self.best, state.last_measured, state.step))
        self._save = save = _Save(step_directory(self._root, state.step), trained, state)
        try:
            with Timer(save.values, metrics.CHECKPOINT_STALL):
                self._begin(save)
        except (_SaveError, EngineError, UserError, OSError) as error:
            self._fail(save, error)
        else:
            if not self._settings.async_save:
                self.wait()

    def evaluated(self, step: int, measurements: Measurements, samples_drawn: int) -> None:
        """The evaluation of a step has ended, which was due when the checkpoint of the step was begun, if it was.

        Args:
            step: that was evaluated.
            measurements: with those of the evaluation.
            samples_drawn: with the ids of its responses.
        """
        best = best_of(self._settings.keep_best, self.best, measurements.last, step)
        if self._save is not None and self.begun(step):
            self._save.state = replace(self._save.state.evaluated(measurements, samples_drawn), best=best)
        elif self._settings.save_interval is not None and self.has(step):
            self.best = best
            directory = step_directory(self._root, step)
            try:
                write_results(directory, measurements.last, best)
            except OSError as error:
                log.warning(f"{directory / RESULTS} cannot be written: {error.strerror}")

    def poll(self) -> None:
        """Complete the save in flight, if all of it is written. Raises as `save`."""
        if self._save is not None and self._is_written(self._save):
            self._finish(self._save)

    def wait(self) -> None:
        """Wait until no save is in flight. Raises as `save`."""
        if (save := self._save) is None:
            return
        with Timer(save.values, metrics.CHECKPOINT_STALL):
            limit_s = self._recipe.limits.save_s
            deadline = time.monotonic() + limit_s
            while not self._is_written(save):
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"checkpoint: {save.directory} was not written within limits.save_s={limit_s:g} s"
                    )
                time.sleep(_POLL_S)
        self._finish(save)

    def _begin(self, save: _Save) -> None:
        if save.directory.exists() and save.directory not in find_checkpoints(self._root)[0]:
            log.info(f"checkpoint: {save.directory} is not whole; now {move_aside(save.directory)}")
        save.directory.mkdir()  # not its parents: a root that has vanished is not this run's to make again
        save.made = True
        background = self._settings.async_save
        for name in save.trained:
            save.role(name).mkdir()
        calls = {
            name: group.begin_checkpoint(save.role(name), background=background) for name, group in save.trained.items()
        }
        begun: dict[str, list[CheckpointBegun]] = _succeeded(_collect(calls))
        save.roles = {name: ranks[0].summary for name, ranks in begun.items()}
        took = [rank.begun for ranks in begun.values() for rank in ranks]
        save.values[metrics.CHECKPOINT_BYTES] = sum(begin.nbytes for begin in took)
        save.values[metrics.CHECKPOINT_HOST_BYTES] = max(begin.host_bytes for begin in took)

    def _is_written(self, save: _Save) -> bool:
        calls = {name: group.checkpoint_written() for name, group in save.trained.items()}
        return all(all(ranks) for ranks in _collect(calls).values()) and self.after(save.state.step)

    def _finish(self, save: _Save) -> None:
        try:
            # Ranks report the files of a save once.
            with Timer(save.values, metrics.CHECKPOINT_STALL), termination.completing():
                self._make_whole(save)
        except (_SaveError, EngineError, UserError, OSError) as error:
            self._fail(save, error)
            return
        self._save = None
        save.values[metrics.CHECKPOINT_COMPLETE_AFTER] = time.perf_counter() - save.started
        self.best = save.state.best
        if self.best is not None:
            best_metrics = {
                metrics.CHECKPOINT_BEST_STEP: self.best.step,
                metrics.CHECKPOINT_BEST_VALUE: self.best.value,
            }
            save.values |= best_metrics
        if self._settings.keep_last_k is not None:
            try:
                with Timer(save.values, metrics.CHECKPOINT_STALL):
                    best = () if self.best is None else (self.best.step,)
                    prune(self._root, self._settings.keep_last_k, best)
            except (OSError, UserError) as error:
                log.warning(f"an old checkpoint could not be removed: {error}")
        self._sinks.log(save.state.step, save.values, phase="checkpoint")

    def _make_whole(self, save: _Save) -> None:
        """Write all but the ranks' files, and at the very end the manifest."""
        calls = {name: group.finish_checkpoint() for name, group in save.trained.items()}
        written: dict[str, list[list[FileEntry]]] = _succeeded(_collect(calls))
        files = [
            replace(entry, path=f"{name}/{entry.path}")
            for name, ranks in written.items()
            for entries in ranks
            for entry in entries
        ]
        files += [file_entry(save.directory, path) for path in save.state.write(save.directory)]
        files += copy_model_files(self._model_directory, save.directory)
        for role in save.trained:
            model = self._recipe.models.get(role)
            if model is not None and model.path is not None:
                files += copy_model_files(model.path, save.directory, role)
        manifest = Manifest(
            step=save.state.step,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            roles=save.roles,
            recipe=public_settings(self._recipe),
            software=software(),
            files=tuple(files),
        )
        write_manifest(save.directory, manifest)

    def _fail(self, save: _Save, error: Exception) -> None:
        save.abandon()
        save.remove()
        self._save = None
        cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        line = f"the checkpoint of step {save.state.step} could not be saved in {save.directory}: {cause}"
        values = {metrics.CHECKPOINT_FAILED: 1.0, metrics.CHECKPOINT_STALL: save.values[metrics.CHECKPOINT_STALL]}
        self._sinks.log(save.state.step, values, phase="checkpoint")
        if self._settings.on_failure == "stop":
            raise EngineError(line) from None
        log.warning(line + termination.unless_ending("; training continues"))


def software() -> dict[str, str]:
    """The versions of what a checkpoint is made with."""
    versions = {"python": machine.python_version()}
    for name in _SOFTWARE:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return versions


def _collect[Answers](calls: Mapping[str, Future[Answers]]) -> dict[str, Answers]:
    """Collect the answers of the ranks of each role. All answer before the error of a role that died is raised."""
    answers: dict[str, Answers] = {}
    errors: list[EngineError | UserError] = []
    for name, call in calls.items():
        try:
            answers[name] = call.result()
        except (EngineError, UserError) as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return answers


def _succeeded[Answer](answers: Mapping[str, list[Answer | CheckpointFailure]]) -> dict[str, list[Answer]]:
    """The answers of all ranks; _SaveError with the first failure, if there is one."""
    for name, ranks in answers.items():
        for rank, answer in enumerate(ranks):
            if isinstance(answer, CheckpointFailure):
                raise _SaveError(f"{name} rank {rank}: {answer.reason}")
    return {
        name: [answer for answer in ranks if not isinstance(answer, CheckpointFailure)]
        for name, ranks in answers.items()
    }
