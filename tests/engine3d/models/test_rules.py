"""Weight rules: every element of the HuggingFace model is written exactly once and read where it belongs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models import model_spec
from engine3d.models.rules import (
    ColumnParallel,
    Cut,
    ExpertNumbering,
    ExpertOrder,
    ExpertRows,
    GateUp,
    HFTensor,
    QueryGroups,
    RowParallel,
    Shard,
    Vocabulary,
    local_parameters,
    multiplications,
)
from tests.support.tiny_families import CONFIGS, DEEPSEEK, MOE, has_experts, may_cut
from tests.support.work import calls_of

LAYOUTS = [
    Layout(),
    Layout(tp=2, dp=2),
    Layout(tp=4, cp=2),
    Layout(pp=2, dp=3),
    Layout(pp=3),
    Layout(pp=2, vpp=2),
    Layout(pp=2, tp=2, stages=(3, 1)),
    Layout(tp=2, pp=4),
    Layout(ep=4, dp=8),
    Layout(tp=2, ep=2, dp=4),
    Layout(tp=4, ep=2, etp=2, pp=2),
    Layout(tp=2, etp=4, ep=2, dp=4, pp=2),
    Layout(tp=2, cp=2, ep=8, dp=2, pp=4),
]
QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}


def slices(box: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(*segment) for segment in box)


@cache
def on_meta(extents: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(extents, device="meta")


def _owners() -> Iterator[Any]:
    """Models on layouts in both orders of experts, with both kinds of layers; the shorter tests have each pair."""
    number = 0
    for name in CONFIGS:
        for layout in LAYOUTS:
            if not may_cut(name, layout):
                continue
            number += 1
            for order in ("ascending", "descending") if has_experts(name) else ("ascending",):
                for transformer_engine in (False, True):
                    pair = (number % 2, number // 2 % 2) if has_experts(name) else (0, number % 2)
                    further = (order == "descending", transformer_engine) != pair
                    marks = [pytest.mark.release] if further else []
                    yield pytest.param(name, layout, order, transformer_engine, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout", "order", "transformer_engine"), list(_owners()), ids=str)
def test_owners_write_every_element_once(
    name: str, layout: Layout, order: ExpertOrder, transformer_engine: bool
) -> None:
    spec = model_spec(CONFIGS[name])
    spec.check_layout(layout)
    written = {name: np.zeros(tensor.shape, dtype=np.int8) for name, tensor in spec.hf_tensors.items()}
    for _, coordinates in layout.ranks():
        parameters = local_parameters(
            spec.rules, layout, coordinates, transformer_engine=transformer_engine, expert_order=order
        )
        assert len({local.name for local in parameters}) == len(parameters)
        for local in parameters:
            filled = np.zeros(local.shape, dtype=np.int8)
            for tensor_slice in local.slices:
                assert tensor_slice.hf_name in written
                filled[slices(tensor_slice.local_box)] += 1
                extents = tuple(stop - start for start, stop in tensor_slice.local_box)
                assert list(tensor_slice.to_hf(on_meta(extents)).shape) == [
                    stop - start for start, stop in tensor_slice.hf_box
                ]
                assert all(
                    0 <= start < stop <= size
                    for (start, stop), size in zip(
                        tensor_slice.hf_box, spec.hf_shape(tensor_slice.hf_name), strict=True
                    )
                )
                if local.owner:
                    written[tensor_slice.hf_name][slices(tensor_slice.hf_box)] += 1
            padded = "word_embeddings" in local.name or "output_layer" in local.name
            assert filled.max(initial=0) <= 1 and (padded or filled.min() == 1)
    for tensor, count in written.items():
        assert (count == 1).all(), tensor


@pytest.mark.parametrize("config", [MOE, DEEPSEEK], ids=["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_copies_hold_the_same_pieces(layout: Layout, config: dict[str, Any]) -> None:
    spec = model_spec(config)
    by_shard: dict[Any, Any] = {}
    for _, at in layout.ranks():
        parameters = spec.local_parameters(layout, at, transformer_engine=True)
        dense = [(local.name, local.slices) for local in parameters if ".experts." not in local.name]
        experts = [(local.name, local.slices) for local in parameters if ".experts." in local.name]
        assert by_shard.setdefault(("dense", at.tp, at.pp), dense) == dense
        assert by_shard.setdefault(("experts", at.etp, at.ep, at.pp), experts) == experts


def filled_by(cut: Cut, tensors: dict[str, Any], shard: Shard) -> Any:
    """The local parameter that the segments make, -1 where there is padding."""
    local = np.full(cut.local_shape(shard.count), -1)
    for segment in cut.segments(shard):
        along = (slice(None),) * cut.axis
        source = tensors[segment.tensor.name]
        local[(*along, slice(segment.local_start, segment.local_start + segment.length))] = source[
            (*along, slice(segment.hf_start, segment.hf_start + segment.length))
        ]
    return local


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_query_groups_are_interleaved(count: int) -> None:
    groups, per_group, head_dim, hidden = 4, 3, 2, 5
    rows = {"q": groups * per_group * head_dim, "k": groups * head_dim, "v": groups * head_dim}
    start = 0
    tensors = {}
    for name, length in rows.items():
        tensors[name] = np.arange(start, start + length * hidden).reshape(length, hidden)
        start += length * hidden
    q, k, v = (HFTensor(name, (length, hidden)) for name, length in rows.items())
    heads = {name: tensor.reshape(groups, -1, head_dim, hidden) for name, tensor in tensors.items()}
    interleaved = np.concatenate([heads["q"], heads["k"], heads["v"]], axis=1).reshape(-1, hidden)
    for rank, expected in enumerate(np.split(interleaved, count)):
        shard = Shard(rank, count, ExpertNumbering(1))
        assert (filled_by(QueryGroups(q, k, v, groups), tensors, shard) == expected).all()


def test_cuts() -> None:
    tensors = {"a": np.arange(24).reshape(6, 4), "b": np.arange(100, 124).reshape(6, 4)}
    a, b = HFTensor("a", (6, 4)), HFTensor("b", (6, 4))
    second = Shard(1, 2, ExpertNumbering(3, "descending"))
    assert (filled_by(ColumnParallel(a), tensors, second) == tensors["a"][3:]).all()
    assert (filled_by(RowParallel(a), tensors, second) == tensors["a"][:, 2:]).all()
    assert (filled_by(GateUp(a, b), tensors, second) == np.concatenate([tensors["a"][3:], tensors["b"][3:]])).all()
    assert (filled_by(ExpertRows(a), tensors, second) == tensors["a"][[2, 1, 0, 5, 4, 3]]).all()
    last = filled_by(Vocabulary(a), tensors, Shard(3, 4, ExpertNumbering(1)))
    assert (last == -1).all() and last.shape == (2, 4)


def test_descending_experts_follow_their_router_rows() -> None:
    spec = model_spec(MOE)
    layout = Layout(ep=2, dp=2)
    for _, coordinates in layout.ranks():
        parameters = local_parameters(
            spec.rules, layout, coordinates, transformer_engine=True, expert_order="descending"
        )
        by_name = {local.name: local for local in parameters}
        rows = {
            tensor_slice.local_box[0][0]: tensor_slice.hf_box[0][0]
            for tensor_slice in by_name["decoder.layers.0.mlp.router.weight"].slices
        }
        for local in range(4):
            expert = by_name[f"decoder.layers.0.mlp.experts.linear_fc2.weight{local}"].slices[0].hf_name
            assert expert == f"model.layers.0.mlp.experts.{rows[coordinates.ep * 4 + local]}.down_proj.weight"


@pytest.mark.slow
def test_a_large_model_on_many_ranks_is_planned() -> None:
    spec = model_spec(QWEN3_30B)
    assert spec.parameter_count() == 30_532_122_624
    layout = Layout(tp=4, pp=8, ep=16, dp=16)
    spec.check_layout(layout)
    elements = 0
    for _, coordinates in layout.ranks():
        for local in spec.local_parameters(layout, coordinates, transformer_engine=True):
            if local.owner:
                for tensor_slice in local.slices:
                    size = 1
                    for start, stop in tensor_slice.hf_box:
                        size *= stop - start
                    elements += size
    assert elements == spec.parameter_count()
    assert layout.world_size == 512
    # A rank alone costs what the rank holds, however many there are.
    coordinates = next(iter(layout.ranks()))[1]
    alone = calls_of(lambda: spec.local_parameters(layout, coordinates, transformer_engine=True))
    assert alone < 50 * len(spec.local_parameters(layout, coordinates, transformer_engine=True))


def test_figures_of_a_model() -> None:
    spec = model_spec(QWEN3_30B)
    # By hand: attention, router and norms of a layer, eight experts, and the output layer.
    layer = 2048 * (32 * 128 * 2 + 4 * 128 * 2) + 2048 * 128 + 2 * 2048 + 2 * 128 + 8 * 3 * 2048 * 768
    assert spec.active_parameter_count() == 48 * layer + 151936 * 2048 + 2048
    assert spec.padded_vocabulary(Layout(tp=2)) == 151936
    assert model_spec(MOE).padded_vocabulary(Layout(tp=4)) == 100
    tied = model_spec(CONFIGS["qwen3-tied"])
    assert "lm_head.weight" not in tied.hf_tensors
    untied = model_spec({**CONFIGS["qwen3-tied"], "tie_word_embeddings": False})
    assert untied.parameter_count() - tied.parameter_count() == 97 * 32
    assert untied.active_parameter_count() == tied.active_parameter_count()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 3}, "tp=3: expected a divisor of num_attention_heads=4"),
        ({"pp": 5}, "pp=5: expected at most num_hidden_layers=4"),
        ({"ep": 3, "dp": 3}, "ep=3: expected a divisor of num_experts=8"),
        ({"etp": 5, "dp": 5}, "etp=5: expected a divisor of moe_intermediate_size=24"),
    ],
)
def test_layouts_that_do_not_divide_the_model(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^layout: {message}$"):
        model_spec(MOE).check_layout(Layout(**sizes))


def test_layers_of_ranks() -> None:
    rules = model_spec({**CONFIGS["llama"], "num_hidden_layers": 9}).rules
    uneven = Layout(pp=2, vpp=2, stages=(1, 3, 3, 2))
    assert [rules.rank_layers(uneven, pp) for pp in range(2)] == [
        (range(1), range(4, 7)),
        (range(1, 4), range(7, 9)),
    ]
    assert rules.rank_layers(Layout(pp=3, stages=(2, 4, 3)), 1) == (range(2, 6),)
    assert rules.rank_layers(Layout(), 0) == (range(9),)


def test_stages_of_published_models() -> None:
    """The output layer of a large vocabulary counts as the layers that it costs as much as."""
    config = {**DEEPSEEK, "num_hidden_layers": 12, "vocab_size": 160}
    small, large = model_spec(config).rules, model_spec({**config, "vocab_size": 16_000}).rules
    assert small.stage_layers(Layout(pp=4)) == (3, 3, 3, 3)
    assert large.head_cost > 2 * large.layer_costs[-1]
    assert large.stage_layers(Layout(pp=4))[-1] == 1
    assert large.stage_layers(Layout(pp=4, stages=(4, 4, 2, 2))) == (4, 4, 2, 2)
    experts = DEEPSEEK["num_experts_per_tok"]
    assert multiplications(small.layers[-1], experts) == small.layer_costs[-1] < multiplications(small.layers[-1], 99)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"pp": 2, "stages": (3, 2)}, "stages=3,2 add up to 5 layers, expected num_hidden_layers=4"),
        ({"pp": 2, "vpp": 3}, "pp*vpp = 2*3 = 6 stages: expected at most num_hidden_layers=4"),
    ],
)
def test_stages_that_do_not_fit_the_model(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(f'layout: {message}')}$"):
        model_spec(MOE).check_layout(Layout(**sizes))


def test_layouts_that_do_not_divide_groups_or_mlp() -> None:
    groups = {**CONFIGS["llama"], "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
    with pytest.raises(UserError, match="tp=2: expected a divisor or a multiple of num_key_value_heads=3"):
        model_spec(groups).check_layout(Layout(tp=2))
    with pytest.raises(UserError, match="tp=4: expected a divisor of intermediate_size=50"):
        model_spec({**MOE, "intermediate_size": 50}).check_layout(Layout(tp=4))
    model_spec({**MOE, "intermediate_size": 50, "mlp_only_layers": []}).check_layout(Layout(tp=4))
    with pytest.raises(UserError, match="ep=2 etp=1: expected 1 for both, because LlamaForCausalLM has no experts"):
        model_spec(CONFIGS["llama"]).check_layout(Layout(ep=2, dp=2))
    with pytest.raises(UserError, match="etp=2: expected 1, because experts of GptOssForCausalLM have biases, which"):
        model_spec(CONFIGS["gpt_oss"]).check_layout(Layout(tp=2, etp=2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture GPT2LMHeadModel is not supported; supported are Qwen3Moe",
        ),
        ({"architectures": "Qwen3"}, "architectures: expected a list of texts"),
        ({"architectures": [], "model_type": "gpt2"}, "architecture gpt2 is not supported"),
        ({"hidden_size": None}, "hidden_size: expected a whole number of at least 1, found null"),
        ({"hidden_size": "32"}, 'hidden_size: expected a whole number of at least 1, found "32"'),
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected a whole number of at least 1, found 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of num_attention_heads=4, found 3"),
        ({"head_dim": 15}, "head_dim: expected an even number"),
        ({"head_dim": None, "num_attention_heads": 6}, "hidden_size: expected a multiple of num_attention_heads=6"),
        ({"hidden_act": "gelu"}, 'hidden_act: expected "silu", found "gelu"'),
        ({"use_sliding_window": True}, "use_sliding_window: expected false, found true"),
        ({"layer_types": ["sliding_attention"]}, "layer_types: expected only"),
        ({"attention_dropout": 0.1}, "attention_dropout: expected 0"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: expected true or false, found 1"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4}},
            "rope_scaling: original_max_position_embeddings: expected a whole number of at least 1, found nothing",
        ),
        ({"rope_scaling": {"rope_type": "other"}}, "rope_scaling: expected rope_type default, linear, llama3 or yarn"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "or yarn .dynamic: transformers computes its freq"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "or yarn .longrope: its frequencies change where a batch has"),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config: expected null, found"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: factor: expected a number above 0, found nothing"),
        ({"rope_scaling": "linear"}, "rope_scaling: expected an object"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: expected 1.0"),
        ({"mlp_bias": True}, "mlp_bias: expected false where attention_bias is false"),
    ],
)
def test_configs_that_are_refused(change: dict[str, Any], message: str) -> None:
    values = {**CONFIGS["llama"], **change}
    with pytest.raises(UserError, match=message) as caught:
        model_spec(values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": None}, "num_local_experts: expected a whole number of at least 1, found nothing"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: expected at most num_experts=8, found 9"),
        ({"mlp_only_layers": 1}, "mlp_only_layers: expected a list of layer numbers, found 1"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob: expected true or false"),
    ],
)
def test_expert_configs_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        model_spec({**MOE, **change})
