"""Weights of tokens."""

from __future__ import annotations

import pytest
import torch

from tests.support.columns import MODES, token_weights


def test_token_weights_by_hand() -> None:
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    losses = torch.tensor([[1.0, 2.0, 3.0], [10.0, 99.0, 99.0], [99.0, 99.0, 99.0]])
    expected = {
        "token-mean": 16 / 4,
        "seq-mean-token-mean": (2.0 + 10.0) / 2,
        "seq-mean-token-sum": (6.0 + 10.0) / 2,
        "seq-mean-token-sum-norm": (6.0 + 10.0) / 2 / 16,
    }
    for mode, length in MODES:
        weights = token_weights(mask, mode, normalising_length=length)
        assert weights.dtype == torch.float32
        assert (weights * losses).sum().item() == pytest.approx(expected[mode], rel=1e-6)


def test_token_weights_refuse_what_has_no_meaning() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="none of 2 sequences has a loss token"):
        token_weights(~mask, "token-mean")
    with pytest.raises(ValueError, match="needs normalising_length"):
        token_weights(mask, "seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match="expected none with mode 'token-mean'"):
        token_weights(mask, "token-mean", normalising_length=4)
