"""Micro-batches: every token once, in both forms, and figures that come back to their tokens."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from engine3d.errors import UserError
from engine3d.training.sequences import Sequences, assign, least_micro_batches, micro_batch


def flops(lengths: list[int]) -> list[float]:
    """Of a model in which attention over 20 tokens costs as much as everything else."""
    return [length * (20.0 + length) for length in lengths]


def most_costly(costs: list[float], batches: list[list[int]]) -> float:
    return max(sum(costs[index] for index in batch) for batch in batches)


def least_possible(lengths: list[int], max_tokens: int, count: int) -> float:
    """What the most costly micro-batch costs in the best of all ways."""
    costs = flops(lengths)
    found = math.inf
    for choice in itertools.product(range(count), repeat=len(lengths)):
        batches = [[index for index, chosen in enumerate(choice) if chosen == number] for number in range(count)]
        if all(len(batch) < 2 or sum(lengths[index] for index in batch) <= max_tokens for batch in batches):
            found = min(found, most_costly(costs, batches))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_assign_covers_every_sequence_once_within_the_budget(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 50) for _ in range(draw.randint(0, 40))]
    costs, at_least = flops(lengths), draw.randint(1, 12)
    batches = assign(lengths, costs, 40, at_least)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert len(batches) == max(at_least, least_micro_batches(lengths, 40))
    for batch in batches:
        assert batch == sorted(batch)
        assert len(batch) <= 1 or sum(lengths[index] for index in batch) <= 40
    assert batches == sorted(batches, key=lambda batch: -sum(costs[index] for index in batch))
    assert batches == assign(lengths, costs, 40, at_least)


def test_as_few_micro_batches_as_first_fit_fills() -> None:
    assert least_micro_batches([], 9) == 0
    assert least_micro_batches([10, 30, 10], 9) == 3  # longer sequences are alone
    assert least_micro_batches([3, 5, 3, 4, 3], 9) == 2  # 5 + 4, 3 + 3 + 3
    assert least_micro_batches([1, 9, 1], 9) == 2


def test_asking_for_more_micro_batches_splits_those_there_are() -> None:
    batches = assign([3, 3, 3, 3], [3, 3, 3, 3], 12, at_least=3)
    assert len(batches) == 3 and sum(map(len, batches)) == 4 and all(batches)
    assert assign([], [], 12, at_least=2) == [[], []]
    assert assign([2, 7], [2, 7], 12, at_least=3) == [[1], [0], []]


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "expected"),
    [
        # First fit alone would fill one micro-batch and leave the rest for the other.
        ([5, 5, 2], 10, [[0, 2], [1]]),
        # Dealt to the cheapest so far, the last sequence would find no room: both must be full.
        ([5, 4, 3, 3, 3], 9, [[0, 1], [2, 3, 4]]),
        # Dealt to the cheapest so far, these would come to 7 and 5.
        ([3, 3, 2, 2, 2], 8, [[0, 1], [2, 3, 4]]),
        # One that is longer than the budget is alone, and the others do not wait for it.
        ([20, 2, 2, 2, 2], 8, [[0], [1, 2, 3, 4]]),
    ],
)
def test_micro_batches_are_even(lengths: list[int], max_tokens: int, expected: list[list[int]]) -> None:
    assert assign(lengths, lengths, max_tokens) == expected


def test_few_sequences_against_every_way_there_is() -> None:
    ratios = []
    for seed in range(20):
        draw = random.Random(seed)
        lengths = [draw.randint(4, 24) for _ in range(8)]
        batches = assign(lengths, flops(lengths), 50)
        ratios.append(most_costly(flops(lengths), batches) / least_possible(lengths, 50, len(batches)))
    assert max(ratios) <= 1.02 and sum(ratio <= 1 + 1e-9 for ratio in ratios) >= 15


@pytest.mark.parametrize(("at_least", "above"), [(1, 0.15), (12, 0.01)])
def test_skewed_lengths_are_even_work(at_least: int, above: float) -> None:
    for seed in range(10):
        draw = random.Random(seed)
        lengths = [min(int(draw.lognormvariate(3, 0.8)) + 1, 200) for _ in range(100)]
        costs = flops(lengths)
        batches = assign(lengths, costs, 400, at_least)
        # Where the budget is nearly used up, short sequences cannot make up for a long one.
        assert most_costly(costs, batches) <= (1 + above) * max(sum(costs) / len(batches), *costs)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("multiple", [1, 4])
def test_targets_and_figures_belong_to_their_tokens(packed: bool, multiple: int) -> None:
    samples = [[10, 11, 12], [20], [30, 31, 32, 33, 34]]
    sequences = Sequences.of(samples, column=torch.arange(9.0))
    batch = micro_batch(sequences, [0, 1, 2], packed=packed, multiple=multiple)
    assert batch.input_ids.shape[1] % multiple == 0
    assert batch.positions == {(True, 1): 9, (True, 4): 12, (False, 1): 3 * 5, (False, 4): 3 * 8}[packed, multiple]
    # A model whose figure of the next token is the id of that token: it must come back to that very token.
    figures = batch.figures(batch.targets.double().flatten())
    assert figures.tolist() == [0, 11, 12, 0, 0, 31, 32, 33, 34]
    assert batch.last_figures(batch.input_ids.double()).tolist() == [12, 20, 34]
    assert batch.members.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 2]
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
    assert batch.indices == (2, 0) and batch.flat.tolist() == [5, 0, 1] and batch.input_ids.tolist() == [[6, 1, 2]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_micro_batch_comes_to_a_gpu_that_is_at_work() -> None:
    samples = [list(range(8192)) for _ in range(4)]
    batch = micro_batch(Sequences.of(samples, weights=torch.rand(4 * 8192)), [0, 1, 2, 3], packed=True, multiple=1)
    device = torch.device("cuda")
    batch.to(device)  # takes page-locked memory, for which the GPU may be waited for
    torch.cuda.synchronize()
    torch.cuda._sleep(3_000_000_000)  # cycles: more than a second
    moved, is_over = batch.to(device), torch.cuda.current_stream().record_event()
    assert not is_over.query()
    assert torch.equal(moved.input_ids.cpu(), batch.input_ids)
    assert torch.equal(moved.columns["weights"].cpu(), batch.columns["weights"])


def test_an_empty_micro_batch_is_padding_only() -> None:
    batch = micro_batch(Sequences.of([]), [], packed=True, multiple=2)
    assert batch.input_ids.shape == (1, 2) and batch.flat.numel() == 0
    assert batch.cu_seqlens is not None and batch.cu_seqlens.tolist() == [0, 2]
    assert batch.figures(torch.ones(2)).numel() == batch.last_figures(torch.ones(1, 2)).numel() == 0
    assert batch.members.numel() == 0


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
