"""The trace of SGLang's loaders: done by hand it gives what they give, bit for bit; what it cannot follow it says."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine3d.errors import EngineError, UserError
from engine3d.reshard.describe.same_model import check_same_model
from engine3d.reshard.describe.shards import Buffer, Holding
from engine3d.reshard.describe.simulate import build_model, engine_rank
from engine3d.reshard.describe.trace import LoadTrace, Tensors, rebind_views, refresh_derived, trace_load
from tests.support.sglang_models import CASES, MODELS, hf_tensors, random_tensors, write_holdings

pytestmark = pytest.mark.slow

POISON = 77.0


def poison(model: nn.Module) -> dict[str, Tensor]:
    for parameter in model.parameters():
        parameter.data.fill_(POISON)
    parameters = {name: parameter.data for name, parameter in model.named_parameters()}
    return {name: data for name, data in parameters.items() if not name.startswith("visual.")}  # which is not sent


def traced(name: str, tp: int, ep: int, rank: int) -> LoadTrace:
    with engine_rank(tp, ep, rank):
        return trace_load(build_model(MODELS[name], torch.bfloat16, "cpu"), hf_tensors(MODELS[name]))


@pytest.mark.parametrize(("name", "tp", "ep"), CASES)
def test_what_is_traced_is_what_the_loader_makes(name: str, tp: int, ep: int) -> None:
    tensors = hf_tensors(MODELS[name])
    values = random_tensors(tensors)
    traces = []
    for rank in range(tp):
        with engine_rank(tp, ep, rank):
            model: Any = build_model(MODELS[name], torch.bfloat16, "cpu")
            parameters = poison(model)
            trace = trace_load(model, tensors)
            assert [buffer.name for buffer in trace.buffers] == list(parameters)
            assert all(torch.isin(tensor, torch.tensor([POISON, 0.0])).all() for tensor in trace.tensors)

            written = [tensor.clone() for tensor in trace.tensors]
            write_holdings(written, trace.holdings, values)
            for tensor, parameter in zip(trace.tensors, parameters.values(), strict=True):
                assert tensor.data_ptr() == parameter.data_ptr()
            model.load_weights(iter(values.items()))
        for buffer, actual, expected in zip(trace.buffers, written, trace.tensors, strict=True):
            assert torch.equal(actual, expected), buffer.name
        traces.append(trace)
    check_same_model(traces, shapes(tensors))


@pytest.mark.parametrize("name", MODELS)
def test_a_parameter_that_was_traced_may_give_its_memory_up(name: str) -> None:
    with engine_rank(1, 1, 0):
        model: Any = build_model(MODELS[name], torch.bfloat16, "cpu")
        gc.collect()
        gc.disable()
        try:
            trace_load(model, hf_tensors(MODELS[name]))
            for parameter in model.parameters():
                storage = parameter.untyped_storage()
                parameter.data = torch.empty_like(parameter.data)
                rebind_views(model)
                assert torch._C._storage_Use_Count(storage._cdata) == 1, "something else than this test has it"
        finally:
            gc.enable()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_derived_tensors_are_written_where_they_are(tp: int) -> None:
    config = MODELS["deepseek_v3"]
    old, new = random_tensors(hf_tensors(config)), random_tensors(hf_tensors(config))
    new = {name: tensor + 1 for name, tensor in new.items()}
    with engine_rank(tp, 1, tp - 1):
        models: list[Any] = [build_model(config, torch.bfloat16, "cpu") for _ in range(2)]
        model, expected = models
        model.load_weights(iter(old.items()))
        expected.load_weights(iter(new.items()))
        trace = trace_load(model, hf_tensors(config))
        derived = [getattr(layer.self_attn, name) for layer in model.model.layers for name in ("w_kc", "w_vc")]
        before = [tensor.clone() for tensor in derived]
        write_holdings(trace.tensors, trace.holdings, new)
        refresh_derived(model)
    expected_tensors = [getattr(layer.self_attn, name) for layer in expected.model.layers for name in ("w_kc", "w_vc")]
    for actual, stale, right in zip(derived, before, expected_tensors, strict=True):
        assert torch.equal(actual, right) and not torch.equal(actual, stale)


def test_routers_forget_the_weight_that_they_were_used_with_before() -> None:
    config = MODELS["glm4_moe"]
    with engine_rank(1, 1, 0):
        model: Any = build_model(config, torch.bfloat16, "cpu")
        model.load_weights(iter(random_tensors(hf_tensors(config)).items()))
        gate, hidden = model.model.layers[1].mlp.gate, torch.randn(2, config["hidden_size"])
        gate(hidden)
        address = gate._weight_fp32.data_ptr()
        gate.weight.data.add_(1.0)
        refresh_derived(model)
    assert torch.equal(gate(hidden), hidden @ gate.weight.float().T) and gate._weight_fp32.data_ptr() == address


def test_other_families_have_nothing_to_refresh() -> None:
    with engine_rank(1, 1, 0):
        refresh_derived(build_model(MODELS["llama"], torch.bfloat16, "cpu"))


def test_the_trace_leaves_the_model_as_it_was() -> None:
    config = MODELS["deepseek_v3"]
    with engine_rank(1, 1, 0):
        model: Any = build_model(config, torch.bfloat16, "cpu")
        model.load_weights(iter(random_tensors(hf_tensors(config)).items()))
        attention = model.model.layers[0].self_attn
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        w_kc = attention.w_kc.clone()
        trace_load(model, hf_tensors(config))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(attention.w_kc, w_kc)
    assert "post_load_weights" not in vars(model)


def test_a_shared_expert_may_be_one_of_the_experts() -> None:
    config = {**MODELS["deepseek_v3"], "n_shared_experts": 1}
    values = random_tensors(hf_tensors(config))
    with engine_rank(2, 1, 1, {"enforce_shared_experts_fusion": True}):
        model: Any = build_model(config, torch.bfloat16, "cpu")
        trace = trace_load(model, hf_tensors(config))
        written = [tensor.clone() for tensor in trace.tensors]
        write_holdings(written, trace.holdings, values)
        model.load_weights(iter(values.items()))
    assert all(map(torch.equal, written, trace.tensors))
    shapes = {buffer.name: buffer.shape for buffer in trace.buffers}
    assert shapes["model.layers.1.mlp.experts.w2_weight"] == (9, 32, 12)


def test_weights_that_are_rearranged_after_loading_are_refused() -> None:
    with engine_rank(1, 1, 0, {"moe_runner_backend": "flashinfer_trtllm"}):
        model: Any = build_model(MODELS["qwen3_moe"], torch.bfloat16, "cpu")
        with pytest.raises(EngineError, match=r"layers.0.mlp.experts.*flashinfer_trtllm permutes"):
            trace_load(model, hf_tensors(MODELS["qwen3_moe"]))


def test_a_tied_head_is_one_buffer() -> None:
    names = [buffer.name for buffer in traced("llama-tied", 2, 1, 0).buffers]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


def test_layers_that_the_trainer_has_not_are_missed() -> None:
    tensors = dict(hf_tensors(MODELS["qwen3_moe"]))
    del tensors["model.layers.2.mlp.experts.5.up_proj.weight"]
    with engine_rank(2, 1, 0), pytest.raises(EngineError, match=r"layers.2.mlp.experts.w13_weight.*384 of its 6144"):
        trace_load(build_model(MODELS["qwen3_moe"], torch.bfloat16, "meta"), tensors)


@pytest.mark.parametrize(
    ("name", "tensor", "shape", "message"),
    [
        ("llama", "model.norm.weight", (31,), r"shape \[31\].*parameter of shape \[32\]"),
        ("llama", "lm_head.weight", (96, 32), r"shape \[96, 32\].*parameter of shape \[64, 32\]"),
        ("qwen3_moe", "model.layers.0.self_attn.k_proj.weight", (16, 32), r"shape \[16, 32\].*parameter of shape"),
        ("qwen3_moe", "model.layers.0.mlp.experts.0.up_proj.weight", (24, 31), r"shape \[24, 31\].*parameter of shape"),
    ],
)
def test_a_shape_that_sglang_refuses(name: str, tensor: str, shape: tuple[int, ...], message: str) -> None:
    tensors = {**hf_tensors(MODELS[name]), tensor: (shape, torch.float32)}
    with engine_rank(2, 1, 1), pytest.raises(UserError, match=f"tensor {re.escape(tensor)} of {message}") as raised:
        trace_load(build_model(MODELS[name], torch.bfloat16, "meta"), tensors)
    assert "\n" not in str(raised.value)


def shapes(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, (shape, _) in tensors.items()}


def test_tensors_that_only_one_of_trainer_and_engine_has() -> None:
    traces = [traced("qwen3_moe", 2, 2, rank) for rank in range(2)]
    right = shapes(hf_tensors(MODELS["qwen3_moe"]))
    check_same_model(traces, right)
    name = "model.layers.0.self_attn.q_proj.weight"
    less = {tensor: shape for tensor, shape in right.items() if tensor != name}
    for trainers, message in (
        (right | {"shared.weight": (3,)}, "tensor shared.weight: the trainer has it in shape [3], engine 4 has not"),
        (less, f"tensor {name}: engine 4 has it in shape [64, 32], the trainer has not"),
        (right | {name: (99, 32)}, f"tensor {name}: the trainer has it in shape [99, 32], engine 4 in [64, 32]"),
        (right | {name: (63, 32)}, f"tensor {name}: the trainer has it in shape [63, 32], engine 4 in [64, 32]"),
        (right | {name: (64, 32, 1)}, f"tensor {name}: the trainer has it in shape [64, 32, 1], engine 4 in [64, 32]"),
    ):
        with pytest.raises(UserError) as raised:
            check_same_model(traces, trainers, "engine 4")
        assert str(raised.value) == message
    with pytest.raises(
        UserError, match=r"embed_tokens.weight of shape \[97, 32\]: engine 4 has 2048 of its elements on no"
    ):
        check_same_model(traces[1:], right, "engine 4")


# Loaders of all kinds, on a model of one parameter.

A, B = "a", "b"
Load = Callable[[nn.Parameter, dict[str, Tensor]], Any]


class Model(nn.Module):
    """One parameter of shape [6, 4], and a loader."""

    def __init__(self, load: Load) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((6, 4), POISON), requires_grad=False)
        self.load = load

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.load(self.weight, dict(weights))


def in_threads(parameter: nn.Parameter, weights: dict[str, Tensor]) -> None:
    with ThreadPoolExecutor() as executor:
        list(executor.map(lambda row: parameter.data[row].copy_(weights[A][row]), reversed(range(6))))


def row_by_row(parameter: nn.Parameter, weights: dict[str, Tensor]) -> None:
    for row in range(6):
        parameter.data[row] = weights[A].unbind()[row]


def twice(parameter: nn.Parameter, weights: dict[str, Tensor]) -> None:
    parameter.data.copy_(weights[A])
    parameter.data.copy_(weights[B].t())


def padded(parameter: nn.Parameter, weights: dict[str, Tensor]) -> None:
    parameter[:4].data.copy_(weights[A][2:])
    parameter[4:].data.fill_(0)


SHAPES: Tensors = {A: ((6, 4), torch.float32), B: ((4, 6), torch.float32)}
FOLLOWED: dict[str, Load] = {
    "whole": lambda p, w: p.copy_(w[A]),
    "transposed": lambda p, w: p.copy_(w[B].transpose(0, 1)),
    "transposed target": lambda p, w: p.data.t().copy_(w[B]),
    "chunks": lambda p, w: [p.data[2 * i : 2 * i + 2].copy_(chunk) for i, chunk in enumerate(w[A].chunk(3))],
    "split columns": lambda p, w: list(map(Tensor.copy_, p.data.split([3, 1], 1), w[A].split([3, 1], 1))),
    "one view for two": lambda p, w: p.view(3, 8).copy_(w[A].view(3, 8)),
    "heads": lambda p, w: p.data.view(2, 3, 4).copy_(w[A].unflatten(0, (3, 2)).transpose(0, 1)),
    "every second row": lambda p, w: [p.data[i::2].copy_(w[A].narrow(0, 3 * i, 3)) for i in range(2)],
    "row to column": lambda p, w: [p.data[:, i].copy_(w[B][i].squeeze().unsqueeze(0)[0]) for i in range(4)],
    "own memory": lambda p, w: p.copy_(w[A].to(torch.float64).contiguous().clone().to("cpu").detach()),
    "own memory, transposed": lambda p, w: p.copy_(w[B].t().contiguous()),
    "joined": lambda p, w: p.copy_(torch.cat([w[A][4:], w[B].t()[:3], w[A][:1]])),
    "joined and cut": lambda p, w: p.copy_(torch.cat([w[A], w[A]])[3:9]),
    "joined and cut to the end": lambda p, w: p.copy_(torch.cat([w[A], w[A]])[:][6:]),
    "joined columns": lambda p, w: p.copy_(torch.cat([w[A][:, 3:], w[A][:, :3]], dim=-1).narrow(-1, 0, 4)),
    "row by row": row_by_row,
    "in threads": in_threads,
    "twice": twice,
    "padded": padded,
}


@pytest.mark.parametrize("load", FOLLOWED.values(), ids=FOLLOWED.keys())
def test_views_and_copies_are_followed(load: Load) -> None:
    model = Model(load)
    trace = trace_load(model, SHAPES)
    assert trace.buffers == (Buffer("weight", "float32", (6, 4)),)
    actual = [model.weight.data.clone()]
    values = random_tensors(SHAPES)
    write_holdings(actual, trace.holdings, values)
    model.load_weights(values.items())
    assert torch.equal(actual[0], model.weight)
    assert trace_load(model, SHAPES) == trace


def test_what_is_written_over_is_not_held() -> None:
    assert {holding.tensor for holding in trace_load(Model(twice), SHAPES).holdings} == {B}


def test_a_whole_tensor_is_one_holding() -> None:
    trace = trace_load(Model(lambda p, w: p.view(2, 12).copy_(w[A].view(2, 12))), SHAPES)
    assert trace.holdings == (Holding(A, ((0, 6), (0, 4)), 0, 0, (4, 1)),)


REFUSED: dict[str, tuple[Load, str]] = {
    "item": (lambda p, w: p.fill_(w[A][0, 0].item()), "a: the loader calls aten._local_scalar_dense"),
    "sum": (lambda p, w: p.copy_(w[A] + w[A]), "a: the loader calls aten.add"),
    "mixed sum": (lambda p, w: p.copy_(torch.ones(6, 4) * w[A]), "a: the loader calls aten.mul"),
    "comparison": (lambda p, w: bool((w[A] > 0).any()), "a: the loader calls aten.gt"),
    "in place": (lambda p, w: p.data.add_(w[A]), "a: the loader calls aten.add_"),
    "changed": (lambda p, w: w[A].fill_(1.0), "a: the loader calls aten.fill_"),
    "joined with zeros": (lambda p, w: p.copy_(torch.cat([w[A][:3], torch.zeros(3, 4)])), "a: the loader joins"),
    "two casts": (lambda p, w: p.copy_(w[A].half()), "a: the loader casts torch.float32 to torch.float16"),
    "other bytes": (lambda p, w: p.copy_(w[A].view(torch.int32)), "a: the loader reads its bytes as another dtype"),
    "repeated": (lambda p, w: p.copy_(w[A][:1].expand(6, 4)), "it repeats an element"),
    "flat piece": (lambda p, w: p.view(-1)[:6].copy_(w[A].view(-1)[1:7]), "runs over the edge of a dimension"),
    "partly over": (
        lambda p, w: (p.copy_(w[A]), p[1:].copy_(w[A][1:])),
        "some of what is loaded into it is overwritten",
    ),
    "too little": (lambda p, w: p[:5].copy_(w[A][:5]), "weight of SGLang's model: no tensor.* 4 of its 24 elements"),
    "ones": (lambda p, w: p.fill_(1), r"calls aten.fill_.Scalar on memory of the model of shape \[6, 4\]"),
    "own values": (lambda p, w: p.copy_(torch.ones(6, 4)), "calls aten.copy_.default on memory of the model"),
    "elsewhere": (lambda p, w: torch.zeros(6, 4).copy_(w[A]), r"a: copied into memory of shape \[6, 4\]"),
}


@pytest.mark.parametrize(("load", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_followed_is_an_error(load: Load, message: str) -> None:
    model = Model(load)
    with pytest.raises(EngineError, match=message) as raised:
        trace_load(model, SHAPES)
    assert "\n" not in str(raised.value)
    assert (model.weight == POISON).all()


def test_a_tensor_that_the_loader_overwrites_with_zeros_is_none_of_the_ranks() -> None:
    model = Model(lambda p, w: p.copy_(w[A].zero_()[:]))
    assert trace_load(model, SHAPES).holdings == ()
    assert (model.weight == 0).all()


def test_a_registered_buffer_that_is_loaded_is_one_of_the_models() -> None:
    def load(parameter: nn.Parameter, weights: dict[str, Tensor]) -> None:
        parameter.copy_(weights[A])
        model.bias.copy_(weights[B][0])

    model: Any = Model(load)
    model.register_buffer("cosines", torch.ones(3))
    model.register_buffer("bias", torch.ones(6))
    assert [buffer.name for buffer in trace_load(model, SHAPES).buffers] == ["weight", "bias"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
