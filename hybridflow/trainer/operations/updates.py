"""Updates of a step: correction and mini-batches of its samples, and optimizer steps of the actor and every critic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridflow.algorithms.advantages.whitening import Moments
from hybridflow.algorithms.base import Step, ValueKind
from hybridflow.algorithms.config import load
from hybridflow.algorithms.corrections.metrics import KEPT, correction_columns, correction_metrics
from hybridflow.algorithms.losses.aggregation import sequence_weights
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.batch.load_balance import even_ranges
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.worker_output import LOSS_TOKENS, joined_per_sample
from hybridflow.config.run import TrainerConfig
from hybridflow.errors.log import log
from hybridflow.metrics import names as metrics
from hybridflow.roles.groups import PolicyGroup, ValueGroup
from hybridflow.roles.model import Update
from hybridflow.workers.future import Future

if TYPE_CHECKING:
    from torch import Tensor

CRITICS: dict[str, ValueKind] = {"critic": "reward", "cost_critic": "cost"}
"""Kind of the values of each critic."""

type Reports = list[list[Update]]
"""Reports of each rank on each optimizer step."""


@dataclass(frozen=True)
class Corrected:
    """Samples with the weights of a correction.

    Args:
        batch: the samples, with the column `correction_weights` if the recipe has a correction.
        left: ids of the samples of which a token has a weight; None without a correction.
    """

    batch: RemoteBatch
    left: frozenset[int] | None = None

    def has_weight(self, mini_batch: RemoteBatch) -> bool:
        """True if the correction leaves anything of a mini-batch to train on."""
        return self.left is None or not self.left.isdisjoint(mini_batch.per_sample["sample_ids"].tolist())


def corrected[C: AlgorithmSettings](
    step: Step[C], batch: RemoteBatch, columns_of_step: list[Mapping[str, Tensor]]
) -> Corrected:
    """The samples as `algorithm.correction` has them; its metrics go to those of the step.

    Args:
        step: whose metrics get them.
        batch: the samples.
        columns_of_step: of `correction_metrics`, of all samples that the step has trained on; gets those of `batch`.
    """
    settings = step.config.correction
    if settings is None or not settings.needs_proximal:
        return Corrected(batch)
    columns = step.apply(batch, correction_columns)
    per_sample = columns.per_sample()
    columns_of_step.append(per_sample)
    step.values |= correction_metrics(joined_per_sample(columns_of_step), settings)
    left = batch.per_sample["sample_ids"][per_sample[KEPT] > 0]
    return Corrected(batch.with_columns(columns), frozenset(left.tolist()))


def log_empty[C: AlgorithmSettings](step: Step[C], empty: int, count: int) -> None:
    """Log the number of mini-batches of which a correction leaves nothing, and a line if there are any.

    Args:
        step: whose metrics add it.
        empty: updates of the actor that are left out.
        count: of all.
    """
    settings = step.config.correction
    if settings is None or not settings.leaves_out:
        return
    step.values[metrics.CORRECTION_EMPTY_UPDATES] = step.values.get(metrics.CORRECTION_EMPTY_UPDATES, 0) + empty
    if empty:
        log.warning(
            f"step {step.number}: algorithm.correction leaves no token in the mini-batches of {empty} of {count} "
            "updates, which the actor skips"
        )


@dataclass(frozen=True)
class UpdatePlan:
    """Mini-batches of a step.

    Args:
        split: of one epoch.
        mini_batches: with the weights of their tokens in the loss, of all epochs, in the order of their updates.
        actor: number in `mini_batches` of those that the actor trains on.
    """

    split: tuple[RemoteBatch, ...]
    mini_batches: tuple[RemoteBatch, ...]
    actor: tuple[int, ...]

    @classmethod
    def of(
        cls, samples: Corrected, config: AlgorithmSettings, trainer: TrainerConfig, limit: int, *, critics_only: bool
    ) -> UpdatePlan:
        """The plan of a step.

        Args:
            samples: to train on.
            config: of the algorithm.
            trainer: counts of mini-batches and epochs.
            limit: most tokens of a response.
            critics_only: the actor trains on nothing.
        """
        split = mini_batches(samples.batch, trainer.mini_batches, load(config.name).together)
        weighted = [_weighted(mini_batch, config, limit) for mini_batch in split] * trainer.epochs
        actor = [n for n, mini_batch in enumerate(weighted) if not critics_only and samples.has_weight(mini_batch)]
        return cls(tuple(split), tuple(weighted), tuple(actor))


@dataclass(frozen=True)
class ActorUpdate:
    """Arguments of the actor's updates of a step.

    Args:
        config: of the algorithm.
        temperature: of the log-probs.
        serving: version of the weights before the step.
        whiten: moments by which advantages are whitened; None where they are not.
        stale: True if an older policy may have made the responses.
        prepare: adds the columns of a mini-batch that depend on the policy just before its update.
    """

    config: AlgorithmSettings
    temperature: float
    serving: int
    whiten: Moments | None
    stale: bool
    prepare: Callable[[RemoteBatch], RemoteBatch] | None = None


class ModelUpdates:
    """Updates of a step's models.

    Args:
        actor: of the run.
        critics: by role.
    """

    def __init__(self, actor: PolicyGroup, critics: Mapping[str, ValueGroup]) -> None:
        self._actor, self._critics = actor, critics
        self.begun = 0
        """Optimizer steps of the actor in this step."""

    def trained(self, plan: UpdatePlan) -> tuple[str, ...]:
        """Roles that a plan trains."""
        return (*self._critics, *(("actor",) if plan.actor else ()))

    def run(self, plan: UpdatePlan, of_actor: ActorUpdate, value_clip: float | None) -> dict[str, Reports]:
        """Take the optimizer steps, one model after another: where they share devices, each has one turn.

        Args:
            plan: of the step.
            of_actor: arguments of the actor's updates.
            value_clip: how far a value moves before a critic's loss is clipped; None does not clip.

        Returns:
            Reports by role, the actor first.
        """
        calls: dict[str, Sequence[Future[list[Update]]]] = {}
        for role, critic in self._critics.items():
            kind = CRITICS[role]
            calls[role] = [critic.update_values(batch, clip=value_clip, kind=kind) for batch in plan.mini_batches]
        calls["actor"] = [self.update_actor(plan.mini_batches[n], of_actor) for n in plan.actor]
        reports = {role: [future.result() for future in futures] for role, futures in calls.items()}
        return {role: reports[role] for role in ("actor", *self._critics)}

    def update_actor(self, batch: RemoteBatch, arguments: ActorUpdate) -> Future[list[Update]]:
        """Begin one optimizer step of the actor."""
        correction = arguments.config.correction
        batch = batch if arguments.prepare is None else arguments.prepare(batch)
        self.begun += 1
        return self._actor.update(
            batch,
            algorithm=arguments.config,
            temperature=arguments.temperature,
            serving=arguments.serving,
            whitening=arguments.whiten,
            stale=arguments.stale,
            against_rollout=arguments.stale if correction is None else correction.against == "rollout",
        )


def refused_updates(updates: Reports, kl_guard: float | None, number: int) -> dict[str, float]:
    """Return the metric of updates that the KL guard refused, none without a guard, and log a line if there are any.

    Args:
        updates: reports of the actor's ranks.
        kl_guard: of the algorithm.
        number: of the step.
    """
    if kl_guard is None or not updates:
        return {}
    refused = sum(ranks[0].refused for ranks in updates)
    if refused:
        line = (
            f"step {number}: {refused} of {len(updates)} updates would have begun past algorithm.kl_guard={kl_guard:g} "
            "and were skipped; the learning rate starts again"
        )
        log.warning(line)
    return {metrics.TRAIN_REFUSED_UPDATES: refused}


def mini_batches(batch: RemoteBatch, count: int, together: int) -> list[RemoteBatch]:
    """Consecutive slices of like size, which keep each `together` samples in one."""
    if together == 1:
        return batch.split(count)
    ranges = even_ranges(len(batch) // together, count)
    return [batch.select(range(together * span.start, together * span.stop)) for span in ranges]


def _weighted(batch: RemoteBatch, config: AlgorithmSettings, limit: int) -> RemoteBatch:
    """A mini-batch with the weight of each of its tokens in the loss, given the most tokens of a response."""
    weights = sequence_weights(
        batch.per_sample[LOSS_TOKENS], config.loss_aggregation, normalising_length=config.normalising_length(limit)
    )
    return batch.with_per_sample(weights=weights)
