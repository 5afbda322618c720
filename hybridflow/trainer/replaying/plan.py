"""The plan of a replay: the step, its checkpoint and its samples, found before anything is started."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine3d.checkpoint.manifest import Manifest, find_checkpoints, read_manifest
from engine3d.checkpoint.reading.verify import damaged_description
from engine3d.errors import UserError
from engine3d.input_files import parse_json
from engine3d.platform import platform
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.checkpoint.driver_state import DRIVER, RunState
from hybridflow.checkpoint.manager import software
from hybridflow.checkpoint.resume import run_identity
from hybridflow.config.reading.yaml_loader import parse_override, public_settings
from hybridflow.config.recipe import Recipe, load_run_recipe
from hybridflow.config.replay_recipe import ReplayRecipe
from hybridflow.rundir.actor_runs import runs_in
from hybridflow.rundir.atomic_files import whole_lines
from hybridflow.rundir.file_names import EVENTS, METRICS, SAMPLE_STORE
from hybridflow.rundir.kept_recipe import saved_to
from hybridflow.rundir.samples.config import SamplesConfig
from hybridflow.rundir.samples.files import stored_steps
from hybridflow.rundir.status.watching import checked_run
from hybridflow.trainer.replaying.stored_step import StepMetadata, all_learned

_SAVE_NONE = 1_000_000_000
_OWN = (
    "overwrite=true",
    "checkpoint.accept=[]",
    "checkpoint.dir=null",
    "checkpoint.on_stop_s=null",
    "checkpoint.keep_last_k=null",
    "checkpoint.keep_best=null",
    "checkpoint.async_save=false",
    f"checkpoint.save_interval={_SAVE_NONE}",
    "samples={store: false, events: false}",
    "metrics.samples_per_step=0",
    "metrics.csv=false",
    "metrics.jsonl=true",
    "metrics.tensorboard=false",
    "metrics.wandb=false",
    "metrics.mlflow=false",
    "metrics.trackio=false",
    "trainer.export=false",
    "trainer.profile=null",
)
"""Settings of every replay."""
_OF_THE_LOOP = (
    "trainer.steps",
    "trainer.epochs_of_data",
    "trainer.async_evaluation",
    "evaluation",
    "trainer.export",
    "trainer.profile",
)
_LIBRARIES = ("torch", "megatron-core", "python")
_OF_NO_RESULT = ("name", "run_dir", "resume", "overwrite", "checkpoint", "samples", "metrics", "limits", "network")
"""Groups of settings that do not change what a step makes of its samples."""


@dataclass(frozen=True)
class Original:
    """The run's own record of a step.

    Args:
        path: its samples; None of a step that has updated nothing.
        metadata: of these.
        metrics: of the step.
        digests: of the weights that it has made, of each rank of the actor; none where no event has them.
    """

    path: Path | None
    metadata: StepMetadata | None
    metrics: Mapping[str, Any]
    digests: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReplayPlan:
    """The plan by which a step is made again.

    Args:
        run: the directory of the run.
        step: that is made again.
        base: the step after which it begins; 0 is the beginning.
        checkpoint: after that step; None at the beginning of a run that has none there.
        after: the run's own checkpoint after the step that is made again; None where there is none.
        recipe: of the replay.
        steps: what is known of each step from the one after `base` on.
        changed: the settings in which the replay differs from the run.
        inexact: why its bits may differ from the run's; nothing where they may not.
    """

    run: Path
    step: int
    base: int
    checkpoint: Path | None
    after: Path | None
    recipe: ReplayRecipe
    steps: Mapping[int, Original]
    changed: tuple[str, ...]
    inexact: tuple[str, ...]

    def lines(self) -> list[str]:
        """Describe the plan."""
        start = f"its checkpoint of step {self.base}" if self.checkpoint is not None else "its beginning"
        steps = f"step {self.step}" if self.base + 1 == self.step else f"steps {self.base + 1} to {self.step}"
        lines = [f"replay: {steps} of {self.run} from {start} and its samples, into {self.recipe.directory}"]
        return lines + [f"replay: the same bits are not expected: {reason}" for reason in self.inexact]


def plan_replay(run: Path, step: int, overrides: Sequence[str] = ()) -> ReplayPlan:
    """Find out how a step can be made again.

    Args:
        run: the directory of a run.
        step: its number.
        overrides: `key=value`, such as another layout or placement.

    Raises:
        UserError: it cannot be; in one line that says what is missing.
    """
    if len(actors := runs_in(run)) > 1:
        raise UserError(f"{run} holds the runs of several actors, expected one: {', '.join(map(str, actors))}")
    run = checked_run(run).absolute()
    kept = load_run_recipe(run)
    recorded = _step_metrics(run)
    if step not in recorded:
        there = f"{min(recorded)} to {max(recorded)}" if recorded else "none"
        raise UserError(f"replay: the run in {run} has done no step {step}; its {METRICS} has the steps {there}")
    base, checkpoint = _beginning(run, step, kept.resume, warms_up=kept.warmup is not None)
    steps = _originals(run, kept.samples, range(base + 1, step + 1), recorded)
    recipe = _replay_recipe(run, kept.actor, step, checkpoint, overrides)
    _check_versions(run, base, checkpoint, steps)
    changed = tuple(_changed(public_settings(kept), public_settings(recipe)))
    _check_what_is_stored(kept.algorithm, steps)
    after = _checkpoints(run).get(step)
    saved = [read_manifest(directory) for directory in (checkpoint, after) if directory is not None]
    inexact = tuple(_inexact(kept, changed, saved, steps, deterministic=recipe.train.deterministic))
    return ReplayPlan(run, step, base, checkpoint, after, recipe, steps, changed, inexact)


def _step_metrics(run: Path) -> dict[int, dict[str, Any]]:
    """The metrics of each training step."""
    path = run / METRICS
    if not path.exists():
        raise UserError(f"no {path}: the run wrote none (metrics.jsonl=false), or has done no step")
    by_step: dict[int, dict[str, Any]] = {}
    for line in whole_lines(path):
        try:
            record = parse_json(line)
            if record["phase"] == "train":
                by_step[int(record["step"])] = record
        except (ValueError, KeyError, TypeError, OverflowError):
            raise UserError(f"{path} holds {line.strip()[:60]!r}, expected an object with phase and step") from None
    return by_step


def _checkpoints(run: Path) -> dict[int, Path]:
    """The run's own whole checkpoints by step, the newest first."""
    root = saved_to(run)
    if root is None or not root.is_dir():
        return {}
    return {
        read_manifest(directory).step: directory
        for directory in find_checkpoints(root)[0]
        if (directory / DRIVER).is_file()
    }


