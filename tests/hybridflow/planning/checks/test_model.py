"""Teachers, judges and fused kernels of a recipe: what they must have, and what they must not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models import initialise_random, load_model_spec, model_spec
from hybridflow.cli.main import main
from hybridflow.cluster.devices.device_map import Device, DeviceKind, Node, pool_devices
from hybridflow.config.reading.yaml_loader import SettingsError
from hybridflow.config.recipe import Recipe, load_recipe
from hybridflow.planning.checks.model import check_teacher_engine
from hybridflow.planning.checks.recipe import check_recipe
from hybridflow.planning.memory.estimate import foresee, recipe_specs
from hybridflow.roles.groups import TeacherEngineGroup, TeacherGroup
from hybridflow.roles.judge_identity import judge_identity
from hybridflow.roles.teacher import TeacherWorker
from hybridflow.trainer.startup.role_specs import RoleSpecs
from hybridflow.trainer.startup.run_setup import prepare
from tests.support.judge_model import ENGINE, make_judge
from tests.support.published_fp8 import publish
from tests.support.tiny_families import CONFIGS, FP8_CONFIGS

ROOT = Path(__file__).parents[4]
DEMO = ROOT / "launch/recipes/demo.yaml"
RECIPE = ROOT / "launch/recipes/algorithms/distillation.yaml"
DENSE = (
    "model.create.config={architectures: [Qwen3ForCausalLM], model_type: qwen3, hidden_size: 64, num_hidden_layers: 3, "
    "intermediate_size: 128, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16, vocab_size: 32, "
    "max_position_embeddings: 64, rms_norm_eps: 1.0e-6, hidden_act: silu, tie_word_embeddings: false, "
    "bos_token_id: 1, eos_token_id: 2}"
)


TEACHER_ENGINE = [
    "teacher.train=null",
    "teacher.engine={dtype: float32, max_running_requests: 64}",
    "placement.teacher=cpu:2-3",
]


def a_model(directory: Path, *overrides: str) -> Path:
    """Make a model of another size and family than the demo's, unless the overrides say otherwise."""
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_no_more_tokens_are_compared_than_there_are(tmp_path: Path) -> None:
    path = f"teacher.path={a_model(tmp_path, 'name=dense')}"
    line = refusal([path, "algorithm.divergence_in=loss", "algorithm.top_k=33"])
    assert line == "algorithm.top_k=33 of a vocabulary of 32 tokens, expected at most as many"


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


@pytest.mark.slow
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
        specs = {spec.role: spec for spec in RoleSpecs(recipe, run, devices, nodes).all()}
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
        load_recipe(RECIPE, ["teacher.path=/models/teacher", *TEACHER_ENGINE, *overrides])
    assert line in str(caught.value)


@pytest.mark.slow
def test_engines_that_serve_a_teacher_have_devices_of_their_own(tmp_path: Path) -> None:
    path = a_model(tmp_path, "name=dense")
    given = [f"teacher.path={path}", f"run_dir={tmp_path}", *TEACHER_ENGINE]
    recipe = load_recipe(RECIPE, given)
    assert check_recipe(recipe) == []
    assert refusal([*given, "placement.teacher=cpu:1-2"]) == (
        "placement.teacher and placement.actor are both on cpu:1 of node 0, expected devices of its own for the teacher"
    )
    line = refusal([*given, "teacher.engine.tp=2", "placement.teacher=cpu:2-4"])
    assert line.startswith("placement.teacher: 3 devices for engines of teacher.engine.tp=2, expected a multiple")
    assert refusal([*given, "teacher.engine.tp=8", "placement.teacher=cpu:2-9"]).startswith("teacher.engine.tp=8")
    assert "context_length=65, expected at most the model" in refusal([*given, "teacher.engine.context_length=65"])
    wider = a_model(tmp_path, "name=wider", "model.create.config.vocab_size=40")
    assert "has a vocab_size of 40" in refusal([*given, f"teacher.path={wider}"])

    assert "teacher" not in recipe.models and recipe.device_maps["teacher"] == "cpu:2-3"
    run, nodes = prepare(recipe), [Node("10.0.0.7", gpus=0, cpu_slots=8)]
    with run.lock:
        devices = pool_devices(recipe.device_maps, {}, nodes)
        devices["reward"] = devices["rollout"][:1]
        specs = {spec.role: spec for spec in RoleSpecs(recipe, run, devices, nodes).all()}
    assert list(specs) == ["rollout", "teacher", "actor", "reward"]
    teacher = specs["teacher"]
    assert (teacher.group, teacher.layout) == (TeacherEngineGroup, Layout(dp=2))
    directory, config = teacher.arguments
    # Room for half of the step's 256 samples at once, at most 64, each of at most 10 tokens and one more.
    assert directory == path and config.max_total_tokens == 65 * 12 + 1 + 8
    assert "load_format" not in config.server_args
    assert "CPU slot 2 of node 0 and 1 like it" in (shown := foreseen(recipe, devices)) and "infer of teacher" in shown


