"""Attention that reads what requests share once for several of them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from engine3d.errors import UserError
from engine3d.models import load_model_spec
from engine3d.platform import platform
from engine3d.rollout.config import RolloutConfig
from engine3d.rollout.launch import ModelDirectory, server_arguments
from engine3d.rollout.scheduler.attention.cascade_attention import attend, requests_of_a_group, share, table_bytes
from engine3d.rollout.served import check_device, check_served
from tests.support import tiny_families
from tests.support.interpreted import run_interpreted
from tests.support.ptx import compiled_for_hopper

_WIDTH = 40


def _batch(
    requests: list[tuple[tuple[int, ...], int]], page_size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, int]:
    """(B, W) pages and (B,) tokens, and how many pages there are, of requests by the parts that they begin with.

    A part is a prefix tree's edge of that many whole pages: the same number at the same place is the same edge.
    """
    names: dict[tuple[Any, ...], int] = {}
    rows = []
    for number, (edges, _) in enumerate(requests):
        pages = [(edges[: depth + 1], page) for depth, edge in enumerate(edges) for page in range(edge % 10)]
        rows.append([names.setdefault(page, len(names)) for page in pages])
        rows[-1] += [names.setdefault((number, page), len(names)) for page in range(_WIDTH - len(pages))]
    mixed = torch.randperm(len(names), generator=generator, dtype=torch.int32)
    table = mixed[torch.tensor(rows)]
    lengths = torch.tensor([length for _, length in requests], dtype=torch.int32)
    used = (lengths + page_size - 1) // page_size
    # What is left from others: the same pages, though nothing is shared.
    table = torch.where(torch.arange(_WIDTH) < used[:, None], table, table[:1])
    return table, lengths, len(names)


def _attention(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(heads, D), (tokens, KV heads, D) -> (heads, D) and (heads,), in float64."""
    repeat = len(query) // keys.shape[1]
    keys, values = (tensor.double().repeat_interleave(repeat, dim=1) for tensor in (keys, values))
    scores = torch.einsum("hd,thd->ht", query.double(), keys) * scale
    return torch.einsum("ht,thd->hd", scores.softmax(-1), values), scores.logsumexp(-1)


def _plain(**given: Any) -> tuple[Tensor, Tensor]:
    """Compute what SGLang's `flash_attn_with_kvcache` does. Rows that it does not compute stay as they were."""
    query, starts = given["q"], given["cu_seqlens_q"].tolist()
    result = torch.full(query.shape, torch.nan, dtype=query.dtype)
    sums = torch.full((query.shape[1], len(query)), torch.nan)
    assert max(end - start for start, end in pairwise(starts)) <= given["max_seqlen_q"]
    for group, (start, end) in enumerate(pairwise(starts)):
        tokens = int(given["cache_seqlens"][group])
        for row in range(start, end):
            assert tokens and not given["causal"]
            keys, values = (
                given[name][given["page_table"][group].long()].flatten(0, 1)[:tokens] for name in ("k_cache", "v_cache")
            )
            output, of_row = _attention(query[row], keys, values, given["softmax_scale"])
            result[row], sums[:, row] = output.to(query.dtype), of_row
    return result, sums


_REQUESTS: list[tuple[tuple[int, ...], int]] = [
    ((12,), 20),  # pages are twice as many tokens: shares its two pages of four tokens and not its last ones
    ((3,), 31),
    ((12, 15), 40),
    ((12, 15), 37),
    ((12,), 17),
    *[((27,), 30 + number) for number in range(9)],  # more than a group has
    ((4, 33), 33),
    ((4, 33), 9),  # ends within what the other has
    ((4,), 25),
    ((), 1),
    ((), 1),
    ((3,), 5),
    ((7,), 0),  # padding
]

_ALIKE: list[tuple[tuple[int, ...], int]] = [((9,), 20)] * 17


