"""Floating point operations from sizes: against what the modules multiply, and against published models by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.reshard_plan import named_model
from engine3d.layout import Layout
from engine3d.models import ModelSpec, model_spec
from engine3d.training.flops import PASSES_OF_AN_UPDATE, pair_flops, sequence_flops, token_flops, update_flops
from tests.support.distributed import run_distributed
from tests.support.tiny_families import CONFIGS, changed, has_delta_nets
from tests.support.work import calls_of

LENGTH = 12
MODELS = [(name, False) for name in CONFIGS] + [("qwen3-tied", True), ("deepseek_v3", True)]


def _count_all() -> dict[tuple[str, bool], tuple[int, int, int]]:
    from engine3d.training.megatron import parallel

    layout = Layout()
    parallel.initialise(layout, seed=1, timeout_s=300)
    counted = {model: _count(*model, layout) for model in MODELS}
    parallel.release()
    parallel.leave()
    return counted


def _count(name: str, value_head: bool, layout: Layout) -> tuple[int, int, int]:
    """FLOPs that PyTorch counts in the module that an engine trains, with one sequence.

    Attention runs as the matrix multiplications that it is defined by, over whole squares of positions: these are the
    only batched ones of the model, and counted apart. The sequence is not packed, since Megatron-Core widens the values
    of packed latent attention to the width of its queries.

    Returns:
        Operations of the forward passes outside of attention and in it, and of forward and backward passes together.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from engine3d.models import build_model

    spec = _spec(name, value_head)
    model = build_model(spec, layout, torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)  # a new model holds nothing, perhaps not even numbers
    positions = torch.arange(LENGTH)[None]
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        output = model(positions, positions, None)
        attention = counter.get_flop_counts()["Global"][torch.ops.aten.bmm]
        outside = counter.get_total_flops() - attention
        output.sum().backward()
    return outside, attention, counter.get_total_flops()


def _spec(name: str, value_head: bool) -> ModelSpec:
    """A model with a layer of each kind that it has: counting an operation takes a hundred times as long as it."""
    layers = 4 if has_delta_nets(name) else 2
    return model_spec(changed(CONFIGS[name], num_hidden_layers=layers), value_head=value_head)


@pytest.mark.processes
def test_every_family_multiplies_what_is_counted() -> None:
    [counted] = run_distributed(_count_all, 1, timeout_s=400)
    for (name, value_head), (outside, attention, training) in counted.items():
        spec = _spec(name, value_head)
        assert outside == LENGTH * token_flops(spec), (name, value_head)
        if spec.sizes.delta is not None:  # chunks of 64 tokens, however few there are, and triangular systems
            continue
        # The causal half of the square that was counted.
        assert attention == 2 * LENGTH**2 * pair_flops(spec.sizes), (name, value_head)
        # All pairs are multiplied here, those outside of a window too.
        everywhere = replace(spec, sizes=replace(spec.sizes, window=None))
        assert sequence_flops(everywhere, LENGTH) == outside + attention / 2, (name, value_head)
        assert training == PASSES_OF_AN_UPDATE * (outside + attention), (name, value_head)


def test_pairs_outside_of_a_window_are_not_counted() -> None:
    spec = model_spec(CONFIGS["gpt_oss"])
    everywhere = replace(spec, sizes=replace(spec.sizes, window=None))
    assert spec.sizes.window == 6 and sequence_flops(spec, 6) == sequence_flops(everywhere, 6)
    # Of 10 tokens the last 4 have 1 to 4 tokens further away: 4^2 halves of pairs of two of four layers.
    assert sequence_flops(everywhere, 10) - sequence_flops(spec, 10) == 2 * 4**2 * pair_flops(spec.sizes) / 4


def test_a_published_mixture_of_experts_by_hand() -> None:
    spec = named_model("qwen3-30b-a3b")
    # Attention, router and eight experts of a layer, and the output layer; the look-up is what "3.3B active" has more.
    layer = 2048 * (32 * 128 * 2 + 4 * 128 * 2) + 2048 * 128 + 8 * 3 * 2048 * 768
    multiplied = 48 * layer + 151936 * 2048
    assert multiplied + 151936 * 2048 == pytest.approx(3.3e9, rel=0.02)
    assert token_flops(spec) == 2 * multiplied
    # Scores and sums over values of 32 heads with 128 elements, half of 2 * n^2 * 128 each.
    n = 4096
    assert sequence_flops(spec, n) == n * 2 * multiplied + 48 * 32 * 2 * (n * n * 128)
    assert PASSES_OF_AN_UPDATE * sequence_flops(spec, n) / n == pytest.approx(
        6 * multiplied + 6 * 48 * 32 * 128 * n, rel=1e-15
    )


def test_published_latent_attention_by_hand() -> None:
    spec = named_model("deepseek-v3")
    attention = 7168 * (1536 + 512 + 64) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    sparse = 7168 * 256 + 9 * 3 * 7168 * 2048
    multiplied = 61 * attention + 58 * sparse + 3 * 3 * 7168 * 18432 + 129280 * 7168
    assert multiplied == pytest.approx(37e9, rel=0.02)
    assert sequence_flops(spec, [2, 1000]).tolist() == [
        n * 2 * multiplied + n * n * 61 * 128 * (192 + 128) for n in (2, 1000)
    ]


def test_a_dense_model_is_two_operations_for_each_weight() -> None:
    spec = named_model("llama-3-70b")
    norms = (2 * 80 + 1) * 8192
    assert token_flops(spec) == 2 * (spec.parameter_count() - 128256 * 8192 - norms)


def test_frozen_weights_have_no_gradients_of_their_own() -> None:
    spec, lengths = _spec("qwen3_moe", False), [5, 12]
    complete, adapters = (update_flops(spec, lengths, adapters=adapters) for adapters in (False, True))
    pairs = np.square(lengths) * pair_flops(spec.sizes)
    np.testing.assert_array_equal(complete - 3 * pairs, 1.5 * (adapters - 3 * pairs))


def test_many_lengths_at_once() -> None:
    spec = model_spec(CONFIGS["deepseek_v3"])
    lengths = np.random.default_rng(0).integers(1, 32768, 100_000)
    assert calls_of(lambda: sequence_flops(spec, lengths)) < 100  # no loop over them
    flops = sequence_flops(spec, lengths)
    assert flops.shape == lengths.shape and flops.dtype == np.float64
    assert flops[[0, -1]].tolist() == [sequence_flops(spec, int(lengths[index])) for index in (0, -1)]
