"""Log-probs of given tokens from an engine, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine3d.errors import UserError
from engine3d.rollout import RolloutEngine
from tests.support.tiny_models import VOCAB_SIZE, make_qwen3_moe
from tests.support.tiny_rollout import TINY_ROLLOUT
from tests.support.warm import warm_starts

pytestmark = pytest.mark.processes


def test_log_probs_of_given_tokens_and_of_the_most_likely_ones(tmp_path: Path) -> None:
    model = make_qwen3_moe(tmp_path / "model", seed=0)
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(3, VOCAB_SIZE, (6,), generator=generator).tolist()
    # Two that begin alike, so that one is in the other's cache; the whole of one but its first token; its last one.
    sequences = [
        prompt + torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (5, 9, 1, 12)
    ]
    firsts = [6, 6, 1, 17]
    with warm_starts(), RolloutEngine(tmp_path / "model", TINY_ROLLOUT) as engine:
        for top in (1, 5):
            for sequence, first, given in zip(sequences, firsts, engine.logprobs(sequences, firsts, top), strict=True):
                with torch.no_grad():
                    every = model(torch.tensor([sequence])).logits[0, first - 1 : -1].double().log_softmax(dim=-1)
                expected = every.gather(1, torch.tensor(sequence[first:])[:, None])[:, 0]
                torch.testing.assert_close(torch.tensor(given.logprobs).double(), expected, atol=2e-5, rtol=1e-4)
                best = every.topk(top, dim=1)
                assert given.top_tokens == best.indices.tolist()
                tops = torch.tensor(given.top_logprobs).double()
                torch.testing.assert_close(tops, best.values, atol=2e-5, rtol=1e-4)
        assert engine.logprobs([], []) == []
        for arguments, line in (
            (([[3, 4]], [0]), "sequence 0 has 2 tokens and the first that is asked for is 0; expected at most the"),
            (([[3, 4]], [2]), "the first that is asked for is 2"),
            (([[3] * 65], [1]), "sequence 0 has 65 tokens"),
            (([[3, VOCAB_SIZE]], [1]), "sequence 0 has token id 128; the vocabulary is 0 to 127"),
            (([[3, 4]], [1, 1]), "2 first tokens for 1 sequences"),
            (([[3, 4]], [1], 0), "top is 0, expected 1 to 128, the vocabulary"),
        ):
            with pytest.raises(UserError, match=line):
                engine.logprobs(*arguments)
