"""One handle for all ranks of a role.

    class Actor:
        def __init__(self, context: WorkerContext, config: TrainConfig) -> None: ...

        @register(THREE_D_PROTO)
        def update(self, batch: SampleBatch) -> list[Statistics]: ...

    class ActorGroup(WorkerGroup):
        update = Actor.update

    group = ActorGroup("actor", Actor, pool, layout, config)
    future = group.update(batch)      # every rank works on its shard; the caller continues
    statistics = future.result()

A group class gives each registered method its type (`hybridflow.workers.methods`). A plain `WorkerGroup` has them too,
by name alone: `group.call("update", batch)`, or `group.update(batch)` where no type checker looks.

A future may be passed as data to another group: each shard goes from rank to rank, not through the caller, where both
groups split it into the same number of shards.

Groups run at the same time as soon as their inputs are there. Where two share a device, calls of their exclusive
methods run one after another, in the order in which they were made, and each releases what its ranks only cache.

When a rank fails, the group is killed at once and every later call raises the one error that says which rank failed
first, in which method and why; errors of ranks that only lost their neighbour do not hide it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import ray

from engine3d.errors import EngineError, UserError
from engine3d.layout import Layout
from engine3d.rendezvous import file_address, tcp_address
from hybridflow.batch.remote_batch import RemoteBatch, SampleAssignment, SampleCosts, SampleIndices
from hybridflow.cluster.processes.process_tree import find_process
from hybridflow.cluster.processes.rank_look import RankPlace
from hybridflow.cluster.ray import ray_session
from hybridflow.cluster.ray.resource_pool import Bundle, ResourcePool
from hybridflow.rundir.private import umask_environment
from hybridflow.rundir.status.heartbeat import heartbeat_path
from hybridflow.workers.call import GroupCall
from hybridflow.workers.context import WorkerContext
from hybridflow.workers.device_turns import OFFLOAD, ONLOAD, RankRequest, turns
from hybridflow.workers.failure_diagnosis import RankError, RankUserError
from hybridflow.workers.future import Future, wait_together
from hybridflow.workers.methods import (
    Arguments,
    Caller,
    OneEach,
    Protocol,
    RankGrid,
    Registration,
    ToAll,
    registrations,
)
from hybridflow.workers.rank_process import CONCURRENT, RankProcess
from hybridflow.workers.ranks import Ranks
from hybridflow.workers.watching.call_progress import ProgressLimits
from hybridflow.workers.watching.waits import waits

__all__ = ["Future", "RankError", "RankUserError", "WorkerContext", "WorkerGroup", "wait_together"]


START_TIMEOUT_S = 600.0
"""Limit of starting the processes of a group, and of building their workers, in seconds."""


class WorkerGroup(Caller):
    """The ranks of a role: one Ray actor each, started together.

    Args:
        role: names the group in errors and log files.
        worker_class: built on every rank as `worker_class(context, *args, **kwargs)`. Its methods marked with
            `@register` are methods of the group. A method `shutdown()` is called before the processes end. An exclusive
            method `offload()` is called when the devices are another group's turn: to release device memory that
            is not needed until the next call. `concurrent_threads` is the number of concurrent calls
            of holders of a rank's handle (`RankProcess.call_concurrently`).
        pool: the devices; rank r has the r-th `devices_per_rank` of them.
        layout: sizes and coordinates; its world size is the number of ranks.
        sample_costs: costs of samples by their tokens, for the balance of a `RemoteBatch` over the ranks.
        devices_per_rank: devices of each rank, all on one node; for an engine that runs several devices itself.
        generation: tensor and pipeline sizes while generating, for 3D_ALL_MICRO_DP.
        ranks_per_store: how many ranks, one after the other, meet at a store of theirs, for a process group; all of
            them if None, no store if 0.
        log_dir: each rank's output goes to `<log_dir>/<role>-<rank>.log`; to Ray's own logs if None.
        environment: further environment variables of the ranks.
        call_timeout_s: limit of every call unless `Future.result` is given another, in seconds.
        quiet_s: seconds without an answer, after which a line on stderr names the awaited ranks.
        progress: limits of a call without progress; None for no limit.
        start_timeout_s: limit of starting the processes and building the workers, in seconds.

    Raises:
        UserError: the pool does not have as many devices as the layout needs.
        RankError, RankUserError: a rank failed while it was built.
    """

    def __init__(
        self,
        role: str,
        worker_class: type,
        pool: ResourcePool,
        layout: Layout,
        *args: Any,
        devices_per_rank: int = 1,
        generation: tuple[int, int] = (1, 1),
        ranks_per_store: int | None = None,
        log_dir: Path | None = None,
        environment: Mapping[str, str] | None = None,
        call_timeout_s: float = 1800.0,
        quiet_s: float = 30.0,
        progress: ProgressLimits | None = None,
        sample_costs: SampleCosts = list,
        start_timeout_s: float = START_TIMEOUT_S,
        **kwargs: Any,
    ) -> None:
        self.role, self.layout, self.pool = role, layout, pool
        self.grid = RankGrid(layout, *generation)
        self._devices_per_rank = devices_per_rank
        self._ranks_per_store = layout.world_size if ranks_per_store is None else ranks_per_store
        self.sample_costs = sample_costs
        self._registrations = registrations(worker_class)
        memory = {name: method for name, method in self._registrations.items() if name in (OFFLOAD, ONLOAD)}
        self.ranks = Ranks(
            role,
            frozenset(bundle.device for bundle in pool.bundles),
            log_dir,
            quiet_s=quiet_s,
            call_timeout_s=call_timeout_s,
            progress=progress,
            ending=turns.remove,
            memory_methods={name: _limit_s(method, call_timeout_s) for name, method in memory.items()},
        )
        if layout.world_size * devices_per_rank != len(pool):
            of_devices = f" of {devices_per_rank} devices each" if devices_per_rank > 1 else ""
            raise UserError(
                f"{role}: the layout ({layout}) has {layout.world_size} ranks{of_devices}, "
                f"and its pool has {len(pool)} devices; expected as many"
            )
        waits.add(self.ranks)
        try:
            self._start(worker_class, args, kwargs, environment or {}, start_timeout_s)
        except BaseException:
            self.kill()
            raise

    if not TYPE_CHECKING:  # a type checker knows the methods of a group class, and refuses others

        def __getattr__(self, name: str) -> Callable[..., Any]:
            self._registration(name)
            return functools.partial(self.call, name)

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a registered method by its name: a `Future`, or the result of a blocking one.

        Raises:
            AttributeError: no method of that name is registered.
            UserError: data that cannot be spread over the ranks.
            RankError, RankUserError: the group has died of this error.
            EngineError: it has been shut down.
        """
        registration = self._registration(method)
        future = self._call(method, registration, args, kwargs)
        return future.result() if registration.blocking else future

    def call_some(self, members: Sequence[int], method: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a registered method on these ranks alone, by their numbers in order; results come from them.

        Only a method that every rank has the same arguments of, or an entry of a list with one for each rank of the
        group. Raises as `call`; UserError for another method.
        """
        registration = self._registration(method)
        if not isinstance(registration.protocol, ToAll | OneEach) or registration.exclusive:
            expected = "expected a method of ONE_TO_ALL or ALL_TO_ALL that takes no turn"
            raise UserError(f"{self.role}.{method}: of some ranks, {expected}")
        return self._call(method, registration, args, kwargs, members)

    def _registration(self, name: str) -> Registration:
        known: Mapping[str, Registration] = self.__dict__.get("_registrations", {})
        if name not in known:
            among = ", ".join(known) or "none"
            raise AttributeError(f"{self.__dict__.get('role')}: no registered method {name!r}; registered are {among}")
        return known[name]

    def shutdown(self, timeout_s: float = 20.0) -> None:
        """End the group: call each worker's `shutdown()`, then end its process and its descendants."""
        if self.is_alive and self.ranks.failure is None and ray_session.ray_answers():
            closing = [actor.close.remote() for actor in self.ranks.actors]
            ray.wait(closing, num_returns=len(closing), timeout=timeout_s)
        self.kill()

    def kill(self) -> None:
        """End every process of the group now."""
        self.ranks.kill()

    @property
    def is_alive(self) -> bool:
        """True if it has processes."""
        return self.ranks.is_alive

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Shut down. After an exception, do not wait for the ranks' calls."""
        if error is None:
            self.shutdown()
        else:
            waits.collect_stacks(again=False)
            self.kill()

    def _start(
        self,
        worker_class: type,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        environment: Mapping[str, str],
        timeout_s: float,
    ) -> None:
        ranks, local_ranks = self.ranks, self._local_ranks()
        threads = getattr(worker_class, "concurrent_threads", 0)
        limits: dict[str, Any] = {"concurrency_groups": {CONCURRENT: threads}} if threads else {}
        actor_class: Any = ray.remote(num_cpus=0, max_restarts=0, **limits)(RankProcess)
        for rank, local_rank in enumerate(local_ranks):
            variables = {**environment, **self._environment(rank, local_rank), **umask_environment()}
            options = actor_class.options(scheduling_strategy=self._bundles(rank)[0].strategy())
            ranks.actors.append(options.remote(self.role, rank, variables, ranks.log_path(rank)))
        files = {first: ray_session.store_file(f"{self.role}-{first}") for first in self._first_ranks()}
        listening = {first for first, file in files.items() if file is None}
        identifying = [actor.identify.remote(rank in listening) for rank, actor in enumerate(ranks.actors)]
        GroupCall(ranks, "start", timeout_s, identifying).wait()
        identities: list[tuple[int, str, str, int]] = ray.get(identifying)
        ranks.locations = [
            RankPlace(self.role, rank, node, address, pid, _heartbeat(ranks.log_path(rank)))
            for rank, (pid, node, address, _) in enumerate(identities)
        ]
        here = ray.util.get_node_ip_address()
        local = [find_process(pid) for pid, _, address, _ in identities if address == here]
        ranks.processes = [process for process in local if process is not None]

        stores = {
            first: file_address(file) if file is not None else tcp_address(*identities[first][2:])
            for first, file in files.items()
        }
        arguments = ray.put((args, kwargs))
        constructing: list[ray.ObjectRef] = []
        for rank, (actor, local_rank) in enumerate(zip(ranks.actors, local_ranks, strict=True)):
            context = WorkerContext(
                role=self.role,
                rank=rank,
                local_rank=local_rank,
                layout=self.layout,
                coordinates=self.layout.coordinates(rank),
                devices=tuple(range(local_rank * self._devices_per_rank, (local_rank + 1) * self._devices_per_rank)),
                store=stores[rank - rank % self._ranks_per_store] if stores else "",
                log_path=ranks.log_path(rank),
            )
            constructing.append(actor.construct.remote(worker_class, context, arguments))
        GroupCall(ranks, "start", timeout_s, constructing).wait()

    def _first_ranks(self) -> range:
        """Return the first of the ranks that meet at each store."""
        return range(0, self.layout.world_size, self._ranks_per_store) if self._ranks_per_store else range(0)

    def _bundles(self, rank: int) -> Sequence[Bundle]:
        return self.pool.bundles[rank * self._devices_per_rank : (rank + 1) * self._devices_per_rank]

    def _local_ranks(self) -> list[int]:
        """Return position of each rank among those of its node."""
        seen: dict[int, int] = {}
        positions = []
        for rank in range(self.layout.world_size):
            nodes = {bundle.device.node for bundle in self._bundles(rank)}
            if len(nodes) > 1:
                raise UserError(
                    f"{self.role}: the {self._devices_per_rank} devices of rank {rank} are on several nodes"
                )
            node = nodes.pop()
            positions.append(seen.get(node, 0))
            seen[node] = positions[-1] + 1
        return positions

    def _environment(self, rank: int, local_rank: int) -> dict[str, str]:
        """Return the variables that torchrun would set, except the address of the store, which is known later.

        Every rank sees the devices of its role on its node first and then the others that the run holds there, so that
        it can map the memory of another's.
        """
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.layout.world_size),
            "LOCAL_RANK": str(local_rank),
            "CUDA_VISIBLE_DEVICES": self.pool.visible_devices(self._bundles(rank)[0].device.node),
            **ray_session.rank_environment(self._bundles(rank)[0].device.node),
        }

    def _call(
        self,
        method: str,
        registration: Registration,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        members: Sequence[int] | None = None,
    ) -> Future[Any]:
        """Send a call to every rank, or to some."""
        if self.ranks.failure is not None:
            raise self.ranks.failure
        if not self.is_alive:
            raise EngineError(f"{self.role}.{method}: the group has been shut down")
        protocol = registration.protocol
        given_futures = [value for value in (*args, *kwargs.values()) if isinstance(value, Future)]
        inputs = [future.call for future in given_futures]
        batches = [value for value in args if isinstance(value, RemoteBatch)]
        try:
            _check_batches(args, kwargs, protocol)
            given = Arguments(
                tuple(self._data(value, protocol) for value in args),
                {name: value.result() if isinstance(value, Future) else value for name, value in kwargs.items()},
            )
            spread = protocol.distribute(self.grid, given)
        except UserError as error:
            raise UserError(f"{self.role}.{method}: {error}") from None
        assignment = None
        if batches:
            inputs += [made.call for made in batches[0].inputs if isinstance(made, Future)]
            spread, shards = self._shard(batches[0], spread, registration)
            assignment = SampleAssignment(batches[0].per_sample["sample_ids"], shards)
        collected = protocol.collect(self.grid)
        if members is not None:
            spread, collected = [spread[rank] for rank in members], [rank for rank in collected if rank in members]
        call, results = turns.send(
            RankRequest(
                self.ranks,
                method,
                _limit_s(registration, self.ranks.call_timeout_s),
                _stored(spread),
                frozenset(collected),
                registration.exclusive,
                inputs,
                members,
            )
        )
        return Future(call, results, collected, joined=protocol.concatenate, assignment=assignment)

    def _shard(
        self, batch: RemoteBatch, spread: list[Arguments], registration: Registration
    ) -> tuple[list[Arguments], list[SampleIndices]]:
        """Shard a batch: replace each rank's samples by references. Return those samples too."""
        chosen = [
            next(value for value in arguments.positional if isinstance(value, SampleIndices)) for arguments in spread
        ]
        nodes: dict[SampleIndices, set[str]] = {}
        for rank, samples in enumerate(chosen):
            nodes.setdefault(samples, set()).add(self.ranks.locations[rank].node)
        shards = batch.shard(
            [samples.indices for samples in nodes],
            [frozenset(names) for names in nodes.values()],
            routes=registration.routes,
        )
        sent = dict(zip(nodes, shards, strict=True))
        return [
            Arguments(
                tuple(sent[value] if isinstance(value, SampleIndices) else value for value in arguments.positional),
                arguments.keyword,
            )
            for arguments in spread
        ], chosen

    def _data(self, value: Any, protocol: Protocol) -> Any:
        """Return a future's data: its shards as they are where this call splits into as many, else its result."""
        if isinstance(value, RemoteBatch):
            return SampleIndices.all_of(value, self.sample_costs)
        if not isinstance(value, Future):
            return value
        if value.shard_indices is None and protocol.splits and protocol.cuts_into is not None:  # else in another order
            shards = value.shards()
            if protocol.cuts_into(self.grid) == len(shards.shards):
                return shards
        return value.result()