def _beginning(run: Path, step: int, resume: str | Path, *, warms_up: bool) -> tuple[int, Path | None]:
    """The nearest step before that the replay can begin after, and its checkpoint."""
    identity = run_identity(run)
    skipped = []
    for number, directory in _checkpoints(run).items():
        if number >= step:
            continue
        if damage := damaged_description(directory):
            skipped.append(f"{directory.name}: {damage}")
        elif RunState.read(directory).run != identity:
            skipped.append(f"{directory.name} is another run's")
        else:
            return number, directory
    if resume in ("none", "auto") and not warms_up:
        return 0, None
    why = "it began with a warm-up" if warms_up else f"it resumed after {resume}"
    also = f" ({'; '.join(skipped)})" if skipped else ""
    raise UserError(
        f"replay: no checkpoint before step {step} is left of the run in {run}{also}, and {why}; expected a smaller "
        "checkpoint.save_interval, and checkpoint.keep_last_k to keep more"
    )


def _originals(
    run: Path, samples: SamplesConfig, steps: range, recorded: Mapping[int, Mapping[str, Any]]
) -> dict[int, Original]:
    store = run / SAMPLE_STORE
    try:
        files = stored_steps(store)
    except OSError as error:
        raise UserError(f"{store} cannot be read: {error.strerror}") from None
    if lost := next((number for number in steps if number not in recorded), None):
        raise UserError(
            f"replay: {METRICS} of the run in {run} has no step {lost}, which is needed from step {steps[0]} on; "
            "expected a step before which there is a later checkpoint"
        )
    learned = {number: "train/update_time_ms" in recorded[number] for number in steps}
    if missing := [number for number in steps if learned[number] and number not in files]:
        has = f"it has those of steps {min(files)} to {max(files)}" if files else "it has none"
        why = "samples.store=false" if not samples.store else f"samples.keep_mb={samples.keep_mb}"
        raise UserError(
            f"replay: no samples of step {missing[0]} in {store}, which are needed from step {steps[0]} on; {has} "
            f"({why}; or the disk was full)"
        )
    digests = _digests(run)
    return {
        number: Original(
            files[number] if learned[number] else None,
            StepMetadata.read(files[number]) if learned[number] else None,
            recorded[number],
            digests.get(number, ()),
        )
        for number in steps
    }


def _digests(run: Path) -> dict[int, tuple[str, ...]]:
    """Digests of the weights that each step has made, as events have them."""
    path = run / EVENTS
    digests: dict[int, tuple[str, ...]] = {}
    if path.is_file():
        for line in whole_lines(path):
            if '"event": "weights"' in line:
                try:
                    event = parse_json(line)
                    digests[int(event["step"])] = tuple(map(str, event["digests"]))
                except (ValueError, KeyError, TypeError, OverflowError):
                    raise UserError(f"{path} holds {line.strip()[:60]!r}, expected an event with its step") from None
    return digests