def test_engines_serve_a_teacher_in_the_precision_of_its_files(tmp_path: Path) -> None:
    initialise_random(model_spec(FP8_CONFIGS["deepseek_v3"]), tmp_path / "teacher", seed=1, dtype=torch.bfloat16)
    publish(tmp_path / "teacher", tmp_path / "in_fp8")
    in_fp8 = "teacher.engine={dtype: bfloat16, precision: fp8}"

    def check(directory: str, *settings: str, kind: DeviceKind = "cpu") -> None:
        recipe = load_recipe(RECIPE, [f"teacher.path={tmp_path}/{directory}", *TEACHER_ENGINE, *settings])
        assert recipe.teacher is not None
        spec, devices = load_model_spec(recipe.teacher.path), {"teacher": [Device(0, kind, 2), Device(0, kind, 3)]}
        check_teacher_engine(recipe.teacher, recipe.algorithm, recipe.samples_per_step, spec, devices)

    check("in_fp8", in_fp8)
    check("teacher")
    with pytest.raises(UserError, match=r"is in fp8, which .*expected bfloat16, teacher\.engine\.precision=fp8, or"):
        check("in_fp8")
    with pytest.raises(UserError, match=r"no tensor is in fp8, and engines with teacher\.engine\.precision=fp8 load"):
        check("teacher", in_fp8)
    with pytest.raises(UserError, match=r"^teacher\.engine\.precision=fp8 was not tried on GPUs; expected null"):
        check("in_fp8", in_fp8, kind="cuda")


def test_a_teacher_with_gated_delta_nets_has_engines_on_cpus(tmp_path: Path) -> None:
    spec = model_spec(CONFIGS["qwen3_next"])
    initialise_random(spec, tmp_path / "teacher", seed=1, dtype=torch.float32)
    recipe = load_recipe(RECIPE, [f"teacher.path={tmp_path}/teacher", *TEACHER_ENGINE])
    teacher = recipe.teacher
    assert teacher is not None

    def check(kind: DeviceKind) -> None:
        devices = {"teacher": [Device(0, kind, 2), Device(0, kind, 3)]}
        check_teacher_engine(teacher, recipe.algorithm, recipe.samples_per_step, spec, devices)

    check("cpu")
    with pytest.raises(UserError, match=r"^teacher\.path: Qwen3NextForCausalLM has .* or placement\.teacher on a CPU$"):
        check("cuda")


ASKS: dict[str, Any] = {
    "name": "quality",
    "path": "judge",
    "arguments": {"rubric": "{{ response }}", "score_range": [0, 1]},
}


def asking(**changes: Any) -> str:
    return "reward.functions=" + json.dumps([ASKS | changes])


