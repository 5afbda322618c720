"""Settings of a run that an algorithm does not go with, and the shipped recipe of each algorithm."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.config.reading.yaml_loader import SettingsError
from hybridflow.config.recipe import load_recipe

RECIPES = Path(__file__).parents[3] / "launch" / "recipes"
WITH_RATIO = ("rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "dr_grpo", "pass_at_k")


@pytest.mark.parametrize(
    ("name", "overrides", "line"),
    [
        (
            "gpg",
            ["trainer.mini_batches=2"],
            "trainer.mini_batches=2 and epochs=1 with algorithm.name=gpg, whose loss has no ratio to the policy that "
            "made the samples: after an update they are another policy's; expected 1 of each",
        ),
        ("opo", ["trainer.epochs=3"], "trainer.mini_batches=1 and epochs=3 with algorithm.name=opo, whose loss has no"),
        (
            "opo",
            ["trainer.max_staleness=1"],
            "trainer.max_staleness=1 with algorithm.name=opo, whose loss has no ratio to the policy that made the "
            "samples; expected 0",
        ),
        (
            "pass_at_k",
            ["algorithm.pass_k=8"],
            "rollout.samples_per_prompt=8 with algorithm.name=pass_at_k, where a group of 8 learns nothing; expected "
            "at least 9",
        ),
        *(
            (
                name,
                ["rollout.samples_per_prompt=1"],
                f"rollout.samples_per_prompt=1 with algorithm.name={name}, where a group of one learns nothing; "
                f"expected at least {3 if name == 'pass_at_k' else 2}",
            )
            for name in ("rloo", "reinforce_plus_plus_baseline", "dr_grpo", "gpg", "opo", "pass_at_k")
        ),
    ],
)
def test_a_run_that_an_algorithm_does_not_go_with_is_refused(name: str, overrides: list[str], line: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_recipe(RECIPES / f"algorithms/{name}.yaml", overrides)
    assert line in str(caught.value)
    assert len(caught.value.lines) == 1


@pytest.mark.parametrize("name", [*WITH_RATIO, "gpg", "opo"])
def test_the_recipe_of_an_algorithm_has_its_name(name: str) -> None:
    recipe = load_recipe(RECIPES / f"algorithms/{name}.yaml")
    assert recipe.name == recipe.algorithm.name == name
    assert recipe.algorithm.smallest_group <= recipe.rollout.samples_per_prompt


def test_algorithms_with_a_ratio_take_several_updates_and_staleness() -> None:
    for name in WITH_RATIO:
        several = ["trainer.mini_batches=2", "trainer.epochs=2", "trainer.max_staleness=1", "placement.rollout=cpu:2"]
        assert load_recipe(RECIPES / f"algorithms/{name}.yaml", several).trainer.updates_per_step == 4
