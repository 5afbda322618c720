"""Supervised learning of the answers before the first rollout, and the roles that begin with the result."""

from __future__ import annotations

from collections.abc import Sequence

from engine3d.training.config import STATE_SETTINGS
from hybridflow.algorithms.losses.aggregation import sequence_weights
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.sample_fields import FinishReason
from hybridflow.batch.worker_output import LOSS_TOKENS
from hybridflow.checkpoint.resume import WARMED_UP, seal_warmed_up
from hybridflow.config.recipe import Recipe
from hybridflow.data.sampler import PromptSampler
from hybridflow.metrics import names as metrics
from hybridflow.metrics.logger import Metrics, Timer
from hybridflow.roles.model import update_metrics
from hybridflow.rundir.status.lock import move_aside
from hybridflow.rundir.status.progress import PhaseFile
from hybridflow.trainer.startup.role_startup import Roles, raise_failed_start, wait_for
from hybridflow.trainer.startup.run_setup import Run


def warm_up(recipe: Recipe, run: Run, roles: Roles, phases: PhaseFile, sinks: Metrics) -> None:
    """Train the actor on the supervised examples; other roles may still be starting."""
    phases.enter("warmup")
    settings, actor = recipe.warmup, roles.actor
    assert settings is not None
    prompts, answers, masks = run.sft, run.answers, run.masks
    kept = recipe.train.optimizer  # where its state lies, and as what, is of the model and not of a phase
    optimizer = settings.optimizer.model_copy(update={name: getattr(kept, name) for name in STATE_SETTINGS})
    actor.reset_optimizer(optimizer).result()
    sampler = PromptSampler(len(prompts), recipe.order_seed)
    sinks.begin("sft", f"warm-up: {settings.steps:,} steps of {settings.batch_size:,} examples")
    for step in range(1, settings.steps + 1):
        raise_failed_start(roles)
        values: dict[str, float] = {}
        indices = sampler.next(settings.batch_size)
        batch = RemoteBatch.of(
            answered(
                [prompts.tokens[index] for index in indices],
                [answers[index] for index in indices],
                [masks[index] for index in indices] if masks is not None else None,
            )
        )
        with Timer(values, metrics.TRAIN_UPDATE_TIME):
            weights = sequence_weights(batch.per_sample[LOSS_TOKENS], "token-mean")
            update = actor.supervise(batch.with_per_sample(weights=weights)).result()
        sinks.log(step, values | update_metrics([update]), phase="sft")
    actor.reset_optimizer(recipe.train.optimizer).result()
    if followers := [role for role, model in recipe.models.items() if model.path is None]:
        # A reference, or a critic, of the model before it has learned anything would be of no use.
        directory = recipe.checkpoint_directory / WARMED_UP
        directory.parent.mkdir(parents=True, exist_ok=True)
        if directory.exists():
            move_aside(directory)  # an earlier run's, which had its checkpoints in the same place
        actor.export(directory).result()
        if recipe.checkpoint.save_interval is not None and recipe.reference_is_warmed_up:
            seal_warmed_up(directory)
        wait_for(roles, *followers)
        for loading in [roles.models[role].load(directory) for role in followers]:
            loading.result()


def answered(
    prompts: Sequence[list[int]], answers: Sequence[list[int]], masks: Sequence[list[bool]] | None = None
) -> SampleBatch:
    """Make a batch of prompts with given answers as responses, each a group; `masks` are of the tokens trained on."""
    count = range(len(prompts))
    return SampleBatch.from_generations(
        prompts=prompts,
        responses=answers,
        logprobs=[[0.0] * len(answer) for answer in answers],
        sample_ids=count,
        group_ids=count,
        prompt_indices=count,
        policy_versions=[0] * len(prompts),
        finish_reasons=[FinishReason.STOP] * len(prompts),
        response_masks=masks,
    )
