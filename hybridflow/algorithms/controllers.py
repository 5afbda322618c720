"""What an algorithm learns beside its models' weights."""

from __future__ import annotations

from collections.abc import Mapping

from hybridflow.algorithms.kl_control import make_kl_controller
from hybridflow.algorithms.lagrange_multiplier import LagrangeMultiplier
from hybridflow.algorithms.pf_ppo import PFPPOSettings
from hybridflow.algorithms.replay import ReplayBuffer
from hybridflow.algorithms.safe_rlhf import SafeRLHFSettings
from hybridflow.algorithms.settings import AlgorithmSettings


class Controllers:
    """The controllers that the settings ask for: of the KL penalty, and of the weight of costs."""

    def __init__(self, config: AlgorithmSettings) -> None:
        self._config = config
        self.kl = make_kl_controller(config)
        self.multiplier = _multiplier(config) if isinstance(config, SafeRLHFSettings) else None
        self.replay: ReplayBuffer | None = None
        """Not part of `state_dict`, which has numbers alone."""
        if isinstance(config, PFPPOSettings):
            self.replay = ReplayBuffer(config.replay_buffer_size, config.replay_max_age)

    @property
    def config(self) -> AlgorithmSettings:
        """The settings with the KL coefficient of now."""
        if self.kl.coef == self._config.kl_coef:
            return self._config
        return self._config.model_copy(update={"kl_coef": self.kl.coef})

    def state_dict(self) -> dict[str, dict[str, float]]:
        """What has been learned, by controller."""
        found = {}
        if self._config.kl_controller == "adaptive":
            found["kl"] = self.kl.state_dict()
        if self.multiplier is not None:
            found["multiplier"] = self.multiplier.state_dict()
        return found

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Go on where `state` was taken; a controller that has no state there starts afresh."""
        if "kl" in state:
            self.kl.load_state_dict(state["kl"])
        if self.multiplier is not None and "multiplier" in state:
            self.multiplier.load_state_dict(state["multiplier"])


def _multiplier(config: SafeRLHFSettings) -> LagrangeMultiplier:
    return LagrangeMultiplier(
        initial=config.lagrange_initial,
        lr=config.lagrange_lr,
        limit=config.cost_limit,
        minimum=config.lagrange_min,
        maximum=config.lagrange_max,
    )
