"""Responses of an engine to a batch of prompts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from engine3d.rollout import Request, Response, RolloutEngine, SamplingConfig
from engine3d.rollout.config import Sampling

_sample_ids = itertools.count(1 << 40)
_groups = itertools.count()


def responses_of(
    engine: RolloutEngine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    samples_per_prompt: int = 1,
    seeds: Sequence[int] | None = None,
) -> list[list[Response]]:
    """Responses to each prompt, in order, `samples_per_prompt` each, submitted together.

    `seeds`: one for each prompt, of a deterministic engine; others than before if None.
    """
    groups = seeds if seeds is not None else list(itertools.islice(_groups, len(prompts)))
    requests = [
        Request(next(_sample_ids), prompt, sampling.for_prompt(len(prompt)), group, index)
        for prompt, group in zip(prompts, groups, strict=True)
        for index in range(samples_per_prompt)
    ]
    engine.submit(requests, together=True)
    responses = iter(engine.wait_for([request.sample for request in requests]))
    return [list(itertools.islice(responses, samples_per_prompt)) for _ in prompts]


def begun(engine: RolloutEngine, prompts: int, complete: int = 0) -> Future[list[list[Response]]]:
    """Long responses to many prompts, of which some tokens are drawn, and a number of responses complete."""
    host = engine._host
    assert host is not None
    earlier, reported = host._progress.done.keys(), host._progress_at
    long = SamplingConfig(max_new_tokens=60, ignore_eos=True)
    pool = ThreadPoolExecutor(1)
    responses = pool.submit(responses_of, engine, [[5]] * prompts, long)
    pool.shutdown(wait=False)
    while host._progress_at == reported or complete > sum(
        count for call, count in host._progress.done.items() if call not in earlier
    ):
        assert not responses.done()
        time.sleep(0.02)
    return responses


def versions_of(groups: Iterable[Iterable[Response]]) -> set[int]:
    """Versions of the weights that drew the tokens of all responses."""
    return {version for group in groups for response in group for version in response.versions}