def _replay_recipe(
    run: Path, actor: str | None, step: int, checkpoint: Path | None, overrides: Sequence[str]
) -> ReplayRecipe:
    fixed = {parse_override(text).key[0] for text in ("resume=x", "samples=x")}
    for text in overrides:
        key = parse_override(text).key
        if key[0] in fixed or key[:2] == ("checkpoint", "save_interval"):
            name = ".".join(map(str, key))
            raise UserError(f"replay: {name} is set, which a replay sets itself; expected none of it")
    name, run_dir = (f"{run.parent.name}.{run.name}", run.parent.parent) if actor else (run.name, run.parent)
    where = [f"name={name}.replay-{step}", f"run_dir={json.dumps(str(run_dir))}"]
    resume = "none" if checkpoint is None else json.dumps(str(checkpoint))
    recipe = load_run_recipe(run, [*where, *overrides, *_OWN, f"resume={resume}"])
    if recipe.directory.resolve() == run.resolve() or recipe.directory.resolve().is_relative_to(run.resolve()):
        raise UserError(f"replay: {recipe.directory} is in the run's own directory; expected another name or run_dir")
    return ReplayRecipe.of(recipe)


def _check_versions(run: Path, base: int, checkpoint: Path | None, steps: Mapping[int, Original]) -> None:
    """Each step's samples were trained on with the weights that the replay has then."""
    version = RunState.read(checkpoint).policy_version if checkpoint is not None else 1
    for number, original in steps.items():
        stored = original.metadata
        if stored is not None and (stored.step, stored.version) != (number, version + number - base):
            raise UserError(
                f"{original.path} is of step {stored.step} and made version {stored.version} of the weights, expected "
                f"step {number} and version {version + number - base}: it is of another course of the run in {run}"
            )


def _check_what_is_stored(algorithm: AlgorithmSettings, steps: Mapping[int, Original]) -> None:
    """Raises UserError for a step whose updates need more than its samples say."""
    for original in steps.values():
        stored = original.metadata
        if stored is not None and algorithm.greedy_baseline and "baseline" not in stored.columns:
            raise UserError(
                f"replay: {original.path} has no column baseline: an earlier version wrote it, and the greedy "
                f"responses of algorithm.name={algorithm.name} are not stored"
            )


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """The settings of the replay that are others than the run's, and may change what a step makes of its samples."""
    fixed = {parse_override(text).key for text in _OWN}
    yield from _differences(before, now, (), fixed)


def _differences(before: Any, now: Any, key: tuple[str, ...], fixed: set[tuple[Any, ...]]) -> Iterator[str]:
    """Settings that have other values, but for a replay's own and those of no result."""
    if key in fixed or (key and key[0] in _OF_NO_RESULT):
        return
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in before:
            if name in now:  # a setting that an earlier version did not have is no difference
                yield from _differences(before[name], now[name], (*key, str(name)), fixed)
    elif before != now:
        yield f"{'.'.join(key)}={json.dumps(now)}"


def _inexact(
    kept: Recipe,
    changed: Sequence[str],
    saved: Sequence[Manifest],
    steps: Mapping[int, Original],
    *,
    deterministic: bool,
) -> Iterator[str]:
    """Why bits may be others.

    Args:
        kept: the run's current recipe: it may have been resumed with other settings.
        changed: settings in which that of the replay differs.
        saved: of the checkpoints before and after the steps.
        steps: that are made again.
        deterministic: `train.deterministic` of the replay.
    """
    if changed:
        yield f"the run had other settings than {', '.join(changed)}"
    before = [
        difference
        for manifest in saved
        for difference in _differences(manifest.recipe, public_settings(kept), (), set())
    ]
    if others := [difference for difference in dict.fromkeys(before) if not difference.startswith(_OF_THE_LOOP)]:
        yield f"the run's checkpoints were saved with other settings than {', '.join(others)}"
    now = software()
    was = {name: manifest.software.get(name, "unknown") for manifest in saved for name in _LIBRARIES}
    if others := [f"{name} {version}" for name, version in was.items() if version != now[name]]:
        yield f"the run had {', '.join(others)}"
    if platform.gpus and not deterministic:
        yield "train.deterministic=false (order of sums on a GPU)"
    reads = any(role != "actor" for role in ReplayRecipe.of(kept).models) or kept.teacher_engine is not None
    reads = reads or kept.trainer.updates_per_step > 1 or kept.algorithm.correction is not None
    stored_steps = [original.metadata for original in steps.values() if original.metadata is not None]
    if reads and not all(_exactly_learned(kept.algorithm, kept.samples_per_step, stored) for stored in stored_steps):
        yield "models have read samples that were not trained on, and are not stored, next to these"


def _exactly_learned(algorithm: AlgorithmSettings, drawn: int, stored: StepMetadata) -> bool:
    """True if models have read just the samples that are stored: those of a filter are read once it has chosen."""
    filtered = getattr(algorithm, "dynamic_sampling", False) or algorithm.kept_samples or not algorithm.needs_engines
    if algorithm.compares_with_left_out:
        return False
    return bool(filtered) or algorithm.name == "dpo" or all_learned(algorithm, drawn, stored)
