"""Weights from the actor to the rollout engines, as numbered versions."""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import ray.util

from engine3d.errors import EngineError
from engine3d.models import ModelSpec
from engine3d.models.lora.spec import AdapterSpec
from engine3d.models.precision import served_shapes
from engine3d.rendezvous import file_address, listen, serve, tcp_address
from engine3d.reshard.describe.memory import SharedShards
from engine3d.reshard.plan.coordinate import Orders, ReceiveOrder, coordinate
from engine3d.reshard.plan.transfers import Plan
from engine3d.reshard.transport.sender import Sent, Transport
from engine3d.rollout.host.stream import InFlightPolicy
from engine3d.rollout.scheduler.rank import AdapterBase
from hybridflow.cluster.ray import ray_session
from hybridflow.metrics import names as metrics
from hybridflow.metrics.logger import Timer
from hybridflow.metrics.timeline import TimelineSpan, timeline
from hybridflow.roles.groups import EngineCalls, PolicyGroup, RolloutGroup
from hybridflow.roles.rollout import Pause
from hybridflow.rollout.config import RolloutRole
from hybridflow.workers.device_turns import turns
from hybridflow.workers.future import as_they_answer, wait_together

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_TRANSPORT_METRICS: dict[Transport, tuple[str, str]] = {
    "one_sided": (metrics.SYNC_ONE_SIDED_BYTES, metrics.SYNC_ONE_SIDED_TIME),
    "collective": (metrics.SYNC_COLLECTIVE_BYTES, metrics.SYNC_COLLECTIVE_TIME),
}
"""Bytes and time of what goes over each transport, by metric name."""


class Requests(Protocol):
    """The sender of requests to engines while weights change: a stream."""

    def change(self, engines: Sequence[int]) -> None:
        """The weights of these engines are about to change."""

    def serve(self, engines: Sequence[int], version: int) -> None:
        """These engines serve this version."""

    def restart_engine(self, engine: int, cause: str) -> None:
        """An engine is gone. Raises EngineError where it may not be started again."""


@dataclass(frozen=True)
class _Transfer:
    """A transfer of weights to some engines that is done by itself.

    Args:
        number: of this transfer, among those that the ranks have connected.
        engines: that get it, by their numbers.
        calls: of them.
        plan: of what goes to them.
        engines_receive: whether their ranks take transfer.
        base: the model under adapters that go to them apart; None where all weights go.
    """

    number: int
    engines: Sequence[int]
    calls: EngineCalls
    plan: Plan
    engines_receive: bool
    base: AdapterBase | None = None


