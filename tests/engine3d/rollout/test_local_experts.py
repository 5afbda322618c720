"""Experts of other ranks that get no rows, and the sum that leaves them out."""

from __future__ import annotations

import ast
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from engine3d.errors import EngineError, UserError
from engine3d.models import load_model_spec
from engine3d.platform import platform
from engine3d.rollout.config import RolloutConfig
from engine3d.rollout.launch import ModelDirectory, server_arguments
from engine3d.rollout.scheduler import local_experts
from engine3d.rollout.served import check_device, check_served
from engine3d.sglang_source import sglang_directory
from tests.support.interpreted import run_interpreted
from tests.support.ptx import compiled_for_hopper


def _sums(device: str) -> None:
    from engine3d.platform.cuda.kernels import expert_sum as expert_sum_kernels

    expert_sum_kernels._WIDTH = 32
    generator = torch.Generator().manual_seed(0)
    for tokens, most, width in ((1, 3, 32), (7, 8, 48), (0, 4, 16)):
        rows = torch.randn(tokens, most, width, generator=generator)
        experts = torch.randint(-1, 2, (tokens, most), dtype=torch.int32, generator=generator)
        experts[:1] = -1
        right = torch.where(experts[:, :, None] >= 0, rows, 0.0).sum(1) * 2.5
        rows[experts < 0] = torch.nan  # nobody has written there
        into = torch.full((tokens, width), torch.nan, device=device)
        expert_sum_kernels.sum_local(rows.to(device), experts.to(device), into, 2.5)
        torch.testing.assert_close(into.cpu(), right)
    # Rounded once: in bfloat16 256 + 1 is 256 again.
    rows = torch.tensor([255.0, 1.0, 1.0, 1.0], dtype=torch.bfloat16).view(1, 4, 1).expand(1, 4, 16).contiguous()
    into = torch.empty(1, 16, dtype=torch.bfloat16, device=device)
    expert_sum_kernels.sum_local(rows.to(device), torch.zeros(1, 4, dtype=torch.int32, device=device), into, 1.0)
    assert into.tolist() == [[258.0] * 16]


@pytest.mark.processes
def test_the_sum_interpreted() -> None:
    run_interpreted(_sums)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_sum_on_a_gpu() -> None:
    _sums("cuda")


@pytest.mark.slow
def test_the_sum_compiles_without_a_gpu() -> None:
    from engine3d.platform.cuda.kernels import expert_sum as expert_sum_kernels

    text = compiled_for_hopper(
        expert_sum_kernels._sum_local_experts,
        {"rows": "*bf16", "experts": "*i32", "into": "*bf16", "width": "i32", "scale": "fp32"},
        {"MOST": 8, "WIDTH": expert_sum_kernels._WIDTH},
        whole_words=("rows", "experts", "into", "width"),
    )
    assert "ld.global.v4.b32" in text and "st.global.v4.b32" in text


class _SGLang:
    """Its functions, as they call each other in the module that is hooked."""

    def __init__(self) -> None:
        self.laid_out: list[bool] = []
        self.compiled = 0

    def align(self, topk_ids: Tensor, block_size: int, num_experts: int, ignore_invalid_expert: bool = False) -> None:
        self.laid_out.append(ignore_invalid_expert)

    def prepare(self, hidden: Tensor, w1: Tensor, w2: Tensor, experts: Tensor) -> None:
        local_experts.lay_out(self.align, experts, 16, len(w1))

    def sequence(
        self, hidden: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, experts: Tensor, *, no_combine: bool, hooks: Any
    ) -> Tensor:
        rows = torch.ones(*experts.shape, hidden.shape[1])
        rows[experts < 0] = torch.nan if self.laid_out[-1] else 0.0
        into = torch.empty_like(hidden)
        if no_combine:
            return rows
        if local_experts.compiles(lambda tokens: True, len(hidden)):
            self.compiled += 1
            return rows.sum(1)
        local_experts.add_up(self.reduce, rows, into, 1.0)
        return into

    @staticmethod
    def reduce(rows: Tensor, into: Tensor, scale: float) -> None:
        into.copy_(rows.sum(1) * scale)


def _added(rows: Tensor, experts: Tensor, into: Tensor, scale: float) -> None:
    into.copy_(torch.where(experts[:, :, None] >= 0, rows, 0.0).sum(1) * scale)


def test_rows_are_left_out_where_the_sum_leaves_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = SimpleNamespace(sum_local=_added)
    monkeypatch.setitem(sys.modules, "engine3d.platform.cuda.kernels.expert_sum", kernels)
    sglang = _SGLang()
    hidden, weights = torch.zeros(2, 4), torch.ones(3, 8, 4)
    experts = torch.tensor([[0, -1, 2, -1], [-1, -1, -1, -1]], dtype=torch.int32)

    def run(experts: Tensor, **named: Any) -> Tensor:
        given = {"no_combine": False, "hooks": None} | named
        local_experts.prepare(sglang.prepare, hidden, weights, weights, experts)
        return local_experts.compute(sglang.sequence, hidden, weights, weights, hidden, experts, **given)  # type: ignore[no-any-return]

    assert run(experts).tolist() == [[2.0] * 4, [0.0] * 4] and sglang.laid_out == [True] and not sglang.compiled
    # Two experts of a token are added up by another function.
    assert run(experts[:, :2]).tolist() == [[1.0] * 4, [0.0] * 4]
    assert sglang.laid_out == [True, False] and sglang.compiled == 1
    # Others lay out rows by the same function, and add them up by the same or otherwise.
    local_experts.lay_out(sglang.align, experts, 16, 3)
    assert sglang.laid_out[-1] is False
    local_experts.lay_out(sglang.align, topk_ids=experts, block_size=16, num_experts=3, ignore_invalid_expert=True)
    assert sglang.laid_out[-1] is True
    into = torch.empty(2, 4)
    local_experts.add_up(sglang.reduce, torch.ones(2, 4, 4), into, 0.5)
    assert into.tolist() == [[2.0] * 4] * 2
    with pytest.raises(EngineError, match="SGLang has not added up by moe_sum_reduce"):
        run(experts, no_combine=True)
    with pytest.raises(EngineError, match="SGLang's experts have hooks, expected none"):
        run(experts, hooks=object())
    assert local_experts.compiles(lambda tokens: True, 2) is True


