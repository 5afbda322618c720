"""Selection of a prompt's responses by the rank of their rewards."""

from __future__ import annotations

import pytest
import torch
from torch import Generator

from hybridflow.algorithms.filtration import filtered_by_rank

#                        group: 4    9    4    2    9    4    4    9
REWARDS = torch.tensor([0.5, 1.0, 0.9, 3.0, 1.0, -1.0, 0.7, 0.0])
GROUPS = torch.tensor([4, 9, 4, 2, 9, 4, 4, 9])


def rows(filtration: str, seed: int = 0, **arguments: int) -> list[int]:
    kept = filtered_by_rank(REWARDS, GROUPS, filtration, Generator().manual_seed(seed), **arguments)  # type: ignore[arg-type]
    return kept.nonzero()[:, 0].tolist()


def test_best_and_worst_by_hand() -> None:
    assert rows("best-n") == [1, 2, 3]  # of equal ones the first
    assert rows("best-n", best=2) == [1, 2, 3, 4, 6]
    assert rows("best-n", best=9) == list(range(8))
    assert rows("best-worst") == [1, 2, 3, 5, 7]


def test_the_best_and_a_random_other() -> None:
    seen: dict[int, set[int]] = {4: set(), 9: set()}
    counts = torch.zeros(8)
    for seed in range(300):
        kept = rows("best-random", seed)
        assert {1, 2, 3} <= set(kept) and len(kept) == 5  # the group of one has no other
        for row in set(kept) - {1, 2, 3}:
            seen[int(GROUPS[row])].add(row)
            counts[row] += 1
    assert seen == {4: {0, 5, 6}, 9: {4, 7}}
    assert ((counts[[0, 5, 6]] - 100).abs() < 35).all() and ((counts[[4, 7]] - 150).abs() < 45).all()
    assert rows("best-random", 5) == rows("best-random", 5)


def test_what_stays_does_not_depend_on_where_groups_stand() -> None:
    order = torch.tensor([3, 0, 2, 5, 6, 1, 4, 7])  # the order within each group is the same
    for filtration in ("best-n", "best-random", "best-worst"):
        kept = filtered_by_rank(REWARDS[order], GROUPS[order], filtration, Generator().manual_seed(1))  # type: ignore[arg-type]
        assert sorted(order[kept].tolist()) == rows(filtration, 1)


def test_rewards_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="the reward of row 1 is inf"):
        filtered_by_rank(torch.tensor([0.0, torch.inf]), torch.tensor([0, 0]), "best-n", Generator())
    with pytest.raises(ValueError, match="group_ids has shape"):
        filtered_by_rank(REWARDS, GROUPS[:2], "best-n", Generator())
