"""Settings of the algorithm."""

from __future__ import annotations

import dataclasses

import pytest

from hybridflow.algorithms.config import AlgorithmConfig
from hybridflow.algorithms.registry import ALGORITHMS, Algorithm, names_with
from hybridflow.config.yaml_loader import SettingsError, build_settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "gradient of k1 is zero in expectation"),
        ({"loss_aggregation": "seq-mean-token-sum-norm"}, "expected a length with"),
        ({"loss_normalising_length": 8}, "expected a length with"),
        ({"clip_low": 1.5}, "clip_low"),
        ({"dual_clip": 0.5}, "dual_clip"),
        ({"name": "ppo2"}, "name"),
        ({"clip": 0.2}, "clip"),
        ({"kl_controller": "adaptive", "kl_coef": 0.1}, "kl_target None and kl_coef 0.1, expected a target"),
        ({"kl_controller": "adaptive", "kl_target": 0.1}, "kl_coef 0.0, expected a target, and a coefficient above 0"),
        (
            {"name": "safe_rlhf", "lagrange_initial": 6.0},
            "lagrange_initial is 6.0, expected between lagrange_min, 0.05, and lagrange_max, 5.0",
        ),
    ],
)
def test_algorithm_settings_that_make_no_sense_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AlgorithmConfig.model_validate(settings)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_there_and_needs_a_reference_only_where_it_is_asked_for(name: str) -> None:
    config = AlgorithmConfig(name=name)
    assert callable(config.algorithm.load())
    assert not config.needs_reference


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("grpo", {"group_baseline", "group_std"}),
        ("ppo", {"critic"}),
        ("remax", {"greedy_baseline"}),
        ("safe_rlhf", {"critic", "costs"}),
    ],
)
def test_what_the_published_algorithms_need(name: str, needs: set[str]) -> None:
    flags = [flag.name for flag in dataclasses.fields(Algorithm) if flag.name != "dataflow"]
    assert {flag for flag in flags if getattr(ALGORITHMS[name], flag)} == needs


def names(**needs: bool) -> str:
    """As errors list the algorithms that need something, however many there are."""
    return " or ".join(map(repr, names_with(**needs)))


def test_only_an_algorithm_that_divides_by_it_takes_the_setting_of_the_standard_deviation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rloo = Algorithm("hybridflow.algorithms.grpo:grpo", group_baseline=True)
    monkeypatch.setitem(ALGORITHMS, "rloo", rloo)
    with pytest.raises(ValueError, match="normalise_advantages_by_std is set with name 'rloo', which does not use it"):
        AlgorithmConfig(name="rloo", normalise_advantages_by_std=False)
    assert "normalise_advantages_by_std" not in AlgorithmConfig(name="rloo").model_dump()


def test_a_key_that_the_algorithm_does_not_use_is_refused_in_one_line() -> None:
    expected = f"gamma is set with name 'grpo', which does not use it; expected name {names(critic=True)}, or no gamma"
    with pytest.raises(ValueError, match=expected):
        AlgorithmConfig(gamma=1.0)  # the default, but somebody wrote it
    with pytest.raises(SettingsError) as refused:
        build_settings(
            AlgorithmConfig, {"name": "remax", "cost_limit": 1.0, "normalise_advantages_by_std": True}, {}, "recipe"
        )
    assert refused.value.lines == (
        f"recipe: normalise_advantages_by_std is set with name 'remax', which does not use it; expected name "
        f"{names(group_std=True)}, or no normalise_advantages_by_std; cost_limit is set with name 'remax', which does "
        f"not use it; expected name {names(costs=True)}, or no cost_limit",
    )
    with pytest.raises(ValueError, match="kl_horizon is set with kl_controller 'fixed', which does not use it"):
        AlgorithmConfig(kl_horizon=100)


USED = {
    "grpo": {"normalise_advantages_by_std"},
    "ppo": {"gamma", "gae_lambda", "value_clip", "whiten_advantages", "critic_warmup_steps"},
    "remax": set(),
    "safe_rlhf": {
        *("gamma", "gae_lambda", "value_clip", "whiten_advantages", "critic_warmup_steps"),
        *("cost_limit", "lagrange_initial", "lagrange_lr", "lagrange_max"),
    },
}


@pytest.mark.parametrize("name", USED)
def test_settings_that_were_written_are_read_again(name: str) -> None:
    config = AlgorithmConfig.model_validate({"name": name, "kl_coef": 0.1})
    written = config.model_dump(mode="json")
    assert set().union(*USED.values()) & written.keys() == USED[name]
    assert AlgorithmConfig.model_validate(written) == config
    adaptive = AlgorithmConfig.model_validate(written | {"kl_controller": "adaptive", "kl_target": 0.1})
    assert adaptive.model_dump(mode="json").keys() - written.keys() == {"kl_target", "kl_horizon"}


def test_where_the_kl_is_a_penalty_depends_on_the_algorithm_and_the_estimator_on_that() -> None:
    def found(**settings: object) -> tuple[str, str]:
        config = AlgorithmConfig.model_validate(settings)
        return config.kl_in, config.kl_estimator

    assert found() == found(name="grpo") == found(name="ppo", kl_in="loss") == ("loss", "k3")
    assert found(name="ppo") == found(name="remax") == found(name="safe_rlhf") == ("reward", "k1")
    assert found(kl_in="reward") == ("reward", "k1")
    assert found(name="ppo", kl_estimator="k2") == ("reward", "k2")


def test_a_wrong_name_is_one_error() -> None:
    with pytest.raises(SettingsError) as refused:
        build_settings(AlgorithmConfig, {"name": "pp0"}, {}, "recipe")
    assert refused.value.lines == (
        f"recipe: name: 'pp0' is no algorithm, expected {' or '.join(map(repr, ALGORITHMS))}",
    )


def test_reference_is_needed_only_with_a_kl_coefficient() -> None:
    assert not AlgorithmConfig().needs_reference
    assert AlgorithmConfig(kl_coef=0.1).needs_reference
