"""The controller's process over ranks that are no engines: what it holds of what they make."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import pytest
import ray
import torch

from engine3d.rollout import Request, SamplingConfig
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.stored_rows import gathered
from hybridflow.batch.stream_requests import SampleEnd, SampleEnds
from hybridflow.batch.worker_output import pack, send_tensors_as_arrays
from hybridflow.data.packed_prompts import PackedPrompts
from hybridflow.data.sampler import PromptOrder
from hybridflow.data.tasks import Example
from hybridflow.rewards.result import SampleScore
from hybridflow.rollout.controller import ControllerPrompts, start_controller
from hybridflow.rollout.ledger import StreamLimits
from hybridflow.rollout.stream_types import StepRows, StreamPlan

PROMPTS = [[1, 2, 3], [4, 5]]
SAMPLES, GROUPS, STEPS, TOKENS = 4, 4, 6, 250_000
THREADS = "beside"
SAMPLING = SamplingConfig(max_new_tokens=TOKENS)


@ray.remote(concurrency_groups={THREADS: 2})
class Rank:
    """Stands for an engine's rank, or one of reward functions: long responses, and their lengths as rewards."""

    def __init__(self) -> None:
        self._lock, self._submitted = threading.Lock(), list[tuple[Request, int]]()

    def call_beside(self, method: str, results: int, *arguments: Any) -> Any:
        return getattr(self, method)(*arguments)

    def of_stream(self, method: str, *arguments: Any) -> Any:
        return getattr(self, method)(*arguments)

    def submit(self, requests: Sequence[Request], prompts: Sequence[int]) -> None:
        submitted = list(zip(requests, prompts, strict=True))
        assert all(request.prompt == PROMPTS[prompt] and request.sampling == SAMPLING for request, prompt in submitted)
        with self._lock:
            self._submitted += submitted

    def take_ended(self, wait_s: float) -> tuple[SampleEnds, Any, Any]:
        with self._lock:
            submitted, self._submitted = self._submitted[:2], self._submitted[2:]
        if not submitted:
            time.sleep(0.05)
            return SampleEnds([]), None, None
        send_tensors_as_arrays()
        requests = [request for request, _ in submitted]
        count, tokens = len(requests), torch.arange(TOKENS) % 100
        batch = SampleBatch.from_generations(
            prompts=[request.prompt for request in requests],
            responses=[tokens.tolist()] * count,
            logprobs=[[-0.5] * TOKENS] * count,
            sample_ids=[request.sample for request in requests],
            group_ids=[request.group for request in requests],
            prompt_indices=[prompt for _, prompt in submitted],
            policy_versions=[0] * count,
            finish_reasons=["stop"] * count,
            token_versions=[[0] * TOKENS] * count,
        )
        packed, summary = pack(batch)
        ends = [
            SampleEnd(request.sample, request.group, request.index, TOKENS, 0, complete=True) for request in requests
        ]
        return SampleEnds(ends), summary, packed

    def score_rows(self, rows: Sequence[Any], examples: Mapping[int, Example]) -> list[dict[str, SampleScore]]:
        batch = gathered(rows).fetch()
        lengths = batch.response_lengths.tolist()
        assert {examples[prompt].answer for prompt in batch.prompt_indices.tolist()} <= {"even", "odd"}
        return [{"reward": SampleScore(float(length), False, {"length": float(length)})} for length in lengths]


def _own_bytes(process: psutil.Process) -> int:
    return int(process.memory_full_info().uss)


@pytest.mark.processes
@pytest.mark.usefixtures("ray_cluster")
def test_neither_the_controller_nor_the_driver_holds_tokens() -> None:
    node = ray.get_runtime_context().get_node_id()
    engines, scorer = [Rank.remote() for _ in range(2)], Rank.remote()
    plan = StreamPlan(StreamLimits(GROUPS, 100), SAMPLES, 4, len(engines), sampling=SAMPLING)
    tokens = PackedPrompts.of([torch.tensor(prompt) for prompt in PROMPTS])
    examples = [Example(str(index), ("even", "odd")[index % 2]) for index in range(len(tokens))]
    prompts = ControllerPrompts(tokens, examples)
    order = PromptOrder(len(tokens), 0)
    controller = start_controller(plan, prompts, order, engines, [node] * 2, THREADS, [scorer])
    here, there = psutil.Process(), psutil.Process(ray.get(controller.__ray_call__.remote(lambda _: os.getpid())))
    ray.get(controller.open.remote(0, GROUPS * STEPS, []))

    def take(version: int) -> StepRows:
        rows: StepRows = ray.get(controller.take.remote(version), timeout=120)
        ray.get(controller.learned.remote(version + 1, {}))
        return rows

    held = [take(0)]
    before = [_own_bytes(each) for each in (here, there)]
    held += [take(version) for version in range(1, STEPS)]
    grown = [_own_bytes(each) - was for each, was in zip((here, there), before, strict=True)]
    batch = gathered([row for rows in held for group in rows.groups for row in group.rows])
    assert int(batch.lengths.sum()) >= (count := GROUPS * STEPS * SAMPLES) * TOKENS
    assert len(set(batch.facts["sample_ids"].tolist())) == count
    assert all(score["reward"].total == TOKENS for rows in held for group in rows.groups for score in group.scores)
    tokens = (STEPS - 1) * GROUPS * SAMPLES * TOKENS
    assert all(each < tokens / 2 for each in grown), grown  # of which each alone has 4 bytes of its own at least
    ray.kill(controller)
