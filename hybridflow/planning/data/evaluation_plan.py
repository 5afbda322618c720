"""Plan of an evaluation without training: weights, sets and output directory, resolved before anything starts."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from engine3d.checkpoint.hf import MODEL
from engine3d.checkpoint.manifest import find_checkpoints, step_directory
from engine3d.errors import UserError
from engine3d.models import ModelSpec, load_model_spec
from engine3d.rollout.config import RolloutConfig
from engine3d.rollout.served import check_files
from hybridflow.checkpoint.resume import find_sound
from hybridflow.checkpoint.set_results import read_best
from hybridflow.cluster.hosts.checks.host_check import check_directories, check_writable
from hybridflow.config.actors import load_one_recipe
from hybridflow.config.evaluation import PlannedSet
from hybridflow.config.evaluation_recipe import EvaluationRecipe
from hybridflow.config.initial_model import initial_spec, initial_tokenizer
from hybridflow.config.reading.yaml_loader import SettingsError
from hybridflow.config.recipe import Recipe, load_recipe, load_run_recipe
from hybridflow.data.prompts import Prompts
from hybridflow.data.tokenizer import special_tokens
from hybridflow.planning.checks.engine import check_sampling
from hybridflow.planning.checks.environment import check_environment
from hybridflow.planning.checks.gpu import used_gpus
from hybridflow.planning.checks.model import as_stored, check_engines, check_judge, check_model_files
from hybridflow.planning.checks.placement import check_engine_devices, planned_devices
from hybridflow.planning.checks.prompt import check_token_ids
from hybridflow.planning.checks.reward import check_set_rewards
from hybridflow.planning.data.evaluation_sets import check_sets, encode_sets, set_notes
from hybridflow.planning.data.prompts import context_tokens
from hybridflow.rundir.actor_runs import runs_in
from hybridflow.rundir.file_names import EXPORT, INITIAL, RECIPE
from hybridflow.rundir.kept_recipe import saved_to

FOLDER = "evaluate"
"""Folder of a run's directory for the results of evaluations without training."""
_OF_TRAINING = ("checkpoint.keep_best=null", "rollout.engine.draft_tokens=0", "train.mtp=null")
_OWN = ("resume=none", "checkpoint.accept=[]", *_OF_TRAINING)
"""Settings of a run that say nothing of an evaluation."""


@dataclass(frozen=True)
class EvaluationPlan:
    """Plan of an evaluation.

    Args:
        recipe: with the sets that are measured; its model is the HuggingFace directory whose weights the engines load,
            or for a checkpoint that of its config and tokenizer.
        checkpoint: whose weights are exported first; None where `recipe.model` has them.
        base: HuggingFace directory of the model whose adapters the checkpoint has, if it is where the recipe says.
        step: of the checkpoint; 0 of a model.
        notes: which prompts are left out, in lines.
    """

    recipe: EvaluationRecipe
    checkpoint: Path | None
    base: Path | None
    step: int
    notes: tuple[str, ...]

    @property
    def directory(self) -> Path:
        """Directory of the results."""
        return self.recipe.directory

    @property
    def weights(self) -> str:
        """Origin of the weights: a checkpoint or a model directory."""
        return str(self.checkpoint if self.checkpoint is not None else self.recipe.model.path)


