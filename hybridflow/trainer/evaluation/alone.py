"""An evaluation without training: engines with given weights respond to the prompts of held-out sets."""

from __future__ import annotations

import dataclasses
import json
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine3d.checkpoint.adapters import export_actor
from engine3d.durable import naming
from hybridflow.checkpoint.set_results import MeasuredSet
from hybridflow.cluster.driver_link import tell_directory
from hybridflow.config.evaluation_recipe import EvaluationRecipe
from hybridflow.config.reading.yaml_loader import settings_yaml
from hybridflow.data.prompts import Prompts
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.errors.log import log
from hybridflow.planning.data.evaluation_plan import EvaluationPlan
from hybridflow.planning.data.evaluation_sets import encode_sets
from hybridflow.rollout.source import RolloutSource
from hybridflow.rundir.atomic_files import replace_file
from hybridflow.rundir.file_names import EVALUATIONS, RECIPE
from hybridflow.rundir.status.lock import claim
from hybridflow.trainer.evaluation.of_set import SetMeasurer, set_identities
from hybridflow.trainer.startup.role_startup import engine_handles, start_serving, wait_for
from hybridflow.trainer.startup.rollout_source import stream_plan
from hybridflow.trainer.startup.run_setup import Run

RESULT = "evaluation.json"
"""Metrics of all sets, in the directory of the evaluation."""
_WEIGHTS = "weights"


@dataclass(frozen=True)
class Evaluated:
    """The result of an evaluation.

    Args:
        directory: with `evaluation.json` and the texts.
        sets: what was measured, by the name of the set.
    """

    directory: Path
    sets: dict[str, MeasuredSet]


def evaluate_alone(plan: EvaluationPlan) -> Evaluated:
    """Measure the sets of a plan; write the metrics and some responses.

    Raises:
        UserError: something that the user can put right.
        EngineError: a role failed; everything that was started is gone.
    """
    recipe = plan.recipe
    with _opened(plan) as run, start_serving(recipe, run) as serving, ExitStack() as stack:
        wait_for(serving, *serving.starting)
        handles = engine_handles(serving.rollout, serving.functions, serving.judge)
        plan_of_stream = stream_plan(recipe, run.train, len(handles.actors))
        source = RolloutSource(plan_of_stream, recipe.all_functions, recipe.limits, run.train, None, handles)
        source.open(0, steps_left=0)
        stack.callback(source.close)
        measurer = SetMeasurer(
            sets=run.sets,
            identities=set_identities(
                recipe.sets,
                run.sets,
                algorithm=recipe.algorithm.name,
                judge=recipe.judge,
                reward_model=recipe.reward_model,
            ),
            learned={},
            samples_of=source,
            functions=serving.functions,
            reward_model=serving.reward_model,
            judge=serving.judge,
            tokenizer=run.tokenizer,
            texts=run.directory / EVALUATIONS,
            characters=recipe.metrics.sample_characters,
        )
        results = {}
        for name, planned in recipe.sets.items():
            settings = planned.settings
            log.info(f"{name}: {len(run.sets[name]):,} prompts, {settings.samples} responses to each")
            results[name] = measurer.measure(planned, plan.step)
        result = {
            "weights": plan.weights,
            "step": plan.step if plan.checkpoint is not None else None,
            "sets": {name: dataclasses.asdict(measured) for name, measured in results.items()},
        }
        replace_file(run.directory / RESULT, json.dumps(result, indent=1) + "\n")
    return Evaluated(run.directory, results)


@contextmanager
def _opened(plan: EvaluationPlan) -> Iterator[Run]:
    """The directory of the evaluation, held; with the weights of its checkpoint, as long as the block lasts."""
    recipe, directory = plan.recipe, plan.directory
    lock = claim(directory, private=recipe.private)
    tell_directory(directory)
    exported = directory / _WEIGHTS
    with lock:
        with naming(directory / RECIPE):
            (directory / RECIPE).write_text(settings_yaml(recipe))
        model = recipe.model.path
        if plan.checkpoint is not None:
            log.info(f"exporting {plan.checkpoint}")
            # As the engines of a run have the actor's weights: those of training, cast where the engines' differ. What
            # is quantised there has the dtype of training.
            engine = recipe.rollout.engine
            dtype: str = recipe.train.dtype
            if dtype == "float32" and engine.precision is None:
                dtype = engine.dtype
            export_actor(
                plan.checkpoint,
                exported,
                plan.base,
                dtype=dtype,
                precision=engine.precision,
                verify=recipe.checkpoint.verify,
                multi_token=False,
            )
            model = exported
        assert model is not None
        try:
            yield _run(recipe, directory, model, lock)
        finally:
            shutil.rmtree(exported, ignore_errors=True)


def _run(recipe: EvaluationRecipe, directory: Path, model: Path, lock: object) -> Run:
    tokenizer, none = load_tokenizer(model), Prompts([], [])
    return Run(
        directory,
        model,
        tokenizer,
        train=none,
        sft=none,
        answers=[],
        masks=None,
        inputs={},
        sets=encode_sets(recipe, tokenizer),
        identity=uuid.uuid4().hex,
        resumption=None,
        lock=lock,  # type: ignore[arg-type]
    )
