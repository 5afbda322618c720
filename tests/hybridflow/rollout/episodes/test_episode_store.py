"""Ended episodes as samples: their masks and versions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from engine3d.rollout.config import SamplingConfig
from engine3d.rollout.requests import GIVEN, Request, Response
from hybridflow.batch.sample_fields import FinishReason
from hybridflow.rewards.result import SampleScore
from hybridflow.rollout.episodes.episode_store import episode_batch
from hybridflow.rollout.episodes.episodes import EndedEpisode


def _episode(sample: int, response: Response, engine: int) -> EndedEpisode:
    score = SampleScore(math.nan, True, {"environment": math.nan})
    request = Request(sample, [2, 3], SamplingConfig(), 3, sample % 2, response, prompt_index=1)
    return EndedEpisode(request, response, score, engine, 0.0, [2, 3])


def test_only_tokens_of_the_policy_are_loss_tokens() -> None:
    turn = Response([5, 6], [-0.5, -0.25], [7, 8], "stop")
    complete = Response(
        [*turn.extended([9, 9, 9]).token_ids, 5],
        [*turn.extended([9, 9, 9]).logprobs, -1.0],
        [7, 8, -1, -1, -1, 8],
        "stop",
    )
    failed = Response([], [], [], "abort")
    batch = episode_batch(
        [
            _episode(10, complete, 1),
            _episode(11, failed, -1),
            _episode(12, replace(failed.extended([9]), finish_reason="abort"), -1),
        ],
        version=4,
        times=[(1.0, 2.0)] * 3,
    )
    assert batch.responses() == [[5, 6, 9, 9, 9, 5], [], [9]]
    assert batch.prompts() == [[2, 3]] * 3
    assert batch.response_mask.tolist() == [True, True, False, False, False, True, False]
    assert batch.logprobs.tolist() == [-0.5, -0.25, 0.0, 0.0, 0.0, -1.0, 0.0]
    assert batch.token_versions is not None and batch.token_versions.tolist() == [7, 8, *[GIVEN] * 3, 8, GIVEN]
    assert batch.policy_versions.tolist() == [7, 4, 4]
    assert batch.newest_versions is not None and batch.newest_versions.tolist()[0] == 8
    assert batch.finish_reasons.tolist() == [FinishReason.STOP, FinishReason.ABORT, FinishReason.ABORT]
    assert batch.engines is not None and batch.engines.tolist() == [1, -1, -1]


@pytest.mark.parametrize(("versions", "oldest"), [([], -1), ([GIVEN], -1), ([GIVEN, 3, 2], 2), ([4, GIVEN, 5], 4)])
def test_the_oldest_version_is_that_of_a_drawn_token(versions: list[int], oldest: int) -> None:
    response = Response([0] * len(versions), [0.0] * len(versions), versions)
    assert response.oldest_version == oldest
