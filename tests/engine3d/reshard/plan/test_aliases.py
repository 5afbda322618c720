"""Aliases: a buffer is bound only where every element is right, and is bound wherever it can be."""

from __future__ import annotations

import random
from dataclasses import replace
from math import prod

import pytest

from engine3d.layout import Layout
from engine3d.models import model_spec
from engine3d.models.rules import Box
from engine3d.reshard.describe.shards import Alias, Buffer, Holding, RankShards
from engine3d.reshard.plan.aliases import find_aliases
from engine3d.reshard.plan.planner import make_plan
from tests.support.tiny_families import CONFIGS, MOE
from tests.support.worlds import bound, check, engines, full_tensors, location, memory_of, shapes, trainer

LAYOUTS = [Layout(), Layout(tp=2), Layout(tp=4), Layout(pp=2), Layout(ep=4, dp=4), Layout(tp=2, ep=2, dp=2)]
SPEC = model_spec(MOE)


def named(target: RankShards, aliases: tuple[Alias, ...]) -> dict[str, Alias]:
    return {target.buffers[alias.target_buffer].name: alias for alias in aliases}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "tp", "ep", "transformer_engine"),
    [
        # Of each trainer and engine one of both, in turns; the other before a release.
        pytest.param(
            *(layout, tp, ep, transformer_engine),
            marks=() if (number + transformer_engine) % 2 else pytest.mark.release,
            id=f"{layout}-{tp}-{ep}-{transformer_engine}",
        )
        for row, layout in enumerate(
            [Layout(), Layout(tp=2), Layout(tp=4), Layout(pp=2), Layout(ep=4, dp=4), Layout(tp=2, ep=2, dp=2)]
        )
        for number, (tp, ep) in enumerate([(1, 1), (2, 1), (2, 2), (4, 1), (4, 4)], row)
        for transformer_engine in (True, False)
    ],
)
def test_bound_buffers_hold_what_they_should(layout: Layout, tp: int, ep: int, transformer_engine: bool) -> None:
    for spec in (SPEC, replace(SPEC, expert_order="descending"), model_spec(CONFIGS["llama"])):
        if not spec.sizes.experts and (ep > 1 or layout.ep > 1):
            continue
        sources = trainer(spec, layout, transformer_engine=transformer_engine)
        targets = [replace(target, aliases=find_aliases(sources, target)) for target in engines(spec, tp, ep, 2)]
        assert any(target.aliases for target in targets)
        plan = make_plan(sources, targets, shapes(spec))
        check(plan, sources, targets, shapes(spec))
        for target in targets:
            for alias in target.aliases:
                assert sources[alias.source_rank].location == target.location


def test_all_experts_are_bound_where_the_layouts_agree() -> None:
    sources = trainer(SPEC, Layout(ep=4, dp=4))
    for rank, target in enumerate(engines(SPEC, 4, 4)):
        aliases = named(target, find_aliases(sources, target))
        for layer in (0, 2, 3):
            assert aliases[f"model.layers.{layer}.w13"].strides == (2 * 24 * 32, 32, 1)
            assert aliases[f"model.layers.{layer}.w2"].strides == (24 * 32, 24, 1)
        # Columns of the trainer's whole matrix: rows would lie further apart than SGLang's kernels may expect.
        assert "model.layers.1.mlp.down" not in aliases
        assert "model.norm.weight" in aliases
        # The last of four ranks has rows of padding.
        assert ("embed_tokens" in aliases) == (rank < 3)
        assert "model.layers.0.mlp.gate.weight" in aliases
        # Of a group's two query heads the second lies before the key head.
        assert ("model.layers.0.qkv" in aliases) == (rank % 2 == 1)
    # Numbered downwards, experts lie downwards in memory, and a router's rows are in another order.
    descending = trainer(replace(SPEC, expert_order="descending"), Layout(ep=4, dp=4))
    target = engines(SPEC, 4, 4)[0]
    aliases = named(target, find_aliases(descending, target))
    assert "model.layers.0.w13" not in aliases and "model.layers.0.mlp.gate.weight" not in aliases


def test_experts_that_lie_apart_are_bound_with_strides() -> None:
    sources = trainer(replace(SPEC, expert_order="descending"), Layout(ep=2, dp=2), transformer_engine=False)
    target = engines(SPEC, 2, 2)[1]
    alias = named(target, find_aliases(sources, target))["model.layers.2.w13"]
    assert alias.strides == (3 * 24 * 32, 32, 1)


def one(name: str, shape: tuple[int, ...], holdings: list[Holding], dtype: str = "bfloat16", at: int = 0) -> RankShards:
    return RankShards(name, 0, location(at), (Buffer("memory", dtype, shape),), tuple(holdings))


def _spans(*starts_at: tuple[int, int], end: int) -> list[tuple[Box, int]]:
    """Boxes of a vector, each from its start to the next one's, with where it lies."""
    starts = [start for start, _ in starts_at]
    return [(((start, stop),), at) for (start, at), stop in zip(starts_at, [*starts[1:], end], strict=True)]


WHOLE = Holding("a", ((0, 4), (0, 6)), 0, 0, (6, 1))
SOURCE = one("source", (30,), [replace(WHOLE, offset=5)])