def _compare(device: str, flash: Any, width: int = 16, dtype: torch.dtype = torch.float32) -> None:
    generator = torch.Generator().manual_seed(3)
    for page_size, requests, heads, kv_heads, groups_of in (
        (1, _REQUESTS, 4, 2, (3, 64)),
        (2, _REQUESTS, 4, 4, (8,)),
        (1, _REQUESTS[:1], 2, 1, (32,)),
        (1, _ALIKE, 20, 1, (requests_of_a_group(20, 1),)),
    ):
        table, lengths, pages = _batch(requests, page_size, generator)
        lengths = lengths.clamp(max=_WIDTH * page_size)
        count = int((lengths > 0).sum())
        table, lengths = table[:count], lengths[:count]
        query = torch.randn(count, heads, width, generator=generator).to(dtype)
        cache = [torch.randn(pages, page_size, kv_heads, width, generator=generator).to(dtype) for _ in range(2)]
        for most in groups_of:
            shared = share(table.to(device), lengths.to(device), page_size, most)
            keys, values = (tensor.to(device) for tensor in cache)
            output = attend(flash, query.to(device), keys, values, shared, softmax_scale=0.3)
            for request in range(count):
                local = [tensor[table[request].long()].flatten(0, 1)[: int(lengths[request])] for tensor in cache]
                right, _ = _attention(query[request], local[0], local[1], 0.3)
                limit = 1e-5 if dtype == torch.float32 else 2e-2
                torch.testing.assert_close(output[request].cpu().double(), right, rtol=limit, atol=limit)


def _groups(device: str) -> None:
    """Check the groups that are found, their sizes and the tokens that they share."""
    table, lengths, _ = _batch(_REQUESTS, 1, torch.Generator().manual_seed(5))
    shared = share(table.to(device), lengths.to(device), 1, 8)
    of_tokens = shared.shared.tolist()
    # 12 with those of 15 too, which share more with each other: they are a group, and 12 another.
    assert of_tokens[:5] == [2, 3, 7, 7, 2]
    assert of_tokens[5:14] == [7] * 9
    # What two share is at most the shorter one's tokens but its last; the third shares less with both than they do.
    assert of_tokens[14:17] == [7, 7, 0]
    assert of_tokens[17:] == [0, 0, 3, 0]
    requests, rows = len(_REQUESTS), shared.rows.tolist()
    entries = list(zip(pairwise(shared.starts.tolist()), shared.lengths.tolist(), strict=True))
    groups = [(rows[start:end], length) for (start, end), length in entries[:-requests] if end > start]
    assert groups == [
        ([0, 4], 2),
        ([1, 19], 3),
        ([2, 3], 7),
        ([5, 6, 7, 8, 9, 10, 11, 12], 7),
        ([13], 7),
        ([14, 15], 7),
    ]
    assert [rows[start:end] for (start, end), _ in entries[-requests:]] == [[number] for number in range(requests)]
    of_own = [length - shared_tokens for (_, length), shared_tokens in zip(_REQUESTS, of_tokens, strict=True)]
    assert [length for _, length in entries[-requests:]] == of_own
    of_groups = [number for members, _ in groups for number in members]
    assert [rows[row] for row in shared.group_row[of_groups].tolist()] == of_groups
    # A batch of other requests in the same memory has nothing of these.
    again = shared.of(4)
    again.find(table[16:20].to(device), lengths[16:20].to(device))
    assert again.shared.tolist() == [0, 0, 0, 0] and again.starts.tolist() == [0, 0, 0, 1, 2, 3, 4]
    assert again.lengths.tolist() == [0, 0, *lengths[16:20].tolist()]
    assert again.rows.tolist() == [*range(4), *[0] * 4]


def _interpreted(device: str) -> None:
    from engine3d.platform.cuda.kernels import cascade as cascade_kernels

    cascade_kernels._PAGES, cascade_kernels._HEADS = 16, 2  # several blocks
    _groups(device)
    _compare(device, _plain)


@pytest.mark.processes
def test_kernels_interpreted() -> None:
    run_interpreted(_interpreted)


