"""Simulated engine ranks hold what a whole model of SGLang's holds, in its own process groups and in real ones."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from engine3d.errors import EngineError, UserError
from engine3d.models import model_spec
from engine3d.platform.cpu import sglang as sglang_cpu
from engine3d.reshard.describe import simulate
from engine3d.reshard.describe.simulate import auto_dtype, build_model, engine_rank, trace_engine, trace_engine_layout
from engine3d.reshard.describe.trace import LoadTrace, trace_load
from engine3d.sglang_source import attention_arguments
from tests.support.sglang_models import CASES, MODELS, hf_tensors
from tests.support.tiny_families import CONFIGS

DEEPSEEK_V3: dict[str, Any] = {
    **CONFIGS["deepseek_v3"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "head_dim": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "dtype": "bfloat16",
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tp", "ep"), CASES)
def test_few_layers_repeated_are_the_whole_model(name: str, tp: int, ep: int) -> None:
    tensors = hf_tensors(MODELS[name])
    simulated = trace_engine_layout(MODELS[name], tensors, tp, ep, torch.bfloat16)
    assert len(simulated) == tp
    for rank, trace in enumerate(simulated):
        with engine_rank(tp, ep, rank):
            assert trace == trace_load(build_model(MODELS[name], torch.bfloat16, "cpu"), tensors)
        assert trace.tensors == ()
    assert simulated[-1] == trace_engine(MODELS[name], tensors, tp, ep, tp - 1, torch.bfloat16)


def real_rank(
    config: dict[str, Any], tp: int, ep: int, attention_dp: int, rank: int, rendezvous: Path, traces: Any
) -> None:
    """One rank as SGLang's own model runner sets it up, with processes and gloo."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.runtime_context import get_context
    from sglang.srt.server_args import ServerArgs

    torch.set_num_threads(1)
    server_args = ServerArgs(model_path="dummy", tp_size=tp, ep_size=ep, device="cpu")
    for name, value in attention_arguments(attention_dp).items():
        setattr(server_args, name, value)
    get_context().set_server_args(server_args)
    parallel_state.set_custom_all_reduce(False)
    parallel_state.init_distributed_environment(
        backend="gloo", world_size=tp, rank=rank, local_rank=rank, distributed_init_method=f"file://{rendezvous}"
    )
    parallel_state.initialize_model_parallel(tp, ep, attention_data_parallel_size=attention_dp)
    model_config = type("ModelConfig", (), {"hf_config": None, "hidden_size": 32, "dtype": torch.bfloat16})
    initialize_dp_attention(server_args, model_config)  # type: ignore[arg-type]
    trace = trace_load(build_model(config, torch.bfloat16, "cpu"), hf_tensors(config))
    traces.put((rank, LoadTrace(trace.buffers, trace.holdings)))
    parallel_state.destroy_model_parallel()  # with its shared memory


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "attention_dp"),
    [
        ("deepseek_v3", 1),
        ("qwen3_moe", 2),
        pytest.param("deepseek_v3", 4, marks=pytest.mark.release),
        pytest.param("qwen3_moe", 1, marks=pytest.mark.release),
    ],
)
def test_process_groups_of_sglang_give_the_same(
    name: str, attention_dp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tp, ep = 4, 2
    tensors = hf_tensors(MODELS[name])
    simulated = trace_engine_layout(MODELS[name], tensors, tp, ep, torch.bfloat16, attention_dp=attention_dp)
    for variable, value in sglang_cpu.environment(1).items():
        monkeypatch.setenv(variable, value)
    # Forked, since SGLang takes a quarter of a minute to import.
    forking = multiprocessing.get_context("fork")
    traces = forking.Queue()
    rendezvous = tmp_path / "rendezvous"
    ranks = [
        forking.Process(
            target=real_rank, args=(MODELS[name], tp, ep, attention_dp, rank, rendezvous, traces), daemon=True
        )
        for rank in range(tp)
    ]
    for process in ranks:
        process.start()
    traced = dict(traces.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(timeout=60)
    assert [traced[rank] for rank in range(tp)] == simulated
    assert not [path for process in ranks for path in Path("/dev/shm").glob(f"sgl_shm_*_{process.pid}_*")]


def test_experts_are_cut_over_tp_by_ep_ranks() -> None:
    traces = trace_engine_layout(MODELS["qwen3_moe"], hf_tensors(MODELS["qwen3_moe"]), 4, 2)
    by_trace = [
        {holding.tensor: holding.box for holding in trace.holdings if "layers.0.mlp.experts" in holding.tensor}
        for trace in traces
    ]
    for rank, boxes in enumerate(by_trace):
        experts = range(4 * (rank // 2), 4 * (rank // 2) + 4)
        rows = (12 * (rank % 2), 12 * (rank % 2) + 12)
        assert {
            f"model.layers.0.mlp.experts.{expert}.{projection}.weight"
            for expert in experts
            for projection in ("gate_proj", "up_proj", "down_proj")
        } == boxes.keys()
        assert boxes[f"model.layers.0.mlp.experts.{experts[0]}.up_proj.weight"] == (rows, (0, 32))
        assert boxes[f"model.layers.0.mlp.experts.{experts[0]}.down_proj.weight"] == ((0, 32), rows)


@pytest.mark.slow
def test_deepseek_v3_on_8_ranks_is_traced_with_few_of_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {
        name: (tensor.shape, torch.bfloat16) for name, tensor in model_spec(DEEPSEEK_V3).rules.hf_tensors.items()
    }
    built: list[int] = []

    def build(hf_config: dict[str, Any], *arguments: Any) -> Any:
        built.append(hf_config["num_hidden_layers"])
        return build_model(hf_config, *arguments)

    monkeypatch.setattr(simulate, "build_model", build)
    traces = trace_engine_layout(DEEPSEEK_V3, tensors, 8, 8)
    assert built == [4] * 8  # three dense ones, and the first with experts
    parameters = sum(buffer.elements for buffer in traces[0].buffers)
    assert 671e9 / 8 < parameters < 1.06 * 671e9 / 8  # some of the latent attention is whole on every rank
    assert sum(len(trace.buffers) for trace in traces) == 8 * len(traces[0].buffers)


def test_sglang_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.runtime_context import get_context

    monkeypatch.setattr(parallel_state, "_TP", "a group")
    ropes = dict(factory._ROPE_DICT)
    config = dict(MODELS["deepseek_v3"])
    with pytest.raises(UserError):
        trace_engine(config, hf_tensors(config), 3, 3, 0)
    trace_engine(config, hf_tensors(config), 2, 2, 1)
    assert parallel_state._TP == "a group" and parallel_state._MOE_EP is None
    assert ropes == factory._ROPE_DICT
    assert get_context()._server_args is None
    assert config == MODELS["deepseek_v3"] and torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize(
    ("name", "tp", "ep", "message"),
    [
        ("qwen3_moe", 4, 3, "ep must divide tp"),
        ("qwen3_moe", 16, 16, "tp=16 ep=16: SGLang refuses it: assert self.total_num_heads % attn_tp_size == 0"),
        ("qwen3_moe-odd", 4, 4, "tp=4 ep=4: SGLang refuses it: assert self._num_global_routed % storage_ep_size == 0"),
        ("llama", 3, 1, "tp=3 ep=1: SGLang refuses it: "),
    ],
)
def test_a_layout_that_sglang_refuses(name: str, tp: int, ep: int, message: str) -> None:
    config = {**MODELS["qwen3_moe"], "num_experts": 6} if name == "qwen3_moe-odd" else MODELS[name]
    with pytest.raises(UserError, match=message.replace("(", r"\(")) as raised:
        trace_engine_layout(config, hf_tensors(config), tp, ep)
    assert "\n" not in str(raised.value)


def test_other_cuts_are_refused() -> None:
    with pytest.raises(UserError, match=r"server_args.enable_dp_attention: .* not simulated"):
        trace_engine_layout(
            MODELS["llama"], hf_tensors(MODELS["llama"]), 2, 1, server_args={"enable_dp_attention": True}
        )


def test_models_that_sglang_would_serve_without_some_of_their_weights() -> None:
    with pytest.raises(
        UserError, match=r"layers.0.mlp.gate_proj.bias: the trainer has it .*, the engine's model has not"
    ):
        trace_engine_layout(CONFIGS["llama-biases"], hf_tensors(CONFIGS["llama-biases"]), 1, 1)
    with pytest.raises(EngineError, match=r"layers.1.mlp.experts.w13_weight.*no tensor is loaded"):
        trace_engine_layout(CONFIGS["qwen3_moe"], hf_tensors(CONFIGS["qwen3_moe"]), 1, 1)


def test_another_number_of_layers_is_refused() -> None:
    with pytest.raises(UserError, match="the tensors are of 4 layers; the engine's model has 5"):
        trace_engine_layout({**MODELS["llama"], "num_hidden_layers": 5}, hf_tensors(MODELS["llama"]), 1, 1)


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(UserError, match="SGLang has no model of the architecture OtherForCausalLM"):
        trace_engine({**MODELS["llama"], "architectures": ["OtherForCausalLM"]}, hf_tensors(MODELS["llama"]), 1, 1, 0)


def test_the_dtype_is_the_configs_unless_given() -> None:
    assert auto_dtype({"dtype": "bfloat16"}) is auto_dtype({"torch_dtype": "torch.bfloat16"}) is torch.bfloat16
    assert auto_dtype({}) is auto_dtype({"dtype": "float32"}) is torch.float16
    trace = trace_engine(MODELS["llama"], hf_tensors(MODELS["llama"]), 1, 1, 0, torch.float32)
    assert {buffer.dtype for buffer in trace.buffers} == {"float32"}
