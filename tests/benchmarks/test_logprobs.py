"""Log-probs of stored samples beside transformers': of which tokens, and with which weights.

`tests/integration/test_rollout_stream.py` has it of a real run.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import logprobs
from benchmarks.logprobs import BEFORE, FIRST, LATER, Drawing, StoredResponse, distances, main, summary


class _Uniform:
    """A model of four tokens: the logits of the first three are 0, that of the last is the version of the weights."""

    def __init__(self, version: int) -> None:
        self.version = version

    def __call__(self, tokens: torch.Tensor, use_cache: bool) -> _Uniform:
        assert not use_cache
        self.logits = torch.zeros(1, tokens.shape[1], 4)
        self.logits[..., 3] = self.version
        return self


def test_each_token_is_compared_with_its_version_and_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "_loaded", lambda checkpoint, dtype, device: _Uniform(int(checkpoint.name)))

    def exact(version: int, token: int) -> float:
        logits = torch.tensor([0.0, 0.0, 0.0, version])
        return float((logits / 0.5).log_softmax(0)[token])

    response = StoredResponse(7, (0, 3, 3, 1), 1, (exact(2, 3), exact(3, 3), exact(3, 1) + 0.5), (2, 3, 3))
    by_token = {
        (distance.position, distance.kind): round(distance.distance, 5)
        for distance in distances(
            [response], {2: Path("2"), 3: Path("3"), 9: Path("9")}, Drawing("float32", temperature=0.5), "cpu"
        )
    }
    assert by_token == {
        (0, FIRST): 0.0,  # of version 1 there is no checkpoint
        (1, LATER): 0.0,
        (2, LATER): 0.5,
        (1, BEFORE): round(exact(3, 3) - exact(2, 3), 5),
        (2, BEFORE): round(abs(exact(3, 1) + 0.5 - exact(2, 1)), 5),
    }


def test_the_furthest_are_told() -> None:
    measured = [logprobs.Distance(sample, 0, 1, FIRST, sample / 1000) for sample in range(200)]
    summarised = summary(measured)
    assert (summarised["tokens"], summarised["p99"], summarised["most"]) == (200, 0.197, 0.199)
    assert summarised["mean"] == pytest.approx(0.0995)
    assert [token["sample"] for token in summarised["furthest"]] == [199, 198, 197, 196, 195]
    assert summary([]) == {}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "{run}: no stored samples, expected those of a run with samples.store=true"),
        (["--samples", "0"], "--samples: 0, expected at least 1"),
    ],
)
def test_what_is_wrong_gets_one_line(
    more: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path), *more]) == 2
    assert capsys.readouterr().err == f"logprobs.py: {said.format(run=tmp_path)}\n"
