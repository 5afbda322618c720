"""Failures of engines that are found before processes start."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models import model_spec
from engine3d.models.lora.config import LoraConfig
from engine3d.models.precision import NOTHING_LEFT_OUT
from engine3d.rollout.config import RolloutConfig
from engine3d.rollout.served import check_adapters, check_deterministic, check_input_blocks
from hybridflow.cluster.devices.device_map import Device
from hybridflow.cluster.ray.cluster_address import check_cluster_answers
from hybridflow.config.initial_model import create_model, initial_spec
from hybridflow.config.recipe import Recipe, load_recipe
from hybridflow.data.tokenizer import make_character_tokenizer
from hybridflow.planning.checks.engine import (
    check_baselines,
    check_engine_nodes,
    check_same_tokens,
    hosts_of_engine,
)
from hybridflow.planning.checks.model import check_megatron, check_model
from hybridflow.planning.checks.placement import check_apart, leased_engines
from hybridflow.planning.checks.recipe import check_recipe
from hybridflow.planning.memory.estimate import recipe_specs
from hybridflow.planning.search.recipe_work import search_settings
from tests.support.tiny_families import CONFIGS, FP8_CONFIGS

DEMO = "launch/recipes/demo.yaml"


def a_recipe(*overrides: str) -> Recipe:
    return load_recipe(DEMO, overrides)


LENT = {"actor": range(2), "reference": range(6, 8), "rollout": (1, 2, 4, 5, 7, 8)}
APART = [Device(0, "cpu", slot) for slot in range(10, 16)]


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("role", ["reward_model", "cost_model"])
def test_a_model_that_scores_has_a_head(tmp_path: Path, role: str) -> None:
    create_model(a_recipe().model, tmp_path / "language", seed=0)
    costs = ["algorithm={name: safe_rlhf}", "cost.functions=[{name: length, path: length}]"] if "cost" in role else []
    recipe = a_recipe(f"{role}.path={tmp_path}/language", *costs)
    line = refusal(lambda: check_model(recipe.models[role], role, recipe.algorithm, initial_spec(recipe.model)))
    assert line.startswith(
        f"{role}.path: {tmp_path}/language: no tensor score.weight, expected a model with a value head"
    )
    critic = a_recipe("algorithm={name: ppo}", f"critic.path={tmp_path}/language")
    spec, notes = check_model(critic.critic, "critic", critic.algorithm, initial_spec(critic.model))
    assert spec is not None and spec.value_head and notes == []  # it begins with a head of zeros


@pytest.mark.slow
@pytest.mark.parametrize("role", ["reference", "critic"])
def test_files_of_any_model_get_the_notes_of_the_actors(tmp_path: Path, role: str) -> None:
    create_model(a_recipe().model, tmp_path / "language", seed=0)
    config = tmp_path / "language" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    recipe = a_recipe("algorithm={name: ppo, kl_coef: 0.1}", f"{role}.path={tmp_path}/language")
    ignored = "config.json names a quantisation (fp8), and the weights are not quantised: it is ignored"
    _, notes = check_model(recipe.models[role], role, recipe.algorithm, initial_spec(recipe.model))
    assert notes == [f"{role}.path: {ignored}"]
    assert f"{role}.path: {ignored}" in check_recipe(recipe)


@pytest.mark.parametrize(
    ("family", "backend", "on_gpu", "line"),
    [
        (
            "deepseek_v3",
            None,
            False,
            "rollout.engine.deterministic=true on a CPU: SGLang has it for DeepseekV3ForCausal",
        ),
        (
            "deepseek_v3",
            "flashinfer",
            True,
            "attention_backend=flashinfer with deterministic=true, expected fa3 or triton",
        ),
        ("qwen3_moe", "flex_attention", True, "expected fa3 or flashinfer or triton, or null for SGLang's choice"),
        (
            "qwen3_moe",
            "triton",
            False,
            "attention_backend=triton with deterministic=true, expected torch_native, or null",
        ),
        ("deepseek_v3", None, True, None),
        ("deepseek_v3", "fa3", True, None),
        ("qwen3_moe", None, False, None),
        ("qwen3_moe", "flashinfer", True, None),
    ],
)
def test_attention_that_samples_deterministically(
    family: str, backend: str | None, on_gpu: bool, line: str | None
) -> None:
    spec = model_spec(CONFIGS[family])
    check_deterministic(spec, RolloutConfig(attention_backend=backend), on_gpu=on_gpu)
    deterministic = RolloutConfig(attention_backend=backend, deterministic=True)
    if line is None:
        check_deterministic(spec, deterministic, on_gpu=on_gpu)
    else:
        assert line in refusal(lambda: check_deterministic(spec, deterministic, on_gpu=on_gpu))


@pytest.mark.parametrize(
    ("tp", "nodes", "hosts", "line"),
    [
        (2, (0, 0, 1, 1), 1, None),
        (2, (0, 1, 0, 1), 2, None),
        (4, (0, 0, 1, 1, 2, 2, 3, 3), 2, None),
        (2, (0, 0, 0, 1), 1, "engine 1 are on nodes 0, 1; expected them on one, or 2 on each of 1 nodes, as the first"),
        (
            4,
            (0, 0, 0, 1),
            2,
            "engine 0 are on nodes 0, 0, 0, 1; expected them on one, or as many on each, node by node",
        ),
        (4, (0, 1, 0, 1), 2, "engine 0 are on nodes 0, 1, 0, 1; expected them on one, or as many on each"),
        (4, (0, 0, 1, 2), 3, "engine 0 are on nodes 0, 0, 1, 2; expected them on one, or as many on each"),
        (4, (0, 0, 1, 1, 2, 2, 2, 2), 2, "engine 1 are on nodes 2, 2, 2, 2; expected them on one, or 2 on each of 2"),
    ],
)
def test_engines_are_on_as_many_nodes_each(tp: int, nodes: tuple[int, ...], hosts: int, line: str | None) -> None:
    devices = [Device(node, "cpu", index) for index, node in enumerate(nodes)]
    recipe = a_recipe(f"rollout.engine.tp={tp}")
    assert hosts_of_engine(devices, tp) == hosts
    if line is None:
        check_engine_nodes(recipe.rollout, devices)
    else:
        assert line in refusal(lambda: check_engine_nodes(recipe.rollout, devices))


@pytest.mark.parametrize(
    "setting",
    [
        "rollout.weights.rolling=true",
        "rollout.lease=true",
        "rollout.stream.engine_restarts=2",
    ],
)
def test_what_was_not_tried_with_engines_over_several_nodes_is_refused(setting: str) -> None:
    recipe = a_recipe("rollout.stream={}", setting, "trainer.max_staleness=1", "rollout.engine.tp=2")

    def check(devices: list[Device]) -> None:
        check_engine_nodes(recipe.rollout, devices)

    check([Device(0, "cpu", index) for index in range(4)])
    line = refusal(lambda: check([Device(index, "cpu", 0) for index in range(4)]))
    assert line.startswith(f"{setting} with engines over 2 nodes each, which was not tried; expected")


def test_engines_with_a_device_of_a_model_are_leased() -> None:
    devices = {role: [Device(0, "cpu", slot) for slot in slots] for role, slots in LENT.items()}
    recipe = a_recipe("rollout.stream={}", "rollout.lease=true", "rollout.engine.tp=2", "algorithm.kl_coef=0.1")
    models = ("actor", "reference")
    assert leased_engines(recipe.rollout, models, devices) == (0, 2)  # of the actor, and of the reference
    assert leased_engines(a_recipe("rollout.engine.tp=2").rollout, models, devices) == ()
    check_apart(recipe.trainer, recipe.rollout, models, devices)
    apart = devices | {"rollout": APART}
    line = refusal(lambda: check_apart(recipe.trainer, recipe.rollout, models, apart))
    assert "no model has a device to lease" in line
    other = a_recipe("rollout.stream={}", "rollout.engine.tp=2")
    line = refusal(lambda: check_apart(other.trainer, other.rollout, ("actor",), devices))
    assert "placement.actor both on cpu:1 of node 0" in line and line.endswith(
        "or rollout.stream with rollout.lease=true"
    )


def test_baselines_have_something_for_everyone() -> None:
    check_baselines(8, ranks=8)
    assert "trainer.prompts_per_step = 7, expected at least 8: a baseline" in refusal(
        lambda: check_baselines(7, ranks=8)
    )


def test_models_beside_the_actor_read_its_tokens(tmp_path: Path) -> None:
    actor, same, other, fewer = (tmp_path / name for name in ("actor", "same", "other", "fewer"))
    for directory, characters in ((actor, "0123"), (same, "01234"), (other, "0132"), (fewer, "012")):
        make_character_tokenizer(characters, directory)
    file = same / "tokenizer.json"
    tokenizer_json = json.loads(file.read_text())
    assert tokenizer_json["added_tokens"][0]["content"] == "<pad>"
    del tokenizer_json["model"]["vocab"]["<pad>"]  # an added token may have another name there
    file.write_text(json.dumps(tokenizer_json | {"added_tokens": []}))
    check_same_tokens("reward_model", same, actor)
    check_same_tokens("reward_model", tmp_path, actor)  # without a tokenizer
    line = f"reward_model.path: {other} has another tokenizer than the actor: '2' is token 5 of the actor and 6 there"
    assert refusal(lambda: check_same_tokens("reward_model", other, actor)).startswith(line)
    assert "'3' is token 6 of the actor and no token there" in refusal(lambda: check_same_tokens("x", fewer, actor))
    shutil.copy(__file__, file)
    assert "tokenizer.json: not valid JSON: " in refusal(lambda: check_same_tokens("x", same, actor))


@pytest.mark.parametrize("address", ["nowhere", "host:", "host:70000", ":6379", "http://host:6379", "host:6379/x"])
def test_what_is_no_address_of_a_cluster(address: str) -> None:
    assert refusal(lambda: check_cluster_answers(address)).startswith(
        f"placement.cluster={address}: no address, expected"
    )


@pytest.mark.slow
def test_a_cluster_that_does_not_answer_is_found_soon() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    line = f"placement.cluster={address}: Connection refused, expected a running cluster, as of ray start --head"
    assert refusal(lambda: check_cluster_answers(address)).startswith(line)
    assert refusal(lambda: check_cluster_answers(f"ray://{address}")).startswith(
        f"placement.cluster=ray://{address}: C"
    )
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        line = f"placement.cluster={address}: no answer within 2 s, expected a running cluster"
        assert refusal(lambda: check_cluster_answers(address, limit_s=2.0)).startswith(line)
        assert time.monotonic() - began < 120


@pytest.mark.processes
def test_a_cluster_that_answers(ray_cluster: None) -> None:
    import ray

    check_cluster_answers(ray.get_runtime_context().gcs_address, limit_s=300.0)


@pytest.mark.processes
def test_a_cluster_that_has_another_token(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    line = "this host has another token than the cluster, or none; expected RAY_AUTH_MODE=token, and the cluster's in"
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "c" * 64)
    assert refusal(lambda: check_cluster_answers("auto", limit_s=300.0)).startswith(
        f"placement.cluster={address}: {line}"
    )
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    if not Path.home().joinpath(".ray/auth_token").exists():
        monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
        assert refusal(lambda: check_cluster_answers(address, limit_s=300.0)).startswith(
            f"placement.cluster={address}: {line}"
        )
    monkeypatch.delenv("RAY_AUTH_MODE")
    assert refusal(lambda: check_cluster_answers(address, limit_s=300.0)).startswith(
        f"placement.cluster={address}: {line}"
    )


FP8, TRAINED = "launch/recipes/fp8.yaml", "launch/recipes/fp8-training.yaml"


@pytest.mark.slow
def test_engines_in_fp8_are_recommended_a_correction() -> None:
    line = (
        "rollout.engine.precision=fp8 without algorithm.correction: the engines draw from another policy than the one "
        "that is trained (trainer float32, engines fp8, KV cache bfloat16); expected a correction such as "
        "{weights: token}"
    )
    assert line not in check_recipe(load_recipe(FP8))
    assert line in check_recipe(load_recipe(FP8, ["algorithm.correction=null"]))
    cache = ["algorithm.correction=null", "rollout.engine={precision: null, kv_cache_dtype: fp8_e5m2}"]
    line = line.replace("precision=fp8", "kv_cache_dtype=fp8_e5m2")
    line = line.replace("engines fp8, KV cache bfloat16", "engines bfloat16, KV cache fp8_e5m2")
    assert [note for note in check_recipe(load_recipe(FP8, cache)) if "without algorithm" in note] == [line]
    trained = ["algorithm.correction=null", "rollout.engine.precision=null"]
    [line] = [note for note in check_recipe(load_recipe(TRAINED, trained)) if "without algorithm" in note]
    assert line.startswith("train.precision=fp8 without algorithm.correction")
    assert "(trainer fp8, engines bfloat16, KV cache bfloat16)" in line


def test_training_in_fp8_is_refused_where_it_was_not_tried() -> None:
    recipe = load_recipe(TRAINED)
    spec = initial_spec(recipe.model)
    for gpus in (False, True):
        check_megatron(recipe.train, "train", spec, Layout(), trained=True, gpus=gpus)
    check_megatron(recipe.train, "train", spec, Layout(dp=2), trained=True, gpus=False)
    line = refusal(lambda: check_megatron(recipe.train, "train", spec, Layout(dp=2), trained=True, gpus=True))
    assert line == "train.precision=fp8 on 2 GPUs: tried on one GPU alone, expected null"
    line = refusal(lambda: search_settings(recipe, {"actor": spec}))
    assert line == "plan: train.precision=fp8 is not planned for; expected null"
    engines = load_recipe(FP8, ["train.fp8.num_layers_at_end_in_bf16=1"])
    line = refusal(lambda: search_settings(engines, {"actor": spec}))
    assert line == "plan: train.fp8.num_layers_at_end_in_bf16 was not tried on GPUs; expected none"
    narrow = ["model.create.config.head_dim=64"]
    message = "train.precision=fp8: rows 0 to 64 of model.layers.0.self_attn.k_proj.weight are rows 128 to 192 of a"
    assert message in refusal(lambda: check_recipe(load_recipe(TRAINED, narrow)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.weights.share=true"], "engine.precision=fp8 with weights.share: engines hold other bytes than the"),
        (
            ["rollout.stream.engine_restarts=1"],
            "engine.precision=fp8 with stream.engine_restarts: it was not tried; expected 0",
        ),
        (
            ["model.create.config.moe_intermediate_size=96"],
            "rollout.engine.precision=fp8 with tp=1 ep=1: a rank has 96 rows of gate and up of an expert",
        ),
        (
            ["model.create.config.moe_intermediate_size=384", "train.layout={etp: 2}"],
            "fp8: layout etp=2 cuts model.layers.0.mlp.experts.0.gate_proj.weight within a block of 128 x 128 (a rank "
            "has rows 0 to 192), expected etp=1",
        ),
    ],
)
def test_recipes_whose_engines_cannot_be_in_fp8(overrides: list[str], message: str) -> None:
    assert message in refusal(lambda: check_recipe(load_recipe(FP8, overrides)))


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        (
            DEMO,
            ["train.fp8.num_layers_at_end_in_bf16=1"],
            "train.fp8.num_layers_at_end_in_bf16=1 without fp8; expected train.precision=fp8 or "
            "rollout.engine.precision=fp8, or 0",
        ),
        (
            FP8,
            ["train.fp8={num_layers_at_start_in_bf16: 1, num_layers_at_end_in_bf16: 1}"],
            "train.fp8.num_layers_at_start_in_bf16=1 and num_layers_at_end_in_bf16=1: expected fewer than "
            "num_hidden_layers=2 together, so that a layer is in fp8",
        ),
        (
            FP8,
            ["train.fp8.shared_experts_in_bf16=true"],
            "train.fp8.shared_experts_in_bf16=true: Qwen3MoeForCausalLM has no shared experts; expected false",
        ),
        (
            FP8,
            [
                "critic={train: {fp8: {num_layers_at_end_in_bf16: 1}}}",
                "algorithm={name: ppo, correction: {weights: token}}",
            ],
            "critic.train.fp8.num_layers_at_end_in_bf16=1 without fp8; expected critic.train.precision=fp8, or 0",
        ),
        (
            FP8,
            ["train.fp8.num_layers_at_end_in_bf16=-1"],
            "train.fp8.num_layers_at_end_in_bf16",
        ),
    ],
)
def test_matrices_that_no_model_can_leave_out_of_fp8(recipe: str, overrides: list[str], message: str) -> None:
    assert message in refusal(lambda: check_recipe(load_recipe(recipe, overrides)))


@pytest.mark.slow
def test_models_next_to_the_actor_leave_out_of_fp8_what_it_does_where_they_are_in_fp8() -> None:
    last = ["train.fp8.num_layers_at_end_in_bf16=1", "algorithm.kl_coef=0.1"]
    recipe = load_recipe(FP8, last)
    assert check_recipe(recipe) == check_recipe(load_recipe(FP8, last[1:]))
    assert recipe_specs(recipe)["actor"].unquantised and recipe.train_config("reference").fp8 == NOTHING_LEFT_OUT
    trained = load_recipe(TRAINED, last)
    check_recipe(trained)
    assert trained.train_config("reference").fp8 == trained.train.fp8


def test_kernels_of_engines_in_fp8_quantise_inputs_in_groups() -> None:
    engine = load_recipe(FP8).rollout.engine
    spec = model_spec(FP8_CONFIGS["qwen3_moe"])
    message = "rollout.engine.precision=fp8 on GPUs: hidden_size=192, expected a multiple of 128"
    assert refusal(lambda: check_input_blocks(spec, engine)).startswith(message)
    check_input_blocks(model_spec(FP8_CONFIGS["qwen3_moe"] | {"hidden_size": 256}), engine)
    check_input_blocks(spec, engine.model_copy(update={"precision": None}))


def test_engines_in_fp8_are_on_one_node_each() -> None:
    rollout = load_recipe(FP8, ["rollout.engine.tp=2"]).rollout
    check_engine_nodes(rollout, [Device(0, "cpu", index) for index in range(2)])
    line = refusal(lambda: check_engine_nodes(rollout, [Device(index, "cpu", 0) for index in range(2)]))
    assert line.startswith("rollout.engine.precision=fp8 with engines over 2 nodes each, which was not tried; expected")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ([], None),
        (["train.lora.targets=[q_proj, up_proj]"], "those of down_proj and of gate_proj or up_proj together"),
        (["train.lora.targets=[q_proj]", "rollout.engine.kv_cache_dtype=fp8_e5m2"], "rollout.engine.kv_cache_dtype"),
        (["train.lora.targets=[q_proj]", "train.routing_replay=rollout"], None),
        (["train.lora.targets=[q_proj]", "rollout.engine.memory_saver=true"], "rollout.engine.memory_saver"),
        (["train.lora.targets=[q_proj]"], None),
        (["train.lora.targets=[q_proj]", "rollout.stream={}", "placement.rollout=cpu:4"], None),
        (
            ["train.lora.targets=[q_proj]", "rollout.stream={}", "rollout.lease=true", "placement.rollout=cpu:0-2"],
            "rollout.lease",
        ),
    ],
)
def test_adapters_apart_from_the_model_that_were_not_tried_are_refused(settings: list[str], line: str | None) -> None:
    recipe = a_recipe("train.lora={engine: adapter}", "warmup=null", *settings)
    if line is None:
        check_recipe(recipe)
    else:
        assert "train.lora.engine=adapter" in (refused := refusal(lambda: check_recipe(recipe))) and line in refused


@pytest.mark.parametrize(
    ("model", "targets", "line"),
    [
        ("mixtral", None, "of experts was not tried with MixtralForCausalLM; expected targets of attention alone"),
        ("mixtral", ("q_proj",), None),
        ("gpt_oss", None, None),
        ("minimax_m2", ("w1",), "of experts was not tried with MiniMaxM2ForCausalLM; expected targets of attention"),
        ("qwen2_moe", None, "intermediate_size=48, and the shared expert has 40"),
        ("qwen2_moe", ("o_proj",), None),
        ("glm4_moe", ("down_proj",), "those of down_proj and of gate_proj or up_proj together"),
        ("glm4_moe", None, None),
        ("deepseek_v3", None, None),
        ("deepseek_v3-queries", ("kv_b_proj",), None),
        ("deepseek_v3-queries", ("q_proj",), "q_proj in lora.targets: SGLang adds it to DeepseekV3ForCausalLM with"),
        ("deepseek_v3-queries", None, "q_proj in lora.targets: SGLang adds it to DeepseekV3ForCausalLM with"),
        ("deepseek_v3-queries", ("kv_a_proj_with_mqa",), "kv_a_proj_with_mqa in lora.targets: SGLang adds it to"),
        ("qwen3_next", None, "was not tried with Qwen3NextForCausalLM; expected merged"),
    ],
)
def test_engines_add_adapters_to_the_layers_that_were_tried(
    model: str, targets: tuple[str, ...] | None, line: str | None
) -> None:
    spec, lora = model_spec(CONFIGS[model]), LoraConfig(rank=4, targets=targets, engine="adapter")
    engine = a_recipe().rollout.engine
    if line is None:
        check_adapters(spec, engine, lora, on_gpu=False)
    else:
        refused = refusal(lambda: check_adapters(spec, engine, lora, on_gpu=False))
        assert "train.lora.engine=adapter" in refused and line in refused
    assert "not tried on GPUs" in refusal(lambda: check_adapters(spec, engine, lora, on_gpu=True))
