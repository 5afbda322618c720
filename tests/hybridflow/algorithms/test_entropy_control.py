"""The coefficient of the entropy bonus."""

from __future__ import annotations

import json
import math

import pytest

from hybridflow.algorithms.entropy_control import AdaptiveEntropy, make_entropy_controller
from hybridflow.algorithms.grpo import GRPOSettings


def adaptive(coef: float = 0.0, largest: float = 0.005) -> AdaptiveEntropy:
    return AdaptiveEntropy(coef, target=0.2, step=0.002, largest=largest)


def test_the_coefficient_by_hand() -> None:
    """It grows and shrinks by its step, between 0 and its limit, and has effect below the target alone."""
    controller, results = adaptive(), []
    assert controller.coef == 0.0
    for entropy in (0.1, 0.1, 0.1, 0.1, 0.3, 0.1, 0.2, 0.3, 0.3, 0.3, 0.19):
        controller.update(entropy)
        results.append(controller.coef)
    expected = [0.002, 0.004, 0.005, 0.005, 0.0, 0.005, 0.0, 0.0, 0.0, 0.0, 0.002]
    assert results == pytest.approx(expected, abs=1e-15)


def test_a_first_coefficient_has_effect_once_an_entropy_is_known() -> None:
    controller = adaptive(0.001)
    assert controller.coef == 0.0
    controller.update(0.1)
    assert controller.coef == pytest.approx(0.003)


def test_it_goes_on_where_it_was_also_above_the_target() -> None:
    first = adaptive()
    for entropy in (0.1, 0.1, 0.3):
        first.update(entropy)
    state = json.loads(json.dumps(first.state_dict()))
    again, lower = adaptive(0.005), adaptive(largest=0.001)
    for controller in (again, lower):
        controller.load_state_dict(state)
        assert controller.coef == 0.0
    for controller in (first, again, lower):
        controller.update(0.1)
    assert first.coef == again.coef == pytest.approx(0.004)
    assert lower.coef == 0.001


def test_an_entropy_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="the entropy is nan, expected a number"):
        adaptive().update(math.nan)


def test_settings_make_the_controller() -> None:
    assert make_entropy_controller(GRPOSettings(entropy_coef=0.1)) is None
    controller = make_entropy_controller(
        GRPOSettings(
            entropy_coef=0.001,
            entropy_controller="adaptive",
            entropy_target=0.5,
            entropy_coef_step=0.01,
            entropy_coef_max=0.015,
        )
    )
    assert controller is not None
    results = []
    for _ in range(3):
        controller.update(0.4)
        results.append(controller.coef)
    assert results == pytest.approx([0.011, 0.015, 0.015])
