"""The precision contract: one quantiser, its blocks on every layout, and directories in DeepSeek's block format."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine3d.errors import UserError
from engine3d.layout import Coordinates, Layout
from engine3d.models import check_weights, initialise_random, load_model_spec, model_spec, weight_notes
from engine3d.models.family import ModelSpec
from engine3d.models.files.safetensors_files import TensorFiles
from engine3d.models.files.weights import finish_export
from engine3d.models.precision import (
    QUANTISATION_CONFIG,
    Fp8Settings,
    check_shards,
    dequantise,
    joined_slices,
    joined_values,
    quantisation_config,
    quantise,
    quantised_as,
    quantised_as_stored,
    scale_box,
    scale_name,
    scale_shape,
    served_shapes,
    stored_tensors,
)
from engine3d.models.quantisation.stored import unquantised_overrides
from engine3d.rollout import RolloutConfig, launch
from engine3d.rollout.served import check_files, check_served
from tests.engine3d.models.test_rules import QWEN3_30B
from tests.support.distributed import run_distributed
from tests.support.tiny_families import CONFIGS, FP8_CONFIGS

LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(pp=2),
    Layout(ep=2, dp=2),
    Layout(tp=2, ep=2),
    Layout(tp=2, etp=2, dp=2),
    Layout(ep=2, etp=2, tp=2, dp=2),
    Layout(tp=2, cp=2, pp=2),
]
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def weights(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Values of many magnitudes, with zeros and with a block of zeros where there are several."""
    generator = torch.Generator().manual_seed(rows * 10_000 + columns)
    values = torch.randn(rows, columns, generator=generator) * torch.rand(rows, columns, generator=generator) ** 12
    values[0, :] = 0
    if rows > 128:
        values[128:256, :128] = 0
    return values.to(dtype)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


# The quantiser --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(256, 384), (576, 200), (1, 1), (130, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_and_scales_are_those_of_sglang_bit_for_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant, per_block_cast_to_fp8

    given = weights(*shape, dtype)
    values, scales = quantise(given)
    theirs, their_scales = per_block_cast_to_fp8(given)
    assert same_bits(values, theirs) and same_bits(scales, their_scales)
    box = tuple((0, size) for size in shape)
    ours = dequantise(values, scales, box)
    assert same_bits(ours, block_quant_dequant(values, scales, [128, 128], torch.float32))
    assert torch.equal(ours, ours.bfloat16().float())  # exact: scales are powers of two


def test_dequantised_values_are_those_of_transformers() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    values, _ = quantise(weights(256, 384))
    scales = torch.rand(2, 3) + 0.01  # of any publisher, no powers of two
    for dtype in (torch.float32, torch.bfloat16):
        theirs = Fp8Dequantize(None)._dequantize_one(values, scales, dtype)
        assert same_bits(dequantise(values, scales, ((0, 256), (0, 384))).to(dtype), theirs)


def test_quantising_twice_changes_no_value() -> None:
    given = weights(576, 200)
    box = ((0, 576), (0, 200))
    once = dequantise(*quantise(given), box)
    assert torch.equal(dequantise(*quantise(once.bfloat16()), box), once)
    assert (once - given.float()).abs().max() <= given.float().abs().max() / 16


def test_blocks_of_zeros_and_of_tiny_values_are_numbers() -> None:
    given = torch.zeros(256, 128, dtype=torch.bfloat16)
    given[128:] = 1e-38
    values, scales = quantise(given)
    assert scales.isfinite().all() and (scales > 0).all()
    assert not dequantise(values, scales, ((0, 256), (0, 128))).any()


def test_memory_is_taken_band_by_band(monkeypatch: pytest.MonkeyPatch) -> None:
    given = weights(576, 200)
    complete = quantise(given)
    monkeypatch.setattr("engine3d.models.precision._BAND_ELEMENTS", 200 * 128)
    assert all(same_bits(left, right) for left, right in zip(quantise(given), complete, strict=True))


# Shards ---------------------------------------------------------------------------------------------------------------


