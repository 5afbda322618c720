"""The parts of SGLang's CPU platform that need no engine."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from engine3d.platform.cpu import sglang as sglang_cpu
from engine3d.platform.cpu.sglang_modules.sampling import murmur_hash32


def reference_murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, word by word in Python's integers."""
    state = 0
    for start in range(0, len(data), 4):
        word = int.from_bytes(data[start : start + 4], "little") * 0xCC9E2D51 % 2**32
        word = ((word << 15 | word >> 17) % 2**32) * 0x1B873593 % 2**32
        state ^= word
        state = ((state << 13 | state >> 19) % 2**32 * 5 + 0xE6546B64) % 2**32
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B % 2**32
    state = (state ^ state >> 13) * 0xC2B2AE35 % 2**32
    return state ^ state >> 16


def test_the_reference_gives_a_published_value() -> None:
    assert reference_murmur3(b"test") == 0xBA6BD213


def test_sampling_noise_is_murmur3_of_seed_position_and_column() -> None:
    seeds = torch.tensor([0, 1, 2**31 - 1, 2**40 + 7], dtype=torch.uint64)
    positions = torch.tensor([0, 5, 70000, 3])
    columns = torch.arange(130)
    hashed = murmur_hash32(seeds, positions, columns)
    assert hashed.dtype == torch.uint32 and hashed.shape == (4, 130)
    for row in range(4):
        for column in (0, 1, 129):
            words = int(seeds[row]).to_bytes(8, "little") + int(positions[row]).to_bytes(4, "little")
            assert int(hashed[row, column]) == reference_murmur3(words + column.to_bytes(4, "little"))


def test_every_rank_has_cores_of_its_own_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6, 7, 8})
    assert sglang_cpu.environment(2)["SGLANG_CPU_OMP_THREADS_BIND"] == "4,5|6,7"
    assert sglang_cpu.environment(8)["SGLANG_CPU_OMP_THREADS_BIND"] == "4|5|6|7|8|4|5|6"
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in sglang_cpu.environment(1)


def test_sglangs_own_cpu_engine_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sglang_cpu.activate() == "engine3d.platform.cpu.sglang_modules.platform.NativeCpuPlatform"
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert sglang_cpu.activate() is None
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert sglang_cpu.activate() is None


@pytest.mark.parametrize("group_tokens", [1 << 17, 8])
@pytest.mark.parametrize("latent", [False, True])
def test_attention_by_length_equals_sglangs_loop(
    group_tokens: int, latent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Backend

    from engine3d.platform.cpu.sglang_modules import attention as ours

    monkeypatch.setattr(ours, "_GATHERED_TOKENS", group_tokens)
    generator = torch.Generator().manual_seed(0)
    prefixes, news = torch.tensor([0, 3, 0, 0, 3, 1]), torch.tensor([4, 2, 4, 1, 2, 4])
    lengths = prefixes + news
    k_cache, v_cache = torch.randn(2, 64, 2, 8, generator=generator)
    if latent:  # one key for all heads, of which the value is a part
        k_cache, v_cache = k_cache[:, :1], k_cache[:, :1, :6]
    req_to_token = torch.randperm(64, generator=generator)[:56].view(7, 8)
    requests = torch.tensor([6, 0, 3, 2, 5, 1])
    common = (k_cache, v_cache, req_to_token, requests, lengths)
    options: dict[str, Any] = {"scaling": 0.3, "enable_gqa": True}

    query = torch.randn(len(lengths), 4, 8, generator=generator)
    loop, grouped = torch.empty(2, *query.shape[:-1], v_cache.shape[-1])
    Backend._run_sdpa_forward_decode(None, query, loop, *common, **options)
    ours.decode(query, grouped, *common, **options)
    torch.testing.assert_close(grouped, loop, atol=1e-6, rtol=1e-5)

    query = torch.randn(int(news.sum()), 4, 8, generator=generator)
    loop, grouped = torch.empty(2, *query.shape[:-1], v_cache.shape[-1])
    Backend._run_sdpa_forward_extend(None, query, loop, *common, prefixes, news, causal=True, **options)
    ours.extend(query, grouped, *common, prefixes, news, causal=True, **options)
    torch.testing.assert_close(grouped, loop, atol=1e-6, rtol=1e-5)
