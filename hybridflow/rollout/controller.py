"""The rollout controller's process: a Ray actor that runs a `RolloutStream` over the engines' own actors.

Between it and the engines go ids and lengths. Samples lie in the object store of the node whose engine made them, and
go from there to whoever learns from them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any, Protocol

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from engine3d.rollout.config import Sampling
from engine3d.rollout.requests import EngineStats, Request
from hybridflow.batch.load_balance import even_ranges
from hybridflow.data.packed_prompts import PackedPrompts
from hybridflow.data.prompts import DrawnPrompt
from hybridflow.data.sampler import PromptOrder
from hybridflow.data.tasks import Example
from hybridflow.environments.environment import Task
from hybridflow.rollout.episodes.episode_store import RayEpisodeStore
from hybridflow.rollout.episodes.episodes import EpisodeSetup
from hybridflow.rollout.other_requests import OtherRows
from hybridflow.rollout.stream.engines import RemoteEngine, RemoteEpisodes, RemoteScorer
from hybridflow.rollout.stream.groups import StepRows, StreamState
from hybridflow.rollout.stream.plan import StreamPlan
from hybridflow.rollout.stream.stream import RolloutStream

_CLOSE_S = 10.0
"""Seconds that the controller's thread has to end."""


@dataclass(frozen=True)
class ControllerPrompts:
    """The prompts of training, as a controller needs them. Files are read in its process, on the driver's host.

    Args:
        tokens: of each.
        examples: of each, for reward functions and environments; none without such.
    """

    tokens: PackedPrompts
    examples: Sequence[Example]


class RolloutController:
    """Made a Ray actor by the driver; all its calls run in one event loop.

    Args:
        plan: of the stream.
        prompts: of training.
        order: draws them; None where there are none.
        actors: of the first rank of every engine, by number.
        nodes: Ray's id of the node of each.
        threads: Ray's name of the threads in which they take calls.
        scorers: of every rank of the reward functions or environments, which take calls in threads of the same name.
    """

    def __init__(
        self,
        plan: StreamPlan,
        prompts: ControllerPrompts,
        order: PromptOrder | None,
        actors: Sequence[Any],
        nodes: Sequence[str],
        threads: str,
        scorers: Sequence[Any] = (),
    ) -> None:
        self._prompts, self._sampler = prompts, (order or PromptOrder(1, 0)).sampler()
        self._before_step: tuple[dict[str, Any], int, frozenset[int]] | None = None
        engines = [
            RemoteEngine(
                number,
                actor,
                node,
                threads,
                plan.engine_answers_s,
                "generate" if plan.together else None,
            )
            for number, (actor, node) in enumerate(zip(actors, nodes, strict=True))
        ]
        self._taking: asyncio.Task[Any] | None = None
        self._engines = len(engines)
        scoring: list[RemoteScorer] = []
        episodes: EpisodeSetup | None = None
        if plan.episodes is None:
            scoring = [RemoteScorer(actor, threads, prompts.examples, plan.scorer_answers_s) for actor in scorers]
        else:
            ranks = [RemoteEpisodes(actor, threads, plan.scorer_answers_s) for actor in scorers]
            episodes = EpisodeSetup(plan.episodes, ranks, self._task, RayEpisodeStore(time.monotonic))
        self._stream = RolloutStream(
            plan, engines, self._sampler.draw, prompts.tokens.compact, scorers=scoring, episodes=episodes
        )

    def _task(self, prompt: int, group: int) -> Task:
        """Task of an episode of a group."""
        example = self._prompts.examples[prompt]
        return Task(example.prompt, example.answer, example.fields, group)

    async def open(self, version: int, groups: int, stats: Sequence[EngineStats]) -> None:
        """Begin with engines that serve `version`.

        Args:
            version: of the weights.
            groups: count after which none is drawn ahead; a further step draws its own.
            stats: of each engine.
        """
        ledger = self._stream.ledger
        ledger.draws_left = max(0, groups - ledger.buffered)
        self._stream.open(version, stats)

    async def take(self, version: int) -> StepRows:
        """The groups of the step from `version`; times in seconds since the epoch."""
        self._taking = asyncio.current_task()
        try:
            rows = await self._stream.take(version)
            return replace(rows, busy=_since_the_epoch(rows.busy))
        finally:
            self._taking = None

    async def next_groups(self) -> list[tuple[int, int]]:
        """Number and prompt index of the next step's groups, of those that are submitted together."""
        return [(group.number, group.prompt) for group in self._stream.next_groups()]

    async def discard_groups(self) -> None:
        """Discard the groups that no step has taken; their draws count as used."""
        self._stream.discard_groups()

    async def respond(self, drawn: Sequence[DrawnPrompt], sampling: Sampling, samples_per_prompt: int) -> OtherRows:
        """Responses to prompts that no group is made of, consecutive ones from the same engine; times as in `take`."""
        rows = await self._stream.respond(self._shares(drawn, sampling, samples_per_prompt))
        return replace(rows, busy=_since_the_epoch(rows.busy))

    async def play(
        self, drawn: Sequence[DrawnPrompt], tasks: Sequence[Task], sampling: Sampling, samples_per_prompt: int
    ) -> OtherRows:
        """Episodes of prompts that no group is made of, with their scores. `tasks`: of each prompt."""
        task_of = {prompt.group: task for prompt, task in zip(drawn, tasks, strict=True)}
        shares = self._shares(drawn, sampling, samples_per_prompt)
        begun = [(request, task_of[request.group]) for share in shares.values() for request in share]
        rows = await self._stream.play(begun)
        return replace(rows, busy=_since_the_epoch(rows.busy))

    def _shares(
        self, drawn: Sequence[DrawnPrompt], sampling: Sampling, samples_per_prompt: int
    ) -> dict[int, list[Request]]:
        """Requests for responses to other prompts, by engine."""
        return {
            engine: [
                Request(
                    prompt.first_sample + index,
                    prompt.tokens,
                    of_prompt,
                    prompt.group,
                    index,
                    prompt_index=prompt.index,
                    engine=engine,
                )
                for prompt in drawn[share.start : share.stop]
                for of_prompt in [sampling.for_prompt(len(prompt.tokens))]
                for index in range(samples_per_prompt)
            ]
            for engine, share in enumerate(even_ranges(len(drawn), self._engines))
            if share
        }

    async def drain(self) -> None:
        """Wait for requests in flight."""
        await self._stream.drain()

    async def begin_step(self) -> None:
        """Remember the state that `abandon_step` returns to, where prompts are submitted together."""
        ledger = self._stream.ledger
        kept = frozenset(group.number for group in (*ledger.groups, *ledger.returned))
        self._before_step = self._sampler.state_dict(), self._stream.groups.samples_drawn, kept

    async def waiting_for(self) -> str:
        """Work that the current step, or a call for other prompts, still waits for: one line."""
        return self._stream.waiting_for()

    async def trained(self, version: int, rates: Mapping[int, float]) -> None:
        """End the step: engines serve `version`. `rates`: pass rates of its prompts, for a curriculum."""
        self._sampler.measured(rates)
        self._stream.trained(version)

    async def change(self, engines: Sequence[int]) -> None:
        """Send nothing more to these engines, whose weights are about to change."""
        self._stream.change(engines)

    async def serve(self, engines: Sequence[int], version: int) -> None:
        """Send requests to these engines again, which serve `version`."""
        self._stream.serve(engines, version)

    async def take_lost(self) -> dict[int, str]:
        """The engines that were lost since the last call, with the cause of each."""
        return self._stream.take_lost()

    async def remove_engine(self, engine: int, cause: str) -> None:
        """Remove a lost engine. Raises EngineError where it may not be restarted."""
        self._stream.remove_engine(engine, cause)

    async def add_engine(self, engine: int, version: int, stats: EngineStats) -> None:
        """Add a restarted engine, which serves `version`. `stats`: of it."""
        self._stream.add_engine(engine, version, stats)

    async def lease(self, engines: Sequence[int]) -> None:
        """Send requests to these engines, on devices of the trainer, until `reclaim`."""
        self._stream.lease(engines)

    async def reclaim(self, engines: Sequence[int]) -> None:
        """Abort what is in flight at these engines. Returns once nothing is."""
        await self._stream.reclaim(engines)

    async def draw(self, count: int) -> list[tuple[int, int]]:
        """Number and prompt index of further draws, which are no groups of the stream."""
        return self._sampler.draw(count)

    async def abandon_step(self, further: Mapping[int, int]) -> None:
        """Return the step's groups and its further draws, as it will not train; it may still wait for groups."""
        if self._taking is not None:
            self._taking.cancel()
        if self._before_step is not None:
            order, self._stream.groups.samples_drawn, kept = self._before_step
            await self._stream.abandon(kept)
            self._sampler.load_state_dict(order)
            return
        self._sampler.load_state_dict(self._sampler.with_returned(self._sampler.state_dict(), further))
        self._stream.groups.return_taken()

    async def state(self) -> tuple[dict[str, int | str], StreamState]:
        """State of the prompts' order and of the stream."""
        state = await self._stream.state()
        return self._sampler.state_dict(), state

    async def restore(self, sampler: dict[str, int | str], state: StreamState | None, samples_drawn: int) -> None:
        """Continue from `state`, before `open`."""
        self._sampler.load_state_dict(sampler)
        if state is not None:
            self._stream.restore(state)
        self._stream.groups.samples_drawn = samples_drawn

    async def close(self) -> None:
        """Stop collecting responses."""
        await asyncio.gather(*self._stream.close(), return_exceptions=True)

    async def reserve_samples(self, count: int) -> int:
        """Reserve consecutive ids for samples outside the stream. Returns the first."""
        first = self._stream.groups.samples_drawn
        self._stream.groups.samples_drawn += count
        return first


