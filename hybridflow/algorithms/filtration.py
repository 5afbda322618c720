"""Selection of a prompt's responses to train on, by the rank of their rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, assert_never

from engine3d.startup.lazy_imports import torch
from hybridflow.algorithms.checks import check_finite, check_rows

if TYPE_CHECKING:
    from torch import Generator, Tensor

Filtration = Literal["best-n", "best-random", "best-worst"]


def filtered_by_rank(
    rewards: Tensor, group_ids: Tensor, filtration: Filtration, generator: Generator, *, best: int = 1
) -> Tensor:
    """Return the responses with reliable rewards, within the responses of each prompt.

        best-n         the `best` first by rank
        best-random    the first, and one of the others, each as likely
        best-worst     the first and the last

    Source: policy filtration, arXiv:2409.06957, where best-random and best-worst are the best of those
    tried. The public implementation in verl draws as many samples as before with replacement, by weights; here the
    others are left out, as in the paper. Equal rewards rank in the order of the batch. A group that has lost samples is
    ranked among those that are left, and may be smaller than what is kept of it.

    `rewards` (B,) float32, `group_ids` (B,) int64; the `generator` draws once for each group of at least two, in the
    order of their ids, with best-random. Returns (B,) bool. Raises ValueError for a reward that is not finite, naming
    its row, and for columns of other shapes.
    """
    check_rows("filtered_by_rank", rows=len(rewards), rewards=rewards, group_ids=group_ids)
    check_finite("policy filtration", "reward", rewards)
    kept = torch.zeros(len(rewards), dtype=torch.bool)
    for rows in _ranked(rewards, group_ids):
        match filtration:
            case "best-n":
                chosen = rows[:best]
            case "best-random":
                chosen = rows[:1]
                if len(rows) > 1:
                    chosen = [*chosen, rows[1 + int(torch.randint(len(rows) - 1, (), generator=generator))]]
            case "best-worst":
                chosen = [rows[0], rows[-1]]
            case _:
                assert_never(filtration)
        kept[chosen] = True
    return kept


def _ranked(rewards: Tensor, group_ids: Tensor) -> list[list[int]]:
    """Return the rows of each group from the highest reward to the lowest, group by group."""
    by_reward = rewards.argsort(descending=True, stable=True)
    order = by_reward[group_ids[by_reward].argsort(stable=True)]
    _, counts = group_ids.unique(return_counts=True)
    return [rows.tolist() for rows in order.split(counts.tolist())]