def plan_evaluation(
    target: Path,
    sets: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    recipe: Path | None = None,
    checkpoint: str | None = None,
    out: Path | None = None,
) -> EvaluationPlan:
    """Find out whether a model can be evaluated.

    Args:
        target: a recipe, the directory of a run, or a HuggingFace directory.
        sets: names of sets; all of the recipe if empty.
        overrides: `key=value`, such as another placement.
        recipe: with the sets of a HuggingFace directory.
        checkpoint: "last", "best" or a step; the last one of a run if None.
        out: where the results go.

    Raises:
        UserError: in one line, what is missing.
    """
    loaded, root, model = _target(target, overrides, recipe)
    chosen = None
    saved = root is not None and bool(find_checkpoints(root)[0])
    if model is None and checkpoint is None and not saved:
        if not target.is_file():
            raise UserError(f"{target} has neither a whole checkpoint nor an exported model, expected one of them")
        raise UserError(
            f"{target}: the model of this recipe is made with random weights, and {root or 'its run'} has no "
            "checkpoint; expected model.path, or a run's or a model's directory"
        )
    if checkpoint is not None or (root is not None and model is None):
        chosen = _checkpoint(target, root, checkpoint or "last")
        model = chosen / MODEL
    step = int(chosen.name.removeprefix("step-")) if chosen is not None else 0
    label = chosen.name if chosen is not None else (model or loaded.model.path or target).name
    directory = out or (
        target / FOLDER / label if (target / RECIPE).is_file() else loaded.run_dir / f"{loaded.name}-evaluate"
    )
    settings: dict[str, object] = {"name": directory.name, "run_dir": directory.absolute().parent}
    if model is not None:
        settings["model"] = loaded.model.model_copy(update={"path": model.absolute(), "create": None})
    measured = _chosen(loaded.sets, sets, recipe or target)
    planned = EvaluationRecipe.of(loaded.model_copy(update=settings), measured)
    given = loaded.model.path or target / INITIAL
    base = given if given.is_dir() else None
    return EvaluationPlan(
        planned, chosen, base, step, tuple(check_evaluation_alone(planned, has_weights=chosen is None))
    )


def _target(target: Path, overrides: Sequence[str], recipe: Path | None) -> tuple[Recipe, Path | None, Path | None]:
    """The recipe, the directory of checkpoints, and the HuggingFace directory of a target, if it has these."""
    if target.is_file():
        if recipe is not None:
            raise UserError(f"--recipe {recipe} with {target}, which is a recipe itself; expected one of them")
        loaded = load_one_recipe(target, [*_OF_TRAINING, *overrides])
        return loaded, loaded.checkpoint_directory, loaded.model.path
    if not target.is_dir():
        raise UserError(f"{target}: no such file or directory; expected a recipe, a run, or a HuggingFace directory")
    if (target / RECIPE).is_file():
        if len(actors := runs_in(target)) > 1:
            raise UserError(f"{target} holds the runs of several actors, expected one: {', '.join(map(str, actors))}")
        if recipe is not None:
            loaded = load_recipe(recipe, [*_OWN, *overrides])
        else:
            loaded = load_run_recipe(target, [*_OWN, *overrides], remedy="--recipe RECIPE")
        root = saved_to(target)
        saved = root is not None and bool(find_checkpoints(root)[0])
        exported = target / EXPORT
        return loaded, root, None if saved or not exported.is_dir() else exported
    if not (target / "config.json").is_file():
        raise UserError(f"{target} has neither {RECIPE} nor config.json, expected a run or a HuggingFace directory")
    if recipe is None:
        raise UserError(f"{target} is a HuggingFace directory, expected --recipe RECIPE, which has the sets")
    model = json.dumps({"path": str(target.absolute())})
    return load_one_recipe(recipe, [*_OF_TRAINING, *overrides, f"model={model}"]), None, target


def _checkpoint(target: Path, root: Path | None, requested: str) -> Path:
    """The checkpoint that is meant. Raises UserError where there is none."""
    if root is None:
        raise UserError(f"--checkpoint {requested}: {target} has no checkpoints, expected a run, or a recipe of one")
    complete = find_sound(root, most_bytes=None)[0] if root.is_dir() else []
    if not complete:
        raise UserError(f"--checkpoint {requested}: no whole checkpoint in {root}")
    if requested == "last":
        return complete[0]
    if requested == "best":
        best = read_best(complete[0])
        if best is None:
            raise UserError(f"--checkpoint best: the run has kept none as the best (checkpoint.keep_best); {root}")
        requested = str(best.step)
    steps = [int(directory.name.removeprefix("step-")) for directory in complete]
    if not requested.isdecimal() or int(requested) not in steps:
        raise UserError(
            f"--checkpoint {requested}: expected best, last, or a step of {', '.join(map(str, sorted(steps)))}"
        )
    return step_directory(root, int(requested))


