"""Gradients of a router's logits against float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from engine3d.models.experts.router import wide_logits

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_as_exact_as_what_they_are_kept_in(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    generator = torch.Generator().manual_seed(1)
    drawn = (torch.randn(*shape, generator=generator) for shape in ((64, 2, 256), (32, 256)))
    hidden, weight = (tensor.to(device, torch.bfloat16).requires_grad_() for tensor in drawn)
    gradient = torch.randn(64, 2, 32, generator=generator).to(device)
    logits = wide_logits(hidden, weight)
    assert logits.dtype == torch.float32 and logits.shape == gradient.shape
    logits.backward(gradient)  # type: ignore[no-untyped-call]
    exact = gradient.double()
    expected = {
        "logits": (logits.detach(), hidden.detach().double() @ weight.detach().double().t()),
        "hidden": (hidden.grad, exact @ weight.detach().double()),
        "weight": (weight.grad, exact.flatten(0, 1).t() @ hidden.detach().double().flatten(0, 1)),
    }
    for name, (actual, right) in expected.items():
        assert actual is not None
        torch.testing.assert_close(actual.double(), right, rtol=1e-2, atol=1e-2, msg=partial("{}: {}".format, name))
    for name in ("hidden", "weight"):
        computed, right = expected[name]
        assert computed is not None and computed.dtype == torch.bfloat16
        # With the upper half of the gradient alone it would be one in three that is rounded otherwise.
        assert (computed != right.bfloat16()).double().mean() < 0.03
