"""One SGLang engine, as a role of the dataflow: a worker for each host that it is on."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Concatenate, cast

from engine3d.engine_figures import EngineFigures
from engine3d.errors import EngineError
from engine3d.reshard.describe.memory import SharedShards
from engine3d.reshard.describe.shards import Place
from engine3d.reshard.plan.coordinate import ReceiveOrder
from engine3d.reshard.transport.sender import Sent, Transport
from engine3d.reshard.verify import Difference
from engine3d.rollout.config import RolloutConfig, Sampling
from engine3d.rollout.engine import RolloutEngine
from engine3d.rollout.host.stream import UnderWay
from engine3d.rollout.member import EngineMember
from engine3d.rollout.part import EnginePart, PartCalls
from engine3d.rollout.requests import Request
from engine3d.training.offload import OffloadFigures
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.data.prompts import DrawnPrompt
from hybridflow.roles.rollout_stream import EngineStream, sample_batch
from hybridflow.workers.context import WorkerContext
from hybridflow.workers.protocols import ALL_TO_ALL, ONE_TO_ALL, THREE_D_PROTO, register

type _Method[**P, R] = Callable[Concatenate[RolloutWorker, P], R]

LONGEST_ROLLOUT_S = 24 * 3600.0
"""Of all responses of a call. The engine itself ends a call that comes no further (`request_timeout_s`)."""


@dataclass(frozen=True, slots=True)
class Pause:
    """When an engine could not generate because its weights changed, in seconds since the epoch by its host's clock."""

    begin: float
    end: float


def on_first_host[**P, R](elsewhere: R) -> Callable[[_Method[P, R]], _Method[P, R]]:
    """A call of an engine, made on its first host; on its others it ends when the first one's has.

    Args:
        elsewhere: what it returns there.
    """

    def decorate(method: _Method[P, R]) -> _Method[P, R]:
        @functools.wraps(method)
        def call(worker: RolloutWorker, /, *args: P.args, **kwargs: P.kwargs) -> R:
            return worker.lead_or_follow(method.__name__, lambda: method(worker, *args, **kwargs), elsewhere)

        return call

    return decorate


_UNUSED = cast("SampleBatch", None)
"""The result of a rank whose results nobody collects."""


