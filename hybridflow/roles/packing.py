"""Packing of samples for a training engine, and unpacking of its outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from engine3d.errors import EngineError
from engine3d.models.experts.routes import TokenRoutes
from engine3d.rollout.requests import BEGINS
from engine3d.training.passes.sequences import Sequences
from hybridflow.batch.sample_batch import SampleBatch


def to_sequences(batch: SampleBatch, *, routes: TokenRoutes | None = None, **columns: Tensor) -> Sequences:
    """Lay out each sample as prompt and response, end to end: one sequence each, or several of a tree of tokens.

    Args:
        batch: the samples. A response token of version `BEGINS` begins another sequence of its sample.
        routes: experts of all tokens.
        columns: name to (R,) or (R, K) values of response tokens; prompt tokens get 0.
    """
    is_response, flat = batch.is_response, {}
    for name, column in columns.items():
        flat[name] = column.new_zeros(len(is_response), *column.shape[1:])
        flat[name][is_response] = column
    if routes is None:
        return Sequences(batch.tokens, _lengths(batch), flat)
    names = [f"sample {number}" for number in batch.sample_ids.tolist()]
    return Sequences(batch.tokens, batch.sequence_lengths, flat, names, routes)


def _lengths(batch: SampleBatch) -> Tensor:
    """(N,) int64 tokens of each sequence, of which a sample has one or more."""
    versions = batch.token_versions
    if versions is None or not bool((versions == BEGINS).any()):
        return batch.sequence_lengths
    begins = torch.zeros(len(batch.tokens), dtype=torch.bool)
    begins[batch.is_response] = versions == BEGINS
    begins[batch.sequence_lengths.cumsum(0) - batch.sequence_lengths] = True
    return begins.nonzero()[:, 0].diff(append=torch.tensor([len(batch.tokens)]))


def of_responses(batch: SampleBatch, outputs: Tensor, what: str) -> Tensor:
    """Select the response tokens' outputs: (T,) or (T, K) for `to_sequences(batch)` -> (R,) or (R, K) float32.

    Args:
        what: name of the outputs in the error.

    Raises:
        EngineError: the output for a token that the policy wrote is not finite; names its sample.
    """
    column = outputs[batch.is_response].float()
    of_tokens = column if column.dim() == 2 else column[:, None]
    bad = (~of_tokens.isfinite() & batch.response_mask[:, None]).nonzero()
    if len(bad):
        position, index = bad[0].tolist()
        sample, token = batch.place_of(position)
        raise EngineError(
            f"{what} of sample {int(batch.sample_ids[sample])} is {float(of_tokens[position, index])} at response "
            f"token {token}, expected a finite number"
        )
    return column


def finite_scores(batch: SampleBatch, scores: Tensor, what: str) -> Tensor:
    """Return (B,) scores of whole responses. Raises EngineError for one that is not finite, naming its sample."""
    bad = (~scores.isfinite()).nonzero()
    if len(bad):
        row = int(bad[0])
        raise EngineError(
            f"{what} of sample {int(batch.sample_ids[row])} is {float(scores[row])}, expected a finite number"
        )
    return scores
