"""Queries, keys and values in one step: against the formula by autograd, and kernels of GPUs against PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from engine3d.models.attention import normed_rotary
from engine3d.models.attention.normed_rotary import has_kernels, normed_and_rotated
from tests.support.interpreted import run_interpreted
from tests.support.ptx import compiled_for_hopper

EPS = 0.05
"""Large enough to show."""
_heads_of: Any = normed_rotary.heads_of
_gradients_of: Any = normed_rotary.gradients_of


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a case; `lengths` are those of its packed sequences."""

    groups: int
    heads: int
    head_dim: int
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


CASES = [
    _Sizes(groups=2, heads=4, head_dim=16, lengths=(3, 1, 4)),
    _Sizes(groups=1, heads=3, head_dim=8, lengths=(1,)),
    _Sizes(groups=4, heads=4, head_dim=2, lengths=(3, 3)),
    _Sizes(groups=3, heads=15, head_dim=32, lengths=(1, 2)),
    _Sizes(groups=4, heads=32, head_dim=128, lengths=(2, 1)),
]
NO_POWER = _Sizes(groups=2, heads=4, head_dim=12, lengths=(4, 3))
SMALL = 1e-5
"""Rounding of float32, of elements of order 1."""


def _drawn(sizes: _Sizes, dtype: torch.dtype) -> dict[str, Tensor]:
    """Arguments of `normed_and_rotated`, and the gradients of its results."""
    generator = torch.Generator().manual_seed(sizes.tokens)
    longest, dim = max(sizes.lengths), sizes.head_dim

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    half = torch.outer(torch.arange(longest) + 0.0, 100.0 ** -(torch.arange(dim // 2) / dim))
    return {
        "mixed": draw(sizes.tokens, sizes.groups, (sizes.heads // sizes.groups + 2) * dim).to(dtype),
        "query_weight": (1 + 0.3 * draw(dim)).to(dtype),
        "key_weight": (1 + 0.3 * draw(dim)).to(dtype),
        "angles": torch.cat([half, half], dim=1)[:, None, None, :],
        "positions": torch.cat([torch.arange(length) for length in sizes.lengths]).int(),
        "of_query": draw(sizes.tokens, sizes.heads, dim).to(dtype),
        "of_key": draw(sizes.tokens, sizes.groups, dim).to(dtype),
        "of_value": draw(sizes.tokens, sizes.groups, dim).to(dtype),
    }


def _expected(sizes: _Sizes, drawn: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values and gradients in float64: halves of heads as complex numbers, that a rotation multiplies."""
    wide = {name: drawn[name].double().requires_grad_() for name in ("mixed", "query_weight", "key_weight")}
    angles = drawn["angles"].double().squeeze()[drawn["positions"].long()].view(sizes.tokens, 1, -1)
    turn = torch.exp(1j * angles[..., : sizes.head_dim // 2])

    def turned(heads: Tensor, weight: Tensor) -> Tensor:
        norm = (heads * heads).sum(-1, keepdim=True) / sizes.head_dim
        first, second = (weight * heads / (norm + EPS) ** 0.5).tensor_split(2, dim=-1)
        product = torch.complex(first, second) * turn
        return torch.cat([product.real, product.imag], dim=-1)

    per_group = sizes.heads // sizes.groups
    queries, keys, values = [], [], []
    for group in wide["mixed"].unbind(1):
        *of_group, key, value = group.split(sizes.head_dim, dim=-1)
        assert len(of_group) == per_group
        queries += of_group
        keys.append(key)
        values.append(value)
    query = turned(torch.stack(queries, dim=1), wide["query_weight"])
    key = turned(torch.stack(keys, dim=1), wide["key_weight"])
    value = torch.stack(values, dim=1)
    torch.autograd.backward([query, key, value], [drawn[name].double() for name in ("of_query", "of_key", "of_value")])
    gradients = {name: tensor.grad for name, tensor in wide.items() if tensor.grad is not None}
    return {"query": query.detach(), "key": key.detach(), "value": value.detach(), **gradients}


def _computed(
    sizes: _Sizes, drawn: dict[str, Tensor], device: str = "cpu", frozen: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The same by `normed_and_rotated`."""
    trained = ("mixed", "query_weight", "key_weight")
    given = {name: drawn[name].to(device, copy=True).requires_grad_(name not in frozen) for name in trained}
    mixed, query_weight, key_weight = given.values()
    angles, positions = drawn["angles"].to(device), drawn["positions"].to(device)
    made = normed_and_rotated(mixed, query_weight, key_weight, angles, positions, groups=sizes.groups, eps=EPS)
    torch.autograd.backward(made, [drawn[name].to(device) for name in ("of_query", "of_key", "of_value")])
    values = dict(zip(("query", "key", "value"), (tensor.detach() for tensor in made), strict=True))
    return values | {name: tensor.grad for name, tensor in given.items()}


def _compare(actual: dict[str, Any], expected: dict[str, Tensor], limit: float) -> None:
    for name, right in expected.items():
        scale = max(1.0, float(right.abs().max()))
        torch.testing.assert_close(
            actual[name].cpu().double(),
            right.double(),
            rtol=limit,
            atol=limit * scale,
            msg=partial("{}: {}".format, name),
        )


@pytest.mark.parametrize("sizes", [*CASES, NO_POWER], ids=repr)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, SMALL), (torch.bfloat16, 2**-7)])
def test_it_is_the_formula(sizes: _Sizes, dtype: torch.dtype, limit: float) -> None:
    drawn = _drawn(sizes, dtype)
    actual = _computed(sizes, drawn)
    for name in ("query", "key", "value"):
        assert actual[name].is_contiguous() and actual[name].dtype == dtype
        heads = sizes.heads if name == "query" else sizes.groups
        assert actual[name].shape == (sizes.tokens, heads, sizes.head_dim)
    assert all(actual[name].dtype == dtype for name in ("mixed", "query_weight", "key_weight"))
    _compare(actual, _expected(sizes, drawn), limit)


def test_normed_heads_are_rounded_before_they_are_turned() -> None:
    """A norm that is a module of its own rounds them, as does SGLang."""
    sizes = CASES[0]
    drawn = _drawn(sizes, torch.bfloat16)
    queries = _computed(sizes, drawn)["query"]
    heads = drawn["mixed"].view(sizes.tokens, sizes.groups, -1, sizes.head_dim)[:, :, :-2].flatten(1, 2).float()
    normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + EPS) * drawn["query_weight"].float()
    angles = drawn["angles"][drawn["positions"].long(), 0]
    for rounded, same in ((normed.bfloat16().float(), True), (normed, False)):
        first, second = rounded.chunk(2, dim=-1)
        turned = (rounded * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()).bfloat16()
        assert torch.equal(turned, queries) == same


def test_frozen_weights_have_no_gradients_and_values_are_copies() -> None:
    sizes = CASES[1]
    drawn = _drawn(sizes, torch.float32)
    frozen, trained = _computed(sizes, drawn, frozen=("query_weight", "key_weight")), _computed(sizes, drawn)
    assert frozen["query_weight"] is None and frozen["key_weight"] is None
    assert torch.equal(frozen["mixed"], trained["mixed"])
    frozen = _computed(sizes, drawn, frozen=("query_weight",))
    assert frozen["query_weight"] is None and torch.equal(frozen["key_weight"], trained["key_weight"])
    given = [drawn[name] for name in ("mixed", "query_weight", "key_weight", "angles", "positions")]
    made = normed_and_rotated(*given, groups=sizes.groups, eps=EPS)
    assert len({tensor.untyped_storage().data_ptr() for tensor in (*made, drawn["mixed"])}) == 4


def test_only_the_projection_is_kept() -> None:
    sizes = CASES[0]
    drawn, kept = _drawn(sizes, torch.float32), list[Tensor]()
    given = [drawn[name].requires_grad_(name == "mixed") for name in ("mixed", "query_weight", "key_weight")]
    mixed, query_weight, key_weight = given

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        normed_and_rotated(
            mixed, query_weight, key_weight, drawn["angles"], drawn["positions"], groups=sizes.groups, eps=EPS
        )
    assert {tensor.data_ptr() for tensor in kept} == {
        tensor.data_ptr() for tensor in (*given, drawn["angles"], drawn["positions"])
    }


def test_what_has_kernels() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert [has_kernels(gpu, head_dim) for head_dim in (128, 2, 96, 1)] == [True, True, False, False]
    assert not has_kernels(cpu, 128)


def _kernels(device: str) -> None:
    """Assert that kernels are what PyTorch is."""
    from engine3d.models.attention import kernels

    forward: Any = kernels.forward
    backward: Any = kernels.backward
    programs, elements = kernels._PROGRAMS, kernels._ELEMENTS
    for dtype, limit in ((torch.float32, SMALL), (torch.bfloat16, 2**-7)):
        # Types differ in what is read and written, of which an interpreter need not see each case.
        for sizes in CASES[: 2 if device == "cpu" and dtype == torch.bfloat16 else None]:
            drawn = {name: tensor.to(device) for name, tensor in _drawn(sizes, dtype).items()}
            given: Any = [drawn[name] for name in ("mixed", "query_weight", "key_weight", "angles", "positions")]
            slopes: Any = [drawn[name] for name in ("of_query", "of_key", "of_value")]
            right = (*_heads_of(*given, EPS), *_gradients_of(*given, EPS, *slopes))
            # Fewer programs than tokens, and more; several tiles a token, and as few as may be, where these differ.
            few, usual = (2, 2 * sizes.head_dim), (programs, elements)
            for kernels._PROGRAMS, kernels._ELEMENTS in (few, usual) if few[1] != elements else (few,):
                made = forward(*given, EPS)
                back = backward(*given, EPS, *slopes, weights=True)
                names = ("query", "key", "value", "mixed", "weights")
                expected = dict(zip(names, right, strict=True))
                actual = dict(zip(names, (*made, *back), strict=True))
                assert all(actual[name].dtype == expected[name].dtype for name in names)
                assert torch.equal(actual["value"], expected["value"])
                _compare(actual, {name: tensor.cpu() for name, tensor in expected.items()}, limit)
            of_mixed, nothing = backward(*given, EPS, *slopes, weights=False)
            assert torch.equal(of_mixed, back[0]) and not nothing.any()
    _without_tokens(kernels, device)
    _of_no_number(kernels, device)


def _of_no_number(kernels: Any, device: str) -> None:
    """A nan and an infinity come out where they do of PyTorch, and nowhere else."""
    drawn = _drawn(CASES[0], torch.float32)
    drawn["mixed"][0, 1, 3], drawn["mixed"][4, 0, 40], drawn["of_query"][7, 2, 5] = torch.nan, torch.inf, torch.nan
    drawn = {name: tensor.to(device) for name, tensor in drawn.items()}
    given: Any = [drawn[name] for name in ("mixed", "query_weight", "key_weight", "angles", "positions")]
    slopes: Any = [drawn[name] for name in ("of_query", "of_key", "of_value")]
    expected = (*_heads_of(*given, EPS), *_gradients_of(*given, EPS, *slopes))
    results = (*kernels.forward(*given, EPS), *kernels.backward(*given, EPS, *slopes, weights=True))
    assert expected[0].isnan().any() and expected[1].isnan().any() and not expected[2].isnan().any()
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, equal_nan=True)


def _without_tokens(kernels: Any, device: str) -> None:
    drawn = {name: tensor.to(device) for name, tensor in _drawn(CASES[0], torch.float32).items()}
    none = {name: drawn[name][:0] for name in ("mixed", "positions", "of_query", "of_key", "of_value")}
    given = [(drawn | none)[name] for name in ("mixed", "query_weight", "key_weight", "angles", "positions")]
    assert [len(tensor) for tensor in kernels.forward(*given, EPS)] == [0, 0, 0]
    slopes = [none[name] for name in ("of_query", "of_key", "of_value")]
    of_mixed, of_weights = kernels.backward(*given, EPS, *slopes, weights=True)
    assert of_mixed.shape == none["mixed"].shape and of_weights.shape == (2, 16) and not of_weights.any()


@pytest.mark.processes
def test_kernels_interpreted() -> None:
    run_interpreted(_kernels)


@pytest.mark.slow
def test_kernels_are_compiled_for_a_gpu_that_is_not_there() -> None:
    """Compile for an absent GPU: no thread reads or writes less than 8 bytes of heads."""
    from engine3d.models.attention import kernels

    sizes = CASES[-1]
    constants = kernels._constants(sizes.groups, sizes.heads // sizes.groups, sizes.head_dim)
    warps = constants.pop("num_warps")
    given = dict.fromkeys(("mixed", "query_weight", "key_weight"), "*bf16") | {"angles": "*fp32", "positions": "*i32"}
    made = dict.fromkeys(("query", "key", "value"), "*bf16") | {"eps": "fp32"}
    slopes = dict.fromkeys(("of_query", "of_key", "of_value", "of_mixed"), "*bf16")
    rest = {"sums": "*fp32", "tokens": "i32", "eps": "fp32"}
    # Halves of heads as large as a tile, and values whole.
    tiles = 2 * (sizes.heads + sizes.groups) * sizes.head_dim // 2 // kernels._ELEMENTS
    for kernel, arguments, more, reads in (
        (kernels._normed_rotary_forward, given | made, {}, tiles),
        (kernels._normed_rotary_backward, given | slopes | rest, {"WEIGHTS": True}, 2 * tiles),
    ):
        pointers = [name for name, kind in arguments.items() if kind.startswith("*")]
        text = compiled_for_hopper(kernel, arguments, more | constants, whole_words=pointers, warps=warps)
        assert text.count("ld.global.v2.b32") == reads and text.count("ld.global.v4.b32") == 1
        assert text.count("st.global.v2.b32") == tiles and text.count("st.global.v4.b32") == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_on_a_gpu() -> None:
    _kernels("cuda")
    large = _Sizes(groups=4, heads=32, head_dim=128, lengths=(3000, 5000, 1000))
    for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, 2**-6)):
        drawn = _drawn(large, dtype)
        actual = _computed(large, drawn, "cuda")
        _compare(actual, _expected(large, drawn), limit)
        again = _computed(large, drawn, "cuda")
        assert all(torch.equal(actual[name], again[name]) for name in actual)
