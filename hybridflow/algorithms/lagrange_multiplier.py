"""The multiplier of the cost limit of Safe-RLHF."""

from __future__ import annotations

import math
from collections.abc import Mapping


class LagrangeMultiplier:
    """The weight of cost against reward: lambda = exp(xi), so it is never negative, and xi is what learns.

    Its steps are in proportion to lambda. Without a floor one batch of very low cost would leave a lambda from which no
    later cost brings it back; from a floor f it returns to 1 in (1/f - 1) / (lr * excess) steps, where excess is the
    mean cost above the limit.

    Args:
        initial: lambda at the start, above 0.
        lr: learning rate of xi.
        limit: the mean cost of a response that is allowed.
        minimum, maximum: between which lambda stays, both above 0.
    """

    def __init__(self, *, initial: float, lr: float, limit: float, minimum: float, maximum: float) -> None:
        self._lr, self._limit = lr, limit
        self._least, self._largest = math.log(minimum), math.log(maximum)
        self._log = self._within(math.log(initial))

    @property
    def value(self) -> float:
        """lambda."""
        return math.exp(self._log)

    def update(self, mean_cost: float) -> None:
        """Take a step of gradient ascent in xi on lambda * (mean_cost - limit).

            xi <- clip(xi + lr * lambda * (mean_cost - limit), log(minimum), log(maximum))

        Source: arXiv:2310.12773, eq. 31, which has no bounds.

        `mean_cost` is the mean cost of the responses of a whole batch, over all ranks, without a KL penalty. Raises
        ValueError if it is not finite.
        """
        if not math.isfinite(mean_cost):
            raise ValueError(f"Lagrange multiplier: the mean cost is {mean_cost}, expected a finite number")
        self._log = self._within(self._log + self._lr * self.value * (mean_cost - self._limit))

    def state_dict(self) -> dict[str, float]:
        """Return the multiplier, without the settings."""
        return {"log_multiplier": self._log}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore `state`. Other bounds hold at once."""
        self._log = self._within(state["log_multiplier"])

    def _within(self, log: float) -> float:
        return min(max(log, self._least), self._largest)
