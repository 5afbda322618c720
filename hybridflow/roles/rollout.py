"""One SGLang engine, as a role of the dataflow: a worker for each host that it is on."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Concatenate, cast

from engine3d.errors import EngineError
from engine3d.models.lora.config import LoraConfig
from engine3d.models.precision import NOTHING_LEFT_OUT, Fp8Settings
from engine3d.reshard.describe.memory import SharedShards
from engine3d.reshard.describe.shards import Location
from engine3d.reshard.plan.coordinate import ReceiveOrder
from engine3d.reshard.transport.sender import Sent, Transport
from engine3d.reshard.verify import BufferDifference
from engine3d.rollout.config import RolloutConfig
from engine3d.rollout.engine import EngineMember, RolloutEngine
from engine3d.rollout.host.stream import InFlightPolicy
from engine3d.rollout.requests import EngineStats, Request, Response
from engine3d.rollout.scheduler.rank import AdapterBase
from engine3d.rollout.shard import EngineShard, ShardCalls
from engine3d.training.offload import OffloadStats
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.stored_rows import SampleEnd, SampleEnds
from hybridflow.batch.worker_output import Packed, Summary, pack, send_tensors_as_arrays
from hybridflow.workers.context import WorkerContext
from hybridflow.workers.protocols import ALL_TO_ALL, ONE_TO_ALL, register

type _Method[**P, R] = Callable[Concatenate[RolloutWorker, P], R]

LONGEST_ROLLOUT_S = 24 * 3600.0
"""Limit of all responses of a call. The engine itself ends a call without progress (`request_timeout_s`)."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Span in which an engine changed weights and could not generate, in seconds since the epoch on its host."""

    begin: float
    end: float


def on_first_host[**P, R](elsewhere: R) -> Callable[[_Method[P, R]], _Method[P, R]]:
    """Make a call of an engine on its first host. On other hosts it ends when the first one's has.

    Args:
        elsewhere: result on other hosts.
    """

    def decorate(method: _Method[P, R]) -> _Method[P, R]:
        @functools.wraps(method)
        def call(worker: RolloutWorker, /, *args: P.args, **kwargs: P.kwargs) -> R:
            return worker.lead_or_follow(method.__name__, lambda: method(worker, *args, **kwargs), elsewhere)

        return call

    return decorate


