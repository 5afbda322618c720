"""Settings that change from step to step."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hybridflow.algorithms.config import load
from hybridflow.algorithms.grpo import GRPOSettings
from hybridflow.algorithms.registry import ALGORITHMS
from hybridflow.algorithms.schedules import Schedule, in_force, largest, schedulable
from tests.hybridflow.algorithms.test_config import build, refused


def test_linear_and_cosine_by_hand() -> None:
    linear = Schedule(shape="linear", to=0.0, over=4, after=2)
    assert [linear.value(step, 1.0) for step in range(1, 10)] == [1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0]
    cosine = Schedule(shape="cosine", to=3.0, over=4)
    values = [cosine.value(step, 1.0) for step in range(1, 7)]
    edge = (1 - math.sqrt(0.5)) / 2
    assert values == pytest.approx([1.0, 1 + 2 * edge, 2.0, 3 - 2 * edge, 3.0, 3.0], rel=1e-12)
    assert (values[0], values[4], values[5]) == (1.0, 3.0, 3.0)
    assert cosine.value(10**9, 0.1) == 3.0


def test_steps_by_hand() -> None:
    steps = Schedule(shape="steps", at={5: 0.2, 3: 0.5})
    assert [steps.value(step, 1.0) for step in range(1, 8)] == [1.0, 1.0, 0.5, 0.5, 0.2, 0.2, 0.2]


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(shape="linear", to=0.3, over=7, after=3),
        Schedule(shape="cosine", to=0.9, over=5),
        Schedule(shape="steps", at={4: 0.9, 2: 0.1, 9: 0.3}),
    ],
)
def test_between_its_turns_a_schedule_stays_within_what_it_has_at_them(schedule: Schedule) -> None:
    """Bounds of the values at the turns bound all values, and the largest value is at a turn."""
    values = [schedule.value(step, 0.5) for step in range(1, 30)]
    at_turns = [0.5, *(schedule.value(step, 0.5) for step in schedule.turns)]
    assert max(values) == max(at_turns) == largest(0.5, schedule)
    assert min(values) == min(at_turns)


def test_settings_in_force_have_the_values_of_the_step_and_no_schedules() -> None:
    config = GRPOSettings(
        kl_coef=0.1,
        schedules={
            "kl_coef": {"shape": "linear", "to": 0.0, "over": 2},
            "clip_high": {"shape": "steps", "at": {2: 0.3}},
        },
    )
    results = [in_force(config, config.schedules, step) for step in (1, 2, 3)]
    assert [(result.kl_coef, result.clip_high) for result in results] == [(0.1, 0.2), (0.05, 0.3), (0.0, 0.3)]
    assert not any(result.schedules for result in results)
    # The reference policy runs for all steps; in the last nothing is made of it.
    assert config.needs_reference
    assert [result.needs_reference for result in results] == [True, True, False]
    plain = GRPOSettings()
    assert in_force(plain, plain.schedules, 7) is plain


@pytest.mark.parametrize(
    ("first", "schedule", "needed"),
    [
        (0.0, {"shape": "cosine", "to": 0.1, "over": 10, "after": 5}, True),
        (0.1, {"shape": "cosine", "to": 0.0, "over": 10}, True),
        (0.0, {"shape": "steps", "at": {50: 0.1, 60: 0.0}}, True),
        (0.0, {"shape": "linear", "to": 0.0, "over": 10}, False),
    ],
)
def test_a_reference_is_needed_where_any_step_has_a_coefficient(
    first: float, schedule: dict[str, Any], needed: bool
) -> None:
    assert build({"kl_coef": first, "schedules": {"kl_coef": schedule}}).needs_reference == needed


LINEAR = {"shape": "linear", "to": 0.1, "over": 3}


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"schedules": {"kl_coef": {"shape": "round"}}},
            "schedules.kl_coef.shape = 'round': expected one of 'linear',",
        ),
        ({"schedules": {"kl_coef": {"shape": "linear", "to": 0.1}}}, "schedules.kl_coef: no over with shape 'linear'"),
        ({"schedules": {"kl_coef": {"shape": "cosine"}}}, "no to and no over with shape 'cosine', which needs it"),
        ({"schedules": {"kl_coef": {"shape": "steps"}}}, "no at with shape 'steps', which needs it"),
        ({"schedules": {"kl_coef": LINEAR | {"at": {2: 0.1}}}}, "at with shape 'linear', which does not use it"),
        (
            {"schedules": {"kl_coef": {"shape": "steps", "at": {2: 0.1}, "to": 0.1, "after": 1}}},
            "to and after with shape 'steps', which does not use it",
        ),
        ({"schedules": {"kl_coef": {"shape": "steps", "at": {1: 0.1}}}}, "expected more than 1"),
        ({"schedules": {"kl_coef": LINEAR | {"over": 0}}}, "schedules.kl_coef.over = 0: expected more than 0"),
        ({"schedules": {"kl_coef": LINEAR | {"to": -1}}}, "in step 4, kl_coef is -1: input should be greater than or"),
        ({"schedules": {"clip_low": {"shape": "steps", "at": {3: 0.1, 7: 1.5}}}}, "in step 7, clip_low is 1.5: input"),
        (
            {"name": "ppo", "schedules": {"gamma": LINEAR | {"to": 1.01}}},
            "in step 4, gamma is 1.01: input should be less",
        ),
        ({"schedules": {"kl_coff": LINEAR}}, "schedules.kl_coff: kl_coff is no number with a bound of this algorithm"),
        ({"schedules": {"gamma": LINEAR}}, "schedules.gamma: gamma is no number with a bound of this algorithm"),
        ({"schedules": {"epochs": LINEAR}}, "schedules.epochs: epochs is no number with a bound of this algorithm"),
        ({"schedules": {"kl_target": LINEAR}}, "schedules.kl_target: kl_target cannot change during a run; expected"),
        ({"name": "safe_rlhf", "schedules": {"lagrange_lr": LINEAR}}, "lagrange_lr cannot change during a run"),
        ({"name": "safe_rlhf", "schedules": {"cost_limit": LINEAR}}, "cost_limit is no number with a bound"),
        ({"schedules": {"kl_guard": LINEAR}}, "schedules.kl_guard: kl_guard is null, expected a number to start from"),
        (
            {"name": "dapo", "schedules": {"overlong_penalty": LINEAR}},
            "schedules.overlong_penalty is set with overlong_buffer null, which does not use it; expected",
        ),
        (
            {"name": "vapo", "schedules": {"gae_lambda": LINEAR}},
            "schedules.gae_lambda is set with length_adaptive_alpha",
        ),
        ({"name": "pf_ppo", "schedules": {"filter_prob": LINEAR}}, "filter_prob cannot change during a run; expected"),
        (
            {"kl_coef": 0.1, "kl_controller": "adaptive", "kl_target": 0.1, "schedules": {"kl_coef": LINEAR}},
            "schedules.kl_coef is set with kl_controller 'adaptive', which moves kl_coef too; expected one of them",
        ),
        (
            {"entropy_controller": "adaptive", "entropy_target": 0.1, "schedules": {"entropy_coef": LINEAR}},
            "schedules.entropy_coef is set with entropy_controller 'adaptive', which moves entropy_coef too",
        ),
        (
            {"kl_estimator": "k1", "schedules": {"kl_coef": LINEAR | {"after": 9}}},
            "schedules: in step 13, kl_estimator is 'k1' with kl_in 'loss'",
        ),
    ],
)
def test_schedules_that_make_no_sense_are_refused_in_one_line(settings: dict[str, Any], line: str) -> None:
    assert line in refused(settings)


COMMON = {"entropy_coef", "kl_coef", "kl_guard"}
CLIPPED = COMMON | {"clip_low", "clip_high", "dual_clip"}
OF_CRITIC = {"gamma", "gae_lambda", "value_clip"}
SCHEDULABLE = {
    "grpo": CLIPPED,
    "ppo": CLIPPED | OF_CRITIC,
    "remax": CLIPPED,
    "safe_rlhf": CLIPPED | OF_CRITIC,
    "ippo": CLIPPED | OF_CRITIC,
    "dapo": CLIPPED | {"overlong_penalty"},
    "vapo": CLIPPED | OF_CRITIC | {"critic_gae_lambda", "length_adaptive_alpha", "positive_lm_coef"},
    "pf_ppo": CLIPPED | OF_CRITIC | {"replay_ratio"},
    "distillation": CLIPPED | {"jsd_beta"},
    "rloo": CLIPPED,
    "reinforce_plus_plus": CLIPPED | {"gamma"},
    "reinforce_plus_plus_baseline": CLIPPED,
    "dr_grpo": CLIPPED,
    "gpg": COMMON,
    "opo": COMMON,
    "pass_at_k": CLIPPED,
    "gspo": CLIPPED,
    "gspo_token": CLIPPED,
    "cispo": COMMON | {"weight_clip_low", "weight_clip_high"},
    "sapo": COMMON | {"gate_temperature_positive", "gate_temperature_negative"},
    "clip_cov": CLIPPED | {"clip_cov_fraction"},
    "kl_cov": COMMON | {"kl_cov_fraction", "kl_cov_coef"},
    "dpo": {"beta", "label_smoothing", "nll_coef"},
    "kto": {"beta", "desirable_weight", "undesirable_weight"},
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_which_settings_of_each_algorithm_may_have_a_schedule(name: str) -> None:
    """Each is read through `Step.config` in every step; any other belongs to `unscheduled` of its class."""
    settings = load(name).settings
    assert set(schedulable(settings, settings.unscheduled)) == SCHEDULABLE[name]


def test_schedules_that_were_written_are_read_again() -> None:
    schedules = {"kl_coef": LINEAR | {"after": 2}, "clip_low": {"shape": "steps", "at": {4: 0.1, 2: 0.3}}}
    config = build({"schedules": schedules})
    assert build(config.model_dump(mode="json")) == config
    assert config.schedules["clip_low"].at == {2: 0.3, 4: 0.1}
