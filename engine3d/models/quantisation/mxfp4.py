"""MXFP4, in which files of gpt-oss have the matrices of experts: values of four bits in blocks of 32 with an exponent.

A tensor [experts, in, out] is two of bytes: NAME_blocks, [experts, out, in / 32, 16] with two values a byte, and
NAME_scales, [experts, out, in / 32]. What is read is dequantised, which is exact in bfloat16.
"""

from __future__ import annotations

from engine3d.startup.lazy_imports import torch

MXFP4 = "MXFP4"
"""Type of such a tensor."""
BLOCKS, SCALES = "_blocks", "_scales"
BLOCK = 32
"""Values of a block."""
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the lower three bits, of which the fourth is the sign (E2M1)."""


def dequantise(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantise blocks: each value times two to the power of its block's scale less 127.

    Source: transformers' `convert_moe_packed_tensors` (integrations/mxfp4.py).

    Args:
        blocks: [..., blocks, 16] uint8, of each byte the lower half first.
        scales: [..., blocks] uint8.

    Returns:
        [..., 32 * blocks] float32.
    """
    table = torch.tensor((*_VALUES, *(-value for value in _VALUES)))
    values = table[torch.stack((blocks & 0xF, blocks >> 4), dim=-1).int()].flatten(-2)
    return torch.ldexp(values, scales[..., None].int() - 127).flatten(-2)
