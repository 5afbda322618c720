"""The correction of a step: found where the tokens are, before the first update."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.algorithms.base import Step
from hybridflow.algorithms.corrections.metrics import KEPT, correction_columns, correction_metrics
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.errors.log import log
from hybridflow.metrics import names as metrics


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


def corrected[C: AlgorithmSettings](step: Step[C], batch: RemoteBatch) -> Corrected:
    """The samples as `algorithm.correction` has them; its metrics go to those of the step."""
    settings = step.config.correction
    if settings is None or not settings.needs_proximal:
        return Corrected(batch)
    columns = step.apply(batch, correction_columns)
    per_sample = columns.per_sample()
    step.values |= correction_metrics(per_sample, settings)
    left = batch.per_sample["sample_ids"][per_sample[KEPT] > 0]
    return Corrected(batch.with_columns(columns), frozenset(left.tolist()))


def log_empty[C: AlgorithmSettings](step: Step[C], empty: int, count: int) -> None:
    """Log the number of mini-batches of which a correction leaves nothing, and a line if there are any.

    Args:
        step: whose metrics get it.
        empty: updates of the actor that are left out.
        count: of all.
    """
    settings = step.config.correction
    if settings is None or not settings.leaves_out:
        return
    step.values[metrics.CORRECTION_EMPTY_UPDATES] = empty
    if empty:
        log.warning(
            f"step {step.number}: algorithm.correction leaves no token in the mini-batches of {empty} of {count} "
            "updates, which the actor skips"
        )
