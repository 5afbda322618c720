"""All roles of a run, started side by side and ended together."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from engine3d.platform import platform
from hybridflow import placement
from hybridflow.config import Recipe
from hybridflow.devices import highest_cpu_slot, pool_devices
from hybridflow.roles.model import ModelWorker
from hybridflow.roles.rollout import RolloutWorker
from hybridflow.run import Run
from hybridflow.worker_group import Future, WorkerGroup


@dataclass(frozen=True)
class Roles:
    """One handle a role."""

    actor: WorkerGroup
    rollout: WorkerGroup
    reference: WorkerGroup | None
    starting: dict[str, Future]
    """The start of each role, which may still be under way."""


@contextmanager
def start_roles(recipe: Recipe, run: Run) -> Iterator[Roles]:
    """Start Ray and every role's processes; end them all when the block is left, however it is left.

    The roles build their models and engines at the same time; `wait_for` says when one is ready.
    """
    wanted = recipe.placement.roles(with_reference=recipe.algorithm.needs_reference)
    pools = recipe.placement.pools
    with ExitStack() as stack:
        placement.start_ray(
            cpu_slots=highest_cpu_slot([*wanted.values(), *pools.values()]), address=recipe.placement.cluster
        )
        stack.callback(placement.stop_ray)
        devices = pool_devices(wanted, pools, placement.cluster_nodes())
        resources = placement.reserve(devices)
        stack.callback(placement.release, resources)

        def model(role: str, *, trainable: bool) -> WorkerGroup:
            group = WorkerGroup(
                role,
                ModelWorker,
                resources[role],
                recipe.train.layout.layout(len(devices[role])),
                run.model_directory,
                recipe.train,
                trainable=trainable,
                seed=recipe.seed,
                log_dir=run.log_directory,
                environment=platform.training_environment(len(devices[role])),
            )
            return stack.enter_context(group)

        engine = recipe.rollout.engine
        engine = engine.model_copy(update={"seed": recipe.seed + engine.seed})
        rollout = stack.enter_context(
            WorkerGroup(
                "rollout",
                RolloutWorker,
                resources["rollout"],
                recipe.rollout.layout(len(devices["rollout"])),
                run.model_directory,
                engine,
                devices_per_rank=recipe.rollout.devices_per_engine,
                log_dir=run.log_directory,
            )
        )
        starting = {"rollout": rollout.start()}
        actor = model("actor", trainable=True)
        starting["actor"] = actor.start()
        reference = model("reference", trainable=False) if "reference" in wanted else None
        if reference is not None:
            starting["reference"] = reference.start()
        yield Roles(actor, rollout, reference, starting)


def wait_for(roles: Roles, *names: str) -> None:
    """Wait until the named roles have started; raise at once when any role fails to."""
    while True:
        for future in roles.starting.values():
            if future.done():
                future.result()
        if all(roles.starting[name].done() for name in names):
            return
        time.sleep(0.05)
