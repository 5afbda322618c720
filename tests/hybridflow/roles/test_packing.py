"""Samples as sequences, figures of their responses back, and figures that are no numbers."""

from __future__ import annotations

import pytest
import torch

from engine3d.errors import EngineError
from engine3d.models.experts.routes import TokenRoutes
from engine3d.rollout.requests import BEGINS, GIVEN
from hybridflow.algorithms.losses.aggregation import AggregationMode, sequence_weights
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.roles.model import finite_scores, of_responses, to_sequences


def a_batch() -> SampleBatch:
    return SampleBatch.from_generations(
        prompts=[[3, 4], [5]],
        responses=[[6], [7, 8, 9]],
        logprobs=[[-1.0], [-1.0] * 3],
        sample_ids=[40, 41],
        group_ids=[0, 0],
        prompt_indices=[0, 0],
        policy_versions=[1, 1],
        finish_reasons=["stop"] * 2,
        response_masks=[[True], [True, False, True]],
    )


def test_there_and_back() -> None:
    batch = a_batch()
    column = torch.tensor([1.5, 2.5, 3.5, 4.5])
    sequences = to_sequences(batch, figure=column)
    assert sequences.tokens.tolist() == [3, 4, 6, 5, 7, 8, 9]
    assert sequences.columns["figure"].tolist() == [0.0, 0.0, 1.5, 0.0, 2.5, 3.5, 4.5]
    back = of_responses(batch, sequences.columns["figure"], "the figure")
    assert back.tolist() == [1.5, 2.5, 3.5, 4.5]


def test_a_sample_is_one_sequence_for_each_of_a_tree() -> None:
    batch = a_batch().replace(token_versions=torch.tensor([1, 1, BEGINS, 1]))
    assert to_sequences(batch).lengths.tolist() == [3, 2, 2]
    assert to_sequences(batch.select([1])).lengths.tolist() == [2, 2]
    assert to_sequences(batch.replace(token_versions=torch.tensor([1, 1, GIVEN, 1]))).lengths.tolist() == [3, 4]


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_a_tree_has_the_weight_of_one_sample_whatever_its_sequences(mode: AggregationMode) -> None:
    # Samples with as many loss tokens, one of them in two sequences.
    batch = SampleBatch.from_generations(
        prompts=[[3], [5]],
        responses=[[6, 7], [7, 5, 8]],
        logprobs=[[-1.0, -1.0], [-1.0, 0.0, -1.0]],
        sample_ids=[40, 41],
        group_ids=[0, 0],
        prompt_indices=[0, 0],
        policy_versions=[1, 1],
        finish_reasons=["stop"] * 2,
        response_masks=[[True, True], [True, False, True]],
        token_versions=[[1, 1], [1, BEGINS, 1]],
    )
    norm = 8 if mode == "seq-mean-token-sum-norm" else None
    of_samples = sequence_weights(batch.sums(batch.response_mask), mode, normalising_length=norm)
    weights = of_samples.repeat_interleave(batch.response_lengths).where(batch.response_mask, 0.0)
    sequences = to_sequences(batch, weights=weights)
    assert sequences.lengths.tolist() == [3, 2, 2]
    one, *other = sequences.columns["weights"].split(sequences.lengths.tolist())
    assert float(one.sum()) == float(sum(weight.sum() for weight in other)) > 0


def test_routes_are_of_all_tokens_and_errors_name_their_samples() -> None:
    routes = torch.arange(14, dtype=torch.uint8).view(7, 2)
    sequences = to_sequences(batch := a_batch(), routes=TokenRoutes.of(routes, batch.sequence_lengths))
    assert sequences.routes is not None and not sequences.columns
    assert [rows.tolist() for rows in sequences.routes.samples] == [routes[:3].tolist(), routes[3:].tolist()]
    assert [sequences.name(number) for number in (0, 1)] == ["sample 40", "sample 41"]


def test_several_figures_of_each_token_there_and_back() -> None:
    batch = a_batch()
    column = torch.arange(1.0, 9.0).view(4, 2)
    sequences = to_sequences(batch, figures=column)
    assert sequences.columns["figures"].tolist() == [[0, 0], [0, 0], [1, 2], [0, 0], [3, 4], [5, 6], [7, 8]]
    assert torch.equal(of_responses(batch, sequences.columns["figures"], "the figure"), column)
    stats = sequences.columns["figures"].clone()
    stats[5] = torch.nan  # of a token that the policy did not write
    of_responses(batch, stats, "the figure")
    stats[6, 1] = -torch.inf
    with pytest.raises(EngineError, match=r"^the figure of sample 41 is -inf at response token 2, expected"):
        of_responses(batch, stats, "the figure")


def test_a_figure_that_is_no_number_ends_the_step_and_names_its_sample() -> None:
    batch = a_batch()
    stats = torch.arange(7.0)
    stats[[0, 1, 5]] = torch.nan  # of prompts, and of a token that the policy did not write
    assert of_responses(batch, stats, "critic rank 0: the value").isnan().sum() == 1
    stats[6] = torch.inf
    with pytest.raises(
        EngineError, match=r"^critic rank 0: the value of sample 41 is inf at response token 2, expected"
    ):
        of_responses(batch, stats, "critic rank 0: the value")
    assert finite_scores(batch, torch.ones(2), "the score").tolist() == [1.0, 1.0]
    with pytest.raises(
        EngineError, match=r"^reward_model rank 1: the score of sample 41 is nan, expected a finite number"
    ):
        finite_scores(batch, torch.tensor([0.0, torch.nan]), "reward_model rank 1: the score")
