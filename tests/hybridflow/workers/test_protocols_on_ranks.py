"""Every transfer protocol on eight real ranks: tp 2, dp 2, pp 2. Rank r has tp r % 2, dp r // 2 % 2 and pp r // 4."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine3d.errors import UserError
from engine3d.layout import Layout
from hybridflow.cluster.devices.device_map import pool_devices
from hybridflow.cluster.ray.resource_pool import cluster_nodes, release, reserve
from hybridflow.workers.protocols import RankGrid
from tests.support.called_group import CalledGroup
from tests.support.group_workers import Remembering

pytestmark = pytest.mark.processes

LAYOUT = Layout(tp=2, pp=2, dp=2)


@pytest.fixture(scope="module")
def group(ray_cluster: None) -> Iterator[CalledGroup]:
    pools = reserve(pool_devices({"actor": "cpu:0-7"}, {}, cluster_nodes()))
    with CalledGroup(
        "actor", Remembering, pools["actor"], LAYOUT, generation=(2, 1), call_timeout_s=60, start_timeout_s=120
    ) as group:
        yield group
    release(pools)


def data_of(group: CalledGroup, **full: Any) -> list[Any]:
    """The one piece of data that each rank got in the last call, beside what all got whole."""
    got = group.got()
    assert [keyword for _, keyword in got] == [full] * 8
    return [only for (only,), _ in got]


def test_one_to_all(group: CalledGroup) -> None:
    assert group.one_to_all(["a", "b"], lr=0.1).result() == [[rank] for rank in range(8)]
    assert data_of(group, lr=0.1) == [["a", "b"]] * 8


def test_all_to_all(group: CalledGroup) -> None:
    letters, seeds = list("abcdefgh"), list(range(10, 18))
    assert group.all_to_all(letters, seed=seeds).result() == [[rank] for rank in range(8)]
    assert group.got() == [((letter,), {"seed": seed}) for letter, seed in zip(letters, seeds, strict=True)]
    with pytest.raises(UserError, match=r"actor\.all_to_all: ALL_TO_ALL: argument 1 has 2 entries, expected a list of"):
        group.all_to_all(["a", "b"])


def test_dp_splits_over_all_ranks(group: CalledGroup) -> None:
    assert group.dp(list("abcdefghi"), lr=0.1).result() == list(range(8))
    shards = data_of(group, lr=0.1)
    assert [letter for shard in shards for letter in shard] == list("abcdefghi")
    assert sorted(map(len, shards)) == [1] * 7 + [2]


def test_3d_splits_over_replicas_and_collects_their_last_stages(group: CalledGroup) -> None:
    assert group.three_d(list("abcd"), lr=0.1).result() == [4, 6]
    first, second = ["a", "b"], ["c", "d"]
    assert data_of(group, lr=0.1) == [first, first, second, second] * 2


def test_micro_dp_splits_over_generation_replicas(group: CalledGroup) -> None:
    """Generating with tp 2, pp 1: the stages of a replica become two engines of two ranks."""
    assert group.micro_dp(list("abcd"), lr=0.1).result() == [0, 4, 2, 6]
    assert data_of(group, lr=0.1) == [["a"], ["a"], ["c"], ["c"], ["b"], ["b"], ["d"], ["d"]]


@pytest.mark.parametrize(
    ("generation", "letters", "collected"),
    [
        ((1, 2), "abcdabcd", [0, 1, 2, 3]),  # the tp ranks of a replica generate apart, over both stages
        ((1, 1), "abefcdgh", [0, 1, 4, 5, 2, 3, 6, 7]),  # every rank on its own
        ((2, 2), "aabbaabb", [0, 2]),  # as in training
    ],
)
def test_micro_dp_with_other_generation_sizes(
    group: CalledGroup,
    monkeypatch: pytest.MonkeyPatch,
    generation: tuple[int, int],
    letters: str,
    collected: list[int],
) -> None:
    monkeypatch.setattr(group, "grid", RankGrid(LAYOUT, *generation))
    assert group.micro_dp(sorted(set(letters))).result() == collected
    assert data_of(group) == [[letter] for letter in letters]


def test_pp_only_collects_one_rank_of_each_stage(group: CalledGroup) -> None:
    assert group.stages("name", lr=0.1).result() == [0, 4]
    assert data_of(group, lr=0.1) == ["name"] * 8


def test_a_protocol_of_ones_own(group: CalledGroup) -> None:
    assert group.users(list("abcd"), lr=0.1).result() == [3, 1]
    first, second = ["c", "d"], ["a", "b"]
    assert data_of(group, lr=0.1) == [first, first, second, second] * 2
