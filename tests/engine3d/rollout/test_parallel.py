"""SGLang cut over two ranks generates what one rank generates."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from engine3d.rollout import RolloutEngine, SamplingConfig
from tests.engine3d.rollout.test_engine import reference_logprobs
from tests.support.checkpoint_sender import transfer
from tests.support.engine_responses import responses_of
from tests.support.tiny_rollout import TINY_ROLLOUT
from tests.support.warm import warm_starts

pytestmark = pytest.mark.processes

PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12]]
GREEDY = SamplingConfig(temperature=0, max_new_tokens=12)


def test_tensor_and_expert_parallel_ranks_agree_with_one(
    engine: RolloutEngine, tiny_model_dirs: tuple[Path, Path], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    expected = [group[0] for group in responses_of(engine, PROMPTS, GREEDY)]
    config = TINY_ROLLOUT.model_copy(
        update={"tp": 2, "ep": 2, "fused_sampling": True, "server_args": {"chunked_prefill_size": 64}}
    )
    with warm_starts(), RolloutEngine(tiny_model_dirs[1], config, log_path=log) as parallel:
        transfer(parallel, tiny_model_dirs[0], version=1)
        generations = [group[0] for group in responses_of(parallel, PROMPTS, GREEDY)]

        # A prompt is computed once, not for each of its samples.
        before, length, count = log.stat().st_size, 24, 12
        prompts = [[3 + number, *range(40, 39 + length)] for number in range(count)]
        responses_of(parallel, prompts, SamplingConfig(max_new_tokens=4), samples_per_prompt=4)
        computed = sum(map(int, re.findall(r"TP0.*#new-token: (\d+)", log.read_text()[before:])))
        assert length * count <= computed < 2 * length * count

        # Both ranks draw the same tokens: drawn apart, what a rank computes next would be of other tokens.
        assert log.read_text().count("drawn in one pass over the logits") == 2
        for sampling in (
            SamplingConfig(temperature=0.7, max_new_tokens=12),
            SamplingConfig(top_k=20, max_new_tokens=12),  # drawn by SGLang
        ):
            drawn = responses_of(parallel, PROMPTS, sampling, samples_per_prompt=4)
            assert len({tuple(response.token_ids) for response in drawn[0]}) == 4
            for prompt, group in zip(PROMPTS, drawn, strict=True):
                for response in group:
                    of_all = reference_logprobs(tiny_model_dirs[0], prompt, response.token_ids, sampling.temperature)
                    chosen = of_all.gather(1, torch.tensor(response.token_ids)[:, None])[:, 0]
                    assert response.logprobs == pytest.approx(chosen.tolist(), abs=1e-3)
    for generation, reference in zip(generations, expected, strict=True):
        assert generation.token_ids == reference.token_ids
        assert generation.logprobs == pytest.approx(reference.logprobs, abs=1e-3)
