"""Plans: every element of every target from one source, the nearest, evenly, in few segments."""

from __future__ import annotations

import random
import time
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest

from engine3d.errors import EngineError, UserError
from engine3d.layout import Layout
from engine3d.models import model_spec
from engine3d.models.rules import ExpertOrder
from engine3d.reshard.describe.shards import Alias, Buffer, Holding, Location, RankShards
from engine3d.reshard.plan import planner as plan_module
from engine3d.reshard.plan.planner import make_plan
from engine3d.reshard.plan.transfers import Link, Plan, Segments
from tests.support.tiny_families import CONFIGS, MOE
from tests.support.worlds import check, engine_rank, engines, location, shapes, trainer

SPECS = {name: model_spec(CONFIGS[name]) for name in ("qwen3_moe", "qwen3-tied", "llama")}
SMALL_MOE = SPECS["qwen3_moe"]
LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=4),
    Layout(pp=2),
    Layout(tp=2, pp=2),
    Layout(dp=2),
    Layout(ep=2, dp=2),
    Layout(ep=4, dp=4),
    Layout(tp=2, ep=2, dp=2),
    Layout(tp=2, ep=4, dp=4, pp=2),
    Layout(tp=2, ep=2, etp=2, dp=2),
    Layout(etp=2, dp=2),
    Layout(tp=2, cp=2, ep=2, dp=2),
    Layout(cp=4),
    Layout(cp=4, ep=2, pp=2),
]
ENGINES = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "tp", "ep", "colocated"),
    [
        # Of each trainer and engine one of both, in turns; the other before a release.
        pytest.param(
            *pair,
            colocated,
            marks=() if (number + colocated) % 2 else pytest.mark.release,
            id=f"{layout}-{pair[1]}-{pair[2]}-{'colocated' if colocated else 'apart'}",
        )
        for row, layout in enumerate(LAYOUTS)
        for number, pair in enumerate(((layout, *engine) for engine in ENGINES), row)
        for colocated in (True, False)
    ],
)
def test_every_element_arrives(layout: Layout, tp: int, ep: int, colocated: bool) -> None:
    order: ExpertOrder = "descending" if (layout.ep + tp) % 2 else "ascending"
    spec = replace(SMALL_MOE, expert_order=order)
    sources = trainer(spec, layout)
    targets = engines(spec, tp, ep, count=2, first_node=0 if colocated else 9)
    check(make_plan(sources, targets, shapes(spec)), sources, targets, shapes(spec))


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2), Layout(tp=4, dp=2), Layout(pp=4), Layout(pp=2, dp=2)], ids=str)
@pytest.mark.parametrize("name", ["qwen3-tied", "llama"])
def test_dense_models_arrive(name: str, layout: Layout, tp: int) -> None:
    spec = SPECS[name]
    sources, targets = trainer(spec, layout), engines(spec, tp, 1, count=3)
    check(make_plan(sources, targets, shapes(spec)), sources, targets, shapes(spec))


def links(plan: Plan, targets: list[RankShards], sources: list[RankShards]) -> None:
    for transfer in plan.transfers:
        source, target = sources[transfer.source].location, targets[transfer.target].location
        expected = Link.DEVICE if source == target else Link.NODE if source.node == target.node else Link.NETWORK
        assert transfer.link is expected


def one_buffer(name: str, rank: int, where: Location, holdings: list[Holding], elements: int) -> RankShards:
    return RankShards(name, rank, where, (Buffer("memory", "bfloat16", (elements,)),), tuple(holdings))


def test_the_nearest_source_is_chosen() -> None:
    complete = [Holding("a", ((0, 8), (0, 4)), 0, 0, (4, 1))]
    sources = [one_buffer(f"source {rank}", rank, location(rank, 2), complete, 32) for rank in range(6)]
    targets = [
        one_buffer("on gpu 3", 0, location(3, 2), complete, 32),
        one_buffer("on node 2", 1, Location("node 2", "another"), complete, 32),
        one_buffer("elsewhere", 2, Location("node 7", "gpu 0"), complete, 32),
    ]
    plan = make_plan(sources, targets, {"a": (8, 4)})
    links(plan, targets, sources)
    by_target = {transfer.target: transfer for transfer in plan.transfers}
    assert by_target[0].source == 3 and by_target[0].link is Link.DEVICE
    assert by_target[1].source in (4, 5) and by_target[1].link is Link.NODE
    # Node 2's rank 4 or 5 has sent already, but nothing left that node: rank 0 is the first of those that sent nothing.
    assert by_target[2].source == 0 and by_target[2].link is Link.NETWORK


