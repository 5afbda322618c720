"""Adaptive controllers of an algorithm: state that a run changes next to the models' weights."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hybridflow.algorithms.entropy_control import make_entropy_controller
from hybridflow.algorithms.kl_control import make_kl_controller
from hybridflow.algorithms.lagrange_multiplier import LagrangeMultiplier
from hybridflow.algorithms.pf_ppo import PFPPOSettings
from hybridflow.algorithms.replay import ReplayBuffer
from hybridflow.algorithms.safe_rlhf import SafeRLHFSettings
from hybridflow.algorithms.schedules import in_force
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.metrics import names as metrics


class Controllers:
    """The controllers that the settings ask for: of the KL penalty, of the entropy bonus, of the weight of costs."""

    def __init__(self, config: AlgorithmSettings) -> None:
        self._config = config
        self.kl = make_kl_controller(config)
        self.entropy = make_entropy_controller(config)
        self.multiplier = _multiplier(config) if isinstance(config, SafeRLHFSettings) else None
        self.replay: ReplayBuffer | None = None
        """Not part of `state_dict`, which has numbers alone."""
        if isinstance(config, PFPPOSettings):
            self.replay = ReplayBuffer(config.replay_buffer_size, config.replay_max_age)

    def config(self, step: int) -> AlgorithmSettings:
        """Return the settings of a step, counted from 1, with the current coefficients and the values of schedules."""
        coefficients = {"kl_coef": self.kl.coef}
        if self.entropy is not None:
            coefficients["entropy_coef"] = self.entropy.coef
        coefficients = {name: value for name, value in coefficients.items() if getattr(self._config, name) != value}
        config = self._config.model_copy(update=coefficients) if coefficients else self._config
        return in_force(config, self._config.schedules, step)

    def metrics(self, step: int) -> dict[str, float]:
        """Return the coefficients of a step, of controllers and of every schedule, by metric name."""
        config, names = self.config(step), dict.fromkeys(self._config.schedules)
        if self._config.needs_reference and "kl_coef" not in self._config.not_used:
            names["kl_coef"] = None
        if self.entropy is not None:
            names["entropy_coef"] = None
        return {metrics.coefficient(name): getattr(config, name) for name in names}

    def learn(self, values: Mapping[str, float], samples: int) -> None:
        """Update the controllers with the metrics of a step and its number of samples."""
        kl, entropy = values.get(metrics.TRAIN_REFERENCE_KL), values.get(metrics.TRAIN_ENTROPY)
        if kl is not None and math.isfinite(kl):
            self.kl.update(kl, samples)
        if self.entropy is not None and entropy is not None and math.isfinite(entropy):
            self.entropy.update(entropy)

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Return the state of each controller, by name."""
        state = {}
        if self._config.kl_controller == "adaptive":
            state["kl"] = self.kl.state_dict()
        if self.entropy is not None:
            state["entropy"] = self.entropy.state_dict()
        if self.multiplier is not None:
            state["multiplier"] = self.multiplier.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Restore `state`. A controller without an entry keeps its initial state."""
        if "kl" in state:
            self.kl.load_state_dict(state["kl"])
        if self.entropy is not None and "entropy" in state:
            self.entropy.load_state_dict(state["entropy"])
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