class SomeRanks(Caller):
    """Some ranks of a group, with those of its methods that a subclass names.

    Args:
        group: of the ranks. They end with it, and it with them.
        members: their numbers, in order.
    """

    def __init__(self, group: WorkerGroup, members: Sequence[int]) -> None:
        self.group, self.members = group, members

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        return self.group.call_some(self.members, method, *args, **kwargs)


def _heartbeat(log_path: Path | None) -> str | None:
    return None if log_path is None else str(heartbeat_path(log_path))


def _limit_s(registration: Registration, call_timeout_s: float) -> float:
    """Return the limit of a call of a method in seconds, unless the caller has another."""
    return call_timeout_s if registration.timeout_s is None else registration.timeout_s


def _stored(spread: Sequence[Arguments]) -> list[Arguments]:
    """Put each value of the arguments into the object store once, for all ranks that get it. Small ones stay as they
    are.
    """
    stored: dict[int, ray.ObjectRef] = {}

    def store(value: Any) -> Any:
        if value is None or isinstance(value, ray.ObjectRef | int | float | str):
            return value
        if id(value) not in stored:
            stored[id(value)] = ray.put(value)
        return stored[id(value)]

    return [
        Arguments(
            tuple(store(value) for value in arguments.positional),
            {name: store(value) for name, value in arguments.keyword.items()},
        )
        for arguments in spread
    ]


def _check_batches(args: tuple[Any, ...], kwargs: Mapping[str, Any], protocol: Protocol) -> None:
    count = sum(isinstance(value, RemoteBatch) for value in args)
    if any(isinstance(value, RemoteBatch) for value in kwargs.values()):
        raise UserError("a batch by keyword, expected it by position")
    if count > 1:
        raise UserError(f"{count} batches in one call, expected one; join their columns first")
    if count and protocol.splits and len(args) > 1:
        raise UserError(
            "data next to a batch would be split differently from its samples; make it a per-sample column of the "
            "batch, or pass it by keyword to give it to every rank whole"
        )
