"""Weights from the actor to the rollout engines, as numbered versions."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import ray.util

from engine3d.errors import EngineError
from engine3d.models import ModelSpec
from engine3d.reshard.plan.coordinate import ReceiveOrder, coordinate
from engine3d.reshard.plan.pieces import Plan
from engine3d.reshard.transport.sender import Sent, Transport
from engine3d.rollout.host.stream import UnderWay
from engine3d.stores import StoreServer, file_address, listen, serve, tcp_address
from hybridflow.cluster.runtime import ray_runtime
from hybridflow.config.roles import RolloutRole
from hybridflow.metrics import names as metrics
from hybridflow.metrics.logger import Timer
from hybridflow.roles.groups import PolicyGroup, RolloutGroup
from hybridflow.workers.device_turns import turns
from hybridflow.workers.future import Future
from hybridflow.workers.worker_group import wait_together

_TRANSPORT_METRICS: dict[Transport, tuple[str, str]] = {
    "one_sided": (metrics.SYNC_ONE_SIDED_BYTES, metrics.SYNC_ONE_SIDED_TIME),
    "collective": (metrics.SYNC_COLLECTIVE_BYTES, metrics.SYNC_COLLECTIVE_TIME),
}
"""Bytes and time of what goes over each transport, by metric name."""


class NoEngines:
    """In the place of a `WeightSync` in a run without engines: there is nobody to bring weights to."""

    def before_update(self, version: int) -> None:
        """Nothing."""

    def before_generation(self) -> None:
        """Nothing."""

    def sync_weights(self, version: int) -> dict[str, float]:
        """Nothing; no figures."""
        return {}

    def __enter__(self) -> NoEngines:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing."""


class WeightSync:
    """Brings every rollout engine to the actor's weights; a version is served by all engines or by none.

    Args:
        actor: the ranks that train.
        rollout: the engines.
        spec: the model.
        config: how weights are transferred, and whether that is verified.
        directory: where an export lies while `verify` compares the engines with it; seen by all nodes.
    """

    def __init__(
        self, actor: PolicyGroup, rollout: RolloutGroup, spec: ModelSpec, config: RolloutRole, directory: Path
    ) -> None:
        self._actor, self._rollout, self._spec = actor, rollout, spec
        self._config, self._verify, self._directory = config.weights, config.verify_weights, directory
        self._plan: Plan | None = None
        self._engines_receive = False
        self._store: StoreServer | None = None
        self._releases = config.engine.release_weights
        self._version: int | None = None
        self._under_way: UnderWay = config.stream.on_new_weights if config.stream is not None else "wait"

    def before_update(self, version: int) -> None:
        """The actor's weights are about to change into `version`: engines that share their memory stop serving it."""
        if self._plan is not None and self._plan.bytes_aliased:
            self._rollout.begin_weights(version, under_way=self._under_way).result()

    def sync_weights(self, version: int) -> dict[str, float]:
        """Every engine serves `version` when this returns; after an error none does, nor any other version.

        Returns:
            Bytes and times of the transfer, by metric name.
        """
        values = self._transfer(version, self._rollout.commit_weights)
        self._version = version
        return values

    def _transfer(self, version: int, commit: Callable[[int], Future[list[None]]]) -> dict[str, float]:
        values: dict[str, float] = {}
        if self._releases:
            with Timer(values, metrics.SYNC_MEMORY_TIME):
                self._rollout.take_turn().result()  # what is written has to be there
        if self._plan is None:
            self._plan = self._connect()
        with Timer(values, metrics.SYNC_BEGIN_TIME):
            self._rollout.begin_weights(version, under_way=self._under_way).result()
        with Timer(values, metrics.SYNC_SEND_TIME):
            sent = self._send(version)
        with Timer(values, metrics.SYNC_SEAL_TIME):
            self._rollout.seal_weights(version, flush_cache=self._config.flush_cache).result()
        if self._verify:
            with Timer(values, metrics.SYNC_VERIFY_TIME):
                self.verify(version)
        with Timer(values, metrics.SYNC_COMMIT_TIME):
            commit(version).result()
        return values | _figures(self._plan, sent)

    def before_generation(self) -> None:
        """Let the engines have whole weights, where they gave them back since the last transfer.

        Nothing has changed in the actor's since: an update is followed by the transfer of its own version.
        """
        if self._releases and self._version is not None and turns.gave_back(self._rollout.ranks):
            self._transfer(self._version, self._rollout.recommit_weights)

    def _send(self, version: int) -> Sequence[dict[Transport, Sent]]:
        """What each rank sent, or took itself, once all of it is in the engines."""
        sending = self._actor.send_weights(version)
        receiving = [self._rollout.receive_weights(version)] if self._engines_receive else []
        wait_together(sending, *receiving)
        sent = list(sending.result())
        for each in receiving:
            sent += itertools.chain.from_iterable(each.result())
        return sent

    def verify(self, version: int) -> None:
        """Prove that every engine holds what SGLang's loader makes of an export of the actor's weights.

        Raises:
            EngineError: it does not; names engine, rank, parameter and tensor.
        """
        weights = self._directory / f"version-{version}"
        self._directory.mkdir(parents=True, exist_ok=True)
        self._actor.export(weights).result()
        found = self._rollout.verify_weights(weights).result()[:: self._rollout.layout.tp]
        shutil.rmtree(weights)
        for engine, ranks in enumerate(found):
            for rank, differences in enumerate(ranks):
                if differences:
                    more = f", and {len(differences) - 1} more" if len(differences) > 1 else ""
                    raise EngineError(
                        f"weights version {version}: rollout engine {engine} rank {rank} does not hold what SGLang "
                        f"makes of the actor's export: {differences[0]}{more}"
                    )

    def _connect(self) -> Plan:
        sources = self._actor.share_weights().result()
        hosts = self._rollout.layout.tp  # of an engine, of which the first answers
        engines = self._rollout.share_weights().result()[::hosts]
        orders = coordinate(
            sources,
            list(itertools.chain.from_iterable(engines)),
            {name: tensor.shape for name, tensor in self._spec.hf_tensors.items()},
            transport=self._config.transport,
            store=self._open_store,
            staging_bytes=self._config.staging_mb * 10**6,
            timeout_s=self._config.timeout_s,
        )
        ranks = len(engines[0])
        connecting = [self._actor.connect_weights(orders.send)]
        self._engines_receive = orders.engines_receive
        if orders.engines_receive:
            per_engine = [list(orders.receive[first : first + ranks]) for first in range(0, len(orders.receive), ranks)]
            nothing: list[list[ReceiveOrder]] = [[]] * (hosts - 1)
            per_rank = list(itertools.chain.from_iterable([orders, *nothing] for orders in per_engine))
            connecting.append(self._rollout.connect_weights(per_rank))
        wait_together(*connecting)
        return orders.plan

    def _open_store(self) -> str:
        """Where ranks meet that send and receive over a process group; its address."""
        if (file := ray_runtime.store_file("weights")) is not None:
            return file_address(file)
        self._store = serve(listen(ray.util.get_node_ip_address()))
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