@pytest.mark.slow
def test_kernels_compile_without_a_gpu() -> None:
    from engine3d.platform.cuda.kernels import cascade as kernels

    for kernel, constants in (
        (kernels._nearest, {"BLOCK": 256}),
        (kernels._follow, {"BLOCK": 1024}),
        (kernels._measure, {"BLOCK": 256}),
        (kernels._arrange, {"BLOCK": 256}),
        (kernels._write, {"BLOCK": 1024}),
    ):
        integers = ("requests", "stride", "page_size", "halvings", "groups", "most", "width")
        names = [name for name in kernel.arg_names if name not in constants]
        types = {name: "i32" if name in integers else "*i32" for name in names}
        compiled_for_hopper(kernel, types, constants, whole_words=[name for name in names if name not in integers])
    tensors = {"outputs": "*bf16", "sums": "*fp32", "result": "*bf16"}
    tensors |= dict.fromkeys(("group_row", "shared", "starts"), "*i32")
    numbers = dict.fromkeys(("count", "heads", "width"), "i32")
    tile, words = {"HEADS": kernels._HEADS, "WIDTH": 128}, ("outputs", "result", "width")
    text = compiled_for_hopper(kernels._merge, tensors | numbers, tile, whole_words=words)
    assert "ld.global.v4.b32" in text and "st.global.v4.b32" in text
    del numbers["heads"]
    compiled_for_hopper(kernels._merge, tensors | numbers, tile | {"heads": 1}, whole_words=words)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_it_is_attention_on_a_gpu() -> None:
    from sglang.jit_kernel.flash_attention import flash_attn_with_kvcache

    _groups("cuda")
    _compare("cuda", flash_attn_with_kvcache, width=128, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"deterministic": True}, "cascade_attention=true was not tried with deterministic=true, expected one of them"),
        ({"token_versions": True}, "was not tried with token_versions=true"),
        (
            {"tp": 2, "attention_dp": 2, "cuda_graph": False},
            "with attention_dp=2 and cuda_graph=false: expected CUDA graphs of all batches",
        ),
        (
            {"tp": 2, "attention_dp": 2, "server_args": {"cuda_graph_max_bs_decode": 8}},
            "with attention_dp=2 and server_args.cuda_graph_max_bs_decode: expected",
        ),
        ({"attention_backend": "flashinfer"}, "with attention_backend=flashinfer, expected fa3, or null"),
        ({"max_running_requests": 1025}, "with 1,025 requests at the same time .*, expected at most 1,024"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ValidationError, match=line):
        RolloutConfig(cascade_attention=True, **settings)
    split = RolloutConfig(cascade_attention=True, tp=2, attention_dp=2, max_running_requests=2048)
    assert split.attention_kernels == "fa3"


def test_a_cpu_is_refused(tmp_path: Path) -> None:
    config = RolloutConfig(cascade_attention=True)
    check_device(config, on_gpu=True)
    line = "cascade_attention=true on a CPU: SGLang has FlashAttention-3 on GPUs alone"
    with pytest.raises(UserError, match=line):
        check_device(config, on_gpu=False)
    if not platform.gpus:
        with pytest.raises(UserError, match=line):
            server_arguments(config, ModelDirectory(tmp_path, ("Qwen3ForCausalLM",), 100, 4096))


def test_latent_attention_is_refused(tmp_path: Path) -> None:
    config = RolloutConfig(cascade_attention=True)
    for name in ("llama", "deepseek_v3"):
        tiny_families.make(name, tmp_path / name)
    check_served(load_model_spec(tmp_path / "llama"), config)
    with pytest.raises(UserError, match="expected false, because DeepseekV3ForCausalLM has latent attention"):
        check_served(load_model_spec(tmp_path / "deepseek_v3"), config)


def test_as_many_go_together_as_a_tile_has_rows_for() -> None:
    assert [requests_of_a_group(heads, 4) for heads in (4, 8, 32, 64, 128)] == [64, 32, 8, 4, 4]
    assert table_bytes(1024, 4096) == 1024 * 4096 * 6
