"""The controller's process over ranks that are no engines: what it holds of what they make."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch

from engine3d.rollout import Request, Response, SamplingConfig
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.stored_rows import SampleEnd, SampleEnds, gathered
from hybridflow.batch.worker_output import pack, send_tensors_as_arrays
from hybridflow.data.packed_prompts import PackedPrompts
from hybridflow.data.sampler import PromptOrder
from hybridflow.data.tasks import Example
from hybridflow.data.tokenizer import make_character_tokenizer
from hybridflow.environments.config import EnvironmentConfig
from hybridflow.environments.episode_host import EpisodeHost
from hybridflow.environments.observation_tokens import ObservationTokens
from hybridflow.rewards.result import SampleScore
from hybridflow.rollout.controller import (
    ControllerActor,
    ControllerPrompts,
    ControllerThread,
    RolloutController,
    start_controller,
)
from hybridflow.rollout.episodes.episodes import EpisodePlan
from hybridflow.rollout.ledger import StreamLimits
from hybridflow.rollout.stream.groups import StepRows
from hybridflow.rollout.stream.plan import StreamPlan

PROMPTS = [[1, 2, 3], [4, 5]]
SAMPLES, GROUPS, STEPS, TOKENS = 4, 4, 4, 250_000
THREADS = "beside"
SAMPLING = SamplingConfig(max_new_tokens=TOKENS)


class _Rank:
    """Stands for an engine's rank, or one of reward functions: long responses, and their lengths as rewards."""

    def __init__(self) -> None:
        self._lock, self._submitted = threading.Lock(), list[Request]()

    def call_concurrently(self, method: str, results: int, *arguments: Any) -> Any:
        return getattr(self, method)(*arguments)

    def of_stream(self, method: str, *arguments: Any) -> Any:
        return getattr(self, method)(*arguments)

    def submit(self, requests: Sequence[Request], together: bool = False) -> None:
        for request in requests:
            assert list(request.prompt) == PROMPTS[request.prompt_index] and request.sampling == SAMPLING
            assert request.turn_start is None
        with self._lock:
            self._submitted += requests

    def take_ended(self, wait_s: float) -> tuple[SampleEnds, Any, Any]:
        with self._lock:
            requests, self._submitted = self._submitted[:2], self._submitted[2:]
        if not requests:
            time.sleep(0.05)
            return SampleEnds([]), None, None
        send_tensors_as_arrays()
        count, tokens = len(requests), torch.arange(TOKENS) % 100
        batch = SampleBatch.from_generations(
            prompts=[request.prompt for request in requests],
            responses=[tokens.tolist()] * count,
            logprobs=[[-0.5] * TOKENS] * count,
            sample_ids=[request.sample for request in requests],
            group_ids=[request.group for request in requests],
            prompt_indices=[request.prompt_index for request in requests],
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


class _Player(_Rank):
    """Stands for an engine's rank that guesses 1, 2, 3 and so on, or for one with environments."""

    def __init__(self, directory: str = "") -> None:
        super().__init__()
        self._directory = Path(directory)
        self._turns = dict[int, Response]()
        if directory:
            tokenizer = make_character_tokenizer(CHARACTERS, self._directory)
            config = EnvironmentConfig(path="hybridflow.environments.guess:Guess", workers=1)
            self._host = EpisodeHost(config, ObservationTokens(tokenizer))
            self._host.start()

    def of_environments(self, method: str, *arguments: Any) -> Any:
        return getattr(self._host, method)(*arguments)

    def submit(self, requests: Sequence[Request], together: bool = False) -> None:
        for request in requests:
            assert list(request.prompt) == PROMPTS[request.prompt_index] and request.turn_start is not None
            prefix = request.prefix or Response([], [], [])
            assert request.sampling.max_new_tokens == min(len(prefix.token_ids) + 2, 9)
            guess = 3 + CHARACTERS.index(str(1 + len(prefix.token_ids) // 3))
            turn = Response([guess, 2], [-0.5, -0.25], [0, 0])
            self._turns[request.sample] = Response(
                prefix.token_ids + turn.token_ids,
                prefix.logprobs + turn.logprobs,
                prefix.versions + turn.versions,
                "stop",
            )
            self._submitted.append(request)

    def take_ended(self, wait_s: float) -> tuple[SampleEnds, Any, Any]:
        submitted, self._submitted = self._submitted, []
        if not submitted:
            time.sleep(0.05)
        ends = [
            SampleEnd(
                request.sample, request.group, request.index, 0, 0, complete=True, turn=self._turns.pop(request.sample)
            )
            for request in submitted
        ]
        return SampleEnds(ends), None, None


CHARACTERS = "123+-?"
Rank: Any = ray.remote(concurrency_groups={THREADS: 2})(_Rank)  # type: ignore[call-overload]
Player: Any = ray.remote(concurrency_groups={THREADS: 2})(_Player)  # type: ignore[call-overload]


def _own_bytes(process: psutil.Process) -> int:
    return int(process.memory_full_info().uss)


@pytest.mark.processes
@pytest.mark.usefixtures("ray_cluster")
def test_neither_the_controller_nor_the_driver_holds_tokens() -> None:
    node = ray.get_runtime_context().get_node_id()
    engines, scorer = [Rank.remote() for _ in range(2)], Rank.remote()
    plan = StreamPlan(StreamLimits(GROUPS, 100), SAMPLES, 4, len(engines), sampling=SAMPLING)
    tokens = PackedPrompts.of(PROMPTS)
    examples = [Example(str(index), ("even", "odd")[index % 2]) for index in range(len(tokens))]
    prompts = ControllerPrompts(tokens, examples)
    order = PromptOrder(len(tokens), 0)
    handle = start_controller(plan, prompts, order, engines, [node] * 2, THREADS, [scorer])
    assert isinstance(handle, ControllerActor)
    controller = handle.actor
    here, there = psutil.Process(), psutil.Process(ray.get(controller.__ray_call__.remote(lambda _: os.getpid())))
    ray.get(controller.open.remote(0, GROUPS * STEPS, []))

    def take(version: int) -> StepRows:
        rows: StepRows = ray.get(controller.take.remote(version), timeout=120)
        ray.get(controller.trained.remote(version + 1, {}))
        return rows

    steps = [take(0)]
    before = [_own_bytes(process) for process in (here, there)]
    steps += [take(version) for version in range(1, STEPS)]
    grown = [_own_bytes(process) - was for process, was in zip((here, there), before, strict=True)]
    batch = gathered([row for rows in steps for group in rows.groups for row in group.rows])
    assert int(batch.lengths.sum()) >= (count := GROUPS * STEPS * SAMPLES) * TOKENS
    assert len(set(batch.per_sample["sample_ids"].tolist())) == count
    assert all(
        score["reward"].total == TOKENS for rows in steps for group in rows.groups for score in group.scores.values()
    )
    taken = (STEPS - 1) * GROUPS * SAMPLES * TOKENS
    assert all(growth < taken / 2 for growth in grown), grown  # of which each alone has 4 bytes of its own at least
    handle.close()


@pytest.mark.processes
@pytest.mark.usefixtures("ray_cluster")
def test_episodes_are_stored_with_what_the_policy_wrote_and_what_it_read(tmp_path: Path) -> None:
    node, limits = ray.get_runtime_context().get_node_id(), EpisodePlan(max_turns=3, max_turn_tokens=2)
    engine, environments = Player.remote(), Player.remote(str(tmp_path))
    sampling = SamplingConfig(max_new_tokens=9)
    plan = StreamPlan(StreamLimits(GROUPS, 1), SAMPLES, 4, 1, sampling=sampling, episodes=limits)
    prompts = ControllerPrompts(PackedPrompts.of(PROMPTS), [Example("", "3"), Example("", "1")])
    handle = start_controller(plan, prompts, PromptOrder(2, 0), [engine], [node], THREADS, [environments])
    handle.call("open", 0, GROUPS, []).result(60)
    rows: StepRows = handle.call("take", 0).result(60)
    batch = gathered([row for group in rows.groups for row in group.rows]).fetch()
    higher, (one, two, three) = 3 + CHARACTERS.index("+"), (3 + CHARACTERS.index(guess) for guess in "123")
    for prompt, tokens in zip(batch.prompt_indices.tolist(), batch.responses(), strict=True):
        assert tokens == ([one, 2] if prompt else [one, 2, higher, two, 2, higher, three, 2])
    drawn = [token != higher for tokens in batch.responses() for token in tokens]
    assert batch.response_mask.tolist() == drawn and set(batch.prompt_indices.tolist()) == {0, 1}
    assert batch.finish_reasons.tolist() == [0] * GROUPS * SAMPLES
    scores = [score["reward"] for group in rows.groups for score in group.scores.values()]
    assert {score.total for score in scores} == {1.0} and not any(score.dropped for score in scores)
    assert {score.metrics["environment/turns"] for score in scores} == {1.0, 3.0}
    handle.close()


def test_a_controller_in_a_thread_ends_its_calls_as_it_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait_for_ever(self: RolloutController) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(RolloutController, "drain", wait_for_ever)
    plan = StreamPlan(StreamLimits(GROUPS, 0), SAMPLES, 4, 0, sampling=SAMPLING, together=True)
    handle = start_controller(plan, ControllerPrompts(PackedPrompts.of([]), []), None, [], [], THREADS)
    assert isinstance(handle, ControllerThread)
    draining = handle.call("drain")
    time.sleep(0.1)
    handle.close()
    assert draining.cancelled() and not handle._thread.is_alive()
