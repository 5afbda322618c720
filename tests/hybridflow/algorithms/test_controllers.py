"""Coefficients that controllers and schedules say, in force through the settings of a step."""

from __future__ import annotations

import json
import math

from hybridflow.algorithms.controllers import Controllers
from hybridflow.algorithms.grpo import GRPOSettings
from hybridflow.algorithms.ppo import PPOSettings
from hybridflow.metrics import names as metrics

ADAPTIVE = PPOSettings(
    kl_coef=0.1,
    kl_controller="adaptive",
    kl_target=1.0,
    kl_horizon=100,
    entropy_controller="adaptive",
    entropy_target=0.5,
    schedules={"gae_lambda": {"shape": "linear", "to": 1.0, "over": 2}},
)


def test_settings_in_force_follow_controllers_and_schedules() -> None:
    controllers = Controllers(ADAPTIVE)
    assert controllers.metrics(1) == {"train/kl_coef": 0.1, "train/entropy_coef": 0.0, "train/gae_lambda": 0.95}
    controllers.learn({metrics.TRAIN_REFERENCE_KL: 2.0, metrics.TRAIN_ENTROPY: 0.4}, samples=10)
    config = controllers.config(2)
    assert isinstance(config, PPOSettings)
    assert (config.kl_coef, config.entropy_coef, config.gae_lambda) == (0.1 * 1.02, 1e-4, (0.95 + 1.0) / 2)
    assert controllers.metrics(3) == {
        metrics.TRAIN_KL_COEF: 0.1 * 1.02,
        metrics.TRAIN_ENTROPY_COEF: 1e-4,
        "train/gae_lambda": 1.0,
    }


def test_figures_that_are_missing_or_no_number_teach_nothing() -> None:
    controllers = Controllers(ADAPTIVE)
    controllers.learn({}, samples=10)
    controllers.learn({metrics.TRAIN_REFERENCE_KL: math.nan, metrics.TRAIN_ENTROPY: math.inf}, samples=10)
    assert controllers.metrics(1) == Controllers(ADAPTIVE).metrics(1)


def test_what_was_learned_is_in_the_state_and_a_schedule_needs_none() -> None:
    first, again = Controllers(ADAPTIVE), Controllers(ADAPTIVE)
    first.learn({metrics.TRAIN_REFERENCE_KL: 2.0, metrics.TRAIN_ENTROPY: 0.4}, samples=10)
    state = json.loads(json.dumps(first.state_dict()))
    assert set(state) == {"kl", "entropy"}
    again.load_state_dict(state)
    assert again.config(2) == first.config(2) != Controllers(ADAPTIVE).config(2)
    again.load_state_dict({})  # of a checkpoint without controllers
    scheduled = GRPOSettings(schedules={"entropy_coef": {"shape": "cosine", "to": 0.1, "over": 9}})
    assert Controllers(scheduled).state_dict() == {}
    assert Controllers(scheduled).config(10).entropy_coef == 0.1


def test_only_coefficients_that_may_move_are_figures() -> None:
    assert Controllers(GRPOSettings(entropy_coef=0.1)).metrics(1) == {}
    assert Controllers(GRPOSettings(kl_coef=0.1)).metrics(1) == {metrics.TRAIN_KL_COEF: 0.1}
    falling = GRPOSettings(kl_coef=0.1, schedules={"kl_coef": {"shape": "steps", "at": {2: 0.0}}})
    assert Controllers(falling).metrics(2) == {metrics.TRAIN_KL_COEF: 0.0}
    assert Controllers(GRPOSettings()).config(3) == GRPOSettings()