@cache
def complete_tensors(name: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Values of a model's tensors that are quantised, and what they are quantised to."""
    tensors = model_spec(FP8_CONFIGS[name]).hf_tensors.values()
    complete = {tensor.name: weights(tensor.shape[0], tensor.shape[1]) for tensor in tensors if tensor.fp8}
    expected: dict[str, torch.Tensor] = {}
    for tensor_name, values in complete.items():
        expected[tensor_name], expected[scale_name(tensor_name)] = quantise(values)
    return complete, expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (name, layout)
        for name, config in FP8_CONFIGS.items()
        for layout in LAYOUTS
        if "experts" in " ".join(config) or layout.ep * layout.etp == 1
    ],
    ids=str,
)
def test_shards_are_quantised_as_the_complete_tensor(name: str, layout: Layout) -> None:
    spec = model_spec(FP8_CONFIGS[name])
    spec.check_layout(layout)
    check_shards(spec, layout, transformer_engine=False)
    complete, expected = complete_tensors(name)
    written = {key: torch.full(value.shape, torch.nan).to(value.dtype) for key, value in expected.items()}
    for rank in range(layout.world_size):
        for local in spec.local_parameters(layout, layout.coordinates(rank), transformer_engine=False):
            if not all(tensor_slice.hf_name in complete for tensor_slice in local.slices) or not local.slices:
                continue
            parameter = torch.full(local.shape, torch.nan, dtype=torch.bfloat16)
            for tensor_slice in local.slices:
                parameter[indices(tensor_slice.local_box)] = complete[tensor_slice.hf_name][
                    indices(tensor_slice.hf_box)
                ]
            for tensor_name, box, slices in joined_slices(local.slices if local.owner else ()):
                values = joined_values(parameter, box, slices)
                tensor = spec.hf_tensors[tensor_name]
                for stored_name, stored_box, stored in stored_tensors(tensor, box, values, torch.bfloat16, "fp8"):
                    written[stored_name][indices(stored_box)] = stored
    for key, value in expected.items():
        assert same_bits(written[key], value), key


def indices(box: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        (
            Layout(tp=4, dp=2),
            {"mlp_only_layers": [1]},
            "fp8: layout tp=4 cuts model.layers.1.mlp.gate_proj.weight within a block of 128 x 128 (a rank has rows 0 "
            "to 64), expected tp=1 or 2",
        ),
        (
            Layout(tp=4, etp=4),
            {"num_attention_heads": 8, "num_key_value_heads": 8},
            "fp8: layout etp=4 cuts model.layers.0.mlp.experts.0.gate_proj.weight within a block of 128 x 128 (a rank "
            "has rows 0 to 64), expected etp=1 or 2",
        ),
    ],
)
def test_layouts_that_divide_blocks_are_refused_with_those_that_fit(
    layout: Layout, changes: dict[str, Any], message: str
) -> None:
    spec = model_spec({**FP8_CONFIGS["qwen3_moe"], "mlp_only_layers": [], **changes})
    spec.check_layout(layout)
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        check_shards(spec, layout, transformer_engine=False)


def test_published_models_fit_their_usual_layouts() -> None:
    qwen = model_spec(QWEN3_30B)
    check_shards(qwen, Layout(tp=8, etp=2, ep=4), transformer_engine=True)  # more ranks than key heads
    with pytest.raises(
        UserError, match=r"layout etp=4 cuts .*gate_proj\.weight .* rows 0 to 192\), expected etp=1 or 2"
    ):
        check_shards(qwen, Layout(tp=4, etp=4), transformer_engine=True)
    deepseek = model_spec(
        {
            **FP8_CONFIGS["deepseek_v3"],
            "hidden_size": 7168,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "moe_intermediate_size": 2048,
            "intermediate_size": 18432,
        }
    )
    check_shards(deepseek, Layout(tp=8, ep=8), transformer_engine=True)  # 576 rows of kv_a_proj, on every rank
    with pytest.raises(UserError, match=r"kv_a_proj_with_mqa\.weight within a block .* rows 0 to 288\), expected tp=1"):
        check_shards(deepseek, Layout(tp=2), transformer_engine=False)


# Matrices that stay in the model's dtype ------------------------------------------------------------------------------


def in_fp8(spec: ModelSpec) -> set[str]:
    """Names of a model's tensors that are quantised, without `.weight`."""
    return {name.removesuffix(".weight") for name, tensor in spec.hf_tensors.items() if tensor.fp8}


