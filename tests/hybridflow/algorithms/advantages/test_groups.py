"""Sums and means over the samples of each prompt."""

from __future__ import annotations

import math

import pytest
import torch

from hybridflow.algorithms.advantages.groups import Groups, groups_of


def test_figures_of_groups_by_hand_in_any_order_and_size() -> None:
    groups = Groups.of(torch.tensor([7, 900, 7, -3, 900, 7]))
    stats = torch.tensor([1.0, 10.0, 2.0, 5.0, 20.0, 6.0])
    assert groups.count == 3
    assert groups.of_samples(groups.sums(stats)).tolist() == [9.0, 30.0, 9.0, 5.0, 30.0, 9.0]
    assert groups.of_samples(groups.means(stats)).tolist() == [3.0, 15.0, 3.0, 5.0, 15.0, 3.0]
    assert groups.of_samples(groups.sizes()).tolist() == [3.0, 2.0, 3.0, 1.0, 2.0, 3.0]
    assert groups.sums(stats).dtype == groups.sizes().dtype == torch.float64
    assert groups.sums(torch.tensor([True, False, True, True, False, False])).tolist() == [1.0, 2.0, 0.0]


def test_a_group_differs_where_two_of_its_figures_do() -> None:
    groups = Groups.of(torch.tensor([1, 2, 1, 3, 2, 2]))
    rewards = torch.tensor([-1.0, -2.0, -1.0, 4.0, -2.0, -2.0000002])
    assert groups.differ(rewards).tolist() == [False, True, False]


def test_no_samples_are_no_groups() -> None:
    groups = Groups.of(torch.empty(0, dtype=torch.int64))
    assert groups.count == 0
    assert groups.of_samples(groups.means(torch.empty(0))).tolist() == []


def test_what_is_asked_of_rewards() -> None:
    ids = torch.tensor([1, 1])
    with pytest.raises(ValueError, match="the reward of row 1 is nan, expected a finite number"):
        groups_of("here", torch.tensor([0.0, math.nan]), ids)
    with pytest.raises(ValueError, match=r"here: group_ids has shape \(2,\), expected \(3,\)"):
        groups_of("here", torch.zeros(3), ids)
