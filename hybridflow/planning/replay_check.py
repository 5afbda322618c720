"""Host memory of the samples that an algorithm keeps for later steps."""

from __future__ import annotations

from engine3d.errors import UserError, amount
from hybridflow.algorithms.replay import most_bytes
from hybridflow.config.recipe import Recipe

_COPIES = 3
"""What is kept; what was kept when a checkpoint began that is still being written; and a copy that either needs."""


def replay_bytes(recipe: Recipe, sequence_tokens: int) -> int:
    """The most that the driver's host holds of them.

    Args:
        recipe: the run.
        sequence_tokens: of the longest prompt with its response.
    """
    return _COPIES * most_bytes(recipe.algorithm.kept_samples, sequence_tokens)


def check_replay(recipe: Recipe, sequence_tokens: int, host_bytes: int | None) -> None:
    """Refuse a buffer that, full of the longest samples, is larger than its host's memory.

    Args:
        recipe: the run.
        sequence_tokens: of the longest prompt with its response.
        host_bytes: of the driver's host, if that is known.

    Raises:
        UserError: naming the setting, and the most that there is room for.
    """
    needed = replay_bytes(recipe, sequence_tokens)
    if host_bytes is None or needed <= host_bytes:
        return
    room = host_bytes // (_COPIES * most_bytes(1, sequence_tokens))
    raise UserError(
        f"algorithm.replay_buffer_size={recipe.algorithm.kept_samples}: samples of up to {sequence_tokens:,} tokens "
        f"take {amount(needed, 1)} with their copies, on a host of {amount(host_bytes, 1)}; expected at most "
        f"{room:,}"
    )
