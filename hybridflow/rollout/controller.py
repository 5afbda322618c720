"""The rollout controller's process: a Ray actor that runs a `RolloutStream` over the engines' own actors.

Between it and the engines go ids and lengths. Samples lie in the object store of the node whose engine made them, and
go from there to whoever learns from them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from engine3d.engine_figures import EngineFigures
from engine3d.errors import EngineError, UserError
from engine3d.rollout.config import Sampling
from engine3d.rollout.requests import Request, Response
from hybridflow.batch.stored_rows import Row, StoredRows
from hybridflow.batch.stream_requests import EngineLostError, SampleEnds, StreamRequest
from hybridflow.data.packed_prompts import PackedPrompts
from hybridflow.data.sampler import PromptOrder
from hybridflow.data.tasks import Example
from hybridflow.errors.rank_failure import Failure
from hybridflow.rollout.stream import RolloutStream
from hybridflow.rollout.stream_types import StepRows, StreamPlan, StreamState

_WAIT_S = 2.0
"""How long an engine's rank waits for something to end before it says that nothing has."""


class _RemoteRank:
    """A rank by its handle.

    Args:
        name: of it in errors.
        actor: of the rank.
        threads: Ray's name of the threads that take calls beside those of the group.
        answers_s: that it has for a call.
        failed: raised where the worker failed of something that the user cannot put right.
    """

    def __init__(
        self, name: str, actor: Any, threads: str, answers_s: float, failed: type[EngineError] = EngineError
    ) -> None:
        self._name, self._actor, self._threads, self._failed = name, actor, threads, failed
        self._answers_s = answers_s

    async def call(self, method: str, results: int, *arguments: Any, what: str = "") -> Any:
        """What a method returns; of several results only the first, and references to others."""
        calling = self._actor.call_beside.options(concurrency_group=self._threads, num_returns=results)
        refs = calling.remote(method, results, *arguments)
        first, *others = refs if results > 1 else [refs]
        try:
            value = await asyncio.wait_for(first, self._answers_s)
        except TimeoutError:
            raise EngineError(f"{self._name}, {what or method}: no answer within {self._answers_s:g} s") from None
        except RayError as error:
            raise EngineError(f"{self._name}, {what or method}: {' '.join(str(error).split())}") from None
        if isinstance(value, Failure):  # the rank is there, and says what its worker failed of
            kind = UserError if value.user_error else self._failed
            raise kind(f"{value.role} rank {value.rank}, {value.method}: {value.error}")
        return (value, *others) if results > 1 else value


class RemoteScorer:
    """A rank of the reward functions.

    Args:
        actor: of the rank.
        threads: Ray's name of its threads.
        examples: that the indices of prompts count.
        answers_s: that it has for a call.
    """

    def __init__(self, actor: Any, threads: str, examples: Sequence[Example], answers_s: float) -> None:
        self._rank, self._examples = _RemoteRank("reward rank", actor, threads, answers_s), examples

    async def score(self, rows: Sequence[Row], prompts: Sequence[int]) -> Sequence[Any]:
        examples = {prompt: self._examples[prompt] for prompt in dict.fromkeys(prompts)}
        found: Sequence[Any] = await self._rank.call("score_rows", 1, list(rows), examples)
        return found


class RemoteEngine:
    """An engine by the handle of its first rank.

    Args:
        number: of the engine.
        actor: of the rank.
        node: Ray's id of the node that it is on.
        threads: Ray's name of the threads that take calls beside those of the group.
        prompts: token ids of prompts, by the index that requests have.
        sampling: of all responses.
        answers_s: that the rank has for a call.
    """

    def __init__(
        self,
        number: int,
        actor: Any,
        node: str,
        threads: str,
        prompts: PackedPrompts,
        sampling: Sampling,
        answers_s: float,
    ) -> None:
        self._rank = _RemoteRank(f"rollout rank of engine {number}", actor, threads, answers_s, EngineLostError)
        self._node, self._prompts, self._sampling = node, prompts, sampling

    async def submit(self, requests: Sequence[StreamRequest]) -> None:
        # Those of a prompt have it in common, also when they are sent.
        prompts = {prompt: self._prompts[prompt] for prompt in {request.prompt for request in requests}}
        sampling = {prompt: self._sampling.for_prompt(len(tokens)) for prompt, tokens in prompts.items()}
        complete = [
            Request(
                request.sample,
                prompts[request.prompt],
                sampling[request.prompt],
                request.group,
                request.index,
                request.prefix,
            )
            for request in requests
        ]
        await self._call("submit", 1, complete, [request.prompt for request in requests])

    async def ended(self) -> SampleEnds:
        without_rows, summary, packed = await self._call("take_ended", 3, _WAIT_S)
        ends: SampleEnds = replace(without_rows, rows=StoredRows(summary, packed, self._node))
        return ends

    async def abort(self, samples: Sequence[int]) -> None:
        await self._call("abort", 1, list(samples))

    async def in_flight(self) -> Mapping[int, Response]:
        responses: Mapping[int, Response] = await self._call("in_flight", 1)
        return responses

    async def _call(self, method: str, results: int, *arguments: Any) -> Any:
        """What a method of the engine's stream returns; of several results only the first, and references to others."""
        return await self._rank.call("of_stream", results, method, *arguments, what=method)


