"""Micro-batches: every token once, in both forms, and figures that come back to their tokens."""

from __future__ import annotations

import random

import pytest
import torch

from engine3d.errors import UserError
from engine3d.training.sequences import Sequences, assign, micro_batch


@pytest.mark.parametrize("seed", range(20))
def test_assign_covers_every_sequence_once_within_the_budget(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 50) for _ in range(draw.randint(0, 40))]
    at_least = draw.randint(1, 12)
    batches = assign(lengths, 40, at_least)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert len(batches) >= at_least
    for batch in batches:
        assert len(batch) <= 1 or sum(lengths[index] for index in batch) <= 40


def test_asking_for_more_micro_batches_splits_those_there_are() -> None:
    batches = assign([3, 3, 3, 3], 12, at_least=3)
    assert len(batches) == 3 and sum(map(len, batches)) == 4 and all(batches)
    assert assign([], 12, at_least=2) == [[], []]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("multiple", [1, 4])
def test_targets_and_figures_belong_to_their_tokens(packed: bool, multiple: int) -> None:
    samples = [[10, 11, 12], [20], [30, 31, 32, 33, 34]]
    sequences = Sequences.of(samples, column=torch.arange(9.0))
    batch = micro_batch(sequences, [0, 1, 2], packed=packed, multiple=multiple)
    assert batch.input_ids.shape[1] % multiple == 0
    # A model whose figure of the next token is the id of that token: it must come back to that very token.
    figures = batch.figures(batch.targets.double())
    assert figures.tolist() == [0, 11, 12, 0, 0, 31, 32, 33, 34]
    assert batch.columns["column"].tolist() == list(range(9))
    assert sequences.tokens[batch.flat].tolist() == [token for sample in samples for token in sample]
    positions = batch.position_ids.view(-1)
    inputs = batch.input_ids.view(-1)
    for sample in samples:
        for place, token in enumerate(sample):
            assert positions[(inputs == token).nonzero()[0, 0]] == place
    if packed:
        assert batch.cu_seqlens is not None
        assert batch.cu_seqlens[:4].tolist() == [0, 3, 4, 9] and batch.cu_seqlens[-1] == batch.input_ids.shape[1]
        assert batch.max_length == 5


def test_a_subset_keeps_its_place() -> None:
    sequences = Sequences.of([[1, 2], [3, 4, 5], [6]])
    batch = micro_batch(sequences, [2, 0], packed=True, multiple=1)
    assert batch.flat.tolist() == [5, 0, 1] and batch.input_ids.tolist() == [[6, 1, 2]]


def test_an_empty_micro_batch_is_padding_only() -> None:
    batch = micro_batch(Sequences.of([]), [], packed=True, multiple=2)
    assert batch.input_ids.shape == (1, 2) and batch.flat.numel() == 0
    assert batch.cu_seqlens is not None and batch.cu_seqlens.tolist() == [0, 2]
    assert batch.figures(torch.ones(1, 2)).numel() == 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Sequences(torch.arange(3), torch.tensor([2])), "add up to 2 tokens, 3 were given"),
        (lambda: Sequences.of([[1], []]), "sequence 1 is empty"),
        (lambda: Sequences.of([[1, 2]], advantages=torch.zeros(3)), "'advantages' has shape (3,), expected (2,)"),
    ],
)
def test_sequences_that_do_not_fit_are_refused(make, words: str) -> None:
    with pytest.raises(UserError) as error:
        make()
    assert words in str(error.value)
