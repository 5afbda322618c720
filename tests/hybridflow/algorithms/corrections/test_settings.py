"""Settings of a correction."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from hybridflow.algorithms.corrections.settings import CorrectionSettings
from hybridflow.config.reading.yaml_loader import SettingsError
from hybridflow.config.recipe import load_recipe
from tests.support.runs import DEMO, SMALL


def refused(*overrides: str) -> str:
    with pytest.raises(SettingsError) as error:
        load_recipe(DEMO, [*SMALL, *overrides])
    [line] = error.value.lines
    return line


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": "token", "against": "rollout"}, "would count twice; expected against 'proximal', or no weights"),
        ({"truncate": 2.0}, "truncate is 2 without weights, expected weights, or no truncate"),
        ({"mask_low": 0.5, "mask_high": 2.0}, "mask_low is 0.5 without mask, expected mask, or no mask_low; mask_high"),
        ({"mask": "token"}, "mask is 'token' without mask_low and mask_high, expected both bounds"),
        ({"mask": "token", "mask_low": 0.5}, "mask is 'token' without mask_high, expected both bounds"),
        (
            {"mask": "token", "mask_low": 0.5, "mask_high": 2.0, "weights": "token", "truncate": 2.0},
            "truncate is 2, which no weight reaches that mask_high 2 leaves",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        CorrectionSettings(**settings)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "setting", ["truncate=0.5", "mask_low=1", "mask_low=-0.1", "mask_high=1", "veto=0", "veto=1", "weights=tokens"]
)
def test_bounds_that_tokens_of_equal_policies_would_not_pass_are_refused(setting: str) -> None:
    name, value = setting.split("=")
    line = refused(f"algorithm.correction.{setting}").removeprefix(f"override algorithm.correction.{setting}: ")
    assert line.startswith(f"algorithm.correction.{name} = ")
    assert value in line


def test_an_unknown_key_is_one_error_that_names_what_is_near() -> None:
    assert "did you mean algorithm.correction.truncate?" in refused("algorithm.correction.truncat=2")


def test_weights_are_truncated_unless_something_else_is_said() -> None:
    assert CorrectionSettings(weights="token").truncate == 2.0
    assert CorrectionSettings(weights="token", truncate=None).truncate is None
    assert CorrectionSettings(weights="token", mask="token", mask_low=0.5, mask_high=5.0).truncate is None
    assert CorrectionSettings().truncate is None


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weights": "sequence"},
        {"weights": "token", "truncate": None},
        {"against": "rollout", "mask": "geometric", "mask_low": 0.0, "mask_high": 1.001, "veto": 1e-4},
    ],
)
def test_settings_that_were_written_are_read_again(settings: dict[str, object]) -> None:
    correction = CorrectionSettings(**settings)
    assert CorrectionSettings(**correction.model_dump(mode="json")) == correction


def test_what_is_needed_of_the_trainer() -> None:
    assert CorrectionSettings().needs_proximal
    assert not CorrectionSettings().corrects
    bypass = CorrectionSettings(against="rollout")
    assert bypass.corrects and not bypass.needs_proximal and not bypass.leaves_out
    vetoed = CorrectionSettings(against="rollout", veto=1e-4)
    assert vetoed.needs_proximal and vetoed.leaves_out


@pytest.mark.parametrize("name", ["grpo", "ppo", "remax", "safe_rlhf", "dapo", "vapo", "pf_ppo"])
def test_every_algorithm_has_a_correction_off_unless_asked_for(name: str) -> None:
    more = ["cost.functions=[{name: long, path: tests.support.runs:reward}]"] if name == "safe_rlhf" else []
    common = [*SMALL, f"algorithm.name={name}", *more]
    assert load_recipe(DEMO, common).algorithm.correction is None
    result = load_recipe(DEMO, [*common, "algorithm.correction.weights=sequence"]).algorithm.correction
    assert result == CorrectionSettings(weights="sequence", truncate=2.0)


def test_what_does_not_fit_the_rest_of_a_recipe_is_refused() -> None:
    ahead = ["trainer.max_staleness=1", "placement.rollout=cpu:2"]
    assert (
        "algorithm.correction has neither weights, mask nor veto with trainer.max_staleness=1, whose samples are of "
        "older weights: it would only measure what the ratio leaves out; expected one of them, or against='rollout'"
    ) in refused(*ahead, "algorithm.correction={}")
    assert "with algorithm.replay_buffer_size=10000, whose samples are of older weights" in refused(
        "algorithm.name=pf_ppo", "algorithm.correction={}"
    )
    guarded = ["trainer.epochs=2", "algorithm.kl_guard=0.1"]
    assert "algorithm.kl_guard is set with algorithm.correction.against='rollout'" in refused(
        *guarded, "algorithm.correction.against=rollout"
    )
    assert "or an algorithm.correction, whose ratio is to that policy" in refused(*ahead, *guarded)
    # The ratio to the policy before the step is what the guard goes by.
    load_recipe(DEMO, [*SMALL, *ahead, *guarded, "algorithm.correction.weights=token"])
    load_recipe(DEMO, [*SMALL, *ahead, "algorithm.correction.against=rollout"])
    load_recipe(DEMO, [*SMALL, "algorithm.correction={}"])


def test_losses_that_have_no_ratio_or_need_no_weights_are_refused_by_name() -> None:
    for name in ("gpg", "opo"):
        line = refused(f"algorithm.name={name}", "algorithm.correction.against=rollout")
        assert f"against='rollout' with algorithm.name={name}, whose loss has no ratio to any policy" in line
        load_recipe(
            DEMO, [*SMALL, "trainer.mini_batches=1", f"algorithm.name={name}", "algorithm.correction.weights=token"]
        )
    line = refused("algorithm.name=distillation", "algorithm.divergence_in=loss", "algorithm.correction.weights=token")
    assert "algorithm.correction is set with algorithm.divergence_in='loss', a loss that is exact" in line
