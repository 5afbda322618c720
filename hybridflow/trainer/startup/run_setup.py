"""Run set-up: its directory, its model and tokenizer, its examples as tokens, and where its metrics go."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from transformers import PreTrainedTokenizerBase

from engine3d.durable import naming
from engine3d.errors import EngineError, UserError
from engine3d.models import ModelSpec
from hybridflow.checkpoint.compatibility import input_checksums
from hybridflow.checkpoint.own_code import code_checksums
from hybridflow.checkpoint.resume import (
    RUN_IDENTITY,
    Resumption,
    find_resumption,
    keep_warmed_up,
    run_identity,
)
from hybridflow.cluster.driver_link import tell_directory
from hybridflow.cluster.hosts.checks.facts import checkout_commit, installed_versions
from hybridflow.cluster.hosts.checks.host_check import check_interpreter, check_open_files
from hybridflow.cluster.ray.ray_session import keep_hosts
from hybridflow.config.initial_model import create_model, initial_spec
from hybridflow.config.reading.yaml_loader import settings_yaml
from hybridflow.config.recipe import Recipe
from hybridflow.data.prompts import Prompts
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.errors.log import log
from hybridflow.metrics.logger import Metrics
from hybridflow.planning.data.recipe_prompts import RecipePrompts
from hybridflow.planning.data.report import first_prompt
from hybridflow.rundir.file_names import FLIGHT_RECORDER, INITIAL, LOGS, PHASE, RECIPE
from hybridflow.rundir.private import umask_restored
from hybridflow.rundir.run_record import record_start
from hybridflow.rundir.status.first_failure import forget_failures
from hybridflow.rundir.status.heartbeat import forget_heartbeats
from hybridflow.rundir.status.lock import LOCK, SETTING, claim, hold
from hybridflow.rundir.status.progress import PhaseFile


@dataclass(frozen=True)
class Run:
    """The set-up of a run, which does not change.

    Args:
        directory: `<run_dir>/<name>`: logs, metrics and the exported model.
        model_directory: HuggingFace directory of the initial weights.
        answers: response token ids of the supervised examples.
        masks: which of these are learned; all if None.
        inputs: what identifies the files that the run was given, by the setting that names them.
        identity: of this run, however often it is resumed.
        sets: the held-out prompts, by the name of the set.
        resumption: the checkpoint that the run resumes from; None for a fresh start.
    """

    directory: Path
    model_directory: Path
    tokenizer: PreTrainedTokenizerBase
    train: Prompts
    sft: Prompts
    answers: Sequence[list[int]]
    masks: Sequence[list[bool]] | None
    inputs: dict[str, str]
    identity: str
    sets: Mapping[str, Prompts]
    resumption: Resumption | None
    lock: TextIO
    """Held as long as the run lasts."""

    def check_directory(self) -> None:
        """Check that the directory is still that of this run.

        Raises:
            EngineError: it was removed, or another has taken its place.
        """
        try:
            if os.path.samestat((self.directory / LOCK).stat(), os.fstat(self.lock.fileno())):
                return
        except FileNotFoundError:
            pass
        except OSError:
            return  # a file system that does not answer has not lost it
        raise EngineError(
            f"run directory {self.directory} was removed or replaced during the run; metrics, logs and the "
            "model have no place"
        )

    @property
    def steps_done(self) -> int:
        """Steps after which the run resumes; 0 of one that begins."""
        state = self.resumption.state if self.resumption is not None else None
        return 0 if state is None else state.step

    @property
    def evaluation_due(self) -> bool:
        """True if the run resumes before the evaluation of that step."""
        state = self.resumption.state if self.resumption is not None else None
        return state is not None and state.evaluation_due

    @property
    def log_directory(self) -> Path:
        return self.directory / LOGS

    def trace_path(self, step: int, role: str) -> Path:
        """Path of the trace of a role's update, where `trainer.profile` asks for one."""
        return self.directory / "profile" / f"step-{step}-{role}.json.gz"

    def rollout_trace_directory(self, step: int) -> Path:
        """Directory of the traces of the first engine's ranks, where `trainer.profile` asks for some."""
        return self.directory / "profile" / f"step-{step}-rollout"


@dataclass(frozen=True)
class OpenRun:
    """A run whose directory is held, before and after its roles.

    Args:
        recipe: with the steps that its number of prompts means.
        run: the rest of what is known of it.
        sinks: its metrics.
        phases: file of its current phase.
    """

    recipe: Recipe
    run: Run
    sinks: Metrics
    phases: PhaseFile


