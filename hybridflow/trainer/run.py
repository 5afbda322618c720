"""A run from its start to its end: its directory, its roles, its trainer, and what is left when it ends."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine3d.checkpoint.adapters import export_actor
from engine3d.cleaning import cleaning
from engine3d.errors import DamagedCheckpointError
from engine3d.models.lora.config import LoraConfig
from engine3d.models.lora.spec import AdapterSpec
from engine3d.training.config import TrainConfig
from hybridflow.checkpoint.driver_state import Measurements
from hybridflow.checkpoint.manager import Checkpoints
from hybridflow.checkpoint.resume import inexact_because
from hybridflow.checkpoint.set_results import Best, MeasuredSet, summary_of_best, summary_of_sets
from hybridflow.cluster.devices.device_monitor import DeviceMonitor
from hybridflow.cluster.processes.orphans import remove_orphans
from hybridflow.config.initial_model import initial_spec
from hybridflow.config.recipe import Recipe
from hybridflow.config.run import TrainerConfig
from hybridflow.errors.log import log
from hybridflow.metrics.timeline import timeline
from hybridflow.roles.config import ModelConfig
from hybridflow.rollout.config import RolloutRole
from hybridflow.rundir.file_names import DEVICES, EVENTS, EXPORT, SAMPLE_STORE, TIMELINE
from hybridflow.rundir.run_record import record_end
from hybridflow.rundir.status.lock import WEIGHTS, move_aside
from hybridflow.trainer.closing import results
from hybridflow.trainer.event_log import EventLog
from hybridflow.trainer.samples.store import SampleStore
from hybridflow.trainer.startup.role_startup import Roles, start_roles
from hybridflow.trainer.startup.run_setup import OpenRun, Run, open_run
from hybridflow.trainer.trainer import Trainer
from hybridflow.trainer.weight_sync import NoEngines, WeightSync


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Args:
        directory: of the run.
        first, last: the first and the last measurement of each held-out set, by its name.
    """

    directory: Path
    first: dict[str, MeasuredSet]
    last: dict[str, MeasuredSet]


def train(recipe: Recipe) -> Outcome:
    """Run a recipe to its end, and say how much better the model is.

    Raises:
        UserError: something that the user can put right.
        EngineError: a role failed; everything that was started is gone.
    """
    while True:
        with open_run(recipe) as opened:
            run = opened.run
            try:
                measurements, best = _run(opened)
            except DamagedCheckpointError as error:
                fall_back(opened, error)
                continue
            opened.phases.enter("end")
            measured = [*summary_of_sets(measurements.first, measurements.last), *summary_of_best(best)]
            with cleaning("hybridflow: the result could not be recorded", needed=False):
                record_end(run.directory, measured)
        recipe = opened.recipe
        kept = results(run.directory, recipe.checkpoint, recipe.checkpoint_directory, exports=recipe.trainer.export)
        for line in (*measured, *kept):
            log.info(line)
        return Outcome(run.directory, measurements.first, measurements.last)


def _run(opened: OpenRun) -> tuple[Measurements, Best | None]:
    """Lines on the evaluations of a finished run, and on the best checkpoint."""
    recipe, run = opened.recipe, opened.run
    resumed = run.resumption.state if run.resumption is not None else None
    if resumed is not None and resumed.step >= recipe.trainer.steps and not run.evaluation_due:
        verify = recipe.checkpoint.verify
        export_finished(run, recipe.trainer, dtype=recipe.train.dtype, verify=verify)
        return resumed.measurements, resumed.best
    with start_trainer(opened) as trainer:
        return trainer.run(), trainer.checkpoints.best


def fall_back(opened: OpenRun, error: DamagedCheckpointError) -> None:
    """Put the checkpoint aside that ranks could not load, so that `resume=auto` takes the one before it.

    Raises:
        DamagedCheckpointError: the recipe names this very checkpoint.
    """
    resumption = opened.run.resumption
    if opened.recipe.resume != "auto" or resumption is None:
        error.checkpoint = resumption.directory if resumption is not None else None
        raise error
    log.warning(f"resume: {error}; now {move_aside(resumption.directory)}, and the one before it is tried")


@contextmanager
def start_trainer(opened: OpenRun) -> Iterator[Trainer]:
    """Start the roles, and end them when the block is left."""
    recipe, run, sinks = opened.recipe, opened.run, opened.sinks
    timeline.clear()
    resumed = run.resumption.directory if run.resumption is not None else None
    if recipe.checkpoint.save_interval is None:
        log.info(
            "checkpoints: none, so that this run cannot be resumed; checkpoint.save_interval=10 saves every ten steps"
        )
    elif reasons := inexact_because(
        recipe.train, recipe.rollout if recipe.algorithm.needs_engines else None, recipe.functions
    ):
        log.info(f"checkpoints: a resumed run may differ from this one by {'; '.join(reasons)}")
    with (
        # Entered first and so left last: when the groups are gone, it waits for them no more.
        ThreadPoolExecutor(1, thread_name_prefix="eval") as evaluating,
        Checkpoints(recipe, run.model_directory, sinks, resumed) as checkpoints,
        start_roles(recipe, run) as roles,
        DeviceMonitor(
            (bundle for group in roles.groups for bundle in group.pool.bundles),
            recipe.metrics.device_interval_s,
            run.directory / DEVICES,
        ) as devices,
        _weight_sync(recipe.model, recipe.train, recipe.rollout, recipe.served_adapters, run, roles) as weights,
        SampleStore(recipe.samples, run.directory / SAMPLE_STORE, run.steps_done) as samples,
        EventLog(run.directory / EVENTS, run.steps_done, enabled=recipe.samples.events) as events,
    ):
        checkpoints.after = samples.written  # a resumed run has the samples of the steps before it
        trainer = Trainer(
            recipe, run, roles, weights, sinks, checkpoints, opened.phases, devices, samples, events, evaluating
        )
        try:
            yield trainer
        finally:
            trainer.source.close()
            write_timeline(run.directory)


def _weight_sync(
    model: ModelConfig, train: TrainConfig, rollout: RolloutRole, adapters: LoraConfig | None, run: Run, roles: Roles
) -> WeightSync | NoEngines:
    if roles.rollout is None:
        return NoEngines()
    spec = train.with_mtp(train.fp8.applied(initial_spec(model)))
    apart = AdapterSpec.of(spec, adapters) if adapters is not None else None
    return WeightSync(roles.actor, roles.rollout, spec, rollout, run.directory / WEIGHTS, roles.leased, apart)


def write_timeline(directory: Path) -> None:
    """Write the run's timeline; what keeps it from being written neither fails the run nor hides its failure."""
    path = directory / TIMELINE
    with cleaning(f"hybridflow: {path} could not be written", needed=False):
        timeline.write(path)


def export_finished(run: Run, settings: TrainerConfig, *, dtype: str, verify: bool) -> None:
    """Export a run that has done all its steps, from its last checkpoint, if it has not been."""
    assert run.resumption is not None
    remove_orphans()  # perhaps of this run, killed after its last step
    directory = run.directory / EXPORT
    state, steps = run.resumption.state, settings.steps
    past = f"; the checkpoint is after step {state.step}" if state is not None and state.step > steps else ""
    log.info(f"resume: all {steps} steps are done{past}; a larger trainer.steps trains on")
    if settings.export and not directory.exists():
        export_actor(run.resumption.directory, directory, run.model_directory, dtype=dtype, verify=verify)