@pytest.mark.parametrize("name", FP8_CONFIGS)
def test_first_and_last_layers_stay_in_the_dtype_of_the_model(name: str) -> None:
    spec = model_spec({**FP8_CONFIGS[name], "num_hidden_layers": 4})
    fewer = Fp8Settings(num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=2).applied(spec)
    assert in_fp8(fewer) == {tensor for tensor in in_fp8(spec) if tensor.startswith("model.layers.1.")} != set()
    assert Fp8Settings().applied(spec) is spec and in_fp8(Fp8Settings().applied(fewer)) == in_fp8(spec)
    shapes = served_shapes(fewer, "fp8")
    assert {tensor for tensor in shapes if tensor.endswith("_scale_inv")} == {
        f"{tensor}.weight_scale_inv" for tensor in in_fp8(fewer)
    }


@pytest.mark.parametrize(
    ("name", "shared"),
    [("deepseek_v3", "shared_experts"), ("glm4_moe", "shared_experts"), ("qwen2_moe", "shared_expert")],
)
def test_shared_experts_stay_in_the_dtype_of_the_model(name: str, shared: str) -> None:
    spec = model_spec(FP8_CONFIGS[name])
    fewer = Fp8Settings(shared_experts_in_bf16=True).applied(spec)
    kept = {tensor for tensor in in_fp8(spec) if f".mlp.{shared}." in tensor}
    assert kept and in_fp8(fewer) == in_fp8(spec) - kept


def test_engines_and_files_read_of_one_list_what_stays_in_the_dtype_of_the_model() -> None:
    settings = Fp8Settings(num_layers_at_end_in_bf16=1, shared_experts_in_bf16=True)
    spec = settings.applied(model_spec({**FP8_CONFIGS["deepseek_v3"], "num_hidden_layers": 3}))
    config = quantisation_config(spec)
    kept = config["modules_to_not_convert"]
    assert [module for module in kept if ".1." in module] == [
        "model.layers.1.self_attn.kv_b_proj",
        "model.layers.1.mlp.gate",
        *(f"model.layers.1.mlp.shared_experts.{linear}_proj" for linear in ("gate", "up", "down")),
    ]
    assert "model.layers.2.mlp.experts" in kept and len(kept) == len(set(kept))  # a module of all experts
    assert quantised_as(model_spec(spec.hf_config), config).hf_tensors == spec.hf_tensors


def test_layouts_may_divide_what_is_not_quantised() -> None:
    spec = model_spec({**FP8_CONFIGS["qwen2_moe"], "shared_expert_intermediate_size": 192, "num_hidden_layers": 3})
    shared = Fp8Settings(shared_experts_in_bf16=True)
    with pytest.raises(UserError, match=r"cuts model\.layers\.0\.mlp\.shared_expert\.gate_proj\.weight within a block"):
        check_shards(spec, Layout(tp=2), transformer_engine=False)
    check_shards(shared.applied(spec), Layout(tp=2), transformer_engine=False)
    config = RolloutConfig(precision="fp8", tp=2)
    with pytest.raises(UserError, match="a rank has 96 rows of gate and up of the shared expert"):
        check_served(spec, config)
    check_served(shared.applied(spec), config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1},
            "fp8.num_layers_at_start_in_bf16=1 and num_layers_at_end_in_bf16=1: expected fewer than "
            "num_hidden_layers=2 together, so that a layer is in fp8",
        ),
        (
            {"num_layers_at_end_in_bf16": 7},
            "fp8.num_layers_at_start_in_bf16=0 and num_layers_at_end_in_bf16=7: expected fewer than "
            "num_hidden_layers=2 together, so that a layer is in fp8",
        ),
        (
            {"shared_experts_in_bf16": True},
            "fp8.shared_experts_in_bf16=true: Qwen3MoeForCausalLM has no shared experts; expected false",
        ),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        Fp8Settings(**settings).applied(model_spec(FP8_CONFIGS["qwen3_moe"]))


# Files ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for each model, with all that two ranks have written of it."""
    root = tmp_path_factory.mktemp("fp8")
    for name, config in FP8_CONFIGS.items():
        initialise_random(model_spec(config), root / name / "bf16", seed=2, dtype=torch.bfloat16)
    run_distributed(export_all, 2, root, timeout_s=300)
    return root