@pytest.mark.parametrize("layout", [Layout(ep=4, dp=8), Layout(tp=2, pp=2, ep=2, dp=4)], ids=str)
def test_links_of_whole_plans(layout: Layout) -> None:
    sources, targets = trainer(SMALL_MOE, layout), engines(SMALL_MOE, 2, 2, count=4)
    plan = make_plan(sources, targets, shapes(SMALL_MOE))
    links(plan, targets, sources)
    assert list(plan.transfers) == sorted(plan.transfers, key=lambda transfer: (transfer.source, transfer.target))
    assert len({(transfer.source, transfer.target) for transfer in plan.transfers}) == len(plan.transfers)


@pytest.mark.parametrize("layout", [Layout(dp=8), Layout(cp=8), Layout(cp=4, dp=2)], ids=str)
def test_equally_near_sources_send_equally_much(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "_SMALLEST_SHARE", 256)
    spec = SPECS["llama"]
    sources, targets = trainer(spec, layout), engines(spec, 2, 1, count=3, first_node=9)
    plan = make_plan(sources, targets, shapes(spec))
    check(plan, sources, targets, shapes(spec))
    sent = np.zeros(8)
    for transfer in plan.transfers:
        sent[transfer.source] += transfer.nbytes
    # As evenly as whole tensors can be dealt: the largest is half of the padded vocabulary.
    largest = 49 * 32 * 2
    assert sent.max() - sent.min() <= largest and abs(sent[:4].sum() - sent[4:].sum()) <= largest


def test_context_parallel_copies_share_what_a_stage_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "_SMALLEST_SHARE", 256)
    targets = engines(SMALL_MOE, 2, 2, count=2, first_node=9)
    most = {}
    for layout in (Layout(tp=2, pp=2), Layout(tp=2, pp=2, cp=2), Layout(tp=2, pp=2, cp=4)):
        plan = make_plan(sources := trainer(SMALL_MOE, layout), targets, shapes(SMALL_MOE))
        check(plan, sources, targets, shapes(SMALL_MOE))
        sent = np.zeros(layout.world_size)
        for transfer in plan.transfers:
            sent[transfer.source] += transfer.nbytes
        for stage in sent.reshape(layout.pp, layout.cp * layout.tp):
            assert stage.max() < 1.25 * stage.mean()
        most[layout.cp] = sent.max()
    assert most[2] < 0.6 * most[1] and most[4] < 0.6 * most[2]


def test_a_node_that_sends_much_to_others_is_spared() -> None:
    def holds(*names: str) -> list[Holding]:
        return [Holding(name, ((0, 64),), 0, 64 * number, (1,)) for number, name in enumerate(names)]

    # Only rank 0 has b; a is on three ranks, of which rank 1 shares rank 0's node.
    sources = [
        one_buffer("source 0", 0, Location("node 0", "gpu 0"), holds("b"), 128),
        one_buffer("source 1", 1, Location("node 0", "gpu 1"), holds("a"), 128),
        one_buffer("source 2", 2, Location("node 1", "gpu 0"), holds("a"), 128),
    ]
    targets = [one_buffer("target", 0, Location("node 2", "gpu 0"), holds("a", "b"), 128)]
    plan = make_plan(sources, targets, {"a": (64,), "b": (64,)})
    assert [(transfer.source, transfer.nbytes) for transfer in plan.transfers] == [(0, 128), (2, 128)]


def test_a_rank_that_alone_has_something_is_spared() -> None:
    complete = Holding("a", ((0, 64),), 0, 0, (1,))
    alone = Holding("b", ((0, 64),), 0, 64, (1,))
    where = [Location("node 0", f"gpu {rank}") for rank in range(3)]
    sources = [
        one_buffer("source 0", 0, where[0], [complete, alone], 128),
        one_buffer("source 1", 1, where[1], [complete], 64),
    ]
    targets = [one_buffer("target", 0, where[2], [complete, alone], 128)]
    plan = make_plan(sources, targets, {"a": (64,), "b": (64,)})
    assert [(transfer.source, transfer.nbytes) for transfer in plan.transfers] == [(0, 128), (1, 128)]


def pieces_of(plan: Plan) -> int:
    return sum(len(transfer.segments) for transfer in plan.transfers)


