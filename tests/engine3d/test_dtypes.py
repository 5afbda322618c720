"""Sizes of dtypes against PyTorch's own."""

from __future__ import annotations

import torch

from engine3d.dtypes import ITEMSIZES


def test_sizes_are_those_of_pytorch() -> None:
    assert {name: getattr(torch, name).itemsize for name in ITEMSIZES} == ITEMSIZES
    assert all(str(getattr(torch, name)) == f"torch.{name}" for name in ITEMSIZES)
