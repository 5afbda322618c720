"""Models that leave their devices between their turns: what is refused, and in which order roles start."""

from __future__ import annotations

import pytest

from engine3d.errors import UserError
from hybridflow.cluster.devices.device_map import DeviceMap, Node
from hybridflow.config.evaluation_recipe import EvaluationRecipe
from hybridflow.config.reading.yaml_loader import SettingsError
from hybridflow.config.recipe import Recipe, load_recipe
from hybridflow.planning.checks.offload import check_offload, check_overlap
from hybridflow.planning.checks.placement import planned_devices
from hybridflow.roles.groups import begin_in_turn
from tests.support.runs import DEMO, ROOT

PPO = ROOT / "launch/recipes/ppo.yaml"


def _recipe(*overrides: str) -> Recipe:
    return load_recipe(PPO, overrides)


def _check(recipe: Recipe) -> None:
    devices = planned_devices(recipe.device_maps, recipe.placement)
    check_offload(recipe.megatron_roles, recipe.rollout, devices or {})


def test_a_model_alone_on_its_devices_is_not_offloaded() -> None:
    alone = _recipe("placement.critic=cpu:2-3", "placement.reference=cpu:0-1", "critic.offload=true")
    with pytest.raises(UserError, match=r"^critic\.offload=true: no other role computes on the devices of critic"):
        _check(alone)
    shared = _recipe("placement.critic=cpu:1-2", "critic.offload=true", "reference.offload=true")
    _check(shared)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("reference.offload=true", r"reference is set, and there is no such role with algorithm\.kl_coef=0"),
        ("critic.offload=true", r"critic is set, and there is no such role with algorithm\.name=grpo"),
        ("train.offload=true", r"train\.offload"),
        ("rollout.engine.release_weights=true", "release_weights=true needs memory_saver=true"),
    ],
)
def test_what_is_not_there_is_not_offloaded(setting: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_recipe(DEMO, [setting])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["rollout.weights.share=false", "placement.rollout=cpu:2"],
            "no other role computes on the devices of rollout",
        ),
        ([], r"with rollout\.weights\.share=true: expected share=false and transport=auto"),
        (["rollout.weights={share: false, transport: collective}"], r"with rollout\.weights\.transport=collective: "),
    ],
)
def test_weights_are_released_where_others_use_the_memory_and_none_is_shared(
    overrides: list[str], message: str
) -> None:
    recipe = _recipe("rollout.engine={memory_saver: true, release_weights: true}", *overrides)
    with pytest.raises(UserError, match=message):
        _check(recipe)


@pytest.mark.parametrize(
    ("overrides", "order"),
    [
        ([], ()),
        (["critic.offload=true"], ("critic", "rollout")),
        (["critic.offload=true", "reference.offload=true"], ("reference", "critic", "rollout")),
        (["critic.offload=true", "placement.rollout=cpu:2"], ("critic",)),
    ],
)
def test_an_engine_starts_when_the_models_there_have_left(overrides: list[str], order: tuple[str, ...]) -> None:
    recipe = _recipe(*overrides)
    devices = planned_devices(recipe.device_maps, recipe.placement)
    assert devices is not None and begin_in_turn(recipe.offloaded_roles, devices) == order


def test_a_state_returns_in_the_turns_of_others() -> None:
    overlap = ["train.optimizer.offload=true", "train.optimizer.overlap_offload=true"]
    here, there = (
        DeviceMap.parse(entry).devices([Node("host-0", gpus=4, cpu_slots=0)]) for entry in ("cuda:0-1", "cuda:2-3")
    )
    check_overlap(load_recipe(DEMO, overlap).megatron_roles["actor"], {"actor": here, "rollout": here, "reward": there})
    check_overlap(load_recipe(DEMO).megatron_roles["actor"], {"actor": here, "rollout": there})
    alone = r"^train\.optimizer\.overlap_offload=true: nothing else is on placement\.actor, in whose turns it would"
    actor = load_recipe(DEMO, overlap).megatron_roles["actor"]
    with pytest.raises(UserError, match=alone):
        check_overlap(actor, {"actor": here, "rollout": there, "reward": here})
    critic = ["algorithm.name=ppo", "critic.path=/model", "critic.offload=true"]
    recipe = load_recipe(DEMO, [*overlap, *critic])
    devices = dict.fromkeys(("actor", "critic", "rollout"), here)
    check_overlap(recipe.megatron_roles["actor"], devices)
    with pytest.raises(UserError, match=r"overlap_offload=true does nothing with critic\.offload=true"):
        check_overlap(recipe.megatron_roles["critic"], devices)
    with pytest.raises(UserError, match=r"overlap_offload=true does nothing with critic\.offload=true"):
        check_offload(recipe.megatron_roles, recipe.rollout, devices)


def test_an_evaluation_has_no_optimizer_that_overlaps() -> None:
    recipe = load_recipe(DEMO, ["train.optimizer.offload=true", "train.optimizer.overlap_offload=true"])
    _check(EvaluationRecipe.of(recipe, recipe.sets))
