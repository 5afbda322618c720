"""One rank of a model with a scalar head: a trained critic, or a frozen reward or cost model."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from hybridflow.algorithms.base import ValueKind
from hybridflow.algorithms.losses import value
from hybridflow.algorithms.losses.statistics import Statistics
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.worker_output import Columns
from hybridflow.metrics.names import COST_CRITIC, CRITIC
from hybridflow.roles.model import ModelWorker, Update, finite_scores, of_responses, to_sequences
from hybridflow.workers.protocols import THREE_D_PROTO, register

if TYPE_CHECKING:
    from engine3d.training.passes.forward import TokenOutputs

NAMES = {"reward": CRITIC, "cost": COST_CRITIC}
"""Metric names of either critic."""


class ValueWorker(ModelWorker):
    """One rank of a critic, a reward model or a cost model: a decoder with a scalar head.

    Its directory holds a sequence classification model of one label; or a token classification model of one label,
    whose head has a bias; or a language model, in whose place a critic starts with a head of zeros, so that its first
    values are 0. A model that is not trained is refused without a head, in one line.
    """

    _value_head: ClassVar[bool] = True

    @register(THREE_D_PROTO, exclusive=True)
    def values(self, batch: SampleBatch) -> Columns | None:
        """Compute column `values`, (R,) float32, of the states in which the response tokens were chosen.

        The value of the first response token is the head's output at the last token of the prompt.
        """
        outputs = self._engine.values(to_sequences(batch))
        if outputs is None or outputs.values is None:
            return None
        return Columns({"values": of_responses(batch, outputs.values, f"{self._name}: the value")})

    @register(THREE_D_PROTO, exclusive=True)
    def score(self, batch: SampleBatch) -> Columns | None:
        """Compute per-sample column `score`, (b,) float32: the head's output at the last token of the response."""
        outputs = self._engine.values(to_sequences(batch))
        if outputs is None or outputs.scores is None:
            return None
        return Columns(per_sample={"score": finite_scores(batch, outputs.scores, f"{self._name}: the score")})

    @register(THREE_D_PROTO, exclusive=True)
    def update_values(self, batch: SampleBatch, *, clip: float | None, kind: ValueKind) -> Update:
        """Take one optimizer step towards the returns.

        Args:
            batch: a mini-batch with weights, and with values and returns of this kind.
            clip: range of a value's change before its loss is clipped; None does not clip.
            kind: reward or cost, which selects the columns and the metric names.
        """
        old_values, returns = _columns(batch, kind)
        assert batch.weights is not None
        sequences = to_sequences(batch, old_values=old_values, returns=returns, weights=batch.weights)

        def loss(outputs: TokenOutputs, columns: dict[str, Tensor]) -> tuple[Tensor, Statistics]:
            assert outputs.values is not None
            return value.value_loss(outputs.values, clip=clip, names=NAMES[kind], **columns)

        return self._update(sequences, loss)


def _columns(batch: SampleBatch, kind: ValueKind) -> tuple[Tensor, Tensor]:
    """Return (R,) values and returns."""
    values, returns = (batch.values, batch.returns) if kind == "reward" else (batch.cost_values, batch.cost_returns)
    assert values is not None and returns is not None
    return values, returns
