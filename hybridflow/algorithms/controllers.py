"""What an algorithm learns beside its models' weights."""

from __future__ import annotations

from collections.abc import Mapping

from hybridflow.algorithms.config import AlgorithmConfig
from hybridflow.algorithms.kl_control import make_kl_controller
from hybridflow.algorithms.lagrange_multiplier import LagrangeMultiplier


class Controllers:
    """The controllers that the settings ask for: of the KL penalty, and of the weight of costs."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self._config = config
        self.kl = make_kl_controller(config)
        self.multiplier = LagrangeMultiplier(
            initial=config.lagrange_initial,
            lr=config.lagrange_lr,
            limit=config.cost_limit,
            minimum=config.lagrange_min,
            maximum=config.lagrange_max,
        )

    @property
    def config(self) -> AlgorithmConfig:
        """The settings with the KL coefficient of now."""
        if self.kl.coef == self._config.kl_coef:
            return self._config
        return self._config.model_copy(update={"kl_coef": self.kl.coef})

    def state_dict(self) -> dict[str, dict[str, float]]:
        """What has been learned, by controller."""
        found = {}
        if self._config.kl_controller == "adaptive":
            found["kl"] = self.kl.state_dict()
        if self._config.needs_cost:
            found["multiplier"] = self.multiplier.state_dict()
        return found

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Go on where `state` was taken; a controller that has no state there starts afresh."""
        if "kl" in state:
            self.kl.load_state_dict(state["kl"])
        if "multiplier" in state:
            self.multiplier.load_state_dict(state["multiplier"])
