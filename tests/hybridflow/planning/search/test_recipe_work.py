"""Work of a step of a recipe."""

from __future__ import annotations

import json

import pytest

from engine3d.errors import UserError
from hybridflow.config.recipe import load_recipe
from hybridflow.planning.memory.estimate import recipe_specs
from hybridflow.planning.search.recipe_work import recipe_work, search_settings
from hybridflow.planning.time.generation import EngineShape
from tests.support.runs import ROOT
from tests.support.tiny_families import CONFIGS


def test_engines_that_a_check_refuses_are_not_proposed() -> None:
    """Attention data parallelism is neither over several nodes nor of dense models."""
    recipe = load_recipe(ROOT / "launch/recipes/qwen3-30b-a3b-4xh200.yaml")
    accepts = search_settings(recipe, recipe_specs(recipe), gpus_per_node=8).accepts_engines
    accepts(EngineShape(tp=8, ep=8, attention_dp=8, engines=2))
    accepts(EngineShape(tp=16, ep=16))
    with pytest.raises(UserError, match=r"attention_dp=16 with engines over 2 nodes each, which was not tried"):
        accepts(EngineShape(tp=16, ep=16, attention_dp=16, engines=2))
    dense = [f"model.create={json.dumps({'config': CONFIGS['qwen3-tied']})}", "warmup=null"]
    recipe = load_recipe(ROOT / "launch/recipes/demo.yaml", dense)
    accepts = search_settings(recipe, recipe_specs(recipe)).accepts_engines
    with pytest.raises(UserError, match=r"attention_dp=2: expected 1, because .* has no experts"):
        accepts(EngineShape(tp=2, attention_dp=2))
    apart = load_recipe(ROOT / "launch/recipes/lora.yaml", ["train.lora={engine: adapter, targets: [q_proj]}"])
    specs = recipe_specs(apart)
    search_settings(apart, specs, gpus=False).accepts_engines(EngineShape(tp=2))
    with pytest.raises(UserError, match=r"train.lora.engine=adapter was not tried on GPUs; expected merged"):
        search_settings(apart, specs).accepts_engines(EngineShape(tp=2))
    model = f"model.create={json.dumps({'config': CONFIGS['qwen3_next']})}"
    recipe = load_recipe(ROOT / "launch/recipes/demo.yaml", [model, "warmup=null"])
    specs = recipe_specs(recipe)
    search_settings(recipe, specs, gpus=False).accepts_engines(EngineShape(tp=2))
    with pytest.raises(UserError, match=r"has gated delta nets, which were not tried in engines on GPUs"):
        search_settings(recipe, specs).accepts_engines(EngineShape(tp=2))


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_a_reference_without_adapters_is_a_pass_of_the_actor(mini_batches: int) -> None:
    settings = ["warmup=null", "algorithm.kl_coef=0.1", f"trainer.mini_batches={mini_batches}"]
    recipe = load_recipe(ROOT / "launch/recipes/lora.yaml", settings)
    work = recipe_work(recipe, recipe_specs(recipe), prompt_tokens=8)
    assert [(role.role, role.passes) for role in work.roles] == [("actor", mini_batches)]
    recipe = load_recipe(ROOT / "launch/recipes/lora.yaml", [*settings, "train.lora=null"])
    work = recipe_work(recipe, recipe_specs(recipe), prompt_tokens=8)
    assert [(role.role, role.passes) for role in work.roles] == [("actor", mini_batches - 1), ("reference", 1)]
