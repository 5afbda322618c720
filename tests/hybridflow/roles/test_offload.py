"""Models that leave their devices between their turns, in whole runs and before them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from engine3d.errors import UserError
from hybridflow.config.recipe import Recipe, load_recipe
from hybridflow.config.yaml_loader import SettingsError
from hybridflow.metrics.timeline import read_spans
from hybridflow.planning.placement_check import planned_devices
from hybridflow.roles.offload import begin_in_turn, check_offload
from hybridflow.rundir.file_names import TIMELINE
from tests.support.runs import DEMO, ROOT, records, rewarded_by_length, run_recipe

PPO = ROOT / "launch/recipes/ppo.yaml"
REMAX = ROOT / "launch/recipes/remax.yaml"
OFFLOAD = ROOT / "launch/recipes/ppo-offload.yaml"

COMPARED = ("loss", "norm", "mean", "accuracy", "variance", "kl", "std")


def _recipe(*overrides: str) -> Recipe:
    return load_recipe(PPO, overrides)


def test_a_model_alone_on_its_devices_is_not_offloaded() -> None:
    alone = _recipe("placement.critic=cpu:2-3", "placement.reference=cpu:0-1", "critic.offload=true")
    with pytest.raises(UserError, match=r"^critic\.offload=true: no other role computes on the devices of critic"):
        check_offload(alone, planned_devices(alone) or {})
    shared = _recipe("placement.critic=cpu:1-2", "critic.offload=true", "reference.offload=true")
    check_offload(shared, planned_devices(shared) or {})


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
        check_offload(recipe, planned_devices(recipe) or {})


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
    devices = planned_devices(recipe := _recipe(*overrides))
    assert devices is not None and begin_in_turn(recipe, devices) == order


@pytest.mark.processes
def test_ppo_with_offloaded_models_learns_the_same_bits_and_resumes_with_them(tmp_path: Path) -> None:
    """PPO with every model on the same devices; checkpoints are saved after an evaluation, when the critic is away."""
    settings = ["trainer.eval_interval=1", "checkpoint.save_interval=1", "algorithm.critic_warmup_steps=0"]
    settings.append(rewarded_by_length(tmp_path))
    for recipe, name, *more in (
        (PPO, "stays", "trainer.steps=3"),
        (OFFLOAD, "leaves", "trainer.steps=2", "checkpoint.async_save=false"),
        (OFFLOAD, "leaves", "trainer.steps=3", "resume=auto"),
    ):
        ended = run_recipe(str(recipe), tmp_path / name, *settings, *more)
        assert ended.returncode == 0, ended.stderr
    stays, leaves = (records(tmp_path / name / "small", "train", "eval") for name in ("stays", "leaves"))
    for one, other in zip(stays, leaves, strict=True):
        same = [name for name in one if name.endswith(COMPARED) and not name.startswith(("device/", "memory/"))]
        assert len(same) > 10 or one["phase"] == "eval"
        assert {name: one[name] for name in same} == {name: other[name] for name in same}
    trained = [record for record in leaves if record["phase"] == "train"]
    assert all(record["train/gradient_norm"] > 0 < record["critic/gradient_norm"] for record in trained)
    assert [record["step"] for record in trained] == [1, 2, 3]
    assert all(record["memory/critic_offload_ms"] > 0 < record["memory/critic_onload_ms"] for record in trained)
    assert trained[1]["memory/critic_offloaded_bytes"] > 2 * trained[1]["memory/reference_offloaded_bytes"] > 0
    assert not any(name.startswith("memory/critic_off") for name in stays[0])
    turns = {(span.role, span.method) for span in read_spans(tmp_path / "leaves" / "small" / TIMELINE)}
    assert ("critic", "give_back") in turns


@pytest.mark.processes
def test_an_engine_that_releases_its_weights_serves_the_same_policy(tmp_path: Path) -> None:
    """Two pipeline stages under one engine, whose weights are away whenever a model computes.

    ReMax generates its baselines after the reference has begun to compute: the engine gets the same version again.
    """
    settings = [
        "train.layout={pp: 2}",
        "trainer.steps=2",
        "trainer.eval_interval=1",
        "algorithm.kl_coef=0.01",
        "rollout.weights.share=false",
        rewarded_by_length(tmp_path),
    ]
    released = [
        "rollout.engine.memory_saver=true",
        "rollout.engine.release_weights=true",
        "rollout.verify_weights=true",
    ]
    for name, more in (("stays", []), ("leaves", released)):
        ended = run_recipe(str(REMAX), tmp_path / name, *settings, *more)
        assert ended.returncode == 0, ended.stderr
    stays, leaves = (records(tmp_path / name / "small", "train", "eval") for name in ("stays", "leaves"))
    for one, other in zip(stays, leaves, strict=True):
        same = [name for name in one if name.endswith(COMPARED) and not name.startswith(("device/", "memory/"))]
        assert {name: one[name] for name in same} == {name: other[name] for name in same}
    trained = [record for record in leaves if record["phase"] == "train"]
    for record in trained:
        assert record["train/gradient_norm"] > 0
        assert record["memory/rollout_offload_ms"] > 0 < record["memory/rollout_onload_ms"]
        assert record["memory/rollout_offloaded_bytes"] > 0 and record["sync/memory_ms"] > 0
        assert record["rollout/baseline_time_ms"] > 0
        assert record["sync/one_sided_bytes"] == record["sync/moved_bytes"] > 0
    spans = read_spans(tmp_path / "leaves" / "small" / TIMELINE)
    served = Counter(span.method for span in spans if span.method.endswith("commit_weights"))
    # At first and after each step; and of each step the version that it began with, before its baselines.
    assert served == {"commit_weights": 1 + len(trained), "recommit_weights": len(trained)}