@contextmanager
def open_run(recipe: Recipe) -> Iterator[OpenRun]:
    """Prepare a run and open its metrics. At the end of the block close them, and restore the umask.

    Raises as `prepare` does.
    """
    with umask_restored():
        run = prepare(recipe)
        tell_directory(run.directory)
        keep_hosts(run.directory)
        with run.lock:
            recipe = recipe.for_prompts(len(run.train))
            phases = PhaseFile(run.directory / PHASE)
            phases.enter("start")
            state = run.resumption.state if run.resumption is not None else None
            done = state.step if state is not None else None
            with Metrics(recipe.metrics, run.directory, totals=recipe.phase_steps, resume_from_step=done) as sinks:
                yield OpenRun(recipe, run, sinks, phases)


def _record_start(directory: Path, spec: ModelSpec, resumption: Resumption | None) -> None:
    state = resumption.state if resumption is not None else None
    record_start(
        directory,
        state.step if state is not None else None,
        installed_versions(),
        checkout_commit(),
        spec.parameter_count(),
        spec.active_parameter_count(),
        resumption.directory if resumption is not None else None,
    )


def prepare(recipe: Recipe) -> Run:
    """Make the run's directory and model, and encode its examples; or find those of the run that resumes.

    Raises:
        UserError: this process cannot have what a run needs, a run of this name is there or runs, model,
            tokenizer or examples do not fit, or the recipe contradicts the checkpoint that it is to resume from.
    """
    check_interpreter()
    check_open_files()
    directory = recipe.directory
    if recipe.model.path is not None and recipe.model.path.is_relative_to(directory):
        raise UserError(f"model.path: {recipe.model.path} is in the directory of this run; choose another name")
    # Held already while the checkpoints are looked at, so that the run that makes them has ended.
    lock = hold(directory, SETTING) if directory.is_dir() else None
    resumption, notes = find_resumption(recipe)
    for note in notes:
        log.info(note)
    in_place = resumption is not None and resumption.in_place
    if resumption is not None and not in_place and resumption.directory.is_relative_to(directory):
        raise UserError(
            f"resume: {resumption.directory} is another run's, in this one's directory; choose another name"
        )
    # With resume=auto a run that ended before its first checkpoint begins again, as a launcher's restarts do.
    overwrite = recipe.overwrite or recipe.resume == "auto"
    lock = claim(directory, in_place=in_place, overwrite=overwrite, private=recipe.private, lock=lock)
    forget_failures(directory)  # those before it was resumed
    shutil.rmtree(directory / FLIGHT_RECORDER, ignore_errors=True)
    forget_heartbeats(directory / LOGS)
    with naming(directory / RECIPE):
        (directory / RECIPE).write_text(settings_yaml(recipe))  # first: by it a run that was killed at once is known
    if not in_place:
        with naming(directory / RUN_IDENTITY):
            (directory / RUN_IDENTITY).write_text(f"{uuid.uuid4().hex}\n")
    model_directory = recipe.model.path or directory / INITIAL
    _record_start(directory, initial_spec(recipe.model), resumption)
    # A resumed run compares with the weights that it began with, whatever its seed is now.
    if recipe.model.create is not None and not (in_place and model_directory.is_dir()):
        began = resumption.manifest.recipe if resumption is not None else {}
        create_model(recipe.model, model_directory, seed=began.get("seed", recipe.seed))
    if resumption is not None and recipe.reference_is_warmed_up:
        keep_warmed_up(recipe.checkpoint_directory, resumption)
    tokenizer = load_tokenizer(model_directory)
    prompts = RecipePrompts(recipe, tokenizer)
    encoded = prompts.of_training
    if recipe.data.files is not None:
        log.info(first_prompt(tokenizer, encoded.train))
    return Run(
        directory,
        model_directory,
        tokenizer,
        train=encoded.train,
        sft=encoded.sft,
        answers=encoded.answers,
        masks=encoded.masks,
        inputs=input_checksums(recipe.algorithm.name, recipe.model.path, recipe.data)
        | code_checksums(recipe.functions, recipe.environment),
        sets=prompts.sets,
        identity=run_identity(directory) or "",
        resumption=resumption,
        lock=lock,
    )