def export_all(root: Path) -> None:
    """Export each model in bf16 by two tensor ranks in fp8, and that by two stages in both."""
    from engine3d.training.megatron import parallel

    for layout in (Layout(tp=2), Layout(pp=2)):
        coordinates = parallel.initialise(layout, seed=1, timeout_s=300)
        for name in FP8_CONFIGS:
            export_by_ranks(root / name, layout, coordinates)
        parallel.release()


def export_by_ranks(directory: Path, layout: Layout, coordinates: Coordinates) -> None:
    from engine3d.models import build_model, export_weights, load_weights

    source = directory / ("fp8" if layout.pp > 1 else "bf16")
    spec = load_model_spec(source)
    model = build_model(spec, layout, torch.bfloat16)
    load_weights(model, spec, layout, coordinates, source)
    arguments = (model, spec, layout, coordinates)
    if layout.pp > 1:
        export_weights(*arguments, directory / "again-bf16", torch.bfloat16)
        export_weights(*arguments, directory / "again-fp8", torch.bfloat16, precision="fp8")
    else:
        export_weights(*arguments, directory / "fp8", torch.bfloat16, precision="fp8", max_shard_bytes=400e3)


@pytest.mark.processes
@pytest.mark.parametrize("name", FP8_CONFIGS)
def test_a_directory_in_fp8_is_trained_as_its_dequantised_values(name: str, exports: Path) -> None:
    plain, directory, trained_in = (exports / name / kind for kind in ("bf16", "fp8", "again-bf16"))
    spec = load_model_spec(directory)
    check_weights(spec, directory)
    assert any("tensors of the files are in fp8" in note for note in weight_notes(spec, directory))
    assert len(weight_notes(spec, directory)) == 1
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    assert {key: config[key] for key in QUANTISATION_CONFIG} == QUANTISATION_CONFIG
    assert "lm_head" in config["modules_to_not_convert"] or spec.sizes.tied

    again = load_model_spec(trained_in)
    assert "quantization_config" not in again.hf_config
    with (
        TensorFiles(plain) as original,
        TensorFiles(directory) as fp8,
        TensorFiles(trained_in) as trained,
        TensorFiles(exports / name / "again-fp8") as twice,
    ):
        for tensor in spec.hf_tensors.values():
            box = tuple((0, size) for size in tensor.shape)
            values = original.read(tensor.name, box)
            if tensor.fp8:
                quantised, scales = quantise(values)
                assert same_bits(fp8.stored(tensor.name, box), quantised)
                assert same_bits(fp8.stored(scale_name(tensor.name), scale_box(box)), scales)
                values = dequantise(quantised, scales, box).bfloat16()
            assert same_bits(trained.read(tensor.name, box), values), tensor.name
            assert torch.equal(twice.read(tensor.name, box).float(), values.float()), tensor.name


@pytest.mark.processes
@pytest.mark.parametrize("model", FP8_CONFIGS)
def test_any_box_is_dequantised_as_the_complete_tensor(model: str, exports: Path) -> None:
    directory, name = exports / model / "fp8", "model.layers.0.self_attn.o_proj.weight"
    rows, columns = load_model_spec(directory).hf_shape(name)
    with TensorFiles(directory) as files:
        complete = files.read(name, ((0, rows), (0, columns)))
        for box in [((5, 131), (1, columns)), ((127, 129), (120, 130)), ((128, rows), (0, 128))]:
            assert torch.equal(files.read(name, box), complete[indices(box)])


def change_config(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] |= changes
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "gptq"}, 'quantization_config.quant_method: expected "fp8", found "gptq"'),
        ({"fmt": "e5m2"}, 'quantization_config.fmt: expected "e4m3", found "e5m2"'),
        (
            {"weight_block_size": [64, 128]},
            "quantization_config.weight_block_size: expected [128, 128], found [64, 128]",
        ),
        ({"weight_block_size": None}, "quantization_config.weight_block_size: expected [128, 128], found null"),
        ({"activation_scheme": "static"}, 'quantization_config.activation_scheme: expected "dynamic", found "static"'),
    ],
)
def test_other_quantisations_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    directory = small(tmp_path)
    change_config(directory, **changes)
    with pytest.raises(UserError, match=re.escape(f"{directory / 'config.json'}: {message}") + "$"):
        check_weights(load_model_spec(directory), directory)