def test_what_can_be_bound() -> None:
    assert find_aliases([SOURCE], one("target", (4, 6), [WHOLE])) == (Alias(0, 0, 0, 5, (6, 1)),)
    # The same bytes in another shape, and a source further down the list.
    assert find_aliases([SOURCE], one("target", (24,), [WHOLE])) == (Alias(0, 0, 0, 5, (1,)),)
    assert find_aliases([SOURCE], one("target", (2, 2, 6), [WHOLE])) == (Alias(0, 0, 0, 5, (12, 6, 1)),)
    assert find_aliases([SOURCE], one("target", (1, 4, 1, 6), [WHOLE]))[0].strides[1::2] == (6, 1)
    elsewhere = replace(SOURCE, location=location(1))
    second = replace(SOURCE, rank=1)
    assert find_aliases([elsewhere, second], one("target", (4, 6), [WHOLE])) == (Alias(0, 1, 0, 5, (6, 1)),)
    rows = [Holding("a", ((row, row + 1), (0, 6)), 0, row * 9, (6, 1)) for row in range(4)]
    apart = one("source", (40,), rows)
    assert find_aliases([apart], one("target", (4, 6), [WHOLE])) == ()
    assert find_aliases([apart], one("target", (4, 1, 6), [WHOLE])) == (Alias(0, 0, 0, 0, (9, 6, 1)),)
    assert find_aliases([apart], one("target", (2, 2, 6), [WHOLE])) == ()


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (replace(SOURCE, location=location(1)), one("target", (4, 6), [WHOLE])),
        (SOURCE, one("target", (4, 6), [WHOLE], "float32")),
        (SOURCE, one("target", (5, 6), [WHOLE])),  # a row of padding
        (SOURCE, one("target", (4, 6), [replace(WHOLE, box=((0, 2), (0, 6)))])),  # half of it is padding
        (one("source", (12,), [replace(WHOLE, box=((0, 2), (0, 6)))]), one("target", (4, 6), [WHOLE])),
        (one("source", (24,), [replace(WHOLE, strides=(1, 4))]), one("target", (4, 6), [WHOLE])),  # transposed
        (one("source", (48,), [replace(WHOLE, strides=(12, 2))]), one("target", (4, 6), [WHOLE])),  # every other
        (  # rows at uneven distances
            one("source", (60,), [Holding("a", ((r, r + 1), (0, 6)), 0, r * r * 6, (6, 1)) for r in range(4)]),
            one("target", (4, 6), [WHOLE]),
        ),
        (  # rows apart, in a buffer whose one dimension has one stride
            one("source", (40,), [replace(WHOLE, strides=(9, 1))]),
            one("target", (24,), [WHOLE]),
        ),
        (  # rows in the opposite order
            one("source", (24,), [Holding("a", ((r, r + 1), (0, 6)), 0, (3 - r) * 6, (6, 1)) for r in range(4)]),
            one("target", (4, 6), [WHOLE]),
        ),
        (  # runs that start where they should, one of which goes on past the end of a row
            one(
                "source",
                (40,),
                [Holding("c", span, 0, at, (1,)) for span, at in _spans((0, 0), (6, 9), (14, 20), (18, 27), end=24)],
            ),
            one("target", (4, 6), [Holding("c", ((0, 24),), 0, 0, (1,))]),
        ),
        (SOURCE, one("target", (3, 8), [replace(WHOLE, tensor="b")])),
    ],
)
def test_what_cannot_be_bound(source: RankShards, target: RankShards) -> None:
    assert find_aliases([source], target) == ()


def test_parts_in_two_buffers_cannot_be_bound() -> None:
    halves = tuple(Holding("a", ((2 * half, 2 * half + 2), (0, 6)), half, 0, (6, 1)) for half in (0, 1))
    buffers = (Buffer("one", "bfloat16", (12,)), Buffer("other", "bfloat16", (12,)))
    assert find_aliases([RankShards("source", 0, location(0), buffers, halves)], one("target", (4, 6), [WHOLE])) == ()


def test_random_memory() -> None:
    """A tensor in blocks at random distances, the target in random shapes: every element of what is bound is right."""
    aliased = 0
    for seed in range(600):
        draw = random.Random(seed)
        blocks, rows, columns = draw.randint(1, 3), draw.randint(1, 4), draw.randint(1, 4)
        shape = (blocks * rows, columns)
        row_step = columns + draw.choice([0, 0, 2])
        steps = [draw.choice([0, 0, 0, 1]) for _ in range(blocks)]
        offset, holdings = draw.randint(0, 3), []
        for block in range(blocks):
            box = ((block * rows, (block + 1) * rows), (0, columns))
            holdings.append(Holding("a", box, 0, offset, (row_step, 1)))
            offset += rows * row_step + steps[block]
        source = one("source", (offset + 8,), holdings)
        target_shape = draw.choice([shape, (blocks, rows, columns), (blocks, rows * columns), (prod(shape),)])
        target = one("target", target_shape, [Holding("a", ((0, shape[0]), (0, columns)), 0, 0, (columns, 1))])
        aliases = find_aliases([source], target)
        tensors = full_tensors({"a": shape})
        for alias in aliases:
            assert (bound(alias, target_shape, [memory_of(source, tensors)]) == memory_of(target, tensors)[0]).all()
            aliased += 1
        if row_step == columns and not any(steps[:-1]):
            assert aliases
    assert 200 < aliased < 590