def judge(directory: Path, **engine: Any) -> list[str]:
    settings = json.dumps({"path": str(directory), "engine": ENGINE | engine})
    return [asking(), f"judge={settings}", "placement.judge=cpu:2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_judge(tmp_path_factory.mktemp("judge"))


def lines_of(overrides: list[str]) -> str:
    with pytest.raises(SettingsError) as caught:
        check_recipe(load_recipe(DEMO, overrides))
    return "\n".join(caught.value.lines)


def test_a_judge_is_there_where_it_is_asked_and_nowhere_else() -> None:
    url = {"arguments": {**ASKS["arguments"], "url": "http://judge/v1"}}
    for overrides, line in (
        ([asking()], "reward.functions.quality has path judge without arguments.url, expected one, or judge.path and"),
        (["judge.path=/models/judge"], "judge is set, and no function asks it; expected one with path: judge"),
        ([asking(), "judge.path=/models/judge"], "judge is set without placement.judge, expected devices of its own"),
        (["placement.judge=cpu:2"], "placement.judge is set, and there is no such role with judge=null"),
        ([asking(**url)], "url and model, expected both, or neither for the recipe's judge"),
        ([asking(arguments=ASKS["arguments"] | {"cached_as": "x"})], "arguments.cached_as without url"),
        (
            [asking(), "judge={path: /j, engine: {server_args: {port: 3}}}"],
            "server_args.port is not set here; set nothing: it takes a free one",
        ),
        ([asking(), "judge={path: /j, engine: {tp: 4, ep: 3}}"], "ep is 3 and must divide tp, which is 4"),
        (
            [asking(), "judge={path: /j, engine: {server_args: {quantisation: fp8}}}"],
            "server_args.quantisation is not an argument of SGLang's ServerArgs; did you mean quantization?",
        ),
    ):
        with pytest.raises(SettingsError) as caught:
            load_recipe(DEMO, overrides)
        assert line in str(caught.value)


@pytest.mark.slow
def test_what_is_no_judge_is_refused_before_anything_starts(model: Path, tmp_path: Path) -> None:
    assert "judge.path: /nowhere has no config.json" in lines_of(judge(Path("/nowhere")))
    assert "judge.path: context_length is 999; " in lines_of(judge(model, context_length=999))
    assert "judge.engine.tp=3 does not divide the model's 4 attention heads" in lines_of(judge(model, tp=3))
    shared = [*judge(model), "placement.judge=cpu:0"]
    assert "placement.judge and placement.actor are both on cpu:0 of node 0, expected devices of its own" in lines_of(
        shared
    )
    two = [*judge(model, tp=2), "placement.judge=cpu:2-4"]
    assert "placement.judge: 3 devices for engines of judge.engine.tp=2, expected a multiple" in lines_of(two)
    other = judge(model, server_args={"attention_backend": "triton"})
    assert "judge.engine.server_args.attention_backend=triton: on a CPU SGLang runs with torch_native" in lines_of(
        other
    )
    bare = make_judge(tmp_path / "bare")
    for template in bare.glob("chat_template*"):
        template.unlink()
    assert f"judge.path: {bare} has no chat template" in lines_of(judge(bare))
    (bare / "tokenizer.json").unlink()
    assert f"judge.path: {bare} holds no tokenizer" in lines_of(judge(bare))


def test_functions_wait_for_the_judge_and_know_it_from_others(model: Path, tmp_path: Path) -> None:
    recipe = load_recipe(DEMO, judge(model))
    assert recipe.asked_judge is recipe.judge is not None and recipe.device_maps["judge"] == "cpu:2"
    other = load_recipe(DEMO, judge(make_judge(tmp_path / "same"), context_length=128)).judge
    same = load_recipe(DEMO, judge(make_judge(tmp_path / "moved"))).judge
    assert other is not None and same is not None
    assert judge_identity(recipe.judge) == judge_identity(same) != judge_identity(other)


@pytest.mark.parametrize("name", ["chat_template.jinja", "vocab.json", "tokenizer.model", "merges.txt"])
def test_verdicts_are_of_the_files_of_the_tokenizer_too(tmp_path: Path, name: str) -> None:
    made = make_judge(tmp_path)
    known = load_recipe(DEMO, judge(made)).judge
    assert known is not None
    before = judge_identity(known)
    (made / name).write_text("of another tokenizer")
    after = judge_identity(known)
    (made / name).write_text("of another Tokenizer")
    assert len({before, after, judge_identity(known)}) == 3


def test_verdicts_are_of_the_template_that_the_server_is_given(model: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    known = load_recipe(DEMO, judge(model, server_args={"chat_template": str(template)})).judge
    assert known is not None
    before = judge_identity(known)
    template.write_text("{{ messages[-1] }}")
    assert judge_identity(known) != before


SETTING, EVEN = "train.fused_query_key=true", "model.create.config.head_dim=32"


def test_a_model_with_norms_may_have_it() -> None:
    assert main(["check", str(DEMO), SETTING, EVEN]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("beside", "line"),
    [
        ((), "train.fused_query_key=true: head_dim=24 is no power of two, as the kernels need; expected false"),
        (
            (EVEN, "train.layout={tp: 2}", "model.create.config.num_key_value_heads=1"),
            "train.fused_query_key=true with tp=2: expected at most num_key_value_heads=1, or false",
        ),
    ],
)
def test_what_it_cannot_be_used_with(beside: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(DEMO), *beside]) == 0
    capsys.readouterr()
    assert main(["check", str(DEMO), SETTING, *beside]) == 2
    said = capsys.readouterr().err
    assert line in said and said.count("\n") == 1
