"""All roles of a run, started side by side and ended together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine3d.layout import Layout
from engine3d.platform import platform
from engine3d.reshard.shards import Place
from engine3d.training.flops import sequence_flops
from hybridflow import placement
from hybridflow.check import check_reward_devices
from hybridflow.config import Recipe
from hybridflow.devices import Device, Node, highest_cpu_slot, pool_devices
from hybridflow.initial_model import initial_spec
from hybridflow.roles.policy import PolicyWorker
from hybridflow.roles.reward import FunctionRewardWorker
from hybridflow.roles.rollout import RolloutWorker
from hybridflow.run import SHARDS, Run
from hybridflow.worker_group import WorkerGroup

# An engine says itself that it did not start in time; its rank is given a little longer.
_MARGIN_S = 30.0


@dataclass(frozen=True)
class Roles:
    """One handle a role."""

    actor: WorkerGroup
    rollout: WorkerGroup
    reward: WorkerGroup
    reference: WorkerGroup | None
    starting: dict[str, Future[Any]]
    """The start of each role, which may still be under way."""


@contextmanager
def start_roles(recipe: Recipe, run: Run) -> Iterator[Roles]:
    """Start Ray and every role's processes; end them all when the block is left, however it is left.

    The roles build their models and engines at the same time; `wait_for` says when one is ready.
    """
    wanted = recipe.placement.roles(with_reference=recipe.algorithm.needs_reference)
    pools = recipe.placement.pools
    with ExitStack() as stack:
        # Entered first and so left last: when the groups are gone, nobody waits for them any more.
        waiters = stack.enter_context(ThreadPoolExecutor(thread_name_prefix="start"))
        placement.start_ray(
            cpu_slots=highest_cpu_slot([*wanted.values(), *pools.values()]), address=recipe.placement.cluster
        )
        stack.callback(placement.stop_ray)
        nodes = placement.cluster_nodes()
        devices = pool_devices(wanted, pools, nodes)
        devices.setdefault("reward", devices["rollout"][:1])
        check_reward_devices(len(devices["reward"]))
        places = {role: [_place(device, nodes) for device in held] for role, held in devices.items()}
        published = [run.directory / SHARDS / f"actor-{rank}" for rank in range(len(devices["actor"]))]
        sources = dict(zip(devices["actor"], published, strict=True)) if recipe.rollout.weights.share else {}
        resources = placement.reserve(devices)
        stack.callback(placement.release, resources)

        # A reference policy is the initial model, however far the actor has come.
        checkpoint = run.resumption.role("actor") if run.resumption is not None else None

        spec = initial_spec(recipe)

        def model(role: str, *, trainable: bool) -> WorkerGroup:
            group = WorkerGroup(
                role,
                PolicyWorker,
                resources[role],
                recipe.train.layout.layout(len(devices[role])),
                run.model_directory,
                recipe.train,
                trainable=trainable,
                seed=recipe.seed,
                places=places[role],
                publish=published if role == "actor" else (),
                checkpoint=checkpoint if role == "actor" else None,
                saves_in_background=trainable and recipe.checkpoint.saves_in_background,
                log_dir=run.log_directory,
                sample_costs=lambda lengths: sequence_flops(spec, lengths).tolist(),
                environment=platform.training_environment(len(devices[role]), deterministic=recipe.train.deterministic),
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
                places=places["rollout"],
                weight_sources=[sources.get(device) for device in devices["rollout"]],
                devices_per_rank=recipe.rollout.engine.tp,
                log_dir=run.log_directory,
            )
        )
        starting = {"rollout": waiters.submit(rollout.start().result, engine.start_timeout_s + _MARGIN_S)}
        actor = model("actor", trainable=True)
        starting["actor"] = waiters.submit(actor.start().result, recipe.train.start_timeout_s)
        reference = model("reference", trainable=False) if "reference" in wanted else None
        if reference is not None:
            starting["reference"] = waiters.submit(reference.start().result, recipe.train.start_timeout_s)
        samples = max(
            recipe.trainer.prompts_per_step * recipe.rollout.samples_per_prompt,
            len(run.evaluation) * recipe.trainer.eval_samples,
        )
        reward = stack.enter_context(
            WorkerGroup(
                "reward",
                FunctionRewardWorker,
                resources["reward"],
                Layout(dp=len(devices["reward"])),
                recipe.reward,
                run.model_directory,
                {"train": run.train.examples, "evaluation": run.evaluation.examples},
                Path.cwd(),
                log_dir=run.log_directory,
                call_timeout_s=_MARGIN_S + max(function.limit_s(samples) for function in recipe.reward.functions),
            )
        )
        load_limit_s = max(function.load_timeout_s for function in recipe.reward.functions)
        starting["reward"] = waiters.submit(reward.start().result, load_limit_s + _MARGIN_S)
        yield Roles(actor, rollout, reward, reference, starting)


def _place(device: Device, nodes: Sequence[Node]) -> Place:
    return Place(f"node {device.node} ({nodes[device.node].name})", f"{device.kind}:{device.index}")


def wait_for(roles: Roles, *names: str) -> None:
    """Wait until the named roles have started, each within its limit; raise at once when any role fails to."""
    pending = {roles.starting[name] for name in names}
    while pending:
        done, _ = wait(roles.starting.values(), timeout=1.0, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        pending -= done


def raise_failed_start(roles: Roles) -> None:
    """Raise if a role has failed to start; do not wait for those that still start."""
    for future in roles.starting.values():
        if future.done():
            future.result()
