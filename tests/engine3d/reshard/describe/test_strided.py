"""Views of contiguous tensors, told as boxes: every element of a view is in one box, at the right place."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from torch import Tensor

from engine3d.reshard.describe.strided import BoxOfView, NotABox, boxes_of_view


def elements(boxes: list[BoxOfView]) -> dict[tuple[int, ...], int]:
    """Map each element of the tensor to its position on the other side."""
    positions: dict[tuple[int, ...], int] = {}
    for box in boxes:
        for index in product(*(range(*edges) for edges in box.box)):
            inside = zip(index, box.box, box.strides, strict=True)
            position = box.offset + sum((i - start) * stride for i, (start, _), stride in inside)
            assert positions.setdefault(index, position) == position
    return positions


def boxes_of(view: Tensor, shape: tuple[int, ...], other: Tensor) -> list[BoxOfView]:
    return boxes_of_view(
        shape, int(view.storage_offset()), view.shape, view.stride(), int(other.storage_offset()), other.stride()
    )


def random_view(tensor: Tensor, chooser: random.Random) -> Tensor:
    for _ in range(chooser.randrange(4)):
        dimension = chooser.randrange(tensor.dim())
        size = tensor.shape[dimension]
        match chooser.randrange(5):
            case 0:
                start = chooser.randrange(size)
                tensor = tensor.narrow(dimension, start, chooser.randint(1, size - start))
            case 1:
                tensor = tensor.transpose(dimension, chooser.randrange(tensor.dim()))
            case 2:
                factor = chooser.choice([n for n in range(1, size + 1) if size % n == 0])
                tensor = tensor.unflatten(dimension, (factor, size // factor))
            case 3:
                tensor = tensor.unsqueeze(dimension)
            case 4 if tensor.dim() > 1:
                tensor = tensor.select(dimension, chooser.randrange(size))
    return tensor


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_every_element_is_in_one_box_at_its_position(seed: int) -> None:
    chooser = random.Random(seed)
    shape = tuple(chooser.choice([1, 2, 3, 4, 6]) for _ in range(chooser.randint(1, 3)))
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    view = random_view(tensor, chooser)
    permutation = random.Random(seed).sample(range(view.dim()), view.dim())
    other = torch.arange(2 * view.numel())[view.numel() :].view([view.shape[d] for d in permutation])
    other = other.permute([permutation.index(d) for d in range(view.dim())])
    expected = dict(zip(view.flatten().tolist(), other.flatten().tolist(), strict=True))
    for position, other_position in elements(boxes_of(view, shape, other)).items():
        assert other_position == expected.pop(int(tensor[position]))
    assert not expected


def test_a_merged_view_is_one_box_of_the_tensor() -> None:
    flat = torch.empty(2, 3, 4).view(-1)
    assert boxes_of(flat, (2, 3, 4), flat) == [BoxOfView(((0, 2), (0, 3), (0, 4)), 0, (12, 4, 1))]


def test_an_empty_view_is_no_box() -> None:
    empty = torch.empty(4, 6)[:, 6:]
    assert boxes_of(empty, (4, 6), empty) == []


@pytest.mark.parametrize(
    ("view", "reason"),
    [
        (torch.empty(4, 6).view(-1)[2:10], "over the edge"),
        (torch.empty(4, 6)[:1].expand(3, 6), "repeats an element"),
        (torch.empty(4, 6).as_strided((2, 2), (9, 1)), "across a dimension"),
        (torch.empty(4, 6).as_strided((2, 6), (6, 1), 3), "over the edge"),
    ],
)
def test_what_is_no_box(view: Tensor, reason: str) -> None:
    with pytest.raises(NotABox, match=reason):
        boxes_of(view, (4, 6), view)
