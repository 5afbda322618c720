"""Collective operations of SGLang's by memory of each other, and the kernels of GPUs that do."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine3d.platform import platform
from engine3d.platform.cpu.memory import CpuPeerMemory
from engine3d.rollout.scheduler import peer_collectives
from tests.support.distributed import meet_others, run_distributed
from tests.support.interpreted import run_interpreted
from tests.support.ptx import compiled_for_hopper


def _operations(device: str) -> None:
    everyone = meet_others(device)
    mine, ranks = everyone.rank(), everyone.size()
    group = SimpleNamespace(device_group=everyone, world_size=ranks)
    calls: list[str] = []

    def original(name: str) -> Callable[..., Any]:
        return lambda *_, **__: calls.append(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sglang.srt.distributed.parallel_state.get_tp_group", lambda: group)
        patch.setattr(peer_collectives, "PEER_BYTES", 4096)
        peer_collectives._connect(None, SimpleNamespace(is_draft_worker=False))
        for tokens in (3, 8, 1):
            generator = torch.Generator().manual_seed(tokens)
            drawn = torch.randn(2, ranks, ranks * tokens, 8, generator=generator).to(device, torch.bfloat16)
            for local, full in zip(drawn[0, :, :tokens], drawn[1], strict=False):
                assert local.shape == (tokens, 8) and full.shape == (ranks * tokens, 8)
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
        assert not calls
        # What is too large, of unequal parts, of numbers, or between other ranks is left to SGLang.
        large = torch.zeros(ranks * 256, 8, dtype=torch.bfloat16, device=device)
        peer_collectives.gather(original("large"), group, large, large[:256])
        peer_collectives.add_up(original("large sum"), group, large)
        small = torch.zeros(2 * ranks, 8, dtype=torch.bfloat16, device=device)
        peer_collectives.add_up(original("unequal"), group, small, None, [1, 2 * ranks - 1, *[0] * (ranks - 2)])
        peer_collectives.add_up(original("integers"), group, small.int())
        peer_collectives.gather(original("odd"), group, small.view(-1)[: 2 * ranks], small.view(-1)[:2])
        peer_collectives.gather(original("others"), SimpleNamespace(world_size=ranks), small, small[:2])
        assert calls == ["large", "large sum", "unequal", "integers", "odd", "others"]
    dist.destroy_process_group()


@pytest.mark.processes
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.release), 3])
def test_ranks_exchange_tokens(world: int) -> None:
    run_distributed(_operations, world, "cpu", timeout_s=300)


@pytest.mark.gpu
@pytest.mark.skipif(platform.gpus < 2, reason="needs two GPUs")
def test_ranks_exchange_tokens_on_gpus() -> None:
    run_distributed(_operations, min(4, platform.gpus), "cuda", timeout_s=300)


def _exchanges(_device: str) -> None:
    """Kernels in processes that have mapped each other's memory, at the same time."""
    from engine3d.platform.cuda.kernels import peer as peer_kernels

    everyone = meet_others("cpu")
    mine, ranks = everyone.rank(), everyone.size()
    peer_kernels.SLOT_BYTES, peer_kernels._PROGRAMS = 64, 3
    layout = peer_kernels.ExchangeBuffer.of(ranks * 8 * 64, ranks)
    assert layout.slots == 8 and layout.nbytes == layout.flags + 2 * ranks * 8 * 64
    memory = CpuPeerMemory(everyone, layout.nbytes)
    memory.of(mine, (layout.nbytes,), torch.uint8).zero_()
    memory.meet()
    addresses = [memory.of(rank, (layout.nbytes,), torch.uint8).data_ptr() for rank in range(ranks)]
    exchange = peer_kernels.ExchangeKernels(mine, addresses, layout, 60.0, device="cpu")
    generator = torch.Generator().manual_seed(0)
    for number, count in enumerate((4, 16, 128, 40, 128, 100, 4)):
        drawn = torch.randn(2, ranks, ranks, count, generator=generator)
        if number % ranks == mine:
            time.sleep(0.05)
        gathered, total = torch.empty(ranks, count), torch.empty(count)
        exchange.all_gather(drawn[0, mine, 0].contiguous(), gathered)
        assert torch.equal(gathered, drawn[0, :, 0])
        exchange.reduce_scatter(drawn[1, mine].contiguous(), total)
        right = torch.zeros(count)
        for rank in range(ranks):
            right += drawn[1, rank, mine]
        assert torch.equal(total, right)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.processes
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.release), 3])
def test_kernels_interpreted(world: int) -> None:
    run_interpreted(_exchanges, ranks=world)


@pytest.mark.slow
def test_kernels_compile_without_a_gpu() -> None:
    from engine3d.platform.cuda.kernels import peer as peer_kernels

    tensors = ("flags", "halves", "counts", "tensor", "into")
    ints = dict.fromkeys(("words", "mine"), "i32") | {"half": "i32", "tries": "i32"}
    of_slot = {"RANKS": 4, "PADDED": 4, "OF_SLOT": peer_kernels.SLOT_BYTES // 8}
    others = {"SLOT_BYTES": peer_kernels.SLOT_BYTES, "TRAPS": True}
    types = {"flags": "*i64", "halves": "*i64", "counts": "*i32"}
    text = compiled_for_hopper(
        peer_kernels._all_gather,
        types | {"tensor": "*i64", "into": "*i64"} | ints,
        of_slot | others,
        whole_words=(*tensors, "words", "half"),
        warps=peer_kernels._WARPS,
    )
    assert "ld.global.v2.b64" in text and "st.global.v2.b64" in text and "ld.global.cg.v2.b64" in text
    assert "atom.global.sys.acquire" in text and "trap;" in text
    assert text.count("atom.global.sys.release") == 1  # for all other ranks at once
    text = compiled_for_hopper(
        peer_kernels._reduce_scatter,
        types | {"tensor": "*bf16", "into": "*bf16", "elements": "i32"} | dict(list(ints.items())[1:]),
        of_slot | {"OF_SLOT": peer_kernels.SLOT_BYTES // 2} | others,
        whole_words=("flags", "halves", "counts", "tensor", "into", "elements", "half"),
        warps=peer_kernels._WARPS,
    )
    assert "ld.global.v4.b32" in text and "st.global.v4.b32" in text and "ld.global.cg.v4.b32" in text
    assert text.count("atom.global.sys.release") == 1
