"""From samples to what a training engine reads, and from its figures back."""

from __future__ import annotations

from torch import Tensor

from engine3d.errors import EngineError
from engine3d.training.sequences import Sequences
from hybridflow.batch.sample_batch import SampleBatch


def to_sequences(batch: SampleBatch, **columns: Tensor) -> Sequences:
    """Each sample as prompt and response, end to end.

    Args:
        columns: name to (R,) or (R, K) figures of response tokens; prompt tokens get 0.
    """
    is_response, flat = batch.is_response, {}
    for name, column in columns.items():
        flat[name] = column.new_zeros(len(is_response), *column.shape[1:])
        flat[name][is_response] = column
    return Sequences(batch.tokens, batch.sequence_lengths, flat)


def of_responses(batch: SampleBatch, figures: Tensor, what: str) -> Tensor:
    """(T,) or (T, K) figures of all tokens of `to_sequences(batch)` -> (R,) or (R, K) float32 of the response tokens.

    Args:
        what: whose figures, and how they are called, for the error.

    Raises:
        EngineError: the figure of a token that the policy wrote is not finite; names its sample.
    """
    column = figures[batch.is_response].float()
    of_tokens = column if column.dim() == 2 else column[:, None]
    bad = (~of_tokens.isfinite() & batch.response_mask[:, None]).nonzero()
    if len(bad):
        place, figure = bad[0].tolist()
        sample, token = batch.place_of(place)
        raise EngineError(
            f"{what} of sample {int(batch.sample_ids[sample])} is {float(of_tokens[place, figure])} at response token "
            f"{token}, expected a finite number"
        )
    return column


def finite_scores(batch: SampleBatch, scores: Tensor, what: str) -> Tensor:
    """(B,) scores of whole responses as they are. Raises EngineError for one that is not finite, naming its sample."""
    bad = (~scores.isfinite()).nonzero()
    if len(bad):
        row = int(bad[0])
        raise EngineError(
            f"{what} of sample {int(batch.sample_ids[row])} is {float(scores[row])}, expected a finite number"
        )
    return scores