@dataclass(frozen=True)
class ControllerPrompts:
    """The prompts of training, as a controller needs them; what lies in files is read there, on the driver's host.

    Args:
        tokens: of each.
        examples: of each, for reward functions; none without such.
    """

    tokens: PackedPrompts
    examples: Sequence[Example]


class RolloutController:
    """Made a Ray actor by the driver; all its calls run in one event loop.

    Args:
        plan: of the stream.
        prompts: of training.
        order: draws them.
        actors: of the first rank of every engine, by number.
        nodes: Ray's id of the node of each.
        threads: Ray's name of the threads in which they take calls.
        scorers: of every rank of the reward functions, which take calls in threads of the same name.
    """

    def __init__(
        self,
        plan: StreamPlan,
        prompts: ControllerPrompts,
        order: PromptOrder,
        actors: Sequence[Any],
        nodes: Sequence[str],
        threads: str,
        scorers: Sequence[Any] = (),
    ) -> None:
        assert plan.sampling is not None
        self._prompts, self._sampler = prompts, order.sampler()
        engines = [
            RemoteEngine(number, actor, node, threads, prompts.tokens, plan.sampling, plan.engine_answers_s)
            for number, (actor, node) in enumerate(zip(actors, nodes, strict=True))
        ]
        self._taking: asyncio.Task[Any] | None = None
        scoring = [RemoteScorer(actor, threads, prompts.examples, plan.scorer_answers_s) for actor in scorers]
        self._stream = RolloutStream(plan, engines, self._sampler.draw, prompts.tokens.length, scorers=scoring)

    async def open(self, version: int, groups: int, figures: Sequence[EngineFigures]) -> None:
        """Begin with engines that serve `version`, for so many groups in all. `figures`: of each engine."""
        ledger = self._stream.ledger
        ledger.draws_left = max(0, groups - ledger.held)
        self._stream.open(version, figures)

    async def take(self, version: int) -> StepRows:
        """The groups of the step from `version`; times in seconds since the epoch."""
        self._taking = asyncio.current_task()
        try:
            rows = await self._stream.take(version)
            offset = time.time() - time.monotonic()
            return replace(rows, busy=tuple((engine, begin + offset, end + offset) for engine, begin, end in rows.busy))
        finally:
            self._taking = None

    async def waiting_for(self) -> str:
        """What the step that waits for its groups waits for, in words."""
        return self._stream.waiting_for()

    async def learned(self, version: int, rates: Mapping[int, float]) -> None:
        """The step is over, and engines serve `version`. `rates`: the pass rates of its prompts, if any are asked."""
        self._sampler.measured(rates)
        self._stream.learned(version)

    async def change(self, engines: Sequence[int]) -> None:
        """The weights of these engines are about to change."""
        self._stream.change(engines)

    async def serve(self, engines: Sequence[int], version: int) -> None:
        """These engines serve this version."""
        self._stream.serve(engines, version)

    async def take_lost(self) -> dict[int, str]:
        """The engines that were lost since the last call, and why."""
        return self._stream.take_lost()

    async def lose(self, engine: int, cause: str) -> None:
        """An engine is gone. Raises EngineError where it may not be started again."""
        self._stream.lose(engine, cause)

    async def gain(self, engine: int, version: int, figures: EngineFigures) -> None:
        """An engine that was lost was started again, and serves `version`. `figures`: of it."""
        self._stream.gain(engine, version, figures)

    async def lend(self, engines: Sequence[int]) -> None:
        """These engines take requests, on devices of the trainer, until `withdraw`."""
        self._stream.lend(engines)

    async def withdraw(self, engines: Sequence[int]) -> None:
        """Have nothing in flight at these engines any more."""
        await self._stream.withdraw(engines)

    async def draw(self, count: int) -> list[tuple[int, int]]:
        """Number and prompt index of further draws, which no group of the stream is made of."""
        return self._sampler.draw(count)

    async def give_back(self, further: Mapping[int, int]) -> None:
        """Return the step's groups and its further draws, as it will not train; it may still wait for groups."""
        if self._taking is not None:
            self._taking.cancel()
        self._sampler.load_state_dict(self._sampler.with_returned(self._sampler.state_dict(), further))
        self._stream.give_back()

    async def state(self) -> tuple[dict[str, int | str], StreamState]:
        """State of the prompts' order, and all that is under way."""
        state = await self._stream.state()
        return self._sampler.state_dict(), state

    async def restore(self, sampler: dict[str, int | str], state: StreamState | None, samples_drawn: int) -> None:
        """Go on where `state` was taken, before `open`."""
        self._sampler.load_state_dict(sampler)
        if state is not None:
            self._stream.restore(state)
        self._stream.samples_drawn = samples_drawn

    async def reserve_samples(self, count: int) -> int:
        """Ids for so many samples that the stream does not make: the first of them."""
        first = self._stream.samples_drawn
        self._stream.samples_drawn += count
        return first


def start_controller(*arguments: Any) -> Any:
    """The handle of a controller on this node, where the files of the data are."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": here}
    return ray.remote(**options)(RolloutController).remote(*arguments)
