"""The random numbers of SGLang's seeded sampling, on a CPU: SGLang computes them with a Triton kernel."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

_Words = npt.NDArray[np.uint32]


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 (32 bit) of 16 bytes for each row and column: seed low, seed high, position, column.

    `seed` and `positions` are (rows,), `columns` is (columns,), all integers; the result is (rows, columns) uint32, the
    same bits as `sglang.kernels.ops.sampling.murmur_hash.murmur_hash32` gives on a GPU.
    """
    seeds = seed.numpy().astype(np.uint64)
    rows = np.zeros(seeds.shape, np.uint32)
    for word in (seeds & np.uint64(0xFFFFFFFF), seeds >> np.uint64(32), positions.numpy()):
        rows = _mix(rows, word.astype(np.uint32))
    mixed = _mix(rows[:, None], columns.numpy().astype(np.uint32)[None, :])
    return torch.from_numpy(_finish(mixed, length=16))


def _mix(state: _Words, word: _Words) -> _Words:
    word = _rotate_left(word * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return _rotate_left(state ^ word, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _finish(state: _Words, length: int) -> _Words:
    state = state ^ np.uint32(length)
    state = (state ^ (state >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    state = (state ^ (state >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return state ^ (state >> np.uint32(16))


def _rotate_left(words: _Words, bits: int) -> _Words:
    return (words << np.uint32(bits)) | (words >> np.uint32(32 - bits))
