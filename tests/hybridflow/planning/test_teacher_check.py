"""A recipe with a teacher: what it must have, what it must not, and what is foreseen of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine3d.layout import Layout
from hybridflow.cluster.devices.device_map import Device, Node, pool_devices
from hybridflow.config.recipe import Recipe, load_recipe
from hybridflow.config.yaml_loader import SettingsError
from hybridflow.planning.memory_estimate import foresee
from hybridflow.planning.memory_report import recipe_specs
from hybridflow.planning.recipe_check import check_recipe
from hybridflow.roles.groups import TeacherEngineGroup, TeacherGroup
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


ENGINE = [
    "teacher.train=null",
    "teacher.engine={dtype: float32, max_running_requests: 64}",
    "placement.teacher=cpu:2-3",
]


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


def foreseen(recipe: Recipe, devices: dict[str, tuple[Device, ...]]) -> str:
    ledger = foresee(
        recipe,
        devices,
        recipe_specs(recipe),
        gpu_bytes=None,
        host_bytes=16 << 30,
        sequence_tokens=12,
        cache_tokens=1024,
        with_engines=False,
    )
    return "\n".join(ledger.lines())


def test_a_teacher_of_another_size_family_and_layout(tmp_path: Path) -> None:
    path = a_model(tmp_path, "name=dense")
    overrides = [f"teacher.path={path}", f"run_dir={tmp_path}", "placement.teacher=cpu:2-3"]
    recipe = load_recipe(RECIPE, overrides)
    assert check_recipe(recipe) == []
    assert recipe.trained_roles == ("actor",)
    run, nodes = prepare(recipe), [Node("10.0.0.7", gpus=0, cpu_slots=8)]
    with run.lock:
        devices = pool_devices(recipe.device_maps, {}, nodes)
        devices["reward"] = devices["rollout"][:1]
        specs = {spec.role: spec for spec in role_specs(recipe, run, devices, nodes)}
    teacher = specs["teacher"]
    assert (teacher.group, teacher.worker, teacher.layout) == (TeacherGroup, TeacherWorker, Layout(tp=2))
    assert teacher.arguments[0] == path and not teacher.settings["trainable"] and not teacher.settings["publish"]
    assert specs["actor"].layout == Layout(dp=2, ep=2)
    assert teacher.sample_costs([8])[0] != specs["actor"].sample_costs([8])[0]
    assert "infer of teacher" in (shown := foreseen(recipe, devices)) and "update of teacher" not in shown


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["placement.teacher=null"], "teacher.engine is set without placement.teacher, expected devices of its own"),
        (
            ["rollout.sampling.temperature=0.8"],
            "teacher.engine is set with rollout.sampling.temperature=0.8, and SGLang",
        ),
        (
            ["algorithm.divergence_in=loss", "algorithm.top_k_of=student"],
            "teacher.engine is set with algorithm.top_k_of=student, and SGLang gives log-probs of its own most likely",
        ),
        (["teacher.train={}"], "train is of a teacher on Megatron-Core, and engine is set; expected one of them"),
        (["teacher.offload=true"], "offload is of a teacher on Megatron-Core, and engine is set; expected one of them"),
        (
            ["teacher.engine.server_args={load_format: dummy}"],
            "engine.server_args.load_format=dummy, a teacher with random weights; expected auto",
        ),
        (
            ["teacher.engine.memory_saver=true"],
            "engine.memory_saver is set, and a teacher keeps its weights throughout",
        ),
        (
            ["teacher.engine.memory_saver=true", "teacher.engine.release_weights=true"],
            "engine.release_weights is set, and a teacher keeps its weights throughout; expected none",
        ),
        (["teacher.engine.token_versions=true"], "engine.token_versions is set, and a teacher keeps its weights"),
    ],
)
def test_what_an_engine_cannot_do_for_a_teacher_is_refused(overrides: list[str], line: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_recipe(RECIPE, ["teacher.path=/models/teacher", *ENGINE, *overrides])
    assert line in str(caught.value)


def test_engines_that_serve_a_teacher_have_devices_of_their_own(tmp_path: Path) -> None:
    path = a_model(tmp_path, "name=dense")
    given = [f"teacher.path={path}", f"run_dir={tmp_path}", *ENGINE]
    recipe = load_recipe(RECIPE, given)
    assert check_recipe(recipe) == []
    assert refusal([*given, "placement.teacher=cpu:1-2"]) == (
        "placement.teacher and placement.actor are both on cpu:1 of node 0, expected devices of its own for the teacher"
    )
    found = refusal([*given, "teacher.engine.tp=2", "placement.teacher=cpu:2-4"])
    assert found.startswith("placement.teacher: 3 devices for engines of teacher.engine.tp=2, expected a multiple")
    assert refusal([*given, "teacher.engine.tp=8", "placement.teacher=cpu:2-9"]).startswith("teacher.engine.tp=8")
    assert "context_length=65, expected at most the model" in refusal([*given, "teacher.engine.context_length=65"])
    wider = a_model(tmp_path, "name=wider", "model.create.config.vocab_size=40")
    assert "has a vocab_size of 40" in refusal([*given, f"teacher.path={wider}"])

    assert "teacher" not in recipe.models and recipe.device_maps["teacher"] == "cpu:2-3"
    run, nodes = prepare(recipe), [Node("10.0.0.7", gpus=0, cpu_slots=8)]
    with run.lock:
        devices = pool_devices(recipe.device_maps, {}, nodes)
        devices["reward"] = devices["rollout"][:1]
        specs = {spec.role: spec for spec in role_specs(recipe, run, devices, nodes)}
    assert list(specs) == ["rollout", "teacher", "actor", "reward"]
    teacher = specs["teacher"]
    assert (teacher.group, teacher.layout) == (TeacherEngineGroup, Layout(dp=2))
    directory, config = teacher.arguments
    # Room for half of the step's 256 samples at once, at most 64, each of at most 10 tokens and one more.
    assert directory == path and config.max_total_tokens == 65 * 12 + 1 + 8
    assert "load_format" not in config.server_args
    assert "CPU slot 2 of node 0 and 1 like it" in (shown := foreseen(recipe, devices)) and "infer of teacher" in shown