def test_sglang_has_what_is_hooked_and_lays_out_and_adds_up_by_it() -> None:
    # Where it had not, SGLang would log so, and compute with what nobody has written.
    path = sglang_directory() / "srt/layers/moe/moe_runner/triton_utils/fused_moe.py"
    tree = ast.parse(path.read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert local_experts.HOOKS.keys() <= functions.keys() | imported
    called = {
        name: {
            node.func.id
            for node in ast.walk(functions[name])
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        for name in ("_prepare_fused_moe_run", "_fused_moe_kernel_sequence", "fused_experts_impl")
    }
    assert "moe_align_block_size" in called["_prepare_fused_moe_run"]
    assert {"_use_moe_sum_reduce_torch_compile", "moe_sum_reduce"} <= called["_fused_moe_kernel_sequence"]
    assert {"_prepare_fused_moe_run", "_fused_moe_kernel_sequence"} <= called["fused_experts_impl"]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"tp": 2}, "local_experts_only=true does nothing with ep=1, expected false"),
        ({"tp": 2, "ep": 2, "deterministic": True}, "was not tried with deterministic=true, expected one of them"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ValidationError, match=line):
        RolloutConfig(local_experts_only=True, **settings)


def test_a_cpu_is_refused(tmp_path: Path) -> None:
    config = RolloutConfig(local_experts_only=True, tp=2, ep=2)
    if not platform.gpus:
        with pytest.raises(UserError, match="local_experts_only=true on a CPU"):
            server_arguments(config, ModelDirectory(tmp_path, ("Qwen3MoeForCausalLM",), 100, 4096))
    check_device(config, on_gpu=True)
    with pytest.raises(UserError, match="local_experts_only=true on a CPU: SGLang computes experts there by other"):
        check_device(config, on_gpu=False)


def test_too_few_experts_of_a_token_are_refused(tiny_model_dirs: tuple[Path, Path]) -> None:
    spec = load_model_spec(tiny_model_dirs[0])
    two, three = (replace(spec, sizes=replace(spec.sizes, experts_per_token=several)) for several in (2, 3))
    config = RolloutConfig(local_experts_only=True, tp=2, ep=2)
    check_served(three, config)
    check_served(two, RolloutConfig(tp=2, ep=2))
    with pytest.raises(UserError, match="local_experts_only=true: expected false with 2 experts of a token"):
        check_served(two, config)


def _of_sglang(tokens: int) -> Tensor:
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

    generator = torch.Generator(device="cuda").manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32).bfloat16() / 8

    hidden, w1, w2 = draw(tokens, 256), draw(4, 512, 256), draw(4, 256, 256)
    experts = torch.randint(-1, 4, (tokens, 8), generator=generator, device="cuda", dtype=torch.int32)
    experts[0] = -1
    weights = torch.rand(tokens, 8, generator=generator, device="cuda")
    options = dict.fromkeys(("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16"), False)
    quantized = options | {"per_channel_quant": False, "block_shape": None}
    prepared = fused_moe._prepare_fused_moe_run(hidden, w1, w2, experts, **quantized)
    config, down_config, uses_tma, *rows = prepared
    nothing = dict.fromkeys(
        ("b1", "b2", "w1_scale", "w2_scale", "w1_zp", "w2_zp", "a1_scale", "a2_scale", "gemm1_alpha", "gemm1_limit")
    )
    return fused_moe._fused_moe_kernel_sequence(  # type: ignore[no-any-return]
        hidden, w1, w2, weights, experts, *rows, config, down_config, uses_tma, **quantized, **nothing,
        activation="silu", is_gated=True, no_combine=False, inplace=True, apply_router_weight_on_input=False,
        routed_scaling_factor=1.0, filter_expert=True,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("tokens", [1, 20, 257])  # no row, rows laid out by one block and added up compiled, others
def test_sglangs_experts_are_alike_with_and_without(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

    flags = SimpleNamespace(enable_fused_moe_sum_all_reduce=False, enable_deterministic_inference=False)
    monkeypatch.setattr("sglang.srt.runtime_context._CONTEXT", SimpleNamespace(server_args=flags))
    expected = _of_sglang(tokens)
    for name, hook in local_experts.HOOKS.items():
        monkeypatch.setattr(fused_moe, name, partial(hook, getattr(fused_moe, name)))
    outputs = _of_sglang(tokens)
    assert bool(outputs[0].eq(0).all()) and bool(expected[1:].ne(0).any()) == (tokens > 1)
    torch.testing.assert_close(outputs, expected, rtol=2e-2, atol=2e-3)
