"""Coordinates against Megatron-Core's own rank generator, over many layouts."""

from __future__ import annotations

import itertools

import pytest

from engine3d.errors import UserError
from engine3d.layout import Layout

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
    ],
)
def test_bad_sizes_are_one_clear_line(make, words: str) -> None:
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
