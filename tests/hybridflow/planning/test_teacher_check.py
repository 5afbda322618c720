"""A recipe with a teacher: what it must have, what it must not, and what is foreseen of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine3d.layout import Layout
from hybridflow.cli.main import main
from hybridflow.cluster.devices.device_map import Node, pool_devices
from hybridflow.config.recipe import load_recipe
from hybridflow.config.yaml_loader import SettingsError
from hybridflow.planning.recipe_check import check_recipe
from hybridflow.roles.groups import TeacherGroup
from hybridflow.roles.teacher import TeacherWorker
from hybridflow.trainer.role_specs import role_specs
from hybridflow.trainer.run_setup import prepare

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "launch/recipes/demo.yaml"
RECIPE = ROOT / "launch/recipes/algorithms/distillation.yaml"
DENSE = (
    "model.create.config={architectures: [Qwen3ForCausalLM], model_type: qwen3, hidden_size: 64, num_hidden_layers: 3, "
    "intermediate_size: 128, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16, vocab_size: 32, "
    "max_position_embeddings: 64, rms_norm_eps: 1.0e-6, hidden_act: silu, tie_word_embeddings: false, "
    "bos_token_id: 1, eos_token_id: 2}"
)


def a_model(directory: Path, *overrides: str) -> Path:
    """Of another size and family than the demo's, unless the overrides say otherwise."""
    run = prepare(load_recipe(DEMO, [f"run_dir={directory}", DENSE, "train.layout={ep: 1}", *overrides]))
    with run.lock:
        return run.model_directory


def refusal(overrides: list[str]) -> str:
    with pytest.raises(SettingsError) as caught:
        check_recipe(load_recipe(RECIPE, overrides))
    [line] = caught.value.lines
    return line


def test_there_is_a_teacher_where_one_is_learned_from_and_nowhere_else() -> None:
    for overrides, line in (
        (["algorithm.name=distillation"], "algorithm.name=distillation learns from a teacher, expected teacher.path"),
        (["teacher.path=/models/teacher"], "teacher is set, and there is no such role with algorithm.name=grpo"),
        (["placement.teacher=cpu:1"], "placement.teacher is set, and there is no such role with algorithm.name=grpo"),
        (["algorithm.name=distillation", "teacher={train: {}}"], "teacher.path"),
    ):
        with pytest.raises(SettingsError) as caught:
            load_recipe(DEMO, overrides)
        assert line in str(caught.value)


def test_rewards_that_are_learned_from_need_several_samples_of_a_prompt() -> None:
    one = ["rollout.samples_per_prompt=1"]
    assert load_recipe(RECIPE, one).rollout.samples_per_prompt == 1
    with pytest.raises(
        SettingsError, match=r"samples_per_prompt=1 with algorithm\.name=distillation, where a group of"
    ):
        load_recipe(RECIPE, [*one, "algorithm.reward_coef=0.5"])


def test_a_teacher_has_the_students_vocabulary_and_tokens(tmp_path: Path) -> None:
    wider = a_model(tmp_path, "name=wider", "model.create.config.vocab_size=40")
    assert refusal([f"teacher.path={wider}"]) == (
        f"teacher.path: {wider} has a vocab_size of 40 and the actor one of 32; expected the same, since the most "
        "likely tokens of one are looked up in the other"
    )
    dense = a_model(tmp_path, "name=dense")
    tokenizer = dense / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"3"', '"x"'))
    assert refusal([f"teacher.path={dense}"]).startswith(f"teacher.path: {dense} has another tokenizer")


def test_no_more_tokens_are_compared_than_there_are(tmp_path: Path) -> None:
    path = f"teacher.path={a_model(tmp_path, 'name=dense')}"
    found = refusal([path, "algorithm.divergence_in=loss", "algorithm.top_k=33"])
    assert found == "algorithm.top_k=33 of a vocabulary of 32 tokens, expected at most as many"


def test_a_teacher_of_another_size_family_and_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = a_model(tmp_path, "name=dense")
    overrides = [f"teacher.path={path}", f"run_dir={tmp_path}", "placement.teacher=cpu:2-3"]
    assert main(["check", str(RECIPE), *overrides, "--memory"]) == 0
    assert "infer of teacher" in (shown := capsys.readouterr().out) and "update of teacher" not in shown

    recipe = load_recipe(RECIPE, overrides)
    assert recipe.trained_roles == ("actor",)
    run, nodes = prepare(recipe), [Node("10.0.0.7", gpus=0, cpu_slots=8)]
    with run.lock:
        devices = pool_devices(recipe.placement.roles(list(recipe.models)), {}, nodes)
        devices["reward"] = devices["rollout"][:1]
        specs = {spec.role: spec for spec in role_specs(recipe, run, devices, nodes)}
    teacher = specs["teacher"]
    assert (teacher.group, teacher.worker, teacher.layout) == (TeacherGroup, TeacherWorker, Layout(tp=2))
    assert teacher.arguments[0] == path and not teacher.settings["trainable"] and not teacher.settings["publish"]
    assert specs["actor"].layout == Layout(dp=2, ep=2)
    assert teacher.sample_costs([8])[0] != specs["actor"].sample_costs([8])[0]
