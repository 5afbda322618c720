"""Ended episodes as samples in the object store of the controller's node, which has their tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import ray

from engine3d.rollout.requests import GIVEN
from engine3d.startup.lazy_imports import torch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.stored_rows import StoredRow
from hybridflow.batch.worker_output import pack, send_tensors_as_arrays
from hybridflow.rollout.episodes.episodes import EndedEpisode


def episode_batch(episodes: Sequence[EndedEpisode], version: int, times: Sequence[tuple[float, float]]) -> SampleBatch:
    """Make samples of episodes. The loss mask leaves out what the policy did not write.

    Args:
        episodes: that are over.
        version: of an episode without a token of the policy.
        times: of the begin and the end of each, in seconds since the epoch.
    """
    requests = [episode.request for episode in episodes]
    responses = [episode.response for episode in episodes]
    oldest = [response.oldest_version for response in responses]
    credit = [episode.credit for episode in episodes if episode.credit is not None] or None
    batch = SampleBatch.from_generations(
        prompts=[episode.prompt for episode in episodes],
        responses=[response.token_ids for response in responses],
        logprobs=[response.logprobs for response in responses],
        sample_ids=[request.sample for request in requests],
        group_ids=[request.group for request in requests],
        prompt_indices=[request.prompt_index for request in requests],
        policy_versions=[version if drawn == GIVEN else drawn for drawn in oldest],
        finish_reasons=[str(response.finish_reason) for response in responses],
        response_masks=[[drawn >= 0 for drawn in response.versions] for response in responses],
        token_versions=[response.versions for response in responses],
        turns=None if credit is None else [turns.numbers for turns in credit],
        turn_returns=None if credit is None else [turns.returns for turns in credit],
        times=times,
    )
    return batch.replace(engines=torch.tensor([episode.engine for episode in episodes], dtype=torch.int64))


class RayEpisodeStore:
    """Puts episodes into the object store of this node.

    Args:
        clock: in seconds, by which episodes begin.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        send_tensors_as_arrays()

    def __call__(self, episodes: Sequence[EndedEpisode], version: int) -> Sequence[StoredRow]:
        now, passed = time.time(), self._clock()
        times = [(now - passed + episode.began, now) for episode in episodes]
        packed, summary = pack(episode_batch(episodes, version, times))
        stored = ray.put(packed), ray.put(summary), ray.get_runtime_context().get_node_id()
        return [StoredRow(stored[0], index, *stored[1:]) for index in range(len(episodes))]
