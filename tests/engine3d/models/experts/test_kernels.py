"""Kernels of fused experts against the same in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine3d.models.experts import permutation, row_capacity
from engine3d.models.experts.grouped_gemm import accumulate
from engine3d.models.experts.permutation import RowMap
from engine3d.models.experts.row_capacity import PredictedCapacity, RowCapacity
from tests.support.interpreted import run_interpreted
from tests.support.ptx import compiled_for_hopper


def _compare(device: str) -> None:
    from engine3d.models.experts import kernels

    kernels._WIDTH, kernels._CELLS, kernels._TILES = 16, 32, 2
    row_capacity.LEAST_TOKENS, row_capacity.LEAST_CHUNKS, row_capacity.MOST_OF_EVEN = 1, 1, 100
    generator = torch.Generator().manual_seed(3)
    short = set[bool]()
    shapes = [(1, 3, 9, 2, 16), (2, 5, 7, 3, 40), (3, 1, 4, 4, 24)]
    for number, (ranks, experts, tokens, topk, width) in enumerate(shapes):
        scores = torch.rand(ranks, experts, tokens, generator=generator)
        least = scores.topk(min(topk, experts), dim=1).values[:, -1:]
        scores[(scores < least) | (torch.rand(scores.shape, generator=generator) < 0.3)] = -torch.inf
        for chunks in (1, 2, 3):
            mapped = kernels.map_rows(scores.to(device), min(topk, experts), chunks)
            _same_rows(mapped, permutation.row_maps(scores, topk, chunks)(), min(topk, experts))
            shares: tuple[float, ...] = (0.5, 1.0, 9.0)  # too little for some, for few, and for none
            if device == "cpu":  # an interpreter takes long: each with each number of chunks, and with each shape
                shares = (shares[(number + chunks) % 3],)
            for share in shares:
                capacity = RowCapacity(PredictedCapacity(torch.device("cpu")))
                capacity.observe([int(share * 100)], [100])
                lengths = [ranks * (tokens // chunks + (number < tokens % chunks)) for number in range(chunks)]
                capacities = capacity.of(lengths, min(topk, experts), 1.0)
                overflow = torch.zeros((), dtype=torch.int32, device=device)
                mapped = kernels.map_rows(scores.to(device), min(topk, experts), chunks, capacities, overflow)
                _same_rows(mapped, permutation.row_maps(scores, topk, chunks, capacity)(), min(topk, experts))
                assert bool(overflow) == bool(capacity.predicted.overflow)
                short.add(bool(overflow))
        [expected] = permutation.row_maps(scores, topk)()
        count = len(expected.token)
        routed = torch.rand(tokens, experts, generator=generator) < 0.5
        transposed = kernels.expert_scores(scores[0].t().contiguous().to(device), routed.to(device))
        assert torch.equal(transposed.cpu(), permutation.expert_scores(scores[0].t(), routed))
        sequences = torch.randint(-1, 3, (tokens,), dtype=torch.int32, generator=generator)
        counted, added = (torch.arange(experts, dtype=torch.float64, device=of) for of in ("cpu", device))
        permutation.count_tokens(routed, sequences, counted)
        kernels.count_tokens(routed.to(device), sequences.to(device), added)
        assert torch.equal(added.cpu(), counted)
        rows = RowMap(*(getattr(expected, name).to(device) for name in vars(expected)))

        hidden = torch.randn(ranks * tokens, width, generator=generator)
        partials = torch.randn(3, 5, width, generator=generator)
        for rank in range(3):
            together = torch.empty(5, width, device=device)
            kernels.sum_partials(partials.to(device), partials[0].to(device), rank, together)
            assert torch.equal(together.cpu(), permutation.sum_partials(partials, partials[0], rank))
        taken = kernels.permute(hidden.to(device), rows.token)
        assert torch.equal(taken.cpu(), permutation.permute(hidden, expected))
        for first in range(0, ranks * tokens, tokens):
            local = hidden[first : first + tokens].clone()
            others = hidden.clone()
            others[first : first + tokens] = torch.nan
            assert torch.equal(
                permutation.permute(others, expected, permutation.LocalTokens(local, first)), taken.cpu()
            )
            assert torch.equal(kernels.permute(others.to(device), rows.token, local.to(device), first), taken)
        values = torch.randn(count, width, generator=generator)
        added = kernels.unpermute(values.to(device), rows.token_rows, rows.row_counts)
        torch.testing.assert_close(added.cpu(), permutation.unpermute(values, expected))

        grown, *both = torch.randn(3, 5, 7, generator=generator)
        one, other = (tensor.bfloat16() for tensor in both)
        right = grown + one.float() + other.float()
        at_once = grown.clone().to(device)
        kernels.add_both(at_once, one.to(device), other.to(device))
        assert torch.equal(at_once.cpu(), right)
        accumulate(grown, one, other)
        assert torch.equal(grown, right)

        between, slope = (
            torch.randn(count, 2 * width, generator=generator),
            torch.randn(count, width, generator=generator),
        )
        made = kernels.gate(between.to(device), rows.score)
        torch.testing.assert_close(made.cpu(), permutation.gated(between, expected.score))
        gradients = kernels.gate_gradient(between.to(device), rows.score, slope.to(device))
        for one, other in zip(gradients, permutation.gated_gradient(between, expected.score, slope), strict=True):
            torch.testing.assert_close(one.cpu(), other, atol=1e-5, rtol=1e-5)

    assert short == {False, True}


def _same_rows(mapped: Sequence[Tensor], expected: list[RowMap], topk: int) -> None:
    """Assert that the kernels have mapped these rows of chunks."""
    token, score_index, score, token_rows, row_counts, ends, counts = (tensor.cpu() for tensor in mapped)
    seen = 0
    for number, chunk in enumerate(expected):
        rows, last = slice(seen * topk, seen * topk + len(chunk.token)), seen + len(chunk.row_counts)
        assert torch.equal(ends[number], chunk.ends) and counts[number] == chunk.row_counts.sum()
        assert torch.equal(token[rows], chunk.token) and torch.equal(score_index[rows], chunk.score_index)
        assert torch.equal(score[rows], chunk.score) and torch.equal(row_counts[seen:last], chunk.row_counts)
        for token_number, count in enumerate(chunk.row_counts.tolist()):
            assert torch.equal(token_rows[seen + token_number, :count], chunk.token_rows[token_number, :count])
        seen = last


@pytest.mark.processes
def test_kernels_interpreted() -> None:
    run_interpreted(_compare)


@pytest.mark.slow
def test_kernels_compile_without_a_gpu() -> None:
    from engine3d.models.experts import kernels

    text = compiled_for_hopper(
        kernels._sum_partials,
        dict.fromkeys(("received", "local", "result"), "*bf16") | dict.fromkeys(("count", "rank", "ranks"), "i32"),
        {"WIDTH": kernels._WIDTH},
        whole_words=("received", "local", "result", "count"),
    )
    assert "ld.global.v4.b32" in text and "st.global.v4.b32" in text
    text = compiled_for_hopper(
        kernels._permute,
        dict.fromkeys(("tokens", "local", "result"), "*bf16")
        | {"token": "*i32"}
        | dict.fromkeys(("first", "count", "width"), "i32"),
        {"WIDTH": kernels._WIDTH},
        whole_words=("tokens", "local", "token", "result", "width"),
    )
    assert text.count("ld.global.v4.b32") == 4 and "st.global.v4.b32" in text  # of either, for each thread two
    text = compiled_for_hopper(
        kernels._add_both,
        dict.fromkeys(("into", "one", "other"), "*bf16") | {"count": "i32"},
        {"WIDTH": kernels._WIDTH},
        whole_words=("into", "one", "other", "count"),
    )
    assert "ld.global.v4.b32" in text and "st.global.v4.b32" in text
    ints = dict.fromkeys(("experts", "tokens", "least", "longer"), "i32")
    tile = {"BLOCK": 32, "WIDTH": 128}
    compiled_for_hopper(
        kernels._expert_scores,
        {"probabilities": "*fp32", "routing": "*u8", "result": "*fp32", "experts": "i32", "tokens": "i32"},
        tile,
        whole_words=("probabilities", "routing", "result", "experts"),
    )
    compiled_for_hopper(
        kernels._count_tokens,
        {"routing": "*u8", "sequences": "*i32", "into": "*fp64", "experts": "i32", "tokens": "i32"},
        tile | {"TILES": kernels._TILES},
        whole_words=("routing", "sequences", "into", "experts"),
    )
    compiled_for_hopper(
        kernels._mark,
        {"scores": "*fp32", "seen": "*i32"} | ints,
        tile,
        whole_words=("scores", "seen", "experts"),
    )
    tensors = (
        "scores",
        "up_to",
        "token",
        "score_index",
        "score",
        "token_rows",
        "row_counts",
        "ends",
        "counts",
        "overflow",
    )
    others = {"scores": "*fp32", "score_index": "*i64", "score": "*fp32"}
    types = {name: others.get(name, "*i32") for name in tensors}
    types |= dict.fromkeys(
        ("experts", "tokens", "topk", "chunks", "least", "longer", "longer_capacity", "shorter_capacity"), "i32"
    )
    for ones in ((), ("topk", "chunks"), ("experts", "topk", "chunks")):
        variables = {name: kind for name, kind in types.items() if name not in ones}
        compiled_for_hopper(
            kernels._map_rows,
            variables,
            tile | dict.fromkeys(ones, 1),
            whole_words=(*tensors, *{"experts"} - {*ones}),
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_on_a_gpu() -> None:
    _compare("cuda")
