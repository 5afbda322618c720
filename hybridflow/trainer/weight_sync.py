"""Weights from the actor to the rollout engines, as numbered versions."""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import ray.util

from engine3d.errors import EngineError
from engine3d.models import ModelSpec
from engine3d.reshard.describe.memory import SharedShards
from engine3d.reshard.plan.coordinate import Orders, ReceiveOrder, coordinate
from engine3d.reshard.plan.pieces import Plan
from engine3d.reshard.transport.sender import Sent, Transport
from engine3d.rollout.host.stream import UnderWay
from engine3d.stores import StoreServer, file_address, listen, serve, tcp_address
from hybridflow.cluster.runtime import ray_runtime
from hybridflow.config.roles import RolloutRole
from hybridflow.metrics import names as metrics
from hybridflow.metrics.logger import Timer
from hybridflow.metrics.timeline import Span, timeline
from hybridflow.roles.groups import EngineCalls, PolicyGroup, RolloutGroup
from hybridflow.roles.rollout import Pause
from hybridflow.workers.device_turns import turns
from hybridflow.workers.future import as_they_answer, wait_together

_TRANSPORT_METRICS: dict[Transport, tuple[str, str]] = {
    "one_sided": (metrics.SYNC_ONE_SIDED_BYTES, metrics.SYNC_ONE_SIDED_TIME),
    "collective": (metrics.SYNC_COLLECTIVE_BYTES, metrics.SYNC_COLLECTIVE_TIME),
}
"""Bytes and time of what goes over each transport, by metric name."""


class Requests(Protocol):
    """Who sends requests to engines while weights change: a stream."""

    def change(self, engines: Sequence[int]) -> None:
        """The weights of these engines are about to change."""

    def serve(self, engines: Sequence[int], version: int) -> None:
        """These engines serve this version."""

    def lose(self, engine: int, cause: str) -> None:
        """An engine is gone. Raises EngineError where it may not be started again."""


@dataclass(frozen=True)
class _Part:
    """What is transferred by itself.

    Args:
        number: of this transfer, among those that the ranks have connected.
        engines: that get it, by their numbers.
        calls: of them.
        plan: of what goes to them.
        engines_receive: whether their ranks take part.
    """

    number: int
    engines: Sequence[int]
    calls: EngineCalls
    plan: Plan
    engines_receive: bool


