"""Divergences over k tokens and the rest: by hand, against autograd of the plain formulas, and as bounds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.losses.divergence import TAIL_FLOOR, Divergence, truncated_divergence, with_tail

KINDS: list[Divergence] = ["reverse_kl", "forward_kl", "jsd"]


def plain(q: Tensor, p: Tensor, kind: Divergence, beta: float = 0.5) -> Tensor:
    """The divergence of whole distributions, (..., V) probabilities."""

    def kl(one: Tensor, other: Tensor) -> Tensor:
        return (one * (one / other).log()).sum(dim=-1)

    mixed = beta * p + (1 - beta) * q
    values = {"reverse_kl": kl(q, p), "forward_kl": kl(p, q), "jsd": beta * kl(p, mixed) + (1 - beta) * kl(q, mixed)}
    return values[kind]


def two_distributions(rows: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    student, teacher = 2 * torch.randn(2, rows, vocabulary, generator=generator, dtype=torch.float64)
    return student.log_softmax(dim=-1), teacher.log_softmax(dim=-1)


def test_by_hand() -> None:
    """Two tokens of a half and a quarter, of a quarter and a half; a quarter is left to others in both."""
    q, p = torch.tensor([0.5, 0.25]).log(), torch.tensor([0.25, 0.5]).log()
    torch.testing.assert_close(with_tail(q).exp(), torch.tensor([0.5, 0.25, 0.25]))
    half = 0.25 * math.log(2)
    assert truncated_divergence(q, p, divergence="reverse_kl").item() == pytest.approx(half)
    assert truncated_divergence(q, p, divergence="forward_kl").item() == pytest.approx(half)
    # m is 3/8, 3/8, 1/4: half of (1/2 log 4/3 + 1/4 log 2/3) twice.
    expected = 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3)
    assert truncated_divergence(q, p, divergence="jsd").item() == pytest.approx(expected)


def test_what_the_student_gives_to_other_tokens_counts() -> None:
    """Renormalised over the two tokens both would be the same."""
    p = torch.tensor([0.6, 0.3]).log()
    q = torch.tensor([0.002, 0.001]).log()
    result = truncated_divergence(q, p, divergence="reverse_kl").item()
    expected = 0.003 * math.log(1 / 300) + 0.997 * math.log(9.97)
    assert result == pytest.approx(expected, rel=1e-5) and result > 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_lower_bound_that_grows_to_the_divergence_of_the_whole_vocabulary(kind: Divergence) -> None:
    student, teacher = two_distributions(50, 12)
    exact = plain(student.exp(), teacher.exp(), kind)
    order = teacher.argsort(dim=1, descending=True)
    before = torch.zeros(50, dtype=torch.float64)
    for k in range(1, 13):
        chosen = order[:, :k]
        divergence = truncated_divergence(student.gather(1, chosen), teacher.gather(1, chosen), divergence=kind)
        assert (divergence >= before - 1e-9).all() and (divergence <= exact + 1e-9).all()
        before = divergence
    # All tokens, or all but one, which is the rest.
    torch.testing.assert_close(before, exact, atol=1e-9, rtol=1e-9)
    same = truncated_divergence(student[:, :4].float(), student[:, :4].float(), divergence=kind)
    torch.testing.assert_close(same, torch.zeros(50), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 5])
def test_the_gradient_of_the_plain_formula(kind: Divergence, k: int) -> None:
    student, teacher = two_distributions(20, 12)
    chosen = teacher.argsort(dim=1, descending=True)[:, :k]
    q, p = student.gather(1, chosen), teacher.gather(1, chosen)
    given = q.float().requires_grad_()
    truncated_divergence(given, p.float(), divergence=kind, jsd_beta=0.3).sum().backward()
    exact = q.clone().requires_grad_()
    full = [torch.cat([entry.exp(), 1 - entry.exp().sum(dim=1, keepdim=True)], dim=1) for entry in (exact, p)]
    plain(full[0], full[1], kind, 0.3).sum().backward()
    assert given.grad is not None and exact.grad is not None
    torch.testing.assert_close(given.grad, exact.grad.float(), atol=2e-5, rtol=1e-4)


def test_the_mixture_of_jsd_goes_to_the_forward_kl() -> None:
    student, teacher = (distribution.float() for distribution in two_distributions(20, 6))
    little = truncated_divergence(student, teacher, divergence="jsd", jsd_beta=1e-3) / 1e-3
    forward = truncated_divergence(student, teacher, divergence="forward_kl")
    torch.testing.assert_close(little, forward, atol=1e-2, rtol=1e-1)


@pytest.mark.parametrize("kind", KINDS)
def test_where_nothing_is_left_to_others_all_is_finite(kind: Divergence) -> None:
    q = torch.tensor([[0.0, -40.0], [-1e-4, -30.0], [0.0, 0.0]], requires_grad=True)
    p = torch.tensor([[-30.0, 0.0], [-1e-4, -30.0], [0.0, 0.0]])
    divergence = truncated_divergence(q, p, divergence=kind)
    divergence.sum().backward()
    assert divergence.isfinite().all() and q.grad is not None and q.grad.isfinite().all()
    assert divergence[1:].tolist() == pytest.approx(
        [0.0, 0.0], abs=1e-6
    )  # the last is that of a token that does not count
    assert math.exp(with_tail(p)[0, -1]) == pytest.approx(TAIL_FLOOR)


def test_two_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="truncated_divergence"):
        truncated_divergence(torch.zeros(3, 2), torch.zeros(3, 1), divergence="jsd")
