"""Training in fp8: what it quantises, its gradients, and that its weights are those that engines hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models import model_spec
from engine3d.models.precision import Fp8Settings, check_trained_blocks, rounded, rounded_rows
from engine3d.training.config import OptimizerConfig, TrainConfig
from engine3d.training.megatron.settings import check_options
from engine3d.training.passes.sequences import Sequences
from tests.support.distributed import run_distributed
from tests.support.tiny_families import BLOCK_CONFIGS, CONFIGS, make

DENSE, SPARSE, SHARED = "qwen3-biases-blocks", "qwen3_moe-blocks", "qwen2_moe-blocks"
SAMPLES = [[5, 90, 17, 33, 2, 64, 8, 71, 40], [12, 3, 55, 7]]
FP8 = TrainConfig(dtype="float32", precision="fp8", packing=False, optimizer=OptimizerConfig(clip_grad=1.0))
LESS = FP8.model_copy(update={"fp8": Fp8Settings(num_layers_at_start_in_bf16=1, shared_experts_in_bf16=True)})
"""The second of two layers in fp8, but for its shared expert."""
PLAIN = FP8.model_copy(update={"precision": None})


def _in_fp8(values: Tensor) -> Tensor:
    """A block or a group, rounded to e4m3 times the smallest power of two with which it fits."""
    peak = float(values.abs().max())
    exponent = -100
    while peak > 448 * 2.0**exponent:
        exponent += 1
    return (values / 2.0**exponent).to(torch.float8_e4m3fn).float() * 2.0**exponent


def _in_blocks(values: Tensor, rows: int) -> Tensor:
    result = torch.empty_like(values)
    for first in range(0, len(values), rows):
        for column in range(0, values.shape[1], 128):
            block = slice(first, first + rows), slice(column, column + 128)
            result[block] = _in_fp8(values[block])
    return result


def test_groups_of_a_row_have_a_scale_each() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5, 200, generator=generator) * torch.rand(5, 200, generator=generator) ** 12
    values[1], values[2, :128], values[3, 0] = 0.0, 1e-30, 448.0
    assert torch.equal(rounded_rows(values), _in_blocks(values, 1))
    assert torch.equal(rounded_rows(values[None])[0], rounded_rows(values))
    assert torch.equal(rounded_rows(values.bfloat16()).float(), _in_blocks(values.bfloat16().float(), 1))
    assert rounded_rows(values[:0]).shape == (0, 200)
    assert torch.equal(rounded(values), _in_blocks(values, 128))
    assert torch.equal(rounded(rounded(values)), rounded(values))


def _loss(outputs: Any, columns: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    loss = -(outputs.logprobs * columns["weights"]).sum()
    return loss, loss.detach()


def _on_one_rank(root: Path) -> dict[tuple[str, ...], Any]:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    from engine3d.platform import platform
    from engine3d.training.engine import TrainEngine

    weights = torch.tensor([weight for sample in SAMPLES for weight in [0.0] + [1.0] * (len(sample) - 1)])
    sequences = Sequences.of(SAMPLES, weights=weights)
    results: dict[tuple[str, ...], Any] = {}
    quantised = tuple(platform.quantised_linears(rounded_rows, rounded).values())

    def logprobs(engine: TrainEngine) -> Tensor:
        outputs = engine.logprobs(sequences)
        assert outputs is not None and outputs.logprobs is not None
        return outputs.logprobs

    for name, fp8 in ((DENSE, FP8), (SPARSE, FP8), (SHARED, LESS)):
        for kind, config in (("fp8", fp8), ("plain", PLAIN)):
            engine = TrainEngine(root / name, config, Layout())
            results[name, kind] = logprobs(engine)
            if kind == "fp8":
                modules = dict(engine.module.named_modules())
                for local in engine.spec.local_parameters(Layout(), engine.coordinates, transformer_engine=False):
                    module = modules[local.name.rpartition(".")[0]]
                    in_fp8 = any(engine.spec.hf_tensors[at.hf_name].fp8 for at in local.slices)
                    assert len(local.shape) < 2 or isinstance(module, quantised) == in_fp8, local
                linear = [
                    module
                    for module in modules.values()
                    if isinstance(module, ColumnParallelLinear | RowParallelLinear)
                ]
                share = sum(isinstance(module, quantised) for module in linear) / len(linear)
                assert share > (0.3 if name == SHARED else 0.5)
                engine.export(root / f"{name}-{kind}", precision="fp8")
            results[name, kind, "norm"] = engine.update(sequences, _loss).grad_norm
            engine.close()
            if kind == "plain":
                for again, of in (("fp8", fp8), ("plain", PLAIN)):
                    engine = TrainEngine(root / f"{name}-fp8", of, Layout())
                    results[name, again, "of export"] = logprobs(engine)
                    engine.close()
    return results


@pytest.mark.processes
def test_a_model_in_fp8_is_that_of_transformers_with_quantised_operands(tmp_path: Path) -> None:
    model = make(DENSE, tmp_path / DENSE)
    make(SPARSE, tmp_path / SPARSE)
    make(SHARED, tmp_path / SHARED)
    [results] = run_distributed(_on_one_rank, 1, tmp_path, timeout_s=300)
    for layer in model.model.layers:
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear):
                module.forward = _quantised(module)  # type: ignore[method-assign]
    logprobs = []
    for sample in SAMPLES:
        tokens = torch.tensor([sample])
        every = model(tokens).logits[0, :-1].log_softmax(-1)
        logprobs.append(every.gather(1, tokens[0, 1:, None])[:, 0])
    (-torch.cat(logprobs).sum()).backward()
    norm = float(torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm())
    given = [column[1:] for column in results[DENSE, "fp8"].split([len(sample) for sample in SAMPLES])]
    expected = torch.cat(logprobs).detach()
    plain = torch.cat([column[1:] for column in results[DENSE, "plain"].split([len(sample) for sample in SAMPLES])])
    # An input between two values of fp8 may round to the other one, by the last bit of a sum, which processors compute
    # in orders of their own: all tokens of that sample from there on differ. Others have the same values.
    difference = (torch.cat(given) - expected).abs()
    assert float((difference < 1e-5).float().mean()) > 0.4 and not ((plain - expected).abs() < 1e-5).any(), difference
    assert 10 * difference.mean() < (plain - expected).abs().mean()
    assert 5 * abs(results[DENSE, "fp8", "norm"] - norm) < abs(results[DENSE, "plain", "norm"] - norm)
    for name in (DENSE, SPARSE, SHARED):
        # The weights that engines hold are those of the forward pass: the export's own, bit for bit.
        assert torch.equal(results[name, "fp8"], results[name, "fp8", "of export"])
        assert not torch.equal(results[name, "plain"], results[name, "plain", "of export"])


def _quantised(module: torch.nn.Linear) -> Any:
    def forward(rows: Tensor) -> Tensor:
        operands: list[Tensor] = []
        for values, height in ((rows, 1), (module.weight, 128)):
            with torch.no_grad():
                quantised = _in_blocks(values.flatten(0, -2), height).view(values.shape)
            operands.append(quantised + (values - values.detach()))
        quantised_rows, quantised_weight = operands
        return F.linear(quantised_rows, quantised_weight, module.bias)

    return forward


@pytest.mark.parametrize("name", BLOCK_CONFIGS)
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(tp=2, ep=2)], ids=str)
def test_models_whose_parameters_have_the_blocks_of_tensors(name: str, layout: Layout) -> None:
    check_trained_blocks(model_spec(BLOCK_CONFIGS[name]), layout, transformer_engine=False)
    check_trained_blocks(model_spec(BLOCK_CONFIGS[name]), layout, transformer_engine=True)


@pytest.mark.parametrize(
    ("name", "changes", "layout", "message"),
    [
        ("deepseek_v3", {}, Layout(), "precision=fp8: DeepseekV3ForCausalLM has latent attention, with which"),
        ("gpt_oss", {}, Layout(), "fp8: the experts of GptOssForCausalLM are tensors of all experts, of which"),
        (
            DENSE,
            {"head_dim": 64},
            Layout(),
            "rows 0 to 64 of model.layers.0.self_attn.k_proj.weight are rows 128 to 192 of a parameter, expected "
            "multiples of 128: by other sizes of heads and MLPs, or a smaller tp",
        ),
        (DENSE, {"intermediate_size": 384}, Layout(tp=2), "rows 0 to 192 of model.layers.0.mlp.gate_proj.weight"),
        (SPARSE, {"moe_intermediate_size": 128}, Layout(tp=2, etp=2), "or a smaller etp"),
    ],
)
def test_other_models_and_layouts_are_refused(name: str, changes: Any, layout: Layout, message: str) -> None:
    spec = model_spec({**(CONFIGS | BLOCK_CONFIGS)[name], **changes})
    with pytest.raises(UserError) as raised:
        check_options(FP8, spec, layout, transformer_engine=False)
    assert message in str(raised.value)


def test_matrices_that_are_left_out_were_not_tried_on_gpus() -> None:
    message = "fp8.num_layers_at_start_in_bf16 was not tried on GPUs; expected none, or precision=null"
    with pytest.raises(UserError, match=message):
        check_options(LESS, model_spec(BLOCK_CONFIGS[SHARED]), Layout(), transformer_engine=True)


def test_fused_kernels_are_refused() -> None:
    config = FP8.model_copy(update={"fused_query_key": True})
    with pytest.raises(UserError, match="fused_query_key=true was not tried with precision=fp8; expected false"):
        check_options(config, model_spec(BLOCK_CONFIGS[DENSE]), Layout(), transformer_engine=False)
