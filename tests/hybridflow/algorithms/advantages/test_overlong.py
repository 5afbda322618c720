"""The punishment of long responses, by hand."""

from __future__ import annotations

import pytest
import torch

from hybridflow.algorithms.advantages.overlong import overlong_penalty


def test_the_penalty_grows_within_the_buffer_and_no_further() -> None:
    lengths = torch.tensor([0, 6, 7, 8, 10, 11, 50])
    penalty = overlong_penalty(lengths, limit=10, buffer=4, factor=2.0)
    assert penalty.dtype == torch.float32
    assert penalty.tolist() == [0.0, 0.0, -0.5, -1.0, -2.0, -2.0, -2.0]
    assert not penalty[:2].signbit().any()  # no -0, which would be seen in files


def test_a_buffer_may_be_the_whole_response() -> None:
    assert overlong_penalty(torch.tensor([0, 1, 4]), limit=4, buffer=4, factor=1.0).tolist() == [0.0, -0.25, -1.0]


def test_the_paper_as_it_is_written() -> None:
    """Equation 13, case by case, with its own figures."""
    limit, cache = 20480, 4096
    for length in (1, 16384, 16385, 18000, 20480, 20481):
        if length <= limit - cache:
            expected = 0.0
        elif length <= limit:
            expected = ((limit - cache) - length) / cache
        else:
            expected = -1.0
        penalty = overlong_penalty(torch.tensor([length]), limit=limit, buffer=cache, factor=1.0)
        assert penalty.item() == pytest.approx(expected)


def test_what_makes_no_sense_is_refused() -> None:
    for buffer in (0, 11):
        with pytest.raises(ValueError, match=f"a buffer of {buffer} tokens before a limit of 10, expected 1 to that"):
            overlong_penalty(torch.tensor([1]), limit=10, buffer=buffer, factor=1.0)
    with pytest.raises(ValueError, match="lengths has shape"):
        overlong_penalty(torch.ones(2, 2), limit=10, buffer=2, factor=1.0)


def test_each_response_may_have_a_limit_of_its_own() -> None:
    lengths, limits = torch.tensor([8, 8, 8]), torch.tensor([8, 10, 100])
    penalty = overlong_penalty(lengths, limit=limits, buffer=4, factor=1.0)
    assert penalty.tolist() == [-1.0, -0.5, 0.0]
    with pytest.raises(ValueError, match="a buffer of 9 tokens before a limit of 8"):
        overlong_penalty(lengths, limit=limits, buffer=9, factor=1.0)
    with pytest.raises(ValueError, match="limit"):
        overlong_penalty(lengths, limit=limits[:2], buffer=4, factor=1.0)
