"""Specs of a recipe's roles: no Ray, and no process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from engine3d.layout import Layout
from hybridflow.cluster.devices.device_map import Node, pool_devices
from hybridflow.config.evaluation_recipe import EvaluationRecipe
from hybridflow.config.recipe import Recipe, load_recipe
from hybridflow.data.prompts import Prompts
from hybridflow.data.tasks import Example
from hybridflow.roles.groups import FunctionRewardGroup, PolicyGroup, RolloutGroup, ValueGroup
from hybridflow.roles.policy import PolicyWorker
from hybridflow.roles.value import ValueWorker
from hybridflow.trainer.startup.role_specs import RoleSpec, RoleSpecs
from hybridflow.trainer.startup.run_setup import Run, prepare

DEMO = "launch/recipes/demo.yaml"
WITH_REFERENCE = "algorithm.kl_coef=0.1"
NODES = [Node("10.0.0.7", gpus=0, cpu_slots=8)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = prepare(load_recipe(DEMO, [f"run_dir={tmp_path_factory.mktemp('runs')}"]))
    with run.lock:
        yield run


def specs_of(recipe: Recipe, run: Run, nodes: Sequence[Node] = NODES) -> dict[str, RoleSpec]:
    roles = recipe.device_maps
    devices = pool_devices(roles, recipe.placement.pools, nodes)
    devices.setdefault("reward", devices["rollout"][:1])
    return {spec.role: spec for spec in RoleSpecs(recipe, run, devices, nodes).all()}


@pytest.mark.slow
def test_every_role_of_a_recipe_has_one_spec_in_the_order_of_its_start(run: Run) -> None:
    specs = specs_of(load_recipe(DEMO, [WITH_REFERENCE]), run)
    assert list(specs) == ["rollout", "actor", "reference", "reward"]
    kinds = [spec.group for spec in specs.values()]
    assert kinds == [RolloutGroup, PolicyGroup, PolicyGroup, FunctionRewardGroup]
    assert not any(spec.turn is not None for spec in specs.values())  # all start side by side
    assert [spec.role for spec in specs.values() if spec.ranks_per_store == 0] == ["rollout", "reward"]


def test_an_engine_on_two_hosts_has_a_rank_on_each_that_meet_at_a_store_of_theirs(run: Run) -> None:
    overrides = ["rollout.engine.tp=4", "placement.rollout=cpu:4-11", "placement.actor=cpu:0-1"]
    nodes = [Node(f"10.0.0.{number}", gpus=0, cpu_slots=2) for number in range(6)]
    spec = specs_of(load_recipe(DEMO, overrides), run, nodes)["rollout"]
    assert (spec.layout, spec.devices_per_rank, spec.ranks_per_store) == (Layout(dp=2, tp=2), 2, 2)


def test_an_evaluation_alone_has_engines_that_load_weights_and_what_scores_its_sets(run: Run) -> None:
    with_functions = "{data: {path: own.jsonl}, reward: {functions: [{name: length, path: length}]}}"
    recipe = load_recipe(
        DEMO, [WITH_REFERENCE, "evaluation.sums.data.path=sums.jsonl", f"evaluation.own={with_functions}"]
    )
    prompts = Prompts([Example("1+1=", "2")], [[4, 5]])
    run = replace(run, sets=dict.fromkeys(("eval", "sums", "own"), prompts))
    training = specs_of(recipe, run)
    assert list(training["reward"].arguments[0]) == ["reward", "evaluation.own"]
    assert training["rollout"].arguments[1].server_args["load_format"] == "dummy"
    for measured, scorers in ((["sums"], ["reward"]), (["own"], ["evaluation.own"])):
        alone = replace(run, sets=dict.fromkeys(measured, prompts))
        specs = specs_of(EvaluationRecipe.of(recipe, measured), alone)
        assert list(specs) == ["rollout", "reward"] and list(specs["reward"].arguments[0]) == scorers
        assert "load_format" not in specs["rollout"].arguments[1].server_args
        assert specs["rollout"].settings["weight_sources"] == [None]


def test_only_the_actor_learns_and_publishes_and_takes_a_checkpoint(run: Run) -> None:
    specs = specs_of(load_recipe(DEMO, [WITH_REFERENCE]), run)
    actor, reference = specs["actor"], specs["reference"]
    assert (actor.settings["trainable"], reference.settings["trainable"]) == (True, False)
    assert len(actor.settings["publish"]) == actor.layout.world_size and not reference.settings["publish"]
    assert actor.settings["checkpoint"] is None
    assert actor.arguments[0] == reference.arguments[0] == run.model_directory


def test_a_critic_has_a_scalar_head_and_a_place_of_its_own(run: Run) -> None:
    overrides = ["algorithm.name=ppo", "placement.critic=cpu:2-3"]
    critic = specs_of(load_recipe(DEMO, overrides), run)["critic"]
    assert (critic.group, critic.worker) == (ValueGroup, ValueWorker) and critic.settings["trainable"]
    assert critic.layout == Layout(dp=2, ep=2)
    assert [location.device for location in critic.settings["locations"]] == ["cpu:2", "cpu:3"]
    assert critic.sample_costs([8, 16])[1] > critic.sample_costs([8, 16])[0] > 0


def test_models_that_leave_their_devices_start_one_after_another_and_the_engine_last(run: Run) -> None:
    recipe = load_recipe(
        DEMO, [WITH_REFERENCE, "reference.offload=true", "placement.reference=cpu:0-1", "placement.rollout=cpu:0"]
    )
    specs = specs_of(recipe, run)
    assert {role: spec.turn for role, spec in specs.items() if spec.turn is not None} == {"reference": 0, "rollout": 1}
    assert specs["reference"].settings["offload"] and specs["reference"].worker is PolicyWorker


def test_the_size_of_the_cache_is_told_with_who_chose_it(run: Run) -> None:
    chosen = specs_of(load_recipe(DEMO, ["rollout.engine.max_total_tokens=null"]), run)["rollout"]
    assert chosen.note is not None and "(all that a step needs)" in chosen.note
    given = specs_of(load_recipe(DEMO, ["rollout.engine.max_total_tokens=4096"]), run)["rollout"]
    assert given.note is not None
    assert given.note.startswith("rollout: KV cache of 4,096 tokens (rollout.engine.max_total_tokens), ")
    _, engine = given.arguments
    assert engine.max_total_tokens == 4096 and engine.server_args["load_format"] == "dummy"


def test_limits_leave_an_engine_and_functions_time_to_say_themselves_that_they_are_late(run: Run) -> None:
    recipe = load_recipe(DEMO)
    specs = specs_of(recipe, run)
    assert specs["rollout"].start_s > recipe.rollout.engine.start_timeout_s
    assert specs["actor"].start_s == recipe.train_config("actor").start_timeout_s
    functions = recipe.functions["reward"].functions
    assert specs["reward"].start_s > max(function.load_timeout_s for function in functions)


def test_a_run_without_held_out_sets_has_the_same_roles(run: Run) -> None:
    without = specs_of(load_recipe(DEMO, ["evaluation.eval=null"]), replace(run, sets={}))
    assert list(without) == list(specs_of(load_recipe(DEMO), run))
