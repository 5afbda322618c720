"""Coordinates against Megatron-Core's own rank generator, over many layouts."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from engine3d.errors import UserError
from engine3d.layout import Layout, balanced_stages

SIZES = [
    sizes
    for sizes in itertools.product((1, 2), (1, 2), (1, 2, 4), (1, 2), (1, 2), (1, 2, 4))
    if sizes[0] * sizes[4] * sizes[5] % (sizes[2] * sizes[3]) == 0
]


@pytest.mark.parametrize("sizes", SIZES)
def test_groups_are_megatrons(sizes: tuple[int, ...]) -> None:
    from megatron.core.parallel_state import RankGenerator

    tp, pp, ep, etp, cp, dp = sizes
    layout = Layout(tp=tp, pp=pp, ep=ep, etp=etp, cp=cp, dp=dp)
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
    expert = RankGenerator(tp=etp, ep=ep, dp=layout.edp, pp=pp, cp=1, order="tp-cp-ep-dp-pp")
    for generator, name, token in (
        (dense, "tp", "tp"),
        (dense, "cp", "cp"),
        (dense, "dp", "dp"),
        (dense, "pp", "pp"),
        (expert, "etp", "tp"),
        (expert, "ep", "ep"),
        (expert, "edp", "dp"),
    ):
        for group in generator.get_ranks(token):
            assert [getattr(layout.coordinates(rank), name) for rank in group] == list(range(len(group)))


def test_rank_is_the_inverse_of_coordinates() -> None:
    layout = Layout(tp=2, pp=3, cp=2, dp=4, ep=8)
    for rank, at in layout.ranks():
        assert layout.rank(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp) == rank


def test_world_size_decides_dp() -> None:
    assert Layout.of_world(16, tp=2, pp=2, ep=4) == Layout(tp=2, pp=2, ep=4, dp=4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Layout.of_world(6, tp=4), "tp*pp*cp = 4*1*1 = 4 does not divide the 6 ranks"),
        (lambda: Layout(tp=2, ep=4), "etp*ep = 1*4 = 4 does not divide the tp*cp*dp = 2*1*1 = 2 ranks"),
        (lambda: Layout(tp=0), "tp=0, expected a whole number"),
        (lambda: Layout(pp=True), "pp=True, expected a whole number"),
        (lambda: Layout(tp=2).coordinates(2), "rank 2 is outside the world of 2"),
        (lambda: Layout(vpp=2), "vpp=2 with pp=1: expected vpp=1, or pp of at least 2"),
        (lambda: Layout(pp=2, vpp=2, stages=(2, 2)), "stages=2,2 has 2 stages, expected pp*vpp = 2*2 = 4"),
        (lambda: Layout(pp=3, stages=(2, 0, 2)), "stages=2,0,2: stage 1 has no layers, expected at least 1 in each"),
    ],
)
def test_bad_sizes_are_one_clear_line(make: Callable[[], object], words: str) -> None:
    with pytest.raises(UserError) as error:
        make()
    assert words in str(error.value) and "\n" not in str(error.value)


def test_groups_of_ranks_side_by_side() -> None:
    layout = Layout(tp=2, pp=2, ep=4, dp=4)
    assert [list(group) for group in layout.tensor_groups()[:2]] == [[0, 1], [2, 3]]
    assert [list(group) for group in layout.expert_groups()] == [list(range(4 * n, 4 * n + 4)) for n in range(4)]
    for groups, same in ((layout.tensor_groups(), ("cp", "dp", "pp")), (layout.expert_groups(), ("edp", "pp"))):
        assert sorted(rank for group in groups for rank in group) == list(range(16))
        for group in groups:
            assert len({tuple(getattr(layout.coordinates(rank), name) for name in same) for rank in group}) == 1


@pytest.mark.parametrize(
    ("layers", "head", "stages", "counts"),
    [
        (61, 0, 16, [3, 3, 3, *[4] * 13]),
        (61, 0.6, 16, [3, 3, *[4] * 13, 3]),
        (61, 1.5, 16, [3, *[4] * 14, 2]),
        (63, 0.6, 16, [4] * 15 + [3]),
        (64, 0.6, 16, [4] * 16),
        (3, 0.6, 2, [2, 1]),
        (4, 0.6, 3, [1, 2, 1]),
        (94, 0.6, 4, [23, 24, 24, 23]),
        (7, 0.6, 7, [1] * 7),
    ],
)
def test_stages_are_balanced_by_cost(layers: int, head: float, stages: int, counts: list[int]) -> None:
    assert list(balanced_stages((100,) * layers, round(100 * head), stages)) == counts


def test_no_split_has_a_cheaper_most_costly_stage() -> None:
    costs, head = (5, 1, 1, 4, 2, 2, 3, 1), 4
    for stages in range(1, len(costs) + 1):
        most = [
            max(sum(costs[first:last]) + head * (last == len(costs)) for first, last in itertools.pairwise(bounds))
            for inner in itertools.combinations(range(1, len(costs)), stages - 1)
            for bounds in [(0, *inner, len(costs))]
        ]
        split = list(itertools.accumulate(balanced_stages(costs, head, stages), initial=0))
        assert split[-1] == len(costs) and len(split) == stages + 1
        pairs = itertools.pairwise(split)
        assert max(sum(costs[first:last]) + head * (last == len(costs)) for first, last in pairs) == min(most)


def test_micro_batches_in_flight_of_a_schedule() -> None:
    layout = Layout(pp=4)
    assert [layout.passes_ahead(pp) for pp in range(4)] == [3, 2, 1, 0]
    assert [layout.in_flight(pp) for pp in range(4)] == [((4,),), ((3,),), ((2,),), ((1,),)]
    interleaved = Layout(pp=2, vpp=2)
    assert [interleaved.passes_ahead(pp) for pp in range(2)] == [4, 2]
    assert interleaved.in_flight(0) == ((3, 2), (4, 1))
    assert {sum(moment) for moment in interleaved.in_flight(1)} == {3}
    assert interleaved.bubble(4) == 1 / 8 and layout.bubble(4) == 3 / 4


def test_text_of_a_layout() -> None:
    assert str(Layout(pp=2, vpp=2, stages=(2, 3, 3, 2), dp=4)) == "pp=2 dp=4 vpp=2 stages=(2,3,3,2)"
    assert str(Layout()) == "one rank"