class EngineStream:
    """The calls of an engine by a rollout controller, concurrent with those of its group.

    Args:
        number: of the engine.
        engine: that has been started.
        at_work: makes a block count as a call of a method, for those who watch the rank.
    """

    def __init__(
        self, number: int, engine: RolloutEngine, at_work: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        self._number, self._engine, self._at_work = number, engine, at_work
        self._generating = ExitStack()
        """Closed once the requests that were submitted together have ended."""
        self._together: set[int] = set()
        """Samples in flight that were submitted together."""
        self._lock = threading.Lock()
        self._requests: dict[int, tuple[Request, float]] = {}
        """Requests by sample, with the time of the submission."""

    def submit(self, requests: Sequence[Request], together: bool = False) -> None:
        """Begin responses. `together`: as of `RolloutEngine.submit`. Tokens of turns go to the controller."""
        now = time.time()
        self._requests |= {request.sample: (request, now) for request in requests}
        if together:
            with self._lock:
                if not self._together:
                    self._generating.enter_context(self._at_work("generate"))
                self._together.update(request.sample for request in requests)
        self._engine.submit(requests, together=together)

    @property
    def stats(self) -> EngineStats:
        """Stats of the engine."""
        return self._engine.stats

    def take_ended(self, wait_s: float) -> tuple[SampleEnds, Summary | None, Packed | None]:
        """Return responses that have ended since the last call: without their tokens, and as samples.

        Waits up to `wait_s` for one. Aborted ones are among the ends, and not among the samples.
        """
        ended = self._engine.take_ended(wait_s, self._requests)
        requests = [self._requests.pop(sample) for sample in ended]
        with self._lock:
            self._together.difference_update(ended)
            if not self._together:
                self._generating.close()
        ends = [_end(request, ended[request.sample]) for request, _ in requests]
        complete = [entry for entry, end in zip(requests, ends, strict=True) if end.is_stored]
        ends.sort(key=lambda end: not end.is_stored)  # so that the n-th end is of the n-th sample
        if not complete:
            return SampleEnds(ends, self.stats), None, None
        send_tensors_as_arrays()
        now = time.time()
        batch = sample_batch(
            self._number,
            [request for request, _ in complete],
            [ended[request.sample] for request, _ in complete],
            [(began, now) for _, began in complete],
            token_versions=self._engine.config.token_versions,
        )
        packed, summary = pack(batch)
        return SampleEnds(ends, self.stats), summary, packed

    def abort(self, samples: Sequence[int]) -> None:
        """Abort responses; each ends with what it has."""
        self._engine.abort(samples)

    def close(self) -> None:
        """Report no generation any more: the engine is gone, and so is what was in flight."""
        with self._lock:
            self._together.clear()
            self._generating.close()

    def in_flight(self) -> dict[int, Response]:
        """Return the responses in flight that have a token, by sample."""
        responses = self._engine.responses_in_flight().items()
        return {sample: response for sample, response in responses if response.token_ids}


def sample_batch(
    engine: int,
    requests: Sequence[Request],
    responses: Sequence[Response],
    times: Sequence[tuple[float, float]],
    *,
    token_versions: bool,
) -> SampleBatch:
    """Make samples of responses.

    Args:
        engine: number of the engine.
        requests: of the responses.
        responses: that have ended.
        times: of the submission and the end of each.
        token_versions: True if samples have a version for each token.
    """
    return SampleBatch.from_generations(
        prompts=[request.prompt for request in requests],
        responses=[response.token_ids for response in responses],
        logprobs=[response.logprobs for response in responses],
        sample_ids=[request.sample for request in requests],
        group_ids=[request.group for request in requests],
        prompt_indices=[request.prompt_index for request in requests],
        policy_versions=[response.oldest_version for response in responses],
        finish_reasons=[str(response.finish_reason) for response in responses],
        token_versions=[response.versions for response in responses] if token_versions else None,
        routes=[response.routes for response in responses],
        engine=engine,
        times=times,
    )


def _end(request: Request, response: Response) -> SampleEnd:
    complete = response.finish_reason in ("stop", "length") and bool(response.versions)
    return SampleEnd(
        request.sample,
        request.group,
        request.index,
        len(response.token_ids),
        response.oldest_version,
        complete,
        response.error,
        response if request.turn_start is not None and complete else None,
    )


class RolloutWorker:
    """One engine, or its part on one host. The ranks of its group are several engines, each host by host.

    Args:
        directory: HuggingFace directory of the initial weights.
        config: of every engine.
        locations: of the memory of every rank of every engine, engine by engine.
        weight_sources: for every rank of every engine, the file in which the actor's rank on its device publishes the
            location of its weights, if the engine is to share them.
        keeps_memory: numbers of the engines that compute next to models, and so do not offload.
        restarts: True if a lost engine is restarted, so that `begin_weights` reports the loss and does not fail.
        adapters: that every engine gets apart from the model.
        fp8: matrices that stay in the engines' dtype where these are in fp8.
    """

    concurrent_threads = 4
    """Threads for a stream: one waits for ended responses, the others submit requests."""

    def __init__(
        self,
        context: WorkerContext,
        directory: Path,
        config: RolloutConfig,
        *,
        locations: Sequence[Location],
        weight_sources: Sequence[Path | None],
        keeps_memory: Sequence[int] = (),
        restarts: bool = False,
        adapters: LoraConfig | None = None,
        fp8: Fp8Settings = NOTHING_LEFT_OUT,
    ) -> None:
        self._restarts = restarts
        log_path = context.log_path.with_name(f"sglang-{context.rank}.log") if context.log_path else None
        number = context.coordinates.dp
        ranks = slice(number * config.tp, (number + 1) * config.tp)
        self._number, self._ranks, self._locations = number, ranks, locations[ranks]
        self._offloads = config.memory_saver and number not in keeps_memory
        self._weight_bytes, self._moved = 0, OffloadStats()
        self._stream: EngineStream | None = None
        self._at_work = context.at_work
        self._paused_since: float | None = None
        engine_shard = EngineShard(context.coordinates.tp, context.layout.tp, context.store)
        self._calls = ShardCalls(engine_shard, config.start_timeout_s)
        given = config, context.devices, log_path, weight_sources[ranks]
        self._make_engine = functools.partial(
            RolloutEngine, directory, *given, shard=engine_shard, adapters=adapters, fp8=fp8
        )
        self._engine_here: RolloutEngine | EngineMember = (
            EngineMember(directory, *given, shard=engine_shard) if engine_shard.index else self._make_engine()
        )

    @property
    def _engine(self) -> RolloutEngine:
        """The engine, on its first host."""
        assert isinstance(self._engine_here, RolloutEngine)
        return self._engine_here

    def lead_or_follow[R](self, name: str, call: Callable[[], R], elsewhere: R) -> R:
        """Make a call of the engine on its first host, and wait for its end on others.

        Args:
            name: of the call, for errors.
            call: makes it.
            elsewhere: result on another host than the first.

        Raises:
            EngineError: the part of the engine on this host has died, or the call has failed.
        """
        if isinstance(self._engine_here, EngineMember):
            self._calls.wait(functools.partial(self._engine_here.check, name))
            return elsewhere
        result = call()
        # Not after a failure, which may only be that of a lost neighbour: then the part that died reports it.
        self._calls.done()
        return result

    @register(ONE_TO_ALL)
    def start(self) -> None:
        """Start the engine and wait until it can generate."""
        self._engine_here.start()

    @register(ONE_TO_ALL, timeout_s=LONGEST_ROLLOUT_S)
    def restart(self) -> None:
        """Replace an engine that has died or makes no progress by a new one, which has no weights to serve yet.

        Raises EngineError after the engine's own limits.
        """
        self._engine_here.shutdown()
        if self._stream is not None:
            self._stream.close()
        self._stream = self._paused_since = None
        self._engine_here = self._make_engine()
        self._engine_here.start()

    @register(ONE_TO_ALL)
    @on_first_host(cast("str | None", None))
    def trace(self, directory: Path, *, steps: int) -> str | None:
        """Trace the first engine's next steps; see `RolloutEngine.trace`.

        Returns the reason if there will be no trace. Other engines return None.
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
    def offload(self) -> None:
        """Release the memory of the KV cache, if the engine can, and that of the weights."""
        if self._offloads:
            began = time.perf_counter()
            self._engine.release_memory()
            offload_s = self._moved.offload_s + time.perf_counter() - began
            self._moved = replace(self._moved, offload_s=offload_s, nbytes=self._weight_bytes)

    @register(ONE_TO_ALL, exclusive=True)
    @on_first_host(None)
    def onload(self) -> None:
        """Allocate that memory again. Its contents are lost."""
        if self._offloads:
            began = time.perf_counter()
            self._engine.restore_memory()
            self._moved = replace(self._moved, onload_s=self._moved.onload_s + time.perf_counter() - began)

    @register(ONE_TO_ALL, exclusive=True)
    def take_turn(self) -> None:
        """Take a turn with all memory: others offload, and `onload` comes before."""

    @register(ONE_TO_ALL)
    def take_offload_stats(self) -> OffloadStats:
        """Return the time of offloads and onloads since the last call, and bytes of weights."""
        moved, self._moved = self._moved, OffloadStats()
        return moved

    @register(ONE_TO_ALL)
    @on_first_host(list[SharedShards]())
    def share_weights(self, *, drafts: bool = False) -> list[SharedShards]:
        """Describe the elements of the model in the memory of each of this engine's ranks, and how to reach them.

        Args:
            drafts: True if transfers bring the layer that drafts, too.
        """
        if self._engine.config.release_weights:
            self._weight_bytes = self._engine.weight_bytes()
        name = f"rollout engine {self._number}"
        return self._engine.share_weights(name, self._ranks.start, self._locations, drafts=drafts)

    @register(ALL_TO_ALL)
    @on_first_host(None)
    def connect_weights(self, orders: list[ReceiveOrder]) -> None:
        """Prepare to receive what no rank of the actor writes. `orders`: one for each of this engine's ranks."""
        self._engine.connect_weights(orders)

    @register(ONE_TO_ALL)
    @on_first_host(cast("str | None", None))
    def begin_weights(self, version: int, *, in_flight: InFlightPolicy = "wait") -> str | None:
        """Block new generation until `version` is committed, and wait for requests in flight.

        `in_flight`: fate of a stream's responses in flight.

        Returns the engine's error, where it can be restarted; None if all is well.
        """
        began = time.time()
        try:
            self._engine.begin_weights(version, in_flight=in_flight)
        except EngineError as error:
            if not self._restarts:
                raise
            return str(error)
        if self._paused_since is None:  # with "wait" it generated meanwhile
            self._paused_since = time.time() if in_flight == "wait" else began
        return None

    @register(ONE_TO_ALL)
    @on_first_host(list[dict[Transport, Sent]]())
    def receive_weights(self, version: int) -> list[dict[Transport, Sent]]:
        """Receive what no rank of the actor writes, completely. Return the traffic of each of the engine's ranks."""
        return self._engine.receive_weights(version)

    @register(ONE_TO_ALL)
    @on_first_host(None)
    def seal_weights(self, version: int, *, flush_cache: bool, base: AdapterBase | None = None) -> None:
        """Finish what can fail before `version`, which is completely written, is served."""
        self._engine.seal_weights(version, flush_cache, base)

    @register(ONE_TO_ALL)
    @on_first_host(list[list[BufferDifference]]())
    def verify_weights(self, directory: Path) -> list[list[BufferDifference]]:
        """Compare each rank's weights with what SGLang's loader makes of a HuggingFace directory. Return the
        differences.
        """
        return self._engine.verify_weights(directory)

    @register(ONE_TO_ALL)
    @on_first_host(cast("Pause | None", None))
    def commit_weights(self, version: int) -> Pause | None:
        """Serve `version`. Return the engine's pause, None on another host than its first."""
        self._engine.commit_weights(version)
        end = time.time()
        begin, self._paused_since = self._paused_since, None
        return Pause(end if begin is None else begin, end)

    @register(ONE_TO_ALL)
    @on_first_host(None)
    def recommit_weights(self, version: int) -> None:
        """Serve `version` again, which was served before the engine was offloaded. No step ends with it."""
        self._engine.commit_weights(version)
        self._paused_since = None

    @register(ONE_TO_ALL)
    def check_part(self) -> None:
        """Raise what the engine's part on this host died of, where that is not its first host."""
        if isinstance(self._engine_here, EngineMember):
            self._engine_here.check("generate")

    # Concurrent with the group's calls, from the controller of a stream (`RankProcess.call_concurrently`)

    def open_stream(self) -> EngineStats:
        """Accept requests one by one from here on. Returns the engine's stats."""
        self._stream = EngineStream(self._number, self._engine, self._at_work)
        return self._stream.stats

    def of_stream(self, method: str, *arguments: Any) -> Any:
        """Call a method of the `EngineStream`. EngineError before `open_stream`, as while it restarts."""
        if self._stream is None:
            raise EngineError(f"rollout engine {self._number}: {method} of a stream that was not opened")
        return getattr(self._stream, method)(*arguments)

    def shutdown(self) -> None:
        """End the engine's processes on this host."""
        self._engine_here.shutdown()