def _since_the_epoch(times: Iterable[tuple[int, float, float]]) -> tuple[tuple[int, float, float], ...]:
    offset = time.time() - time.monotonic()
    return tuple((engine, begin + offset, end + offset) for engine, begin, end in times)


class ControllerHandle(Protocol):
    """A controller whose methods others call from outside its event loop."""

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Begin a call of a method."""

    def close(self) -> None:
        """End the controller."""


class ControllerActor:
    """A controller in a process of its own, for requests that engines get one by one.

    Args:
        actor: its handle.
    """

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        future: Future[Any] = getattr(self.actor, method).remote(*arguments).future()
        return future

    def close(self) -> None:
        ray.kill(self.actor)


class ControllerThread:
    """A controller in a thread of this process, for requests that are submitted together: a few messages a step.

    Args:
        arguments: of `RolloutController`.
    """

    def __init__(self, *arguments: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._controller = RolloutController(*arguments)
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout", daemon=True)
        self._thread.start()

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(getattr(self._controller, method)(*arguments), self._loop)

    def close(self) -> None:
        wait([asyncio.run_coroutine_threadsafe(self._end_tasks(), self._loop)], _CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end_tasks(self) -> None:
        """End all calls and tasks: one that is destroyed while it waits prints a line of its own."""
        await self._controller.close()
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def start_controller(plan: StreamPlan, *arguments: Any) -> ControllerHandle:
    """A controller on this node, where the files of the data are. The arguments are those of `RolloutController`."""
    if plan.together:
        return ControllerThread(plan, *arguments)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": here}
    return ControllerActor(ray.remote(**options)(RolloutController).remote(plan, *arguments))
