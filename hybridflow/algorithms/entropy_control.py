"""Keeping the policy's entropy from collapsing: the coefficient of the entropy bonus, fixed or adaptive."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hybridflow.algorithms.settings import AlgorithmSettings


class AdaptiveEntropy:
    """A coefficient that grows in equal steps while the entropy is below its target, and shrinks while it is above.

        c <- min(c + step, largest)  where entropy < target
        c <- max(c - step, 0)        otherwise
        coef = c where entropy < target, else 0

    Source: adaptive entropy control of Skywork-OR1, arXiv:2505.22312, section 3.2.5; the limits are those of its code,
    and so is what an entropy that is the target counts as. The bonus has effect only while the entropy is below the
    target: above it, c is remembered.

    There a step's coefficient follows from the entropy of the policy that made its samples. Here the entropy is that
    which the updates measure, `train/entropy`, so a coefficient follows from the entropy of the step before, and the
    first step, which has none before it, has no bonus.

    Args:
        coef: c at the start.
        target: the entropy to keep, in nats per token.
        step: change of c in one step.
        largest: c grows no larger.
    """

    def __init__(self, coef: float, *, target: float, step: float, largest: float) -> None:
        self._remembered = coef
        self._applied = False
        self._target, self._step, self._largest = target, step, largest

    @property
    def coef(self) -> float:
        """The weight of the entropy bonus in the next update."""
        return self._remembered if self._applied else 0.0

    def update(self, entropy: float) -> None:
        """Update the coefficient with the mean entropy of a step. Raises ValueError for nan."""
        if math.isnan(entropy):
            raise ValueError("adaptive entropy: the entropy is nan, expected a number")
        self._applied = entropy < self._target
        moved = self._remembered + (self._step if self._applied else -self._step)
        self._remembered = min(max(moved, 0.0), self._largest)

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient, without the settings."""
        return {"coef": self._remembered, "applied": float(self._applied)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore `state`. Another limit holds at once."""
        self._remembered, self._applied = min(state["coef"], self._largest), bool(state["applied"])


def make_entropy_controller(config: AlgorithmSettings) -> AdaptiveEntropy | None:
    """Make the controller of the settings; None where the coefficient is fixed."""
    if config.entropy_controller == "fixed":
        return None
    assert config.entropy_target is not None
    return AdaptiveEntropy(
        config.entropy_coef,
        target=config.entropy_target,
        step=config.entropy_coef_step,
        largest=config.entropy_coef_max,
    )
