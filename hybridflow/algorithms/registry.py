"""Every algorithm by its name: where its dataflow is, and which roles it needs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridflow.trainer.step import Step

Dataflow = Callable[["Step"], None]
"""One step of an algorithm."""


@dataclass(frozen=True)
class Algorithm:
    """What is known of an algorithm before its dataflow is imported.

    Args:
        dataflow: "module:function" of one step.
        critic: it learns from a critic's values of the reward.
        costs: it learns from costs, and from a second critic's values of them.
        group_baseline: it compares the samples of a prompt with each other.
        group_std: it divides by the standard deviation of their rewards, unless `normalise_advantages_by_std` is false.
        greedy_baseline: it compares each sample with the most likely response of the same weights.
    """

    dataflow: str
    critic: bool = False
    costs: bool = False
    group_baseline: bool = False
    group_std: bool = False
    greedy_baseline: bool = False

    def load(self) -> Dataflow:
        """Import the dataflow."""
        module, _, function = self.dataflow.partition(":")
        found: Any = getattr(importlib.import_module(module), function)
        return found


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm("hybridflow.algorithms.grpo:grpo", group_baseline=True, group_std=True),
    "ppo": Algorithm("hybridflow.algorithms.ppo:ppo", critic=True),
    "remax": Algorithm("hybridflow.algorithms.remax:remax", greedy_baseline=True),
    "safe_rlhf": Algorithm("hybridflow.algorithms.safe_rlhf:safe_rlhf", critic=True, costs=True),
}


def known(name: str) -> str:
    """The name of an algorithm. Raises ValueError for any other."""
    if name not in ALGORITHMS:
        raise ValueError(f"{name!r} is no algorithm, expected {' or '.join(map(repr, ALGORITHMS))}")
    return name


def names_with(**needs: bool) -> tuple[str, ...]:
    """The algorithms of which all of these are so."""
    return tuple(
        name
        for name, algorithm in ALGORITHMS.items()
        if all(getattr(algorithm, need) == value for need, value in needs.items())
    )
