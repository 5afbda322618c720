"""Collective operations of SGLang's by reading each other's memory, and the kernels of GPUs that do."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine3d.platform import platform
from engine3d.rollout.scheduler import peer_collectives
from tests.support.distributed import meet_others, run_distributed
from tests.support.interpreted import run_interpreted
from tests.support.ptx import compiled_for_hopper


def _operations(device: str) -> None:
    everyone = meet_others(device)
    mine, ranks = everyone.rank(), everyone.size()
    group = SimpleNamespace(device_group=everyone, world_size=ranks)
    asked: list[str] = []

    def original(name: str) -> Callable[..., Any]:
        return lambda *_, **__: asked.append(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sglang.srt.distributed.parallel_state.get_tp_group", lambda: group)
        patch.setattr(peer_collectives, "PEER_BYTES", 4096)
        peer_collectives._connect(None, SimpleNamespace(is_draft_worker=False))
        for tokens in (3, 8, 1):
            generator = torch.Generator().manual_seed(tokens)
            drawn = torch.randn(2, ranks, ranks * tokens, 8, generator=generator).to(device, torch.bfloat16)
            for own, parts in zip(drawn[0, :, :tokens], drawn[1], strict=False):
                assert own.shape == (tokens, 8) and parts.shape == (ranks * tokens, 8)
            output = torch.empty(ranks * tokens, 8, dtype=torch.bfloat16, device=device)
            if mine % 2:
                time.sleep(0.02)
            peer_collectives.gather(original("gather"), group, output, drawn[0, mine, :tokens].contiguous())
            assert torch.equal(output, drawn[0, :, :tokens].flatten(0, 1))
            right = torch.zeros(tokens, 8, device=device)
            for rank in range(ranks):
                right += drawn[1, rank].unflatten(0, (ranks, tokens))[mine].float()
            result = torch.empty(tokens, 8, dtype=torch.bfloat16, device=device)
            if not mine % 2:
                time.sleep(0.02)
            for given in (result, None):
                sizes = [tokens] * ranks if given is None else None
                made = peer_collectives.add_up(original("sum"), group, drawn[1, mine], given, sizes)
                assert torch.equal(made, right.to(torch.bfloat16))
        assert not asked
        # What is too large, of unequal parts, of numbers, or between other ranks is left to SGLang.
        large = torch.zeros(ranks * 256, 8, dtype=torch.bfloat16, device=device)
        peer_collectives.gather(original("large"), group, large, large[:256])
        peer_collectives.add_up(original("large sum"), group, large)
        small = torch.zeros(2 * ranks, 8, dtype=torch.bfloat16, device=device)
        peer_collectives.add_up(original("unequal"), group, small, None, [1, 2 * ranks - 1, *[0] * (ranks - 2)])
        peer_collectives.add_up(original("integers"), group, small.int())
        peer_collectives.gather(original("odd"), group, small.view(-1)[: 2 * ranks], small.view(-1)[:2])
        peer_collectives.gather(original("others"), SimpleNamespace(world_size=ranks), small, small[:2])
        assert asked == ["large", "large sum", "unequal", "integers", "odd", "others"]
    dist.destroy_process_group()


@pytest.mark.processes
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_read_each_other(world: int) -> None:
    run_distributed(_operations, world, "cpu", timeout_s=120)


@pytest.mark.gpu
@pytest.mark.skipif(platform.gpus < 2, reason="needs two GPUs")
def test_ranks_read_each_other_on_gpus() -> None:
    run_distributed(_operations, min(4, platform.gpus), "cuda", timeout_s=300)


def _compare(device: str) -> None:
    from engine3d.platform.cuda import peer_kernels

    peer_kernels._WORDS = 32
    dtype = torch.float32 if device == "cpu" else torch.bfloat16  # which the interpreter rounds otherwise
    generator = torch.Generator().manual_seed(0)
    for ranks, count in ((2, 8), (3, 40), (4, 104)):
        memory = torch.randn(ranks, ranks, count, generator=generator).to(device, dtype)
        addresses = torch.tensor([part.data_ptr() for part in memory], device=device)
        for mine in range(ranks):
            into = torch.empty(ranks, count, dtype=dtype, device=device)
            peer_kernels.collect(addresses, mine, into)
            assert torch.equal(into, memory[:, 0])
            right = torch.zeros(count, device=device)
            for rank in range(ranks):
                right += memory[rank, mine].float()
            peer_kernels.collect_sum(addresses, mine, into[0])
            assert torch.equal(into[0], right.to(dtype))


@pytest.mark.processes
def test_kernels_interpreted() -> None:
    run_interpreted(_compare)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_on_a_gpu() -> None:
    _compare("cuda")


def _compile(device: str) -> None:
    from engine3d.platform.cuda import peer_kernels

    words = peer_kernels._WORDS
    text = compiled_for_hopper(
        peer_kernels._collect,
        {"addresses": "*i64", "into": "*i64", "words": "i32", "mine": "i32", "ranks": "i32"},
        {"WORDS": words},
        whole_words=("addresses", "into", "words"),
    )
    assert "ld.global.v2.b64" in text and "st.global.v2.b64" in text
    text = compiled_for_hopper(
        peer_kernels._collect_sum,
        {"addresses": "*i64", "into": "*bf16", "count": "i32", "mine": "i32"},
        {"RANKS": 4, "WORDS": words},
        whole_words=("addresses", "into", "count"),
    )
    assert "ld.global.v4.b32" in text and "st.global.v4.b32" in text


@pytest.mark.processes
def test_kernels_compile_without_a_gpu() -> None:
    run_interpreted(_compile, interpret=False)
