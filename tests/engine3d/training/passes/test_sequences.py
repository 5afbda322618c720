"""Micro-batches: every token once, in both forms, and outputs that return to their tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch

from engine3d.errors import UserError
from engine3d.training.passes.sequences import Sequences, micro_batch, packed_positions


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("multiple", [1, 4])
def test_targets_and_values_belong_to_their_tokens(packed: bool, multiple: int) -> None:
    samples = [[10, 11, 12], [20], [30, 31, 32, 33, 34]]
    sequences = Sequences.of(samples, column=torch.arange(9.0))
    batch = micro_batch(sequences, [[0, 1, 2]], packed=packed, multiple=multiple)
    assert batch.input_ids.shape[1] % multiple == 0
    assert batch.positions == {(True, 1): 9, (True, 4): 12, (False, 1): 3 * 5, (False, 4): 3 * 8}[packed, multiple]
    # A model whose figure of the next token is the id of that token: it must come back to that very token.
    values = batch.at_tokens(batch.targets.double().flatten())
    assert values.tolist() == [0, 11, 12, 0, 0, 31, 32, 33, 34]
    assert batch.at_ends(batch.input_ids.double()).tolist() == [12, 20, 34]
    assert batch.members.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 2]
    assert batch.columns["column"].tolist() == list(range(9))
    assert sequences.tokens[batch.flat].tolist() == [token for sample in samples for token in sample]
    positions = batch.position_ids.view(-1)
    inputs = batch.input_ids.view(-1)
    for sample in samples:
        for position, token in enumerate(sample):
            assert positions[(inputs == token).nonzero()[0, 0]] == position
    if packed:
        assert batch.cu_seqlens is not None
        assert batch.cu_seqlens[:4].tolist() == [0, 3, 4, 9] and batch.cu_seqlens[-1] == batch.input_ids.shape[1]
        assert batch.max_length == 5


def test_a_subset_keeps_its_place() -> None:
    sequences = Sequences.of([[1, 2], [3, 4, 5], [6]])
    batch = micro_batch(sequences, [[2, 0]], packed=True, multiple=1)
    assert batch.indices == (2, 0) and batch.flat.tolist() == [5, 0, 1] and batch.input_ids.tolist() == [[6, 1, 2]]


@pytest.mark.parametrize("cp", [2, 3])
def test_sequences_are_split_and_their_outputs_return_to_their_tokens(cp: int) -> None:
    samples = [[10, 11, 12], [20], list(range(30, 30 + 14))]
    sequences = Sequences.of(samples, column=torch.arange(36.0).view(18, 2))
    build = partial(micro_batch, sequences, [[0, 1, 2]], packed=True, multiple=4 * cp, cp=cp)
    shards, complete = (
        [build(cp_rank=rank) for rank in range(cp)],
        micro_batch(sequences, [[0, 1, 2]], packed=True, multiple=1),
    )
    positions = 4 * cp * -(-2 * cp * sum(-(-len(sample) // (2 * cp)) for sample in samples) // (4 * cp))
    for shard in shards:
        assert shard.positions == positions and shard.input_ids.shape == (1, positions // cp)
        assert shard.cu_seqlens is not None and shard.cu_seqlens[-1] == positions
        assert not (shard.cu_seqlens % (2 * cp)).any() and shard.max_length == shard.cu_seqlens.diff().max()
        assert shard.columns["column"].equal(complete.columns["column"]) and shard.members.equal(complete.members)
    # Outputs of all ranks end to end: the target of a position is the token after it, which another rank may have.
    targets, inputs = (torch.cat([getattr(shard, name)[0] for shard in shards]) for name in ("targets", "input_ids"))
    assert shards[0].at_tokens(targets).equal(complete.at_tokens(complete.targets[0]))
    assert shards[0].at_ends(inputs).tolist() == [12, 20, 43]
    placed = torch.cat([shard.at_positions(shard.columns["column"]) for shard in shards])
    assert shards[1].at_tokens(placed).equal(complete.at_tokens(complete.at_positions(complete.columns["column"])))
    # A rank has as much of the beginning of a sequence as of its end.
    numbers = [shard.sequences[0].tolist() for shard in shards]
    of_last = [shard.position_ids[0, shard.sequences[0] == 2].tolist() for shard in shards]
    assert sorted(itertools.chain(*of_last)) == list(range(14)) and [min(of_rank) for of_rank in of_last] == [
        rank * -(-14 // (2 * cp)) for rank in range(cp)
    ]
    assert sum(number.count(-1) for number in numbers) == positions - 18


def test_ranks_have_complete_sequences_and_outputs_return_to_their_tokens() -> None:
    samples, shares = [[10, 11, 12], [20], list(range(30, 30 + 5))], [[2], [0, 1], []]
    sequences = Sequences.of(samples, column=torch.arange(18.0).view(9, 2))
    assert packed_positions([3, 1, 5], shares, multiple=6, cp=3) == 18
    build = partial(micro_batch, sequences, shares, packed=True, multiple=6, cp=3)
    shards, complete = (
        [build(cp_rank=rank) for rank in range(3)],
        micro_batch(sequences, [[2, 0, 1]], packed=True, multiple=1),
    )
    assert [shard.input_ids.tolist() for shard in shards] == [
        [[30, 31, 32, 33, 34, 0]],
        [[10, 11, 12, 20, 0, 0]],
        [[0] * 6],
    ]
    assert [shard.sequences.tolist() for shard in shards] == [[[0] * 5 + [-1]], [[1, 1, 1, 2, -1, -1]], [[-1] * 6]]
    bounds = [shard.cu_seqlens for shard in shards]
    assert [of_rank.tolist() for of_rank in bounds if of_rank is not None] == [[0, 5, 6], [0, 3, 4, 6], [0, 6]]
    assert [shard.max_length for shard in shards] == [5, 3, 6]
    assert shards[1].position_ids.tolist() == [[0, 1, 2, 0, 0, 1]]
    for shard in shards:
        assert shard.positions == 18 and not shard.split and shard.indices == (2, 0, 1)
        assert shard.columns["column"].equal(complete.columns["column"]) and shard.members.equal(complete.members)
    targets, inputs = (torch.cat([getattr(shard, name)[0] for shard in shards]) for name in ("targets", "input_ids"))
    assert shards[0].at_tokens(targets).equal(complete.at_tokens(complete.targets[0]))
    assert shards[0].at_ends(inputs).tolist() == [34, 12, 20]
    placed = torch.cat([shard.at_positions(shard.columns["column"]) for shard in shards])
    assert shards[1].at_tokens(placed).equal(complete.at_tokens(complete.at_positions(complete.columns["column"])))
    # More positions, as ranks of other data-parallel replicas need them, are the same for each rank.
    assert [build(cp_rank=rank, positions=36).input_ids.shape[1] for rank in range(3)] == [12] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_micro_batch_comes_to_a_gpu_that_is_at_work() -> None:
    samples = [list(range(8192)) for _ in range(4)]
    batch = micro_batch(Sequences.of(samples, weights=torch.rand(4 * 8192)), [[0, 1, 2, 3]], packed=True, multiple=1)
    device = torch.device("cuda")
    batch.to(device)  # takes page-locked memory, for which the GPU may be waited for
    torch.cuda.synchronize()
    torch.cuda._sleep(3_000_000_000)  # cycles: more than a second
    moved, is_over = batch.to(device), torch.cuda.current_stream().record_event()
    assert not is_over.query()
    assert torch.equal(moved.input_ids.cpu(), batch.input_ids)
    assert torch.equal(moved.columns["weights"].cpu(), batch.columns["weights"])


def test_an_empty_micro_batch_is_padding_only() -> None:
    batch = micro_batch(Sequences.of([]), [[]], packed=True, multiple=2)
    assert batch.input_ids.shape == (1, 2) and batch.flat.numel() == 0
    assert batch.cu_seqlens is not None and batch.cu_seqlens.tolist() == [0, 2]
    assert batch.at_tokens(torch.ones(2)).numel() == batch.at_ends(torch.ones(1, 2)).numel() == 0
    assert batch.members.numel() == 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Sequences(torch.arange(3), torch.tensor([2])), "add up to 2 tokens, 3 were given"),
        (lambda: Sequences.of([[1], []]), "sequence 1 is empty"),
        (lambda: Sequences.of([[1, 2]], advantages=torch.zeros(3)), "'advantages' has shape (3,), expected (2,)"),
    ],
)
def test_sequences_that_do_not_fit_are_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(UserError) as error:
        make()
    assert words in str(error.value)
