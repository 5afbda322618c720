"""Responses to a held-out prompt that pass."""

from __future__ import annotations

import pytest
import torch

from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.trainer.evaluation.of_set import Scored, _by_prompt


@pytest.mark.processes
@pytest.mark.parametrize("passing", [0.9, 0.7, 0.35, 0.45, 1.0])
def test_a_reward_equal_to_what_passes_passes(ray_cluster: None, passing: float) -> None:
    """Rewards are float32, of which these settings are no values."""
    batch = RemoteBatch.of(
        SampleBatch.from_generations(
            prompts=[[1]] * 3,
            responses=[[5]] * 3,
            logprobs=[[-1.0]] * 3,
            sample_ids=range(3),
            group_ids=[0] * 3,
            prompt_indices=[0] * 3,
            policy_versions=[0] * 3,
            finish_reasons=["stop"] * 3,
        )
    )
    scored = Scored(torch.tensor([passing, passing - 0.01, torch.nan]), None)
    groups, _ = _by_prompt(batch, scored, passing)
    assert [response.passes for response in groups[0]] == [True, False]
