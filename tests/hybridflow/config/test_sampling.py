"""Tokens that are learned from are drawn from the distribution that their log-probs are of, whoever says how."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine3d.rollout import Request
from engine3d.rollout.config import NEUTRAL, SamplingConfig
from engine3d.rollout.host.generation import sampling_parameters
from engine3d.rollout.server_arguments import server_argument_names
from hybridflow import get_ppo_config
from hybridflow.api.recipe_builder import Given, make_recipe
from hybridflow.config.reading.yaml_loader import SettingsError
from hybridflow.config.recipe import load_recipe
from tests.support.runs import DEMO, SMALL

OTHERS = {
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
}
_REFUSED = "draws tokens from another distribution than the policy's at the sampling temperature"


def test_everything_that_changes_the_distribution_is_here() -> None:
    assert OTHERS.keys() == NEUTRAL.keys()
    without_effect = {"temperature", "max_new_tokens", "stop_token_ids", "stop", "ignore_eos"}
    assert SamplingConfig.model_fields.keys() == NEUTRAL.keys() | without_effect


@pytest.mark.parametrize("name", OTHERS)
def test_a_recipe_is_refused_and_its_neutral_value_is_not(name: str, tmp_path: Path) -> None:
    setting = f"rollout.sampling.{name}"
    with pytest.raises(SettingsError) as error:
        load_recipe(DEMO, [*SMALL, f"{setting}={OTHERS[name]}"])
    [line] = error.value.lines
    assert _REFUSED in line
    assert f"expected {NEUTRAL[name]:g}, or evaluation.NAME.sampling.{name} for evaluation alone" in line
    load_recipe(DEMO, [*SMALL, f"{setting}={NEUTRAL[name]}"])
    (tmp_path / "recipe.yaml").write_text(f"base: {DEMO}\nrollout: {{sampling: {{{name}: {OTHERS[name]}}}}}\n")
    with pytest.raises(SettingsError, match=_REFUSED):
        load_recipe(tmp_path / "recipe.yaml")


@pytest.mark.parametrize("name", OTHERS)
def test_the_python_interface_is_refused_too(name: str) -> None:
    config = get_ppo_config(recipe={"rollout": {"sampling": {name: OTHERS[name]}}})
    with pytest.raises(SettingsError, match=_REFUSED):
        make_recipe(config, Given(model=Path("/model"), prompts=Path("prompts.jsonl"), reward="arithmetic"), gpus=0)


@pytest.mark.parametrize("name", OTHERS)
def test_an_evaluation_may_and_what_is_learned_from_stays_as_it_is(name: str) -> None:
    overrides = ["evaluation.eval.temperature=1", f"evaluation.eval.sampling.{name}={OTHERS[name]}"]
    recipe = load_recipe(DEMO, [*SMALL, "rollout.engine.deterministic=false", *overrides])
    assert recipe.sets["eval"].sampling.altered == {name: OTHERS[name]}
    assert recipe.rollout.sampling.altered == {}


@pytest.mark.parametrize("argument", ["preferred_sampling_params", "sampling_defaults", "sampling_backend"])
def test_arguments_of_sglang_are_no_way_around(argument: str) -> None:
    with pytest.raises(SettingsError, match=r"rollout\.sampling says how tokens are drawn"):
        load_recipe(DEMO, [*SMALL, f"rollout.engine.server_args.{argument}=model"])


def test_every_argument_of_sglang_that_could_change_a_draw_is_refused() -> None:
    words = ("sampling", "logit", "penal", "temperature", "generation_config")
    named = {name for name in server_argument_names() if any(word in name for word in words)}
    assert {"preferred_sampling_params", "sampling_defaults", "enable_custom_logit_processor"} <= named
    for name in named:
        with pytest.raises(SettingsError, match="refused"):
            load_recipe(DEMO, [*SMALL, f"rollout.engine.server_args.{name}=true"])


def test_an_engine_is_told_all_of_them_so_that_no_default_of_a_model_counts() -> None:
    parameters = sampling_parameters(Request(0, [3], SamplingConfig()), None)
    assert {name: parameters[name] for name in NEUTRAL} == NEUTRAL
    assert parameters["temperature"] == 1.0
