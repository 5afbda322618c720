"""Between the padded rows of a RolloutBatch and the flat sequences that a training engine reads."""

from __future__ import annotations

import torch
from torch import Tensor

from engine3d.errors import EngineError
from engine3d.training.sequences import Sequences
from hybridflow.batch.rollout_batch import RolloutBatch


def to_sequences(batch: RolloutBatch, **columns: Tensor) -> Sequences:
    """Each sample as prompt and response, end to end.

    Args:
        columns: name to (B, S') figures of response tokens; prompt tokens get 0.
    """
    lengths = batch.sequence_lengths
    at = _response_positions(batch)
    within = _within_responses(batch)
    tokens = torch.empty(int(lengths.sum()), dtype=torch.int64)
    is_response = torch.zeros(len(tokens), dtype=torch.bool)
    is_response[at] = True
    tokens[~is_response] = batch.input_ids[batch.attention_mask]
    tokens[at] = batch.generated_ids[within]
    flat = {}
    for name, column in columns.items():
        flat[name] = torch.zeros(len(tokens), dtype=column.dtype)
        flat[name][at] = column[within]
    return Sequences(tokens, lengths, flat)


def to_response_column(batch: RolloutBatch, figures: Tensor, what: str) -> Tensor:
    """(T,) figures of all tokens of `to_sequences(batch)` -> (B, S') float32 of the response tokens, 0 on padding.

    Args:
        what: whose figures, and how they are called, for the error.

    Raises:
        EngineError: the figure of a token that the policy wrote is not finite; names its sample.
    """
    column = torch.zeros(batch.generated_ids.shape, dtype=torch.float32)
    column[_within_responses(batch)] = figures[_response_positions(batch)].float()
    bad = (~column.isfinite() & batch.response_mask).nonzero()
    if len(bad):
        row, token = bad[0].tolist()
        raise EngineError(
            f"{what} of sample {int(batch.sample_ids[row])} is {float(column[row, token])} at response token {token}, "
            "expected a finite number"
        )
    return column


def finite_scores(batch: RolloutBatch, scores: Tensor, what: str) -> Tensor:
    """(B,) scores of whole responses as they are. Raises EngineError for one that is not finite, naming its sample."""
    bad = (~scores.isfinite()).nonzero()
    if len(bad):
        row = int(bad[0])
        raise EngineError(
            f"{what} of sample {int(batch.sample_ids[row])} is {float(scores[row])}, expected a finite number"
        )
    return scores


def _within_responses(batch: RolloutBatch) -> Tensor:
    """(B, S') bool: which positions of `generated_ids` hold a token."""
    return torch.arange(batch.generated_ids.shape[1]) < batch.response_lengths[:, None]


def _response_positions(batch: RolloutBatch) -> Tensor:
    """Flat positions of all response tokens, sample by sample."""
    starts = batch.sequence_lengths.cumsum(0) - batch.sequence_lengths + batch.prompt_lengths
    width = torch.arange(batch.generated_ids.shape[1])
    return (starts[:, None] + width)[_within_responses(batch)]
