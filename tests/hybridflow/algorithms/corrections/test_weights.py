"""Importance weights and masks, by hand and as a plain loop."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.corrections.settings import CorrectionSettings
from hybridflow.algorithms.corrections.weights import correct, log_ratios, of_level, sums_of

# Three responses: ratios 2, 1/2 and 4; 1/4 and 3, with a token of the environment between; and none.
RATIOS = [2.0, 0.5, 4.0, 0.25, 1.0, 3.0]
MASK = torch.tensor([True, True, True, True, False, True])
LENGTHS = torch.tensor([3, 3, 0])


def ratios() -> Tensor:
    return torch.tensor(RATIOS, dtype=torch.float64).log().where(MASK, 0.0)


def weights(**settings: object) -> list[float]:
    return correct(ratios(), MASK, LENGTHS, CorrectionSettings(**settings)).weights.tolist()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1, 1, 1, 1, 0, 1]),
        ({"weights": "token", "truncate": None}, [2, 0.5, 4, 0.25, 0, 3]),
        ({"weights": "token"}, [2, 0.5, 2, 0.25, 0, 2]),
        ({"weights": "sequence", "truncate": None}, [4, 4, 4, 0.75, 0, 0.75]),
        ({"weights": "sequence", "truncate": 3.0}, [3, 3, 3, 0.75, 0, 0.75]),
        (
            {"weights": "geometric", "truncate": None},
            [4 ** (1 / 3)] * 3 + [0.75**0.5, 0, 0.75**0.5],
        ),
        ({"weights": "geometric", "truncate": 1.0}, [1, 1, 1, 0.75**0.5, 0, 0.75**0.5]),
        # IcePop: the ratio of a token within the bounds, 0 outside.
        ({"weights": "token", "mask": "token", "mask_low": 0.4, "mask_high": 3.5}, [2, 0.5, 0, 0, 0, 3]),
        ({"mask": "token", "mask_low": 0.0, "mask_high": 2.5}, [1, 1, 0, 1, 0, 0]),
        # A masked sequence: all of its tokens.
        ({"weights": "token", "mask": "sequence", "mask_low": 0.5, "mask_high": 2.0}, [0, 0, 0, 0.25, 0, 3]),
        ({"weights": "sequence", "mask": "sequence", "mask_low": 0.8, "mask_high": 5.0}, [4, 4, 4, 0, 0, 0]),
        ({"mask": "geometric", "mask_low": 0.9, "mask_high": 1.7}, [1, 1, 1, 0, 0, 0]),
        ({"mask": "geometric", "mask_low": 0.8, "mask_high": 1.5}, [0, 0, 0, 1, 0, 1]),
        # The worst token takes its whole response.
        ({"veto": 0.3}, [1, 1, 1, 0, 0, 0]),
        ({"veto": 0.6, "weights": "sequence"}, [0] * 6),
        ({"veto": 0.1, "weights": "token"}, [2, 0.5, 2, 0.25, 0, 2]),
    ],
)
def test_weights_by_hand(settings: dict[str, object], expected: list[float]) -> None:
    assert weights(**settings) == pytest.approx(expected, rel=1e-6)


def test_what_was_truncated_masked_and_vetoed_by_hand() -> None:
    result = correct(
        ratios(),
        MASK,
        LENGTHS,
        CorrectionSettings(weights="token", truncate=2.5, mask="token", mask_low=0.3, mask_high=3.5, veto=0.4),
    )
    assert result.truncated.tolist() == [False, False, True, False, False, True]
    assert result.low.tolist() == [False, False, False, True, False, False]
    assert result.high.tolist() == [False, False, True, False, False, False]
    assert result.vetoed.tolist() == [False, True, False]
    assert result.weights.tolist() == [2.0, 0.5, 0.0, 0.0, 0.0, 0.0]
    assert result.weights.dtype == torch.float32


def naive(ratio: list[list[float | None]], settings: CorrectionSettings) -> list[float]:
    """Token by token in Python floats; None is a token of the environment."""
    results: list[float] = []
    for response in ratio:
        ratios = [of_token for of_token in response if of_token is not None]
        levels = {"sequence": math.prod(ratios), "geometric": math.prod(ratios) ** (1 / len(ratios)) if ratios else 1.0}
        for of_token in response:
            if of_token is None:
                results.append(0.0)
                continue
            weight = 1.0
            if settings.weights is not None:
                weight = (levels | {"token": of_token})[settings.weights]
                weight = min(weight, settings.truncate or math.inf)
            if settings.mask is not None:
                bounded = (levels | {"token": of_token})[settings.mask]
                weight *= settings.mask_low <= bounded <= settings.mask_high  # type: ignore[operator]
            if settings.veto is not None:
                weight *= min(ratios) >= settings.veto
            results.append(weight)
    return results


@pytest.mark.parametrize("level", ["token", "sequence", "geometric", None])
@pytest.mark.parametrize("mask", ["token", "sequence", "geometric", None])
@pytest.mark.parametrize("veto", [None, 0.5])
def test_weights_against_a_plain_loop(level: str | None, mask: str | None, veto: float | None) -> None:
    torch.manual_seed(3)
    lengths = torch.randint(0, 6, (12,))
    loss_mask = torch.rand(int(lengths.sum())) < 0.8
    result = (0.4 * torch.randn(len(loss_mask), dtype=torch.float64)).where(loss_mask, 0.0)
    bounds = {"mask_low": 0.8, "mask_high": 1.6} if mask is not None else {}
    settings = CorrectionSettings(
        weights=level, truncate=1.3 if level is not None else None, mask=mask, veto=veto, **bounds
    )
    rows = [
        [math.exp(value) if inside else None for value, inside in zip(row.tolist(), of_row.tolist(), strict=True)]
        for row, of_row in zip(result.split(lengths.tolist()), loss_mask.split(lengths.tolist()), strict=True)
    ]
    assert correct(result, loss_mask, lengths, settings).weights.tolist() == pytest.approx(
        naive(rows, settings), rel=1e-6
    )


def test_equal_policies_have_weights_of_one_in_every_setting() -> None:
    logprobs = -torch.rand(6)
    ratio = log_ratios(logprobs, logprobs, MASK)
    for level in ("token", "sequence", "geometric"):
        settings = CorrectionSettings(weights=level, truncate=1.0, mask=level, mask_low=0.99, mask_high=1.01, veto=0.9)
        assert correct(ratio, MASK, LENGTHS, settings).weights.tolist() == MASK.float().tolist()


def test_nothing_outside_the_mask_is_read() -> None:
    dirt = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, torch.nan, 2.0])
    mine, engines = -torch.rand(6), -torch.rand(6)
    clean = log_ratios(mine, engines, MASK)
    soiled = log_ratios(mine.where(MASK, dirt), engines.where(MASK, dirt.flip(0)), MASK)
    assert torch.equal(soiled, clean)
    assert clean.dtype == torch.float64


def test_ratios_beyond_any_number_are_bounded_and_still_compared_as_they_are() -> None:
    far = torch.tensor([800.0, -800.0, 0.0], dtype=torch.float64)
    mask, lengths = torch.ones(3, dtype=torch.bool), torch.tensor([1, 1, 1])
    plain = correct(far, mask, lengths, CorrectionSettings(weights="token", truncate=None)).weights
    assert plain.tolist() == pytest.approx([math.exp(20), math.exp(-20), 1.0])
    settings = CorrectionSettings(mask="token", mask_low=1e-12, mask_high=1e12, veto=1e-10)
    assert correct(far, mask, lengths, settings).weights.tolist() == [0.0, 0.0, 1.0]


def test_the_weights_of_a_sample_do_not_depend_on_what_lies_beside_it() -> None:
    torch.manual_seed(5)
    lengths = torch.randint(0, 40, (9,))
    column = torch.randn(int(lengths.sum()), dtype=torch.float64)
    alone = torch.cat(
        [sums_of(entry, lengths[row : row + 1]) for row, entry in enumerate(column.split(lengths.tolist()))]
    )
    assert torch.equal(sums_of(column, lengths), alone)
    every = torch.ones(len(column), dtype=torch.bool)
    assert torch.equal(of_level(column, every, lengths, "sequence"), alone.repeat_interleave(lengths))


def test_shapes_and_masks_are_checked() -> None:
    with pytest.raises(ValueError, match="sampled_logprobs has shape"):
        log_ratios(torch.zeros(3), torch.zeros(4), torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"expected torch\.bool"):
        log_ratios(torch.zeros(3), torch.zeros(3), torch.ones(3))
