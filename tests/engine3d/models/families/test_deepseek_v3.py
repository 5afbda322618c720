"""DeepSeek-V3: what its configs may say, its files, its size, and that it trains alike on several layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine3d.checkpoint.hf import export_checkpoint, import_checkpoint
from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models import check_weights, initialise_random, load_model_spec, model_spec, weight_notes
from engine3d.models.files.multi_token import KeptTensors
from engine3d.models.files.weights import exported_config
from engine3d.models.precision import dequantise, quantise, scale_name
from tests.engine3d.training import test_engine
from tests.support import tiny_families
from tests.support.distributed import run_distributed
from tests.support.proves import proves, runs_of
from tests.support.tiny_families import DEEPSEEK

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
Q_B_PROJ = "model.layers.0.self_attn.q_b_proj.weight"
YARN = DEEPSEEK["rope_scaling"]
# As its config.json has it.
PUBLISHED: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 163840,
    "num_nextn_predict_layers": 1,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


# Configs and sizes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk_group": 3}, "topk_group: expected n_group=4, or half of num_experts_per_tok=4, found 3"),
        ({"topk_group": 5}, "topk_group: expected at most n_group=4, found 5"),
        ({"n_group": 3}, "n_group: expected a divisor of n_routed_experts=8, found 3"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok: expected between 2 and the 4 experts of topk_group groups"),
        ({"norm_topk_prob": False}, "norm_topk_prob: expected true, found false"),
        ({"scoring_func": "softmax"}, 'scoring_func: expected "sigmoid", found "softmax"'),
        ({"topk_method": "greedy"}, 'topk_method: expected "noaux_tc"'),
        ({"rope_interleave": False}, "rope_interleave: expected true"),
        ({"attention_bias": True}, "attention_bias: expected false"),
        ({"num_key_value_heads": 2}, "num_key_value_heads: expected num_attention_heads=4, found 2"),
        ({"first_k_dense_replace": 4}, "first_k_dense_replace: expected a whole number below num_hidden_layers=4"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, "rope_scaling: expected rope_type default or yarn"),
        ({"rope_scaling": {**YARN, "mscale": None}}, "mscale_all_dim: expected a number above 0 beside mscale"),
        ({"rope_scaling": {**YARN, "truncate": False}}, "truncate: expected true"),
    ],
)
def test_configs_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        model_spec({**DEEPSEEK, **change})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_lora_rank": 31}, "tp=2: expected a divisor of q_lora_rank=31"),
        ({"kv_lora_rank": 17}, r"tp=2: expected a divisor of kv_lora_rank \+ qk_rope_head_dim=25"),
        ({"moe_intermediate_size": 25, "n_shared_experts": 1}, "tp=2: .* intermediate size of the shared expert=25"),
    ],
)
def test_layouts_that_do_not_divide_the_model(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        model_spec({**DEEPSEEK, **change}).check_layout(Layout(tp=2))


def test_figures_of_the_published_model() -> None:
    spec = model_spec(PUBLISHED)
    assert spec.parameter_count() == 671_026_404_352
    # By hand: attention, norms and router of a layer, its shared expert and eight routed ones, or a dense MLP.
    attention = 7168 * (1536 + 512 + 64) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168 + 1536 + 512
    sparse = 7168 * 256 + 9 * 3 * 7168 * 2048
    layers = 61 * (attention + 2 * 7168) + 58 * sparse + 3 * 3 * 7168 * 18432
    assert spec.active_parameter_count() == layers + 129280 * 7168 + 7168
    spec.check_layout(Layout(tp=8, ep=64, dp=8))
    assert (spec.rope.kind, spec.rope.factor, spec.rope.mscale_all_dim) == ("yarn", 40.0, 1.0)


def test_transformer_engine_holds_the_projections_to_latents_whole() -> None:
    spec = model_spec(DEEPSEEK)
    layout = Layout(tp=2)
    split, fused = (
        {local.name: local for local in spec.local_parameters(layout, layout.coordinates(1), transformer_engine=engine)}
        for engine in (False, True)
    )
    attention = "decoder.layers.0.self_attention."
    for name, rows in (("linear_q_down_proj", 32), ("linear_kv_down_proj", 24)):
        assert split[f"{attention}{name}.weight"].shape == (rows // 2, 32)
        assert fused[f"{attention}{name}.weight"].shape == (rows, 32)
    for norm, linear in (("q_layernorm", "linear_q_up_proj"), ("kv_layernorm", "linear_kv_up_proj")):
        assert split[f"{attention}{norm}.weight"].slices == fused[f"{attention}{linear}.layer_norm_weight"].slices
    assert "decoder.layers.0.input_layernorm.weight" in fused
    biases = [local for local in fused.values() if local.buffer]
    assert [local.name for local in biases] == [f"decoder.layers.{layer}.mlp.router.expert_bias" for layer in (1, 2, 3)]


# Files ---------------------------------------------------------------------------------------------------------------


def test_random_weights_keep_the_bias_in_float32(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    described = {**DEEPSEEK, "quantization_config": {"quant_method": "fp8"}, "num_nextn_predict_layers": 1}
    initialise_random(model_spec(described), tmp_path / "random", seed=1, dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "random" / "model.safetensors")
    assert tensors[BIAS].dtype == torch.float32 and tensors[BIAS].any()
    assert {tensor.dtype for name, tensor in tensors.items() if "bias" not in name} == {torch.bfloat16}
    written = json.loads((tmp_path / "random" / "config.json").read_text())
    assert not written.keys() & {"quantization_config", "num_nextn_predict_layers"}
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "random", output_loading_info=True)
    model, report = loaded
    assert not any(report.values())
    assert torch.equal(model.state_dict()[BIAS], tensors[BIAS])
    assert torch.isfinite(model(torch.arange(9)[None]).logits).all()


@pytest.mark.slow
def test_kimi_k2_is_the_same_model_under_its_own_name() -> None:
    published = PUBLISHED | {
        "model_type": "kimi_k2",
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_routed_experts": 384,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "rope_scaling": YARN | {"factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
    }
    kimi, deepseek = model_spec(published), model_spec(published | {"model_type": "deepseek_v3"})
    assert kimi.family is deepseek.family and kimi.hf_tensors == deepseek.hf_tensors
    exported = exported_config(kimi, "bfloat16")
    assert exported["model_type"] == "kimi_k2" and "auto_map" not in exported
    with pytest.raises(UserError, match='model_type: expected "llama", found "kimi_k2"'):
        model_spec(tiny_families.CONFIGS["llama"] | {"model_type": "kimi_k2"})


def test_weights_in_fp8_that_the_config_does_not_name_are_refused_and_layers_past_the_last_are_ignored(
    tmp_path: Path,
) -> None:
    directory = tmp_path / "model"
    initialise_random(model_spec(DEEPSEEK), directory, seed=1, dtype=torch.bfloat16)
    file = directory / "model.safetensors"
    tensors = load_file(file) | {"model.layers.4.eh_proj.weight": torch.zeros(32, 64)}
    save_file(tensors, file)
    check_weights(load_model_spec(directory), directory)
    save_file(tensors | {Q_B_PROJ: tensors[Q_B_PROJ].to(torch.float8_e4m3fn)}, file)
    line = (
        r"/model/config.json: weights are F8_E4M3, and quantization_config .* describes no fp8, expected quantization_"
    )
    with pytest.raises(UserError, match=line):
        check_weights(load_model_spec(directory), directory)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("deepseek_v3", {"dtype": "float32", "max_shard_bytes": 50e3}),
        ("qwen3_next", {}),
        pytest.param("deepseek_v3", {}, marks=pytest.mark.release),
        pytest.param("qwen3_next", {"dtype": "float32", "max_shard_bytes": 20e3}, marks=pytest.mark.release),
    ],
)
def test_checkpoints_are_exported_with_the_layer_for_multi_token_prediction(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    directory, config = tmp_path / "model", tiny_families.CONFIGS[family]
    initialise_random(model_spec(config), directory, seed=1, dtype=torch.bfloat16)
    tiny_families.add_multi_token_layer(directory)
    assert weight_notes(load_model_spec(directory), directory) == []
    import_checkpoint(directory, tmp_path / "checkpoints")
    checkpoint = tmp_path / "checkpoints" / "step-00000000"
    export_checkpoint(checkpoint, tmp_path / "with", base=directory, **options)
    _has_the_same_multi_token_layer(_tensors(tmp_path / "with"), _tensors(directory))
    check_weights(load_model_spec(tmp_path / "with"), tmp_path / "with")
    counted = 1 if family == "deepseek_v3" else None
    assert load_model_spec(tmp_path / "with").hf_config.get("num_nextn_predict_layers") == counted
    export_checkpoint(checkpoint, tmp_path / "served", multi_token=False)
    assert _tensors(tmp_path / "served").keys() == load_model_spec(directory).hf_tensors.keys()
    # An export without it is asked for where its model is known to have it, and the config says so.
    import_checkpoint(tmp_path / "with", tmp_path / "again")
    if counted:
        with pytest.raises(
            UserError, match=r"\(num_nextn_predict_layers=1\); expected --base of that model, or --no-mu"
        ):
            export_checkpoint(tmp_path / "again" / "step-00000000", tmp_path / "without", **options)
    export_checkpoint(tmp_path / "again" / "step-00000000", tmp_path / "without", multi_token=False, **options)
    assert "num_nextn_predict_layers" not in load_model_spec(tmp_path / "without").hf_config
    with pytest.raises(UserError, match="was not tried; expected --no-multi-token"):
        export_checkpoint(checkpoint, tmp_path / "fp8", base=directory, precision="fp8")
    with pytest.raises(
        UserError, match=r"--base .*/without has no layers for multi-token prediction; expected --no-mul"
    ):
        export_checkpoint(checkpoint, tmp_path / "other", base=tmp_path / "without", **options)
    other = tmp_path / "other-model"
    initialise_random(model_spec(config | {"num_hidden_layers": 8}), other, seed=1, dtype=torch.bfloat16)
    with pytest.raises(UserError, match=r"/other-model is another model than that of .*; expected --base of that"):
        export_checkpoint(checkpoint, tmp_path / "other", base=other, **options)


def test_layers_for_multi_token_prediction_in_fp8_are_dequantised_or_kept_as_the_export_is(tmp_path: Path) -> None:
    directory, config = tmp_path / "model", tiny_families.FP8_CONFIGS["deepseek_v3"]
    initialise_random(model_spec(config), directory, seed=1, dtype=torch.bfloat16)
    tiny_families.add_multi_token_layer(directory)
    spec = load_model_spec(directory)
    tensors = load_file(directory / "model.safetensors")
    name = f"model.layers.{spec.sizes.layers}.eh_proj.weight"
    box = tuple((0, size) for size in tensors[name].shape)
    values, scales = quantise(tensors[name].float())
    save_file(tensors | {name: values, scale_name(name): scales}, directory / "model.safetensors")
    quantised = dict(KeptTensors(spec, directory, torch.bfloat16, "fp8").tensors)
    assert quantised[name][1] == torch.float8_e4m3fn and quantised[scale_name(name)][1] == torch.float32
    plain = KeptTensors(spec, directory, torch.bfloat16)
    assert scale_name(name) not in plain.tensors and plain.tensors[name][1] == torch.bfloat16
    read = {read_name: read_values for read_name, _, read_values in plain.read()}
    assert torch.equal(read[name], dequantise(values, scales, box))


# Training ------------------------------------------------------------------------------------------------------------


LAYOUTS: dict[int, list[dict[str, int]]] = {1: [{}], 2: [{"tp": 2}, {"pp": 2, "vpp": 2}], 4: [{"tp": 2, "ep": 4}]}


def _train(directory: Path, world_size: int, export: Path) -> list[dict[str, Any]]:
    from engine3d.training.engine import TrainEngine

    seen = [test_engine._train(directory, sizes, world_size) for sizes in LAYOUTS[world_size]]
    engine: TrainEngine = test_engine._engine(directory, LAYOUTS[world_size][0], world_size, dtype="bfloat16")
    sequences, _ = test_engine._local_samples(test_engine._samples(), engine)
    for _ in range(2):  # the first learning rate is 0
        engine.update(sequences, test_engine._loss, with_entropy=True)
    engine.export(export)
    engine.close()
    return seen


@proves("deepseek_v3", *runs_of(LAYOUTS, "packing"))
@pytest.mark.long
@pytest.mark.processes
def test_every_layout_updates_alike_and_leaves_the_bias_alone(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    tiny_families.make("deepseek_v3", directory)
    tiny_families.add_multi_token_layer(directory)
    before = _tensors(directory)
    alone: dict[str, Any] = {}
    for world_size, layouts in LAYOUTS.items():
        export = tmp_path / f"export-{world_size}"
        ranks = run_distributed(_train, world_size, directory, world_size, export, timeout_s=180)
        alone = alone or ranks[0][0]
        for number, sizes in enumerate(layouts):
            results = [rank[number] for rank in ranks]
            for result in results:
                assert result["losses"] == pytest.approx(alone["losses"], rel=2e-5), sizes
                assert result["norms"] == pytest.approx(alone["norms"], rel=2e-4), sizes
            expected, actual = (test_engine._by_sample(ranks, "after") for ranks in ([alone], results))
            for index, logprobs in expected.items():
                torch.testing.assert_close(actual[index], logprobs, atol=2e-4, rtol=1e-3)
        after = _tensors(export)
        assert after[BIAS].dtype == torch.float32 and torch.equal(after[BIAS], before[BIAS])
        assert after[Q_B_PROJ].dtype == torch.bfloat16
        _has_the_same_multi_token_layer(after, before)
        assert json.loads((export / "config.json").read_text())["num_nextn_predict_layers"] == 1
        assert not torch.equal(after[Q_B_PROJ], before[Q_B_PROJ].bfloat16())


def _has_the_same_multi_token_layer(after: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> None:
    layer = ("model.layers.4.", "mtp.")
    of_layer = {name: tensor for name, tensor in before.items() if name.startswith(layer)}
    assert of_layer and of_layer.keys() == {name for name in after if name.startswith(layer)}
    for name, tensor in of_layer.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
