"""Kernels of experts in one step against the same in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine3d.models.experts import room as expert_room
from engine3d.models.experts import rows as expert_rows
from engine3d.models.experts.grouped_products import learn
from engine3d.models.experts.room import Room, RowsAhead
from engine3d.models.experts.rows import Rows
from tests.support.interpreted import run_interpreted
from tests.support.ptx import compiled_for_hopper


def _compare(device: str) -> None:
    from engine3d.models.experts import kernels as expert_kernels

    expert_kernels._WIDTH, expert_kernels._CELLS, expert_kernels._TILES = 16, 32, 2
    expert_room.LEAST_TOKENS, expert_room.LEAST_PIECES, expert_room.MOST_OF_EVEN = 1, 1, 100
    generator = torch.Generator().manual_seed(3)
    short = set[bool]()
    for ranks, experts, tokens, most, width in [(1, 3, 9, 2, 16), (2, 5, 7, 3, 40), (3, 1, 4, 4, 24)]:
        scores = torch.rand(ranks, experts, tokens, generator=generator)
        least = scores.topk(min(most, experts), dim=1).values[:, -1:]
        scores[(scores < least) | (torch.rand(scores.shape, generator=generator) < 0.3)] = -torch.inf
        for pieces in (1, 2, 3):
            laid_out = expert_kernels.lay_out(scores.to(device), min(most, experts), pieces)
            _same_rows(laid_out, expert_rows.rows_of(scores, most, pieces)(), min(most, experts))
            for share in (0.5, 1.0, 9.0):  # too little for some, for few, and for none
                room = Room(RowsAhead(torch.device("cpu")))
                room.learn([int(share * 100)], [100])
                lengths = [ranks * (tokens // pieces + (number < tokens % pieces)) for number in range(pieces)]
                rooms = room.of(lengths, min(most, experts), 1.0)
                too_little = torch.zeros((), dtype=torch.int32, device=device)
                laid_out = expert_kernels.lay_out(scores.to(device), min(most, experts), pieces, rooms, too_little)
                _same_rows(laid_out, expert_rows.rows_of(scores, most, pieces, room)(), min(most, experts))
                assert bool(too_little) == bool(room.ahead.too_little)
                short.add(bool(too_little))
        [expected] = expert_rows.rows_of(scores, most)()
        count = len(expected.token)
        routed = torch.rand(tokens, experts, generator=generator) < 0.5
        sent = expert_kernels.send(scores[0].t().contiguous().to(device), routed.to(device))
        assert torch.equal(sent.cpu(), expert_rows.scores_of(scores[0].t(), routed))
        sequences = torch.randint(-1, 3, (tokens,), dtype=torch.int32, generator=generator)
        counted, added = (torch.arange(experts, dtype=torch.float64, device=of) for of in ("cpu", device))
        expert_rows.count_routed(routed, sequences, counted)
        expert_kernels.count(routed.to(device), sequences.to(device), added)
        assert torch.equal(added.cpu(), counted)
        there = Rows(*(getattr(expected, name).to(device) for name in vars(expected)))

        hidden = torch.randn(ranks * tokens, width, generator=generator)
        parts = torch.randn(3, 5, width, generator=generator)
        for rank in range(3):
            together = torch.empty(5, width, device=device)
            expert_kernels.add(parts.to(device), parts[0].to(device), rank, together)
            assert torch.equal(together.cpu(), expert_rows.add_parts(parts, parts[0], rank))
        taken = expert_kernels.take(hidden.to(device), there.token)
        assert torch.equal(taken.cpu(), expert_rows.take_rows(hidden, expected))
        for first in range(0, ranks * tokens, tokens):
            own = hidden[first : first + tokens].clone()
            others = hidden.clone()
            others[first : first + tokens] = torch.nan
            assert torch.equal(expert_rows.take_rows(others, expected, expert_rows.Apart(own, first)), taken.cpu())
            assert torch.equal(expert_kernels.take(others.to(device), there.token, own.to(device), first), taken)
        values = torch.randn(count, width, generator=generator)
        added = expert_kernels.sum_of(values.to(device), there.of_token, there.per_token)
        torch.testing.assert_close(added.cpu(), expert_rows.sum_rows(values, expected))

        grown, *both = torch.randn(3, 5, 7, generator=generator)
        one, other = (each.bfloat16() for each in both)
        right = grown + one.float() + other.float()
        at_once = grown.clone().to(device)
        expert_kernels.add_both(at_once, one.to(device), other.to(device))
        assert torch.equal(at_once.cpu(), right)
        learn(grown, one, other)
        assert torch.equal(grown, right)

        between, slope = (
            torch.randn(count, 2 * width, generator=generator),
            torch.randn(count, width, generator=generator),
        )
        made = expert_kernels.gate(between.to(device), there.score)
        torch.testing.assert_close(made.cpu(), expert_rows.gated(between, expected.score))
        found = expert_kernels.gate_gradient(between.to(device), there.score, slope.to(device))
        for one, other in zip(found, expert_rows.gated_gradient(between, expected.score, slope), strict=True):
            torch.testing.assert_close(one.cpu(), other, atol=1e-5, rtol=1e-5)

    assert short == {False, True}


def _same_rows(laid_out: Sequence[Tensor], expected: list[Rows], most: int) -> None:
    """Assert that what the kernels have laid out are these rows of pieces."""
    token, place, score, of_token, per_token, ends, of_pieces = (each.cpu() for each in laid_out)
    seen = 0
    for number, piece in enumerate(expected):
        its, last = slice(seen * most, seen * most + len(piece.token)), seen + len(piece.per_token)
        assert torch.equal(ends[number], piece.ends) and of_pieces[number] == piece.per_token.sum()
        assert torch.equal(token[its], piece.token) and torch.equal(place[its], piece.place)
        assert torch.equal(score[its], piece.score) and torch.equal(per_token[seen:last], piece.per_token)
        for its_token, rows in enumerate(piece.per_token.tolist()):
            assert torch.equal(of_token[seen + its_token, :rows], piece.of_token[its_token, :rows])
        seen = last


@pytest.mark.processes
def test_kernels_interpreted() -> None:
    run_interpreted(_compare)


def _compile(device: str) -> None:
    from engine3d.models.experts import kernels as expert_kernels

    text = compiled_for_hopper(
        expert_kernels._add,
        dict.fromkeys(("received", "own", "result"), "*bf16") | dict.fromkeys(("count", "rank", "ranks"), "i32"),
        {"WIDTH": expert_kernels._WIDTH},
        whole_words=("received", "own", "result", "count"),
    )
    assert "ld.global.v4.b32" in text and "st.global.v4.b32" in text
    text = compiled_for_hopper(
        expert_kernels._take,
        dict.fromkeys(("tokens", "own", "result"), "*bf16")
        | {"token": "*i32"}
        | dict.fromkeys(("first", "count", "width"), "i32"),
        {"WIDTH": expert_kernels._WIDTH},
        whole_words=("tokens", "own", "token", "result", "width"),
    )
    assert text.count("ld.global.v4.b32") == 4 and "st.global.v4.b32" in text  # of either, for each thread two
    text = compiled_for_hopper(
        expert_kernels._add_both,
        dict.fromkeys(("into", "one", "other"), "*bf16") | {"count": "i32"},
        {"WIDTH": expert_kernels._WIDTH},
        whole_words=("into", "one", "other", "count"),
    )
    assert "ld.global.v4.b32" in text and "st.global.v4.b32" in text
    ints = dict.fromkeys(("experts", "tokens", "least", "longer"), "i32")
    tile = {"BLOCK": 32, "WIDTH": 128}
    compiled_for_hopper(
        expert_kernels._send,
        {"probabilities": "*fp32", "routing": "*u8", "result": "*fp32", "experts": "i32", "tokens": "i32"},
        tile,
        whole_words=("probabilities", "routing", "result", "experts"),
    )
    compiled_for_hopper(
        expert_kernels._count,
        {"routing": "*u8", "sequences": "*i32", "into": "*fp64", "experts": "i32", "tokens": "i32"},
        tile | {"TILES": expert_kernels._TILES},
        whole_words=("routing", "sequences", "into", "experts"),
    )
    compiled_for_hopper(
        expert_kernels._mark,
        {"scores": "*fp32", "seen": "*i32"} | ints,
        tile,
        whole_words=("scores", "seen", "experts"),
    )
    tensors = ("scores", "up_to", "token", "place", "score", "of_token", "per_token", "ends", "of_pieces", "too_little")
    others = {"scores": "*fp32", "place": "*i64", "score": "*fp32"}
    types = {name: others.get(name, "*i32") for name in tensors}
    types |= dict.fromkeys(("experts", "tokens", "most", "pieces", "least", "longer", "of_longer", "of_shorter"), "i32")
    for ones in ((), ("most", "pieces"), ("experts", "most", "pieces")):
        variables = {name: kind for name, kind in types.items() if name not in ones}
        compiled_for_hopper(
            expert_kernels._lay_out,
            variables,
            tile | dict.fromkeys(ones, 1),
            whole_words=(*tensors, *{"experts"} - {*ones}),
        )


@pytest.mark.processes
def test_kernels_compile_without_a_gpu() -> None:
    run_interpreted(_compile, interpret=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_on_a_gpu() -> None:
    _compare("cuda")