def _chosen(planned: Mapping[str, PlannedSet], sets: Sequence[str], source: Path) -> list[str]:
    """The sets that are measured. Raises UserError for one that is not there."""
    known = [name for name, planned_set in planned.items() if not planned_set.pairs]
    if not known:
        raise UserError(
            f"{source} has no sets that engines respond to, expected some in evaluation, or in another recipe "
            "(--recipe)"
        )
    for name in sets:
        if name not in known:
            raise UserError(f"--set {name}: no such set, expected one of {', '.join(known)}")
    if twice := next((name for name in sets if list(sets).count(name) > 1), None):
        raise UserError(f"--set {twice} stands twice, expected each once")
    return list(sets or known)


def check_evaluation_alone(recipe: EvaluationRecipe, *, has_weights: bool = True) -> list[str]:
    """Check that engines can start for the sets of a recipe, and that their prompts and rewards are usable.

    Args:
        recipe: of the evaluation.
        has_weights: True if the model directory has them.

    Returns:
        Which prompts are left out, a line each.

    Raises:
        SettingsError: with one line for every error found.
    """
    errors: list[str] = []
    spec = initial_spec(recipe.model)
    devices = planned_devices(recipe.device_maps, recipe.placement)
    sets: dict[str, Prompts] = {}
    notes: list[str] = []

    def prompts() -> None:
        with tempfile.TemporaryDirectory() as scratch:
            tokenizer, _ = initial_tokenizer(recipe.model, Path(scratch))
        context = context_tokens(recipe.rollout.engine, recipe.model)
        sets.update(encode_sets(recipe, tokenizer))
        notes.extend(set_notes(recipe.sets, recipe.data.overlong_prompts, tokenizer, context, sets, ()))
        for name, encoded in sets.items():
            check_token_ids(f"evaluation.{name} prompt", encoded.tokens, spec.vocab_size)
        if devices is not None:
            layouts = {"rollout": recipe.rollout.layout(len(devices["rollout"]))}
            if "reward_model" in devices:
                layouts["reward_model"] = recipe.train_config("reward_model").layout.layout(
                    len(devices["reward_model"])
                )
            check_sets(recipe.sets, sets, layouts)
        notes.extend(check_set_rewards(recipe.sets, sets, special_tokens(tokenizer)))

    def served() -> None:
        engine, directory = recipe.rollout.engine, recipe.model.path
        if has_weights and directory is not None:
            check_files(directory, engine.precision)
        check_engines(engine, _as_served(recipe, spec, has_weights=has_weights))

    checks: list[Callable[[], object]] = [
        prompts,
        served,
        partial(check_sampling, recipe.rollout, recipe.placement, spec, devices),
        partial(check_writable, "--out", recipe.directory),
        partial(check_directories, kernels=bool(devices and used_gpus(devices))),
    ]
    if devices is not None:
        checks.append(partial(check_engine_devices, recipe.rollout.engine, devices["rollout"]))
        checks.append(partial(_check_precision, recipe.rollout.engine, on_gpu=devices["rollout"][0].kind == "cuda"))
    if recipe.environment is not None:
        checks.append(partial(check_environment, recipe.environment))
    if recipe.asked_judge is not None:
        checks.append(partial(check_judge, recipe.asked_judge, devices))
    if has_weights and recipe.model.path is not None:
        checks.append(partial(check_model_files, "model.path", load_model_spec(recipe.model.path), recipe.model.path))
    for check in checks:
        try:
            check()
        except UserError as error:
            errors += str(error).splitlines()
    if errors:
        raise SettingsError(errors)
    return notes


def _as_served(recipe: EvaluationRecipe, spec: ModelSpec, *, has_weights: bool) -> ModelSpec:
    """The model with the matrices in fp8 that its files have in it, or that the export of a checkpoint will have."""
    directory = recipe.model.path
    if recipe.rollout.engine.precision is None:
        return spec
    if not has_weights or directory is None:
        return recipe.train.fp8.applied(spec)
    return as_stored(spec, directory, recipe.rollout.engine.precision)


def _check_precision(engine: RolloutConfig, *, on_gpu: bool) -> None:
    if engine.precision is not None and on_gpu:
        raise UserError(
            f"rollout.engine.precision={engine.precision} was not tried with hybridflow evaluate on GPUs; expected null"
        )