class NoEngines:
    """The stand-in for `WeightSync` in a run without engines."""

    def before_update(self, version: int) -> None:
        """Nothing."""

    def before_generation(self) -> None:
        """Nothing."""

    def sync_weights(self, version: int, stream: Requests | None = None) -> dict[str, float]:
        """Do nothing. Returns no metrics."""
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
        leased: engines that others are not to wait for while the actor learns: they are on its devices, and may share
            its memory.
        adapters: that engines get for each version, and the model once.
    """

    def __init__(
        self,
        actor: PolicyGroup,
        rollout: RolloutGroup,
        spec: ModelSpec,
        config: RolloutRole,
        directory: Path,
        leased: Sequence[int] = (),
        adapters: AdapterSpec | None = None,
    ) -> None:
        dedicated = [number for number in range(rollout.layout.dp) if number not in leased]
        self._together = [list(kind) for kind in (dedicated, leased) if kind]
        """Engines that get weights in the same transfers, but for `rolling_engines`."""
        self._sources: list[SharedShards] | None = None
        self._shared: dict[int, list[SharedShards]] = {}
        """What the ranks of each engine hold, by its number."""
        self._connections = 0
        self._actor, self._rollout, self._spec = actor, rollout, spec
        self._config, self._verify, self._directory = config.weights, config.verify_weights, directory
        self._adapters = {name: tensor.shape for name, tensor in adapters.hf_tensors.items()} if adapters else {}
        """Tensors of a transfer to engines that have the model."""
        self._have_base: set[int] = set()
        self._transfers: tuple[_Transfer, ...] = ()
        self._store: TCPStore | None = None
        self._releases = config.engine.release_weights
        self._precision = config.engine.precision
        self._version: int | None = None
        self._in_flight: InFlightPolicy = config.on_new_weights

    def before_update(self, version: int) -> None:
        """The actor's weights are about to change into `version`: engines that share their memory stop serving it."""
        sharing = [transfer for transfer in self._transfers if transfer.plan.bytes_aliased]
        if sharing:
            wait_together(*[transfer.calls.begin_weights(version, in_flight=self._in_flight) for transfer in sharing])

    def sync_weights(self, version: int, stream: Requests | None = None) -> dict[str, float]:
        """Every engine serves `version` when this returns; after an error the run ends.

        Args:
            version: of the weights.
            stream: from which engines have requests in flight meanwhile.

        Returns:
            Bytes and times of the transfer, by metric name.
        """
        pauses: dict[int, Pause] = {}

        def commit(transfer: _Transfer) -> None:
            paused = transfer.calls.commit_weights(version).result()[:: self._hosts]
            pauses.update(
                (engine, pause) for engine, pause in zip(transfer.engines, paused, strict=True) if pause is not None
            )

        values = self._transfer_version(version, commit, stream)
        self._version = version
        lasted = [1000 * (pause.end - pause.begin) for pause in pauses.values()]
        timeline.record(
            TimelineSpan("rollout", self._hosts * engine, "paused", pause.begin, pause.end)
            for engine, pause in pauses.items()
        )
        return values | {metrics.SYNC_PAUSE_SUM: sum(lasted), metrics.SYNC_PAUSE_MAX: max(lasted, default=0.0)}

    def _transfer_version(
        self, version: int, commit: Callable[[_Transfer], None], stream: Requests | None = None
    ) -> dict[str, float]:
        values: dict[str, float] = {}
        if self._releases:
            with Timer(values, metrics.SYNC_MEMORY_TIME):
                self._rollout.take_turn().result()  # what is written has to be there
        if not self._transfers:
            self._transfers = self._connect()
        requests = stream if self._config.rolling else None
        with closing(self._begun(version, requests, stream)) as begun, self._exported(version) as export:
            while True:
                with Timer(values, metrics.SYNC_BEGIN_TIME):
                    transfer = next(begun, None)
                if transfer is None:
                    break
                self._deliver(transfer, version, export, values)
                with Timer(values, metrics.SYNC_COMMIT_TIME):
                    commit(transfer)
                if requests is not None:
                    requests.serve(transfer.engines, version)
        self._leave_out_base()
        return values

    def _leave_out_base(self) -> None:
        """Connect again before the next transfer where the last one brought the model under adapters."""
        if any(transfer.base is not None and transfer.base.sent for transfer in self._transfers):
            self._transfers = ()

    def _deliver(self, transfer: _Transfer, version: int, export: Callable[[], Path], values: dict[str, float]) -> None:
        """Bring all of a version to engines that stand still; it can be served then."""
        with Timer(values, metrics.SYNC_SEND_TIME):
            sent = self._send(transfer, version)
        with Timer(values, metrics.SYNC_SEAL_TIME):
            transfer.calls.seal_weights(version, flush_cache=self._config.flush_cache, base=transfer.base).result()
        if transfer.base is not None and transfer.base.sent:
            self._have_base.update(transfer.engines)
        if self._verify:
            with Timer(values, metrics.SYNC_VERIFY_TIME):
                self._verify_transfer(transfer, version, export())
        for name, figure in _sent_metrics(transfer.plan, sent).items():
            values[name] = values.get(name, 0.0) + figure

    def leave(self, engine: int) -> None:
        """Leave a lost engine out of transfers until `rejoin`."""
        self._together = [left for kind in self._together if (left := [other for other in kind if other != engine])]
        self._shared.pop(engine, None)
        self._have_base.discard(engine)
        self._transfers = ()

    def rejoin(self, engine: int, version: int) -> None:
        """Bring an engine that was started again to the version that the others serve, while the actor does not learn.

        After an error the run ends.
        """
        self._together.append([engine])
        self._transfers = self._connect()
        transfer = self._transfers[-1]
        for cause in transfer.calls.begin_weights(version, in_flight=self._in_flight).result():
            if cause is not None:
                raise EngineError(f"rollout engine {engine}, started again: {cause}")
        with self._exported(version) as export:
            self._deliver(transfer, version, export, {})
        transfer.calls.commit_weights(version).wait()
        self._leave_out_base()

    def _begun(
        self, version: int, requests: Requests | None, stream: Requests | None
    ) -> Generator[_Transfer, None, None]:
        """The transfers one after another, each once its engines stand still.

        Where responses are waited for, all engines come to their end at the same time, each with its own: one after
        another they would take as much longer as there are engines. Engines that are lost as they are to stand still
        are left out, and those that were to get weights with them are connected again.
        """
        done: set[int] = set()
        while left := [transfer for transfer in self._transfers if not done.issuperset(transfer.engines)]:
            waits = self._in_flight == "wait" and len(left) > 1
            lost: dict[int, str] = {}
            for transfers in [left] if waits else [[transfer] for transfer in left]:
                if requests is not None:
                    requests.change([engine for transfer in transfers for engine in transfer.engines])
                beginning = [transfer.calls.begin_weights(version, in_flight=self._in_flight) for transfer in transfers]
                with closing(as_they_answer(beginning)) as answered:
                    for index in answered:
                        causes = zip(transfers[index].engines, beginning[index].result()[:: self._hosts], strict=True)
                        if gone := {engine: cause for engine, cause in causes if cause is not None}:
                            lost |= gone
                        else:
                            done.update(transfers[index].engines)
                            yield transfers[index]
            for engine, cause in lost.items():
                if stream is None:
                    raise EngineError(f"rollout engine {engine}: {cause}")
                stream.restart_engine(engine, cause)
                self.leave(engine)
            if lost:
                self._transfers = self._connect()

    def before_generation(self) -> None:
        """Bring complete weights to engines that have released them since the last transfer.

        Nothing has changed in the actor's since: an update is followed by the transfer of its own version.
        """
        if self._releases and self._version is not None and turns.is_offloaded(self._rollout.ranks):
            version = self._version
            self._transfer_version(version, lambda transfer: transfer.calls.recommit_weights(version).wait())

    def _send(self, transfer: _Transfer, version: int) -> Sequence[dict[Transport, Sent]]:
        """Bytes that each rank sent, or copied itself, once all of them are in the engines."""
        sending = self._actor.send_weights(version, transfer=transfer.number)
        receiving = [transfer.calls.receive_weights(version)] if transfer.engines_receive else []
        wait_together(sending, *receiving)
        sent = list(sending.result())
        for received in receiving:
            sent += itertools.chain.from_iterable(received.result())
        return sent

    @contextmanager
    def _exported(self, version: int) -> Iterator[Callable[[], Path]]:
        """A function that exports the actor's weights once; the export is there until the block ends."""
        weights = self._directory / f"version-{version}"

        @functools.cache
        def export() -> Path:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._actor.export(weights, self._precision, served=True).result()
            return weights

        yield export
        if weights.exists():  # not where nothing was transferred
            shutil.rmtree(weights)

    def _verify_transfer(self, transfer: _Transfer, version: int, export: Path) -> None:
        """Prove that engines hold what SGLang's loader makes of an export of the actor's weights.

        Raises:
            EngineError: they do not; names engine, rank, parameter and tensor.
        """
        differing = transfer.calls.verify_weights(export).result()[:: self._hosts]
        for engine, ranks in zip(transfer.engines, differing, strict=True):
            for rank, differences in enumerate(ranks):
                if differences:
                    more = f", and {len(differences) - 1} more" if len(differences) > 1 else ""
                    raise EngineError(
                        f"weights version {version}: rollout engine {engine} rank {rank} does not hold what SGLang "
                        f"makes of the actor's export: {differences[0]}{more}"
                    )

    @property
    def _hosts(self) -> int:
        """Hosts of an engine, of which the first answers."""
        return self._rollout.layout.tp

    def _connect(self) -> tuple[_Transfer, ...]:
        present = sorted(itertools.chain.from_iterable(self._together))
        if not present:
            return ()
        sources = self._sources = self._sources or self._actor.share_weights().result()
        if new := [engine for engine in present if engine not in self._shared]:
            shards = self._rollout.engines(new).share_weights(drafts=self._spec.mtp).result()[:: self._hosts]
            self._shared |= zip(new, shards, strict=True)
        shared = self._shared
        self._connections += 1
        # Each transfer has a plan of its own, so that every rank of the actor has a like share of each transfer.
        size = self._config.rolling_engines if self._config.rolling else len(shared)
        split = [kind[first : first + size] for kind in self._together for first in range(0, len(kind), size)]
        bases = [self._base_of(engines, sources[0]) for engines in split]
        orders = [
            self._coordinate(number, sources, [shared[engine] for engine in engines], base)
            for number, (engines, base) in enumerate(zip(split, bases, strict=True))
        ]
        connecting = [
            self._actor.connect_weights([[order.send[rank] for order in orders] for rank in range(len(sources))])
        ]
        if any(order.engines_receive for order in orders):
            ranks = len(shared[present[0]])
            per_rank: list[list[ReceiveOrder]] = [[] for _ in range(self._rollout.layout.world_size)]
            for engines, order in zip(split, orders, strict=True):
                for index, engine in enumerate(engines):
                    per_rank[engine * self._hosts] = list(order.receive[index * ranks : (index + 1) * ranks])
            connecting.append(self._rollout.engines(present).connect_weights(per_rank))
        wait_together(*connecting)
        return tuple(
            _Transfer(number, engines, self._rollout.engines(engines), order.plan, order.engines_receive, base)
            for number, (engines, order, base) in enumerate(zip(split, orders, bases, strict=True))
        )

    def _base_of(self, engines: Sequence[int], source: SharedShards) -> AdapterBase | None:
        """The model under adapters, as a transfer to these engines has it."""
        return None if source.base is None else AdapterBase(source.base, sent=not self._have_base.issuperset(engines))

    def _coordinate(
        self,
        number: int,
        sources: Sequence[SharedShards],
        engines: Sequence[Sequence[SharedShards]],
        base: AdapterBase | None,
    ) -> Orders:
        targets = list(itertools.chain.from_iterable(engines))
        tensors = self._adapters
        if base is None or base.sent:
            tensors = served_shapes(self._spec, self._precision) | self._adapters
        else:
            sources, targets = ([shared.only(tensors) for shared in side] for side in (sources, targets))
        return coordinate(
            sources,
            targets,
            tensors,
            transport=self._config.transport,
            store=self._open_store,
            group=f"weights-{self._connections}-{number}",
            staging_bytes=self._config.staging_mb * 10**6,
            timeout_s=self._config.timeout_s,
        )

    def _open_store(self) -> str:
        """Open the store at which ranks meet that send and receive over a process group, and return its address."""
        if (file := ray_session.store_file("weights")) is not None:
            return file_address(file)
        self._store = self._store or serve(listen(ray.util.get_node_ip_address()))
        return tcp_address(self._store.host, self._store.port)

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


def _sent_metrics(plan: Plan, sent: Sequence[dict[Transport, Sent]]) -> dict[str, float]:
    values: dict[str, float] = {
        metrics.SYNC_BYTES_ALIASED: plan.bytes_aliased,
        metrics.SYNC_BYTES_MOVED: plan.bytes_moved,
    }
    for transport, (nbytes, milliseconds) in _TRANSPORT_METRICS.items():
        if amounts := [rank[transport] for rank in sent if transport in rank]:
            values[nbytes] = sum(amount.nbytes for amount in amounts)
            values[milliseconds] = 1000 * max(amount.seconds for amount in amounts)
    return values