def test_all_experts_of_a_rank_are_one_run() -> None:
    sources = trainer(SMALL_MOE, Layout(ep=4, dp=4))
    buffers, holdings = engine_rank(SMALL_MOE, 4, 4, 1)
    for name in ("w13", "w2"):
        number = [buffer.name for buffer in buffers].index(f"model.layers.2.{name}")
        only = tuple(replace(holding, buffer=0) for holding in holdings if holding.buffer == number)
        target = RankShards("engine", 0, location(0), (buffers[number],), only)
        plan = make_plan(sources, [target], shapes(SMALL_MOE))
        assert len(plan.transfers) == 1 and plan.transfers[0].source == 1
        segments = plan.transfers[0].segments
        assert len(segments) == 1 and segments.rows[0] == 1 and segments.length[0] == buffers[number].elements
        # Numbered downwards, experts lie downwards in Megatron's memory: a run for each, gate and up together.
        descending = trainer(replace(SMALL_MOE, expert_order="descending"), Layout(ep=4, dp=4))
        assert pieces_of(make_plan(descending, [target], shapes(SMALL_MOE))) == 2


def test_experts_at_one_distance_are_rows_of_one_piece() -> None:
    # Without Transformer Engine an expert's two parameters are neighbours, and another expert's follow.
    sources = trainer(replace(SMALL_MOE, expert_order="descending"), Layout(ep=2, dp=2), transformer_engine=False)
    buffers, holdings = engine_rank(SMALL_MOE, 2, 2, 0)
    number = [buffer.name for buffer in buffers].index("model.layers.2.w13")
    only = tuple(replace(holding, buffer=0) for holding in holdings if holding.buffer == number)
    plan = make_plan(sources, [RankShards("engine", 0, location(0), (buffers[number],), only)], shapes(SMALL_MOE))
    segments = plan.transfers[0].segments
    assert len(segments) == 1 and segments.rows[0] == 4 and segments.length[0] == 2 * 24 * 32
    assert segments.source_stride[0] == 3 * 24 * 32 and segments.target_stride[0] == 2 * 24 * 32


def test_columns_are_one_piece_and_halves_of_a_matrix_one_run() -> None:
    left, right = (Holding("a", ((0, 6), (4 * half, 4 * half + 4)), 0, 4 * half, (8, 1)) for half in (0, 1))
    source = one_buffer("source", 0, location(0), [Holding("a", ((0, 6), (0, 8)), 0, 0, (8, 1))], 48)
    column = make_plan([source], [one_buffer("target", 0, location(1), [right], 48)], {"a": (6, 8)})
    segment = column.transfers[0].segments
    assert (len(segment), segment.rows[0], segment.length[0], segment.source_offset[0]) == (1, 6, 4, 4)
    both = make_plan([source], [one_buffer("target", 0, location(1), [left, right], 48)], {"a": (6, 8)})
    segment = both.transfers[0].segments
    assert (len(segment), segment.rows[0], segment.length[0]) == (1, 1, 48)