def small(root: Path) -> Path:
    """A llama in fp8, in one file."""
    spec = model_spec(CONFIGS["llama"])
    initialise_random(spec, root / "bf16", seed=1, dtype=torch.bfloat16)
    tensors = load_file(root / "bf16" / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    for name, values in tensors.items():
        box = tuple((0, size) for size in values.shape)
        stored |= {
            key: data for key, _, data in stored_tensors(spec.hf_tensors[name], box, values, torch.bfloat16, "fp8")
        }
    partial = root / ".fp8.partial"
    partial.mkdir()
    save_file(stored, partial / "model.safetensors")
    finish_export(load_model_spec(root / "bf16"), torch.bfloat16, partial, root / "fp8", "fp8")
    return root / "fp8"


BAD_TENSORS: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "no scales": (
        {scale_name(Q_PROJ): None},
        rf"tensor {Q_PROJ} in .*: dtype F8_E4M3 without {Q_PROJ}_scale_inv, expected its scales of shape \[1, 1\]",
    ),
    "one scale a row": (
        {scale_name(Q_PROJ): torch.ones(32, 1)},
        rf"tensor {Q_PROJ}_scale_inv in .*: F32 of shape \[32, 1\], expected .* of shape \[1, 1\]: a scale for each",
    ),
    "scales in bytes": (
        {scale_name(Q_PROJ): torch.ones(1, 1, dtype=torch.uint8)},
        rf"tensor {Q_PROJ}_scale_inv in .*: U8 of shape \[1, 1\], expected F64, F32, BF16, F16 of shape \[1, 1\]",
    ),
    "other fp8": (
        {Q_PROJ: torch.zeros(32, 32).to(torch.float8_e5m2)},
        rf"tensor {Q_PROJ} in .*: dtype F8_E5M2 of quantised weights \(fp8\), expected .*, or F8_E4M3 with a scale for",
    ),
    "scales of weights that have none": (
        {Q_PROJ: torch.zeros(32, 32)},
        rf"tensor {Q_PROJ}_scale_inv in .*: dtype F32 of quantised weights \(fp8\)",
    ),
    "a norm": (
        {
            "model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn),
            "model.norm.weight_scale_inv": torch.ones(1),
        },
        r"tensor model\.norm\.weight in .*: dtype F8_E4M3 of 1 dimensions, expected a matrix",
    ),
}