class RolloutWorker:
    """One engine, or its part on one host; the ranks of its group are engines side by side, each host by host.

    Args:
        directory: HuggingFace directory of the initial weights.
        config: of every engine.
        places: where the memory of every rank of every engine is, engine by engine.
        weight_sources: for every rank of every engine, where the actor's rank on its device says where its weights
            lie, if the engine is to share them.
        keeps_memory: numbers of the engines that compute beside models, and so give no memory back.
        restarts: whether an engine that is lost is started again, and so `begin_weights` says so and does not fail.
    """

    threads_beside = 4
    """For a stream: one waits for what ends, while others ask for more."""

    def __init__(
        self,
        context: WorkerContext,
        directory: Path,
        config: RolloutConfig,
        *,
        places: Sequence[Place],
        weight_sources: Sequence[Path | None],
        keeps_memory: Sequence[int] = (),
        restarts: bool = False,
    ) -> None:
        self._restarts = restarts
        log_path = context.log_path.with_name(f"sglang-{context.rank}.log") if context.log_path else None
        number = context.coordinates.dp
        ranks = slice(number * config.tp, (number + 1) * config.tp)
        self._number, self._ranks, self._places = number, ranks, places[ranks]
        self._gives_back = config.memory_saver and number not in keeps_memory
        self._weight_bytes, self._moved = 0, OffloadFigures()
        self._stream: EngineStream | None = None
        self._paused_since: float | None = None
        part = EnginePart(context.coordinates.tp, context.layout.tp, context.store)
        self._calls = PartCalls(part, config.start_timeout_s)
        given = config, context.devices, log_path, weight_sources[ranks]
        self._make_engine = functools.partial(RolloutEngine, directory, *given, part=part)
        self._part: RolloutEngine | EngineMember = (
            EngineMember(directory, *given, part=part) if part.index else self._make_engine()
        )

    @property
    def _engine(self) -> RolloutEngine:
        """On its first host."""
        assert isinstance(self._part, RolloutEngine)
        return self._part

    def lead_or_follow[R](self, name: str, call: Callable[[], R], elsewhere: R) -> R:
        """Make a call of the engine on its first host, and wait for its end on others.

        Args:
            name: of the call, for errors.
            call: makes it.
            elsewhere: what is returned on another host than the first.

        Raises:
            EngineError: the part of the engine on this host has died, or the call has failed.
        """
        if isinstance(self._part, EngineMember):
            self._calls.wait(functools.partial(self._part.check, name))
            return elsewhere
        result = call()
        # Not after a failure, which may only be that of a lost neighbour: then the part that died says so.
        self._calls.done()
        return result

    @register(ONE_TO_ALL)
    def start(self) -> None:
        """Start the engine and wait until it can generate."""
        self._part.start()

    @register(ONE_TO_ALL, timeout_s=LONGEST_ROLLOUT_S)
    def restart(self) -> None:
        """Start another engine in the place of one that has died or comes no further; it has no weights to serve yet.

        Raises EngineError after the engine's own limits.
        """
        self._part.shutdown()
        self._stream = self._paused_since = None
        self._part = self._make_engine()
        self._part.start()

    @register(THREE_D_PROTO, exclusive=True, timeout_s=LONGEST_ROLLOUT_S)
    @on_first_host(_UNUSED)
    def generate(self, drawn: list[DrawnPrompt], *, sampling: Sampling, samples_per_prompt: int) -> SampleBatch:
        """Responses to prompts: `samples_per_prompt` samples of each, in order."""
        began = time.time()
        requests = [
            Request(prompt.first_sample + index, prompt.tokens, sampling_of_prompt, prompt.group, index)
            for prompt in drawn
            for sampling_of_prompt in [sampling.for_prompt(len(prompt.tokens))]
            for index in range(samples_per_prompt)
        ]
        self._engine.submit(requests, together=True)
        responses = self._engine.wait_for([request.sample for request in requests])
        prompts = [prompt.index for prompt in drawn for _ in range(samples_per_prompt)]
        times = [(began, time.time())] * len(requests)
        versions = self._engine.config.token_versions
        return sample_batch(self._number, requests, prompts, responses, times, token_versions=versions)

    @register(ONE_TO_ALL)
    @on_first_host(cast("str | None", None))
    def trace(self, directory: Path, *, steps: int) -> str | None:
        """Have the first engine trace its next steps; see `RolloutEngine.trace`.

        Returns why there will be no trace; None if all is well, and of other engines.
        """
        if self._number:
            return None
        try:
            self._engine.trace(directory, steps)
        except EngineError as error:
            return str(error)
        return None

    @register(ONE_TO_ALL, exclusive=True)
    @on_first_host(None)
    def give_back(self) -> None:
        """Give the memory of the KV cache to others that compute here, if the engine can, and that of the weights."""
        if self._gives_back:
            began = time.perf_counter()
            self._engine.release_memory()
            away_s = self._moved.away_s + time.perf_counter() - began
            self._moved = replace(self._moved, away_s=away_s, nbytes=self._weight_bytes)

    @register(ONE_TO_ALL, exclusive=True)
    @on_first_host(None)
    def take_back(self) -> None:
        """Have that memory again; what it held is gone."""
        if self._gives_back:
            began = time.perf_counter()
            self._engine.restore_memory()
            self._moved = replace(self._moved, back_s=self._moved.back_s + time.perf_counter() - began)

    @register(ONE_TO_ALL, exclusive=True)
    def take_turn(self) -> None:
        """Have all memory, in a turn: others have given theirs back, and `take_back` came before."""

    @register(ONE_TO_ALL)
    def take_offload_figures(self) -> OffloadFigures:
        """How long the memory took to be given back and to be there again since the last call; bytes of weights."""
        found, self._moved = self._moved, OffloadFigures()
        return found

    @register(ONE_TO_ALL)
    @on_first_host(list[SharedShards]())
    def share_weights(self) -> list[SharedShards]:
        """Which elements of the model the memory of each of this engine's ranks holds, and how to reach it."""
        if self._engine.config.release_weights:
            self._weight_bytes = self._engine.weight_bytes()
        return self._engine.share_weights(f"rollout engine {self._number}", self._ranks.start, self._places)

    @register(ALL_TO_ALL)
    @on_first_host(None)
    def connect_weights(self, orders: list[ReceiveOrder]) -> None:
        """Make ready for what no rank of the actor writes. `orders`: one for each of this engine's ranks."""
        self._engine.connect_weights(orders)

    @register(ONE_TO_ALL)
    @on_first_host(cast("str | None", None))
    def begin_weights(self, version: int, *, under_way: UnderWay = "wait") -> str | None:
        """Let no generation begin until `version` is committed; wait for those that run.

        `under_way`: what becomes of the responses of a stream.

        Returns what the engine failed of, where it can be started again; None if all is well.
        """
        began = time.time()
        try:
            self._engine.begin_weights(version, under_way=under_way)
        except EngineError as error:
            if not self._restarts:
                raise
            return str(error)
        if self._paused_since is None:  # with "wait" it generated meanwhile
            self._paused_since = time.time() if under_way == "wait" else began
        return None

    @register(ONE_TO_ALL)
    @on_first_host(list[dict[Transport, Sent]]())
    def receive_weights(self, version: int) -> list[dict[Transport, Sent]]:
        """Take what no rank of the actor writes; return when it is all there. What each of the engine's ranks read."""
        return self._engine.receive_weights(version)

    @register(ONE_TO_ALL)
    @on_first_host(None)
    def seal_weights(self, version: int, *, flush_cache: bool) -> None:
        """All of `version` is written: do what can fail before it is served."""
        self._engine.seal_weights(version, flush_cache)

    @register(ONE_TO_ALL)
    @on_first_host(list[list[Difference]]())
    def verify_weights(self, directory: Path) -> list[list[Difference]]:
        """For each rank of this engine, what differs from what SGLang's loader makes of a HuggingFace directory."""
        return self._engine.verify_weights(directory)

    @register(ONE_TO_ALL)
    @on_first_host(cast("Pause | None", None))
    def commit_weights(self, version: int) -> Pause | None:
        """Serve `version`. When the engine could not generate; None on another host than its first."""
        self._engine.commit_weights(version)
        end = time.time()
        begin, self._paused_since = self._paused_since, None
        return Pause(end if begin is None else begin, end)

    @register(ONE_TO_ALL)
    @on_first_host(None)
    def recommit_weights(self, version: int) -> None:
        """Serve `version` again, which was served before its memory was given back: no step ends with it."""
        self._engine.commit_weights(version)
        self._paused_since = None

    # Beside the calls of the group, of the controller of a stream (`RankProcess.call_beside`)

    def open_stream(self) -> EngineFigures:
        """Take requests one by one from here on. Returns the engine's figures."""
        self._stream = EngineStream(self._number, self._engine)
        return self._stream.figures

    def of_stream(self, method: str, *arguments: Any) -> Any:
        """Call a method of the `EngineStream`. EngineError before `open_stream`, as while it is started again."""
        if self._stream is None:
            raise EngineError(f"rollout engine {self._number}: {method} of a stream that was not opened")
        return getattr(self._stream, method)(*arguments)

    def shutdown(self) -> None:
        """End the engine's processes on this host."""
        self._part.shutdown()