class NoEngines:
    """In the place of a `WeightSync` in a run without engines: there is nobody to bring weights to."""

    def before_update(self, version: int) -> None:
        """Nothing."""

    def before_generation(self) -> None:
        """Nothing."""

    def sync_weights(self, version: int, stream: Requests | None = None) -> dict[str, float]:
        """Nothing; no figures."""
        return {}

    def __enter__(self) -> NoEngines:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing."""


class WeightSync:
    """Brings every rollout engine to the actor's weights.

    A version is served by all engines or by none; where they get it one after another (`rolling`), by all when
    `sync_weights` returns.

    Args:
        actor: the ranks that train.
        rollout: the engines.
        spec: the model.
        config: how weights are transferred, and whether that is verified.
        directory: where an export lies while `verify` compares the engines with it; seen by all nodes.
        lent: engines that others are not to wait for while the actor learns: they are on its devices, and may share
            its memory.
    """

    def __init__(
        self,
        actor: PolicyGroup,
        rollout: RolloutGroup,
        spec: ModelSpec,
        config: RolloutRole,
        directory: Path,
        lent: Sequence[int] = (),
    ) -> None:
        dedicated = [number for number in range(rollout.layout.dp) if number not in lent]
        self._together = [list(kind) for kind in (dedicated, lent) if kind]
        """Engines that get weights in the same transfers, but for `rolling_engines`."""
        self._sources: list[SharedShards] | None = None
        self._shared: dict[int, list[SharedShards]] = {}
        """What the ranks of each engine hold, by its number."""
        self._connections = 0
        self._actor, self._rollout, self._spec = actor, rollout, spec
        self._config, self._verify, self._directory = config.weights, config.verify_weights, directory
        self._parts: tuple[_Part, ...] = ()
        self._store: StoreServer | None = None
        self._streams = config.stream is not None
        self._releases = config.engine.release_weights
        self._version: int | None = None
        self._under_way: UnderWay = config.stream.on_new_weights if config.stream is not None else "wait"

    def before_update(self, version: int) -> None:
        """The actor's weights are about to change into `version`: engines that share their memory stop serving it."""
        sharing = [part for part in self._parts if part.plan.bytes_aliased]
        if sharing:
            wait_together(*[part.calls.begin_weights(version, under_way=self._under_way) for part in sharing])

    def sync_weights(self, version: int, stream: Requests | None = None) -> dict[str, float]:
        """Every engine serves `version` when this returns; after an error the run ends.

        Args:
            version: of the weights.
            stream: from which engines have requests that go on meanwhile.

        Returns:
            Bytes and times of the transfer, by metric name.
        """
        pauses: dict[int, Pause] = {}

        def commit(part: _Part) -> None:
            found = part.calls.commit_weights(version).result()[:: self._hosts]
            pauses.update((engine, each) for engine, each in zip(part.engines, found, strict=True) if each is not None)

        values = self._transfer(version, commit, stream)
        self._version = version
        lasted = [1000 * (pause.end - pause.begin) for pause in pauses.values()]
        if self._streams:
            timeline.record(
                Span("rollout", self._hosts * engine, "paused", pause.begin, pause.end)
                for engine, pause in pauses.items()
            )
        return values | {metrics.SYNC_PAUSE_SUM: sum(lasted), metrics.SYNC_PAUSE_MAX: max(lasted, default=0.0)}

    def _transfer(
        self, version: int, commit: Callable[[_Part], None], stream: Requests | None = None
    ) -> dict[str, float]:
        values: dict[str, float] = {}
        if self._releases:
            with Timer(values, metrics.SYNC_MEMORY_TIME):
                self._rollout.take_turn().result()  # what is written has to be there
        if not self._parts:
            self._parts = self._connect()
        requests = stream if self._config.rolling else None
        with closing(self._begun(version, requests, stream)) as begun, self._exported(version) as export:
            while True:
                with Timer(values, metrics.SYNC_BEGIN_TIME):
                    part = next(begun, None)
                if part is None:
                    break
                self._deliver(part, version, export, values)
                with Timer(values, metrics.SYNC_COMMIT_TIME):
                    commit(part)
                if requests is not None:
                    requests.serve(part.engines, version)
        return values

    def _deliver(self, part: _Part, version: int, export: Callable[[], Path], values: dict[str, float]) -> None:
        """Bring all of a version to engines that stand still; it can be served then."""
        with Timer(values, metrics.SYNC_SEND_TIME):
            sent = self._send(part, version)
        with Timer(values, metrics.SYNC_SEAL_TIME):
            part.calls.seal_weights(version, flush_cache=self._config.flush_cache).result()
        if self._verify:
            with Timer(values, metrics.SYNC_VERIFY_TIME):
                self._verify_part(part, version, export())
        for name, figure in _figures(part.plan, sent).items():
            values[name] = values.get(name, 0.0) + figure

    def leave(self, engine: int) -> None:
        """An engine is gone: transfers go to the others, until `rejoin`."""
        self._together = [left for kind in self._together if (left := [each for each in kind if each != engine])]
        self._shared.pop(engine, None)
        self._parts = ()

    def rejoin(self, engine: int, version: int) -> None:
        """Bring an engine that was started again to the version that the others serve, while the actor does not learn.

        After an error the run ends.
        """
        self._together.append([engine])
        self._parts = self._connect()
        part = self._parts[-1]
        for cause in part.calls.begin_weights(version, under_way=self._under_way).result():
            if cause is not None:
                raise EngineError(f"rollout engine {engine}, started again: {cause}")
        with self._exported(version) as export:
            self._deliver(part, version, export, {})
        part.calls.commit_weights(version).wait()

    def _begun(self, version: int, requests: Requests | None, stream: Requests | None) -> Generator[_Part, None, None]:
        """The parts one after another, each once its engines stand still.

        Where responses are waited for, all engines come to their end at the same time, each with its own: one after
        another they would take as much longer as there are engines. Engines that are lost as they are to stand still
        are left out, and those that were to get weights with them are connected anew.
        """
        done: set[int] = set()
        while left := [part for part in self._parts if not done.issuperset(part.engines)]:
            waits = self._under_way == "wait" and len(left) > 1
            lost: dict[int, str] = {}
            for parts in [left] if waits else [[part] for part in left]:
                if requests is not None:
                    requests.change([engine for part in parts for engine in part.engines])
                beginning = [part.calls.begin_weights(version, under_way=self._under_way) for part in parts]
                with closing(as_they_answer(beginning)) as answered:
                    for place in answered:
                        found = zip(parts[place].engines, beginning[place].result()[:: self._hosts], strict=True)
                        if gone := {engine: cause for engine, cause in found if cause is not None}:
                            lost |= gone
                        else:
                            done.update(parts[place].engines)
                            yield parts[place]
            for engine, cause in lost.items():
                if stream is None:
                    raise EngineError(f"rollout engine {engine}: {cause}")
                stream.lose(engine, cause)
                self.leave(engine)
            if lost:
                self._parts = self._connect()

    def before_generation(self) -> None:
        """Let the engines have whole weights, where they gave them back since the last transfer.

        Nothing has changed in the actor's since: an update is followed by the transfer of its own version.
        """
        if self._releases and self._version is not None and turns.gave_back(self._rollout.ranks):
            version = self._version
            self._transfer(version, lambda part: part.calls.recommit_weights(version).wait())

    def _send(self, part: _Part, version: int) -> Sequence[dict[Transport, Sent]]:
        """What each rank sent, or took itself, once all of it is in the engines."""
        sending = self._actor.send_weights(version, part=part.number)
        receiving = [part.calls.receive_weights(version)] if part.engines_receive else []
        wait_together(sending, *receiving)
        sent = list(sending.result())
        for each in receiving:
            sent += itertools.chain.from_iterable(each.result())
        return sent

    @contextmanager
    def _exported(self, version: int) -> Iterator[Callable[[], Path]]:
        """What makes an export of the actor's weights, once, which is there until the block ends."""
        weights = self._directory / f"version-{version}"

        @functools.cache
        def export() -> Path:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._actor.export(weights).result()
            return weights

        yield export
        if weights.exists():  # not where nothing was transferred
            shutil.rmtree(weights)

    def _verify_part(self, part: _Part, version: int, export: Path) -> None:
        """Prove that engines hold what SGLang's loader makes of an export of the actor's weights.

        Raises:
            EngineError: they do not; names engine, rank, parameter and tensor.
        """
        found = part.calls.verify_weights(export).result()[:: self._hosts]
        for engine, ranks in zip(part.engines, found, strict=True):
            for rank, differences in enumerate(ranks):
                if differences:
                    more = f", and {len(differences) - 1} more" if len(differences) > 1 else ""
                    raise EngineError(
                        f"weights version {version}: rollout engine {engine} rank {rank} does not hold what SGLang "
                        f"makes of the actor's export: {differences[0]}{more}"
                    )

    @property
    def _hosts(self) -> int:
        """Of an engine, of which the first answers."""
        return self._rollout.layout.tp

    def _connect(self) -> tuple[_Part, ...]:
        present = sorted(itertools.chain.from_iterable(self._together))
        if not present:
            return ()
        sources = self._sources = self._sources or self._actor.share_weights().result()
        if new := [engine for engine in present if engine not in self._shared]:
            found = self._rollout.engines(new).share_weights().result()[:: self._hosts]
            self._shared |= zip(new, found, strict=True)
        shared = self._shared
        self._connections += 1
        # Each has a plan of its own, so that every rank of the actor has a like share of each transfer.
        each = self._config.rolling_engines if self._config.rolling else len(shared)
        parts = [kind[first : first + each] for kind in self._together for first in range(0, len(kind), each)]
        orders = [self._coordinate(number, sources, [shared[e] for e in part]) for number, part in enumerate(parts)]
        connecting = [
            self._actor.connect_weights([[each.send[rank] for each in orders] for rank in range(len(sources))])
        ]
        if any(each.engines_receive for each in orders):
            ranks = len(shared[present[0]])
            per_rank: list[list[ReceiveOrder]] = [[] for _ in range(self._rollout.layout.world_size)]
            for part, made in zip(parts, orders, strict=True):
                for place, engine in enumerate(part):
                    per_rank[engine * self._hosts] = list(made.receive[place * ranks : (place + 1) * ranks])
            connecting.append(self._rollout.engines(present).connect_weights(per_rank))
        wait_together(*connecting)
        return tuple(
            _Part(number, part, self._rollout.engines(part), each.plan, each.engines_receive)
            for number, (part, each) in enumerate(zip(parts, orders, strict=True))
        )

    def _coordinate(
        self, number: int, sources: Sequence[SharedShards], engines: Sequence[Sequence[SharedShards]]
    ) -> Orders:
        return coordinate(
            sources,
            list(itertools.chain.from_iterable(engines)),
            {name: tensor.shape for name, tensor in self._spec.hf_tensors.items()},
            transport=self._config.transport,
            store=self._open_store,
            group=f"weights-{self._connections}-{number}",
            staging_bytes=self._config.staging_mb * 10**6,
            timeout_s=self._config.timeout_s,
        )

    def _open_store(self) -> str:
        """Where ranks meet that send and receive over a process group; its address."""
        if (file := ray_runtime.store_file("weights")) is not None:
            return file_address(file)
        self._store = self._store or serve(listen(ray.util.get_node_ip_address()))
        return tcp_address(self._store.host, self._store.port)

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


def _figures(plan: Plan, sent: Sequence[dict[Transport, Sent]]) -> dict[str, float]:
    values: dict[str, float] = {
        metrics.SYNC_BYTES_ALIASED: plan.bytes_aliased,
        metrics.SYNC_BYTES_MOVED: plan.bytes_moved,
    }
    for transport, (nbytes, milliseconds) in _TRANSPORT_METRICS.items():
        if figures := [rank[transport] for rank in sent if transport in rank]:
            values[nbytes] = sum(each.nbytes for each in figures)
            values[milliseconds] = 1000 * max(each.seconds for each in figures)
    return values
