"""The digest of weights: of their bits, each in its place."""

from __future__ import annotations

import pytest
import torch

from engine3d.checkpoint.digest import Digest

CPU = torch.device("cpu")


def digest(*tensors: torch.Tensor) -> str:
    found = Digest(CPU, sum(tensor.nbytes for tensor in tensors))
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int16])
def test_wherever_a_tensor_lies_and_ends_its_bits_count(dtype: torch.dtype) -> None:
    within = torch.randint(-(2**15), 2**15, (64,), generator=torch.Generator().manual_seed(3)).to(dtype)
    for start, length in ((0, 64), (1, 17), (2, 8), (3, 1), (4, 7)):
        values = within[start : start + length]
        assert digest(values) == digest(values.clone())
        assert len({digest(values), digest(values[:-1]), digest(torch.cat((values, values.new_zeros(1))))}) == 3


@pytest.mark.parametrize("at", range(0, 64, 7))
def test_the_same_bit_of_two_words_counts(at: int) -> None:
    values = torch.randint(-(2**62), 2**62, (512,), generator=torch.Generator().manual_seed(4))
    other = values.clone()
    other[[3, 400]] ^= 1 << at if at < 63 else -(2**63)
    assert len({digest(values), digest(other), digest(~values)}) == 3


def test_what_is_larger_than_a_chunk_counts_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine3d.checkpoint.digest._CHUNK", 64)
    values = torch.randn(100, generator=torch.Generator().manual_seed(5))
    known = {digest(values), digest(values[:50], values[50:])}
    for place in (0, 15, 16, 17, 63, 99):
        other = values.clone()
        other.view(torch.int32)[place] ^= 1 << 31
        known |= {digest(other), digest(other[:50], other[50:])}
    other = values.clone()
    other[:16], other[16:32] = values[16:32], values[:16]  # two chunks
    assert len(known | {digest(other)}) == 15


def test_the_least_bit_counts_and_tensors_stand_in_an_order() -> None:
    values = torch.randn(64, generator=torch.Generator().manual_seed(2))
    other = values.clone()
    other.view(torch.int32)[17] ^= 1
    assert digest(values) != digest(other)
    one, two = values[:32], values[32:]
    assert len({digest(one, two), digest(two, one), digest(values), digest(one, two, torch.zeros(1))}) == 4
    assert digest(torch.zeros(1)) != digest(torch.zeros(2))
    assert len(digest(values)) == 16