def test_runs_at_two_distances_are_pairs() -> None:
    # Gate and up of three experts: each expert is as far from the next as its halves are not.
    runs = [Holding("a", ((4 * run, 4 * run + 4),), 0, 6 * run + 8 * (run // 2), (1,)) for run in range(6)]
    complete = Holding("a", ((0, 24),), 0, 0, (1,))
    sources, targets = (
        [one_buffer("source", 0, location(0), runs, 64)],
        [one_buffer("target", 0, location(1), [complete], 24)],
    )
    plan = make_plan(sources, targets, {"a": (24,)})
    check(plan, sources, targets, {"a": (24,)})
    segments = plan.transfers[0].segments
    assert segments.rows.tolist() == [2, 2, 2] and segments.source_stride.tolist() == [6, 6, 6]


def test_a_transposed_tensor_is_copied_element_by_element() -> None:
    source = one_buffer("source", 0, location(0), [Holding("a", ((0, 3), (0, 5)), 0, 0, (5, 1))], 15)
    target = one_buffer("target", 0, location(1), [Holding("a", ((0, 3), (0, 5)), 0, 0, (1, 3))], 15)
    plan = make_plan([source], [target], {"a": (3, 5)})
    check(plan, [source], [target], {"a": (3, 5)})
    assert (plan.transfers[0].segments.length == 1).all() and len(plan.transfers[0].segments) == 5


@pytest.mark.slow
def test_random_boxes_and_strides() -> None:
    """Tensors of up to four dimensions, cut at random, in memory with random gaps, orders and dimensions swapped."""
    for seed in range(300):
        draw = random.Random(seed)
        named = {
            name: tuple(draw.randint(1, 5) for _ in range(draw.randint(1, 4)))
            for name in ("a", "b", "c")[: 1 + seed % 3]
        }
        sources = [
            _random_rank(draw, f"source {rank}", rank, named, cut) for rank, cut in enumerate(_cuts(draw, named))
        ]
        targets = [_random_rank(draw, "target", rank, named, cut) for rank, cut in enumerate(_cuts(draw, named))]
        plan = make_plan(sources, targets, named)
        check(plan, sources, targets, named)
        for transfer in plan.transfers:
            segments = transfer.segments
            order = np.lexsort((segments.target_offset, segments.target_buffer))
            assert (order == np.arange(len(segments))).all()
            one_row = segments.rows == 1
            assert (segments.source_stride[one_row] == segments.length[one_row]).all()
            assert (segments.target_stride[one_row] == segments.length[one_row]).all()


def _cuts(draw: random.Random, named: dict[str, tuple[int, ...]]) -> list[dict[str, list[tuple[tuple[int, int], ...]]]]:
    """Each tensor cut at random along one dimension, the parts dealt to one to three ranks."""
    ranks: list[dict[str, list[tuple[tuple[int, int], ...]]]] = [{} for _ in range(draw.randint(1, 3))]
    for name, shape in named.items():
        axis = draw.randrange(len(shape))
        ends = sorted({0, shape[axis], *(draw.randint(0, shape[axis]) for _ in range(2))})
        for start, stop in pairwise(ends):
            box = tuple((start, stop) if number == axis else (0, size) for number, size in enumerate(shape))
            draw.choice(ranks).setdefault(name, []).append(box)
    return ranks


def _random_rank(
    draw: random.Random,
    name: str,
    rank: int,
    named: dict[str, tuple[int, ...]],
    cut: dict[str, list[tuple[tuple[int, int], ...]]],
) -> RankShards:
    boxes = [(tensor, box) for tensor in named for box in cut.get(tensor, [])]
    if draw.random() < 0.5:
        draw.shuffle(boxes)
    offset, holdings = 0, []
    for tensor, box in boxes:
        offset += draw.choice([0, 0, 3])
        order = list(range(len(box)))
        if draw.random() < 0.3:
            draw.shuffle(order)
        strides, step = [0] * len(box), 1
        for dimension in reversed(order):
            strides[dimension] = step
            step *= box[dimension][1] - box[dimension][0] + draw.choice([0, 0, 0, 1])
        holdings.append(Holding(tensor, box, 0, offset, tuple(strides)))
        offset += step
    return one_buffer(name, rank, location(rank), holdings, offset + 8)


def same(one: Plan, other: Plan) -> bool:
    return len(one.transfers) == len(other.transfers) and all(
        (a.source, a.target, a.link, a.nbytes) == (b.source, b.target, b.link, b.nbytes)
        and all((getattr(a.segments, c.name) == getattr(b.segments, c.name)).all() for c in fields(Segments))
        for a, b in zip(one.transfers, other.transfers, strict=True)
    )


def test_every_process_makes_the_same_plan() -> None:
    layout = Layout(tp=2, ep=4, dp=4)
    first = make_plan(trainer(SMALL_MOE, layout), engines(SMALL_MOE, 2, 2, 3), shapes(SMALL_MOE))
    # Equal shards that are other objects, as they are in another process, engine for engine.
    targets = [
        replace(target, buffers=(*target.buffers,)[:], holdings=tuple(replace(holding) for holding in target.holdings))
        for target in engines(SMALL_MOE, 2, 2, 3)
    ]
    assert same(first, make_plan(trainer(SMALL_MOE, layout), targets, shapes(SMALL_MOE)))


def test_aliased_buffers_need_nothing() -> None:
    sources = trainer(SMALL_MOE, Layout())
    target = engines(SMALL_MOE, 1, 1)[0]
    everything = make_plan(sources, [target], shapes(SMALL_MOE))
    number = [buffer.name for buffer in target.buffers].index("model.layers.0.w2")
    # One expert follows another in memory, so the buffer is a stretch of the source's.
    segment = everything.transfers[0].segments
    start = int(segment.source_offset[segment.target_buffer == number][0])
    alias = Alias(number, 0, 0, start, (32 * 24, 24, 1))
    bound = replace(target, aliases=(alias,))
    plan = make_plan(sources, [bound], shapes(SMALL_MOE))
    check(plan, sources, [bound], shapes(SMALL_MOE))
    assert plan.aliases == ((alias,),)
    assert plan.bytes_aliased == target.buffers[number].elements * 2
    assert plan.bytes_moved + plan.bytes_aliased == everything.bytes_moved
    all_aliased = replace(target, aliases=tuple(replace(alias, target_buffer=n) for n in range(len(target.buffers))))
    nothing = make_plan(sources, [all_aliased], shapes(SMALL_MOE))
    assert nothing.transfers == () and nothing.bytes_needed == 0
    assert nothing.bytes_aliased == everything.bytes_needed


def test_bytes_are_of_the_targets_dtype() -> None:
    source = one_buffer("source", 0, location(0), [Holding("a", ((0, 8),), 0, 0, (1,))], 8)
    target = replace(source, buffers=(Buffer("memory", "float32", (8,)),))
    plan = make_plan([source], [target], {"a": (8,)})
    assert plan.bytes_moved == plan.bytes_needed == 32 and plan.transfers[0].segments.elements == 8


WHOLE = Holding("a", ((0, 8), (0, 4)), 0, 0, (4, 1))
HALF = Holding("a", ((0, 4), (0, 4)), 0, 0, (4, 1))
OTHER = Holding("b", ((0, 8), (0, 4)), 0, 0, (4, 1))


@pytest.mark.parametrize(
    ("holdings", "needed", "error", "message"),
    [
        (
            [OTHER],
            [WHOLE],
            UserError,
            "reshard: engine 0 rank 0 needs [0:8, 0:4] of a, which has shape [8, 4], and no source holds the tensor",
        ),
        (
            [HALF],
            [WHOLE],
            UserError,
            "reshard: engine 0 rank 0 needs [0:8, 0:4] of a, which has shape [8, 4], "
            "and no source holds 16 of these elements",
        ),
        (
            [WHOLE],
            [replace(WHOLE, box=((1, 9), (0, 4)))],
            UserError,
            "reshard: engine 0 rank 0 holds [1:9, 0:4] of a, which does not lie within its shape [8, 4]",
        ),
        (
            [replace(WHOLE, box=((-1, 8), (0, 4)))],
            [WHOLE],
            UserError,
            "reshard: trainer rank 0 holds [-1:8, 0:4] of a, which does not lie within its shape [8, 4]",
        ),
        (
            [WHOLE],
            [Holding("a", ((0, 8),), 0, 0, (1,))],
            UserError,
            "reshard: engine 0 rank 0 holds [0:8] of a, which does not lie within its shape [8, 4]",
        ),
        (
            [WHOLE],
            [replace(WHOLE, tensor="c")],
            UserError,
            "reshard: engine 0 rank 0 needs c, which is not a tensor of the model",
        ),
        (
            [HALF, replace(WHOLE, box=((3, 8), (0, 4)), offset=12)],
            [WHOLE],
            EngineError,
            "reshard: sources hold boxes of a that overlap: [0:4, 0:4] and [3:8, 0:4]",
        ),
        (
            [WHOLE],
            [replace(WHOLE, offset=1)],
            EngineError,
            "reshard: engine 0 rank 0: a reaches outside its buffer memory",
        ),
        (
            [replace(WHOLE, strides=(5, 1))],
            [WHOLE],
            EngineError,
            "reshard: trainer rank 0: a reaches outside its buffer memory",
        ),
        ([replace(WHOLE, buffer=1)], [WHOLE], EngineError, "reshard: trainer rank 0: a reaches outside its buffer 1"),
    ],
)
def test_errors(holdings: list[Holding], needed: list[Holding], error: type[Exception], message: str) -> None:
    source = one_buffer("trainer rank 0", 0, location(0), holdings, 32)
    target = one_buffer("engine 0 rank 0", 0, location(1), needed, 32)
    with pytest.raises(error) as caught:
        make_plan([source], [target], {"a": (8, 4), "b": (8, 4)})
    assert str(caught.value) == message


def test_no_sources_and_no_targets() -> None:
    target = one_buffer("engine 0 rank 0", 0, location(1), [WHOLE], 32)
    with pytest.raises(UserError, match="no source holds the tensor"):
        make_plan([], [target], {"a": (8, 4)})
    assert make_plan([target], [], {"a": (8, 4)}) == Plan((), (), 0, 0)


def test_many_engines_cost_little_more_than_one() -> None:
    spec = model_spec({**MOE, "num_experts": 64, "num_hidden_layers": 12})
    sources = trainer(spec, Layout(ep=8, dp=8, pp=4))
    seconds = []
    for count in (1, 16):
        targets = engines(spec, 4, 4, count)
        started = time.process_time()
        plan = make_plan(sources, targets, shapes(spec))
        seconds.append(time.process_time() - started)
        assert plan.bytes_moved == plan.bytes_needed
    assert seconds[1] < 6 * seconds[0]
