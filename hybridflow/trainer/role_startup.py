"""All roles of a run, started side by side and ended together."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine3d.layout import Layout
from engine3d.memory.serving import cache_of_a_token
from engine3d.models import load_model_spec
from engine3d.platform import platform
from engine3d.reshard.describe.shards import Place
from engine3d.training.flops import sequence_flops
from hybridflow.checkpoint.resume import WARMED_UP, needs_warmed_up
from hybridflow.cluster import ray_runtime, resource_pool
from hybridflow.cluster.device_map import Device, Node, highest_cpu_slot, pool_devices
from hybridflow.cluster.gpu_availability import WAIT_S, check_bundles_free, check_gpus_free
from hybridflow.cluster.resource_pool import ResourcePool
from hybridflow.config.recipe import Recipe
from hybridflow.errors.log import log
from hybridflow.planning.cache_size import Lengths, cache_tokens
from hybridflow.planning.placement_check import check_apart, check_reward_devices
from hybridflow.roles.groups import FunctionRewardGroup, ModelGroup, PolicyGroup, RolloutGroup, ValueGroup
from hybridflow.roles.model import ModelWorker
from hybridflow.roles.offload import begin_in_turn, check_offload
from hybridflow.roles.policy import PolicyWorker
from hybridflow.roles.reward import FunctionRewardWorker
from hybridflow.roles.rollout import RolloutWorker
from hybridflow.roles.value import ValueWorker
from hybridflow.rundir.lock import SHARDS
from hybridflow.trainer.run_setup import Run
from hybridflow.trainer.start_log import StartLog
from hybridflow.workers.worker_group import WorkerGroup

# An engine says itself that it did not start in time; its rank is given a little longer.
_MARGIN_S = 30.0

RoleGroup = ModelGroup | RolloutGroup | FunctionRewardGroup


@dataclass(frozen=True)
class Roles:
    """One handle a role."""

    actor: PolicyGroup
    rollout: RolloutGroup
    reference: PolicyGroup | None
    scalar: Mapping[str, ValueGroup]
    """Critics and scoring models, by role."""
    functions: Mapping[str, FunctionRewardGroup]
    """Who calls the reward functions ("reward") and the cost functions ("cost"), where there are any."""
    starting: Mapping[str, Future[Any]]
    """The start of each role, which may still be under way."""
    trained: tuple[str, ...]
    devices: int
    """That the models and engines have, each counted once."""

    @property
    def models(self) -> dict[str, ModelGroup]:
        """Every Megatron-Core model beside the actor, by role: `Recipe.models`."""
        return ({"reference": self.reference} if self.reference is not None else {}) | dict(self.scalar)

    @property
    def groups(self) -> list[WorkerGroup]:
        """Every group, once."""
        return list(dict.fromkeys([self.actor, self.rollout, *self.models.values(), *self.functions.values()]))

    @property
    def learning(self) -> dict[str, ModelGroup]:
        """The actor and every critic, by role."""
        return {role: self.models.get(role, self.actor) for role in self.trained}


@contextmanager
def start_roles(recipe: Recipe, run: Run) -> Iterator[Roles]:
    """Start Ray and every role's processes; end them all when the block is left, however it is left.

    The roles build their models and engines at the same time; `wait_for` says when one is ready.
    """
    wanted = recipe.placement.roles(list(recipe.models))
    pools = recipe.placement.pools
    with ExitStack() as stack:
        # Entered first and so left last: when the groups are gone, nobody waits for them any more.
        waiters = stack.enter_context(ThreadPoolExecutor(thread_name_prefix="start"))
        log = StartLog()
        log.say("Ray" if recipe.placement.cluster is None else f"joining the Ray cluster {recipe.placement.cluster}")
        ray_runtime.start_ray(
            cpu_slots=highest_cpu_slot([*wanted.values(), *pools.values()]),
            address=recipe.placement.cluster,
            limits=recipe.limits,
        )
        stack.callback(ray_runtime.stop_ray)
        nodes = resource_pool.cluster_nodes()
        devices = pool_devices(wanted, pools, nodes)
        if recipe.trainer.max_staleness:
            check_apart(devices, ("actor", *recipe.models))
        check_offload(recipe, devices)
        if recipe.functions:
            devices.setdefault("reward", devices["rollout"][:1])
            check_reward_devices(len(devices["reward"]))
        resources = resource_pool.reserve(devices, recipe.limits.placement_s)
        stack.callback(resource_pool.release, resources)
        if not recipe.placement.shared_gpus:
            _check_nobody_else(recipe, resources, nodes)
        log.roles(devices)
        yield _Start(recipe, run, stack, waiters, devices, nodes, resources, log).roles()


def _check_nobody_else(recipe: Recipe, resources: Mapping[str, ResourcePool], nodes: Sequence[Node]) -> None:
    """The GPUs of the models and engines, while no process of theirs is there."""
    bundles = [each for role, pool in resources.items() if role != "reward" for each in pool.bundles]
    if recipe.placement.cluster is not None:
        check_bundles_free(bundles, nodes, WAIT_S)
    else:
        gpus = {each.device.index: each.visible for each in bundles if each.device.kind == "cuda"}
        check_gpus_free(gpus, WAIT_S)


class _Start:
    """The start of all roles on the devices that are reserved for them."""

    def __init__(
        self,
        recipe: Recipe,
        run: Run,
        stack: ExitStack,
        waiters: ThreadPoolExecutor,
        devices: Mapping[str, Sequence[Device]],
        nodes: Sequence[Node],
        resources: Mapping[str, ResourcePool],
        log: StartLog,
    ) -> None:
        self._recipe, self._run, self._stack, self._waiters = recipe, run, stack, waiters
        self._log = log
        self._devices, self._resources = devices, resources
        self._places = {role: [_place(device, nodes) for device in held] for role, held in devices.items()}
        self._published = [run.directory / SHARDS / f"actor-{rank}" for rank in range(len(devices["actor"]))]
        self._entering = threading.Lock()
        self._in_turn = dict.fromkeys(begin_in_turn(recipe, devices), 0.0)  # and the limit of each start
        self._one_by_one = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="start"))
        self._starting: dict[str, Future[Any]] = {}

    def roles(self) -> Roles:
        """Every role; their processes are there, and their models and engines are being built."""
        recipe = self._recipe
        # The engine first, since it takes longest; the functions last, since they are needed last.
        rollout = self._waiters.submit(self._rollout)
        actor = self._waiters.submit(self._policy, "actor")
        reference = self._waiters.submit(self._policy, "reference") if "reference" in recipe.models else None
        scalar = {role: self._waiters.submit(self._scalar, role) for role in recipe.models if role != "reference"}
        functions = self._waiters.submit(self._functions) if recipe.functions else None
        every = (rollout, actor, reference, *scalar.values(), functions)
        building: list[Future[Any]] = [each for each in every if each is not None]
        try:
            groups = {group.role: group for group in [future.result() for future in building]}
        finally:
            wait(building)  # each that is there is known to the stack, and ends with it
        for role, limit_s in self._in_turn.items():
            self._start(self._one_by_one, groups[role], limit_s)
        return Roles(
            actor=actor.result(),
            rollout=rollout.result(),
            reference=reference.result() if reference is not None else None,
            scalar={role: future.result() for role, future in scalar.items()},
            functions=dict.fromkeys(recipe.functions, functions.result()) if functions is not None else {},
            starting=self._starting,
            trained=recipe.trained_roles,
            devices=len({device for role, held in self._devices.items() if role != "reward" for device in held}),
        )

    def _started[G: RoleGroup](self, group: G, limit_s: float) -> G:
        with self._entering:
            self._stack.enter_context(group)
            if group.role in self._in_turn:
                self._in_turn[group.role] = limit_s
            else:
                self._start(self._waiters, group, limit_s)
        return group

    def _start(self, waiters: ThreadPoolExecutor, group: RoleGroup, limit_s: float) -> None:
        self._starting[group.role] = waiters.submit(_start, group, limit_s)
        self._log.ready_with(group.role, self._starting[group.role])

    def _policy(self, role: str) -> PolicyGroup:
        """The actor, or the reference policy."""
        return self._model(role, PolicyGroup, PolicyWorker)

    def _scalar(self, role: str) -> ValueGroup:
        """A model with a scalar head."""
        return self._model(role, ValueGroup, ValueWorker)

    def _model[G: ModelGroup](self, role: str, group_class: type[G], worker: type[ModelWorker]) -> G:
        recipe, run, devices = self._recipe, self._run, self._devices[role]
        resumes = run.resumption is not None and run.resumption.state is not None
        config = recipe.train_config(role)
        model = recipe.models.get(role)
        directory = run.model_directory
        if model is not None and model.path is not None:
            directory = model.path
        elif role == "reference" and resumes and needs_warmed_up(recipe):
            directory = recipe.checkpoint_directory / WARMED_UP
        spec = load_model_spec(directory, value_head=worker is ValueWorker)
        trainable = role in recipe.trained_roles
        group = group_class(
            role,
            worker,
            self._resources[role],
            config.layout.layout(len(devices)),
            directory,
            config,
            trainable=trainable,
            seed=recipe.seed,
            places=self._places[role],
            publish=self._published if role == "actor" else (),
            # A model that does not learn is the initial one, however far the run has come.
            checkpoint=run.resumption.role(role) if run.resumption is not None and trainable else None,
            verify_checkpoint=recipe.checkpoint.verify,
            saves_in_background=trainable and recipe.checkpoint.saves_in_background,
            offload=role in recipe.offloaded_roles,
            log_dir=run.log_directory,
            call_timeout_s=recipe.limits.call_s,
            quiet_s=recipe.limits.quiet_s,
            sample_costs=lambda lengths: sequence_flops(spec, lengths).tolist(),
            environment=platform.training_environment(len(devices), deterministic=config.deterministic),
        )
        return self._started(group, config.start_timeout_s)

    def _rollout(self) -> RolloutGroup:
        recipe, run, devices = self._recipe, self._run, self._devices["rollout"]
        sources: Mapping[Device, Path] = {}
        if recipe.rollout.weights.share:
            sources = dict(zip(self._devices["actor"], self._published, strict=True))
        engine = recipe.rollout.engine
        # It serves nothing before the actor's weights have come: no need to read others from the disk.
        arguments = {"load_format": "dummy", **engine.server_args}
        tokens = self._cache_tokens()
        engine = engine.model_copy(
            update={"seed": recipe.seed + engine.seed, "server_args": arguments, "max_total_tokens": tokens}
        )
        group = RolloutGroup(
            "rollout",
            RolloutWorker,
            self._resources["rollout"],
            recipe.rollout.layout(len(devices)),
            run.model_directory,
            engine,
            places=self._places["rollout"],
            weight_sources=[sources.get(device) for device in devices],
            devices_per_rank=engine.tp,
            meets=False,
            log_dir=run.log_directory,
            call_timeout_s=recipe.limits.call_s,
            quiet_s=recipe.limits.quiet_s,
        )
        return self._started(group, engine.start_timeout_s + _MARGIN_S)

    def _cache_tokens(self) -> int:
        """The size of an engine's KV cache; it is said, because it is much of what an engine takes."""
        recipe, run, devices = self._recipe, self._run, self._devices["rollout"]
        engine, sizes = recipe.rollout.engine, load_model_spec(run.model_directory).sizes
        engines = recipe.rollout.layout(len(devices)).dp
        lengths = Lengths.of(recipe, run.train.tokens, run.evaluation.tokens)
        tokens = cache_tokens(recipe, lengths, engines, devices[0].kind)
        each = tokens * cache_of_a_token(sizes, engine.tp, getattr(torch, engine.dtype).itemsize)
        said = "rollout.engine.max_total_tokens" if engine.max_total_tokens is not None else "all that a step needs"
        log.info(f"rollout: KV cache of {tokens:,} tokens ({said}), {each / 1e9:.2f} GB of each device")
        return tokens

    def _functions(self) -> FunctionRewardGroup:
        """Who calls the functions of rewards and costs."""
        recipe, run = self._recipe, self._run
        samples = max(
            recipe.trainer.prompts_per_step * recipe.rollout.samples_per_prompt,
            len(run.evaluation) * recipe.trainer.eval_samples,
        )
        functions = [function for config in recipe.functions.values() for function in config.functions]
        group = FunctionRewardGroup(
            "reward",
            FunctionRewardWorker,
            self._resources["reward"],
            Layout(dp=len(self._devices["reward"])),
            recipe.functions,
            run.model_directory,
            {"train": run.train.examples, "evaluation": run.evaluation.examples},
            Path.cwd(),
            meets=False,
            log_dir=run.log_directory,
            call_timeout_s=_MARGIN_S + max(function.limit_s(samples) for function in functions),
            quiet_s=recipe.limits.quiet_s,
        )
        return self._started(group, max(function.load_timeout_s for function in functions) + _MARGIN_S)


def _start(group: RoleGroup, limit_s: float) -> Any:
    return group.start().result(limit_s)


def _place(device: Device, nodes: Sequence[Node]) -> Place:
    return Place(f"node {device.node} ({nodes[device.node].name})", f"{device.kind}:{device.index}")


def wait_for(roles: Roles, *names: str) -> None:
    """Wait until the named roles have started, each within its limit; raise at once when any role fails to."""
    pending = {roles.starting[name] for name in names}
    starting = set(roles.starting.values())
    while pending:
        done, starting = wait(starting, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()
        pending -= done


def raise_failed_start(roles: Roles) -> None:
    """Raise if a role has failed to start; do not wait for those that still start."""
    for future in roles.starting.values():
        if future.done():
            future.result()
