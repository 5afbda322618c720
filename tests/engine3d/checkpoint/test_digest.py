"""The digest of weights: of their bits, each in its place."""

from __future__ import annotations

import pytest
import torch

from engine3d.checkpoint.digest import Digest

CPU = torch.device("cpu")


def digest(*tensors: torch.Tensor) -> str:
    found = Digest(CPU)
    for tensor in tensors:
        found.add(tensor)
    return found.text()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_bit_and_every_place_counts(dtype: torch.dtype) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    known, before = {digest(values)}, values.clone()
    assert torch.equal(values, before) and digest(values) in known
    for place in (0, 1, 500, 999):
        other = values.clone()
        other[place] = torch.nextafter(other[place].float(), torch.tensor(9.0)).to(dtype) + 0.5
        assert digest(other) not in known
        known.add(digest(other))
    swapped = values.clone()
    swapped[[3, 4]] = values[[4, 3]]
    assert digest(swapped) not in known
    assert digest(-values) not in known


def test_the_least_bit_counts_and_tensors_stand_in_an_order() -> None:
    values = torch.randn(64, generator=torch.Generator().manual_seed(2))
    other = values.clone()
    other.view(torch.int32)[17] ^= 1
    assert digest(values) != digest(other)
    one, two = values[:32], values[32:]
    assert len({digest(one, two), digest(two, one), digest(values), digest(one, two, torch.zeros(1))}) == 4
    assert digest(torch.zeros(1)) != digest(torch.zeros(2))
    assert len(digest(values)) == 16
