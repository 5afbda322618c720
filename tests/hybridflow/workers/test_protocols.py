"""Transfer protocols as pure functions: who gets what, and whose results come back."""

from __future__ import annotations

import pytest
import torch

from engine3d.errors import UserError
from engine3d.layout import Layout
from hybridflow.workers.protocols import (
    ALL_TO_ALL,
    DP_PROTO,
    ONE_TO_ALL,
    THREE_D_ALL_MICRO_DP,
    THREE_D_PP_ONLY,
    THREE_D_PROTO,
    Arguments,
    Protocol,
    RankGrid,
    ShardedData,
    register,
    registrations,
    split,
)
from hybridflow.workers.shards import concatenate

LAYOUTS = [
    Layout(),
    Layout(tp=2, pp=2),
    Layout(tp=2, pp=2, dp=2),
    Layout(tp=2, cp=2, dp=3, pp=2, ep=4),
    Layout(dp=4, ep=4),
]


def given(protocol: Protocol, grid: RankGrid, *data: object, **keyword: object) -> list[Arguments]:
    spread = protocol.distribute(grid, Arguments(data, keyword))
    assert len(spread) == grid.layout.world_size
    return spread


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_3d_splits_over_dp_and_comes_back_in_order(layout: Layout) -> None:
    grid = RankGrid(layout)
    data = torch.arange(3 * layout.dp + 1)
    spread = given(THREE_D_PROTO, grid, data, lr=0.1)
    shards = split(data, layout.dp)
    for rank, position in layout.ranks():
        assert torch.equal(spread[rank].positional[0], shards[position.dp])
        assert spread[rank].keyword == {"lr": 0.1}
    collected = THREE_D_PROTO.collect(grid)
    for dp, rank in enumerate(collected):
        index = layout.coordinates(rank)
        assert (index.tp, index.cp, index.dp, index.pp) == (0, 0, dp, layout.pp - 1)
    assert torch.equal(concatenate([spread[rank].positional[0] for rank in collected]), data)


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_rows_of_tensors_and_of_lists_are_cut_alike(shards: int) -> None:
    cut = [shard.tolist() for shard in split(torch.arange(7), shards)]
    assert cut == split(list(range(7)), shards) and [entry for shard in cut for entry in shard] == list(range(7))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_data_parallel_splits_over_all_ranks(layout: Layout) -> None:
    data = list(range(2 * layout.world_size + 1))
    spread = given(DP_PROTO, RankGrid(layout), data)
    assert DP_PROTO.collect(RankGrid(layout)) == list(range(layout.world_size))
    assert concatenate([arguments.positional[0] for arguments in spread]) == data


def test_one_to_all_and_stages() -> None:
    grid = RankGrid(Layout(tp=2, pp=2, dp=2))
    assert given(ONE_TO_ALL, grid, [1], two=2) == [Arguments(([1],), {"two": 2})] * 8
    assert ONE_TO_ALL.collect(grid) == list(range(8))
    assert given(THREE_D_PP_ONLY, grid, "name") == [Arguments(("name",))] * 8
    assert THREE_D_PP_ONLY.collect(grid) == [0, 4]


def test_all_to_all_takes_one_entry_a_rank() -> None:
    grid = RankGrid(Layout(dp=3))
    spread = given(ALL_TO_ALL, grid, [1, 2, 3], seed=(7, 8, 9))
    assert [(entry.positional, entry.keyword["seed"]) for entry in spread] == [((1,), 7), ((2,), 8), ((3,), 9)]
    with pytest.raises(UserError, match="argument 1 has 2 entries, expected a list of 3, one a rank"):
        given(ALL_TO_ALL, grid, [1, 2])
    with pytest.raises(UserError, match="seed has int entries"):
        given(ALL_TO_ALL, grid, seed=1)


def test_micro_data_parallelism_is_the_papers_example() -> None:
    """Training tp 4 dp 2, generating with tp 2: neighbouring ranks generate different samples (section 5.3)."""
    grid = RankGrid(Layout(tp=4, dp=2), generation_tp=2)
    spread = given(THREE_D_ALL_MICRO_DP, grid, ["a", "b", "c", "d"])
    assert [entry.positional[0] for entry in spread] == [["a"], ["b"], ["a"], ["b"], ["c"], ["d"], ["c"], ["d"]]
    assert THREE_D_ALL_MICRO_DP.collect(grid) == [0, 1, 4, 5]


def test_micro_data_parallelism_over_stages_and_with_nothing_to_divide() -> None:
    grid = RankGrid(Layout(tp=2, pp=2), generation_tp=1, generation_pp=1)
    assert THREE_D_ALL_MICRO_DP.collect(grid) == [0, 1, 2, 3]
    same = RankGrid(Layout(tp=2, pp=2, dp=2), generation_tp=2, generation_pp=2)
    assert THREE_D_ALL_MICRO_DP.collect(same) == [0, 2]
    with pytest.raises(UserError, match="generation tp=3 does not divide the training tp=4"):
        RankGrid(Layout(tp=4), generation_tp=3)


def test_split_refuses_what_it_cannot_cut() -> None:
    assert split(ShardedData(("a", "b")), 2) == ["a", "b"]
    with pytest.raises(UserError, match="3 shards, expected 2"):
        split(ShardedData((1, 2, 3)), 2)
    with pytest.raises(UserError, match="cannot split 1 rows of data into 2 shards"):
        split(torch.zeros(1, 5), 2)
    with pytest.raises(UserError, match=r"cannot split a float over ranks.*by keyword"):
        split(0.5, 2)


def test_concatenate_keeps_what_has_no_rows() -> None:
    assert concatenate([None, None]) is None
    assert concatenate([[1], [2, 3]]) == [1, 2, 3]
    assert concatenate([0.5, 1.5]) == [0.5, 1.5]
    assert concatenate([torch.tensor(1.0), torch.tensor(2.0)]) == [torch.tensor(1.0), torch.tensor(2.0)]


def test_a_protocol_of_ones_own_is_bound_the_same_way() -> None:
    first_only = Protocol("FIRST_ONLY", ONE_TO_ALL.distribute, lambda grid: [0], splits=False)

    class Base:
        @register(first_only, blocking=True)
        def version(self) -> int:
            return 1

        def private(self) -> None: ...

    class Derived(Base):
        @register(THREE_D_PROTO)
        def update(self, rows: list[int]) -> list[int]:
            return rows

    result = registrations(Derived)
    assert result.keys() == {"version", "update"}
    assert result["version"].protocol is first_only
    assert result["version"].blocking
    assert not result["update"].blocking


def test_a_method_may_have_a_limit_of_its_own() -> None:
    class Slow:
        @register(ONE_TO_ALL, timeout_s=7200.0)
        def generate(self) -> None: ...

        @register(ONE_TO_ALL)
        def ping(self) -> None: ...

    assert {name: registration.timeout_s for name, registration in registrations(Slow).items()} == {
        "generate": 7200.0,
        "ping": None,
    }
