"""A graph of stages, each on ranks of its own; data goes along its connections.

    flow = DataFlow()
    prompts = Stage(name="prompts", module=draw_prompts)
    actor = Stage(name="actor", module=Actor, num_workers=2)
    flow.connect(prompts, actor)
    results = flow.run(max_steps=3)

A step calls every stage once, as soon as its inputs are there: stages without a path between them run at the same time.
A stage without inputs is a source, and makes its data from the number of the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import ray

from engine3d.errors import UserError
from engine3d.layout import Layout
from hybridflow.api.stage_worker import StageWorker
from hybridflow.cluster.devices.device_map import DeviceMap, highest_cpu_slot, pool_devices
from hybridflow.cluster.ray import ray_session, resource_pool
from hybridflow.cluster.ray.resource_pool import ResourcePool
from hybridflow.config.reading.known_names import no_attribute
from hybridflow.workers.future import Future
from hybridflow.workers.protocols import registrations
from hybridflow.workers.worker_group import WorkerGroup


@dataclass(frozen=True, eq=False)
class Stage:
    """One stage of a `DataFlow`.

    Args:
        name: of the stage, once in its flow.
        module: a function of one batch from each stage that is connected to it, in the order of the connections; a
            class that is built without arguments on every rank and whose instances are such functions; or a worker
            class, which is built with a `WorkerContext` and has methods marked with `@register`. A source gets the
            number of the step instead, from 1; a registered method gets it by the keyword `step`. Every rank gets its
            part of each batch (a list, a tensor, or anything with `split(parts)`), and what the ranks return is joined.
        num_workers: its ranks, on CPU slots of their own.
        device_mapping: a device map such as "cuda:0-1" instead, with one rank on each device.
        method: which registered method of a worker class is called, where it has several.
        log_dir: each rank's output goes to `<log_dir>/<name>-<rank>.log`; to Ray's own logs if None.

    Raises:
        UserError: an argument that makes no sense, in one line.
    """

    name: str
    module: Any
    num_workers: int | None = None
    device_mapping: str | None = None
    method: str | None = None
    log_dir: Path | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise UserError(f"stage {self.name!r}: expected a name that is a text and not empty")
        if self.num_workers is not None and (not isinstance(self.num_workers, int) or self.num_workers < 1):
            raise UserError(f"stage {self.name}: num_workers={self.num_workers!r}, expected at least 1")
        if self.num_workers is not None and self.device_mapping is not None:
            raise UserError(f"stage {self.name}: num_workers and device_mapping, expected one of them")
        if self.device_mapping is not None:
            try:
                DeviceMap.parse(self.device_mapping)
            except UserError as error:
                raise UserError(f"stage {self.name}: {error}") from None
        self._check_module()

    def _check_module(self) -> None:
        module = self.module
        if not callable(module) or (isinstance(module, type) and not self.registered and not _has_call(module)):
            what = f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
            raise UserError(
                f"stage {self.name}: module is {what}, expected a function, a class with __call__, or a worker class "
                "with a method marked with @register"
            )
        if self.method is not None and self.method not in self.registered:
            known = ", ".join(self.registered) or "none"
            raise UserError(f"stage {self.name}: no registered method {self.method!r}; registered are {known}")
        if self.method is None and len(self.registered) > 1:
            raise UserError(f"stage {self.name}: method is not given, expected one of {', '.join(self.registered)}")

    @property
    def registered(self) -> tuple[str, ...]:
        """The registered methods of a worker class."""
        return tuple(registrations(self.module)) if isinstance(self.module, type) else ()

    def __str__(self) -> str:
        return self.name


class DataFlow:
    """Stages and their connections."""

    def __init__(self) -> None:
        self._inputs: dict[Stage, list[Stage]] = {}

    if not TYPE_CHECKING:  # a type checker is to find a method that is not there

        def __getattr__(self, name: str) -> NoReturn:
            raise no_attribute(DataFlow, name)

    def add(self, stage: Stage) -> None:
        """Add a stage, connected or not; nothing if it is there.

        Raises:
            UserError: it is no stage, or another has its name.
        """
        if not isinstance(stage, Stage):
            raise UserError(f"flow: {stage!r} is a {type(stage).__name__}, expected a Stage")
        if stage not in self._inputs and any(stage.name == other.name for other in self._inputs):
            raise UserError(f"flow: two stages are called {stage.name}, expected each name once")
        self._inputs.setdefault(stage, [])

    def connect(self, first: Stage | str, second: Stage | str) -> None:
        """Connect the outputs of the first stage to the inputs of the second. A name stands for a stage that is in the
        flow.

        Raises:
            UserError: a name that is unknown, a connection that is there, or that makes a cycle.
        """
        before, after = self._stage(first), self._stage(second)
        if before in self._inputs[after]:
            raise UserError(f"flow: {before} is connected to {after} already")
        if path := self._path(after, before):
            cycle = " -> ".join(stage.name for stage in (*path, after))
            raise UserError(f"flow: {before} -> {after} makes a cycle, {cycle}; expected none")
        self._inputs[after].append(before)

    def run(self, max_steps: int = 1) -> list[dict[str, Any]]:
        """Start the ranks of every stage, do the steps one after another, and end the ranks.

        On the Ray that this process has started, or on one that starts and ends with the call.

        Returns:
            For each step, what each stage returned whose result no other stage takes, by its name.

        Raises:
            UserError: there is no stage, a device that this machine has not, or data that cannot be split.
            RankError, RankUserError: a rank failed.
        """
        if not self._inputs:
            raise UserError("flow: no stage in it, expected at least one; connect(first, second) adds them")
        if not isinstance(max_steps, int) or max_steps < 1:
            raise UserError(f"flow: max_steps={max_steps!r}, expected at least 1")
        with self._groups() as groups:
            return [self._step(groups, number) for number in range(1, max_steps + 1)]

    def _stage(self, stage: Stage | str) -> Stage:
        if isinstance(stage, str):
            connected = next((source for source in self._inputs if source.name == stage), None)
            if connected is None:
                known = ", ".join(source.name for source in self._inputs) or "none"
                raise UserError(f"flow: no stage is called {stage!r}; there are {known}")
            return connected
        self.add(stage)
        return stage

    def _path(self, first: Stage, last: Stage) -> list[Stage] | None:
        """Stages from one to another along the connections, if there is a path."""
        if first is last:
            return [last]
        for before in self._inputs[last]:
            if path := self._path(first, before):
                return [*path, last]
        return None

    @contextmanager
    def _groups(self) -> Iterator[dict[Stage, WorkerGroup]]:
        """The ranks of every stage, until the block is left."""
        maps = device_maps(list(self._inputs))
        with ExitStack() as stack:
            if not ray.is_initialized():
                ray_session.start_ray(cpu_slots=highest_cpu_slot(list(maps.values())))
                stack.callback(ray_session.stop_ray)
            try:
                devices = pool_devices(maps, {}, resource_pool.cluster_nodes())
            except UserError as error:
                raise UserError(str(error).replace("placement.", "stage ", 1)) from None
            pools = resource_pool.reserve(devices)
            stack.callback(resource_pool.release, pools)
            yield {stage: stack.enter_context(_group(stage, pools[stage.name])) for stage in self._inputs}

    def _step(self, groups: Mapping[Stage, WorkerGroup], number: int) -> dict[str, Any]:
        calls: dict[Stage, Future[Any]] = {}
        waiting = list(self._inputs)
        while waiting:
            ready = [stage for stage in waiting if self._can_be_called(stage, calls, groups)]
            for stage in ready:
                calls[stage] = self._call(stage, groups[stage], calls, number)
                waiting.remove(stage)
            if not ready:
                _wait_for_any(calls.values())
        for call in calls.values():
            call.wait()
        taken = {before for inputs in self._inputs.values() for before in inputs}
        return {stage.name: calls[stage].result() for stage in self._inputs if stage not in taken}

    def _can_be_called(
        self, stage: Stage, calls: Mapping[Stage, Future[Any]], groups: Mapping[Stage, WorkerGroup]
    ) -> bool:
        """True if each input is there, or goes from rank to rank as soon as it is."""
        return all(
            before in calls and (len(groups[before].pool) == len(groups[stage].pool) or calls[before].done())
            for before in self._inputs[stage]
        )

    def _call(self, stage: Stage, group: WorkerGroup, calls: Mapping[Stage, Future[Any]], number: int) -> Future[Any]:
        inputs = [calls[before] for before in self._inputs[stage]]
        registered = stage.method or next(iter(stage.registered), None)
        if inputs:
            future: Future[Any] = group.call(registered or "process", *inputs)
        else:
            future = group.call(registered or "make", step=number)
        return future


def device_maps(stages: list[Stage]) -> dict[str, str]:
    """The device map of each stage: its own, or the next CPU slots that no other stage has."""
    slot = highest_cpu_slot([stage.device_mapping for stage in stages if stage.device_mapping is not None])
    maps = {}
    for stage in stages:
        workers = stage.num_workers or 1
        maps[stage.name] = stage.device_mapping or f"cpu:{slot}-{slot + workers - 1}"
        slot += 0 if stage.device_mapping else workers
    return maps


def _wait_for_any(calls: Iterable[Future[Any]]) -> None:
    """Wait until one more rank has answered.

    Raises:
        RankError: none does within the limit of a call.
    """
    running = [call for call in calls if not call.done()]
    statuses = [status for call in running for status in call.call.statuses]
    _, pending = ray.wait(statuses, num_returns=len(statuses), timeout=0) if statuses else ([], [])
    if pending and not ray.wait(pending, timeout=running[0].call.limit_s)[0]:
        running[0].wait(0.0)


def _group(stage: Stage, pool: ResourcePool) -> WorkerGroup:
    layout = Layout(dp=len(pool))
    if stage.registered:
        return WorkerGroup(stage.name, stage.module, pool, layout, log_dir=stage.log_dir)
    return WorkerGroup(stage.name, StageWorker, pool, layout, stage.module, log_dir=stage.log_dir)


def _has_call(module: type) -> bool:
    return any("__call__" in base.__dict__ for base in module.__mro__)