@pytest.mark.parametrize("kind", BAD_TENSORS)
def test_bad_tensors_in_fp8_are_named_in_one_line(tmp_path: Path, kind: str) -> None:
    changes, message = BAD_TENSORS[kind]
    directory = small(tmp_path)
    file = directory / "model.safetensors"
    tensors: dict[str, torch.Tensor | None] = {**load_file(file), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    with pytest.raises(UserError, match=f"^{message}"):
        check_weights(load_model_spec(directory), directory)


def test_a_config_that_does_not_name_fp8_is_refused(tmp_path: Path) -> None:
    directory = small(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"weights are F8_E4M3, and .* describes no fp8, expected quantization_config"):
        check_weights(load_model_spec(directory), directory)


def test_published_variants_are_read(tmp_path: Path) -> None:
    directory = small(tmp_path)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    # Scales in bfloat16, as in Qwen's files; tensors of a further layer, as of multi-token prediction.
    tensors[scale_name(Q_PROJ)] = torch.full((1, 1), 0.3).bfloat16()
    further = "model.layers.4.self_attn.q_proj.weight"
    tensors |= {further: tensors[Q_PROJ].clone(), scale_name(further): torch.ones(1, 1)}
    save_file(tensors, file)
    spec = load_model_spec(directory)
    check_weights(spec, directory)
    assert len(weight_notes(spec, directory)) == 1
    with TensorFiles(directory) as files:
        values = files.read(Q_PROJ, ((0, 32), (0, 32)))
    assert torch.equal(values, tensors[Q_PROJ].float() * torch.tensor(0.3).bfloat16().float())


def test_engines_of_16_bits_do_not_load_a_directory_in_fp8(tmp_path: Path) -> None:
    directory = small(tmp_path)
    message = r"^model .*fp8: model\.layers\.0\.mlp\.down_proj\.weight is in fp8, which engines of 16 bits load without"
    with pytest.raises(UserError, match=message):
        launch.read_model(directory, weights_needed=True)
    with pytest.raises(UserError, match=message):
        check_served(load_model_spec(directory), RolloutConfig(server_args={"load_format": "auto"}))
    with pytest.raises(UserError, match=message):
        check_files(directory, None)
    launch.read_model(directory, weights_needed=False)
    check_served(load_model_spec(directory), RolloutConfig())  # a run starts its engines without weights
    # A server whose weights nobody writes reads them by its own rules.
    assert unquantised_overrides(directory, json.loads((directory / "config.json").read_text())) == {}


def test_engines_in_fp8_load_what_files_have_in_it(tmp_path: Path) -> None:
    directory, config = small(tmp_path), RolloutConfig(precision="fp8")
    message = (
        r"^model .*bf16: no tensor is in fp8, and engines with rollout\.engine\.precision=fp8 load it; expected null"
    )
    with pytest.raises(UserError, match=message):
        launch.read_model(tmp_path / "bf16", weights_needed=True, precision="fp8")
    model = launch.read_model(directory, weights_needed=True, precision="fp8")
    overrides = json.loads(launch.server_arguments(config, model)["json_model_override_args"])
    spec = load_model_spec(directory)
    assert overrides["quantization_config"] == quantisation_config(spec)

    in_fp8 = {name for name, tensor in spec.hf_tensors.items() if tensor.fp8}
    later = {name for name in in_fp8 if ".layers.0." not in name}
    assert quantised_as_stored(spec, later) == Fp8Settings(num_layers_at_start_in_bf16=1).applied(spec)
    with pytest.raises(UserError, match=r"lm_head\.weight is in fp8, and engines load no scales of it"):
        quantised_as_stored(spec, in_fp8 | {"lm_head.weight"})
    with pytest.raises(UserError, match=r"k_proj\.weight is in fp8 and .*q_proj\.weight is not, which engines join"):
        quantised_as_stored(spec, in_fp8 - {Q_PROJ})


@pytest.mark.parametrize("kept", ["gate_proj", "down_proj"])
def test_experts_of_a_layer_are_in_fp8_together(kept: str) -> None:
    spec = model_spec(FP8_CONFIGS["qwen3_moe"])
    in_fp8 = {name for name, tensor in spec.hf_tensors.items() if tensor.fp8}
    assert quantised_as_stored(spec, in_fp8) == spec
    with pytest.raises(UserError, match=rf"experts\.0\..* is in fp8 and .*experts\.1\.{kept}\.weight is not, which"):
        quantised_as_stored(spec, in_fp8 - {f"model.layers.0.mlp.experts.1.{kept}.weight"})


def test_latent_projections_that_engines_join_are_in_fp8_together() -> None:
    spec = model_spec(FP8_CONFIGS["deepseek_v3"])
    in_fp8 = {name for name, tensor in spec.hf_tensors.items() if tensor.fp8}
    attention = "model.layers.0.self_attn."
    both = {f"{attention}{name}.weight" for name in ("q_a_proj", "kv_a_proj_with_mqa")}
    assert quantised_as_stored(spec, in_fp8 - both).unquantised == {
        f"{attention}q_a_proj",
        f"{attention}kv_a_proj_with_mqa",
    }
    for kept in both:
        with pytest.raises(UserError, match=rf"is in fp8 and {kept} is not, which engines join"):
            quantised_as_stored(spec, in_fp8 - {kept})


def test_kv_b_proj_may_be_in_fp8_in_files_alone() -> None:
    spec = model_spec(FP8_CONFIGS["deepseek_v3"])
    in_fp8 = {name for name, tensor in spec.hf_tensors.items() if tensor.fp8 or "kv_b_proj" in name}
    assert quantised_as_stored(spec, in_fp8) == spec
    kept = quantisation_config(spec, in_fp8)["modules_to_not_convert"]
    assert set(quantisation_config(spec)["modules_to_not_convert"]) - set(kept) == {
        f"model.layers.{layer}.self_attn.kv_b_proj" for layer in range(spec.sizes.layers)
    }


def test_scales_have_the_shape_of_the_blocks() -> None:
    assert scale_shape((576, 7168)) == (5, 56) and scale_box(((128, 576), (100, 130))) == ((1, 5), (0, 2))
    assert scale_name(Q_PROJ) == "model.layers.0.self_attn.q_proj.weight_scale_inv"
