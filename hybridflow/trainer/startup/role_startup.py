"""All roles of a run, started side by side and ended together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine3d.errors import DamagedCheckpointError, UserError
from hybridflow.cluster.devices.device_map import Device, Node, highest_cpu_slot, pool_devices
from hybridflow.cluster.devices.gpu_availability import WAIT_S, check_bundles_free, check_gpus_free
from hybridflow.cluster.limits import LimitsConfig
from hybridflow.cluster.ray import ray_session, resource_pool
from hybridflow.cluster.ray.node_actors import keep_logs
from hybridflow.cluster.ray.resource_pool import ResourcePool
from hybridflow.config.evaluation_recipe import EvaluationRecipe
from hybridflow.config.recipe import Recipe
from hybridflow.errors.log import log
from hybridflow.metrics import names as metrics
from hybridflow.planning.checks.model import check_judge_devices
from hybridflow.planning.checks.offload import check_offload
from hybridflow.planning.checks.placement import check_apart, check_reward_devices, leased_engines
from hybridflow.planning.step_prediction import record_prediction
from hybridflow.rewards.config import JudgeServers
from hybridflow.roles.groups import (
    FunctionRewardGroup,
    JudgeGroup,
    ModelGroup,
    PolicyGroup,
    RolloutGroup,
    TeacherEngineGroup,
    TeacherGroup,
    ValueGroup,
)
from hybridflow.roles.judge import KEY_VARIABLE
from hybridflow.roles.model import CheckpointFailure
from hybridflow.rollout.engine_handles import DeviceLease, EngineHandles
from hybridflow.rundir.status.watching import ENGINES, JUDGE_SERVERS, TEACHER_ENGINES
from hybridflow.trainer.startup.role_specs import RoleGroup, RoleSpec, RoleSpecs
from hybridflow.trainer.startup.run_setup import Run
from hybridflow.workers.call import end_of_standstill
from hybridflow.workers.failure_diagnosis import GRACE_S
from hybridflow.workers.rank_process import CONCURRENT
from hybridflow.workers.watching.call_progress import ProgressLimits
from hybridflow.workers.watching.waits import StandsStillError, waits
from hybridflow.workers.worker_group import START_TIMEOUT_S, WorkerGroup

_ENGINE_LOGS: Mapping[type, str] = {
    RolloutGroup: ENGINES,
    TeacherEngineGroup: TEACHER_ENGINES,
    JudgeGroup: JUDGE_SERVERS,
}
"""Names of the logs of what SGLang prints, by the group."""


@dataclass(frozen=True)
class Roles:
    """One handle a role."""

    actor: PolicyGroup
    rollout: RolloutGroup | None
    """None where the data have the responses."""
    reference: PolicyGroup | None
    teacher: TeacherGroup | TeacherEngineGroup | None
    scalar: Mapping[str, ValueGroup]
    """Critics and scoring models, by role."""
    functions: Mapping[str, FunctionRewardGroup]
    """The groups that call the reward functions ("reward") and the cost functions ("cost"), if there are any."""
    judge: JudgeGroup | None
    starting: Mapping[str, Future[Any]]
    """The start of each role, which may still be in flight."""
    trained: tuple[str, ...]
    devices: int
    """Devices of the models and engines, each counted once."""
    leased: tuple[int, ...] = ()
    """Engines on devices of models, which generate while a step waits."""

    @property
    def models(self) -> dict[str, ModelGroup]:
        """Every Megatron-Core model next to the actor, by role: `Recipe.models`."""
        language = {"reference": self.reference, "teacher": self.teacher}
        models = {role: group for role, group in language.items() if isinstance(group, ModelGroup)}
        return models | dict(self.scalar)

    @property
    def groups(self) -> list[WorkerGroup]:
        """Every group, once."""
        engines = [group for group in (self.rollout, self.teacher, self.judge) if group is not None]
        return list(dict.fromkeys([self.actor, *engines, *self.models.values(), *self.functions.values()]))

    def engine_handles(self, before: Callable[[], object]) -> EngineHandles:
        """Handles by which a rollout controller reaches the engines. `before`: is called before each of their turns."""
        assert self.rollout is not None
        return engine_handles(self.rollout, self.functions, self.judge, before)

    def lease(self, after_s: float) -> DeviceLease | None:
        """The turns of such engines, which begin `after_s` after a step waits; None without any."""
        rollout = self.rollout
        if rollout is None or not self.leased:
            return None
        return DeviceLease(self.leased, after_s, lambda: rollout.take_turn().result())

    @property
    def learning(self) -> dict[str, ModelGroup]:
        """The actor and every critic, by role."""
        return {role: self.models.get(role, self.actor) for role in self.trained}


def engine_handles(
    rollout: RolloutGroup,
    functions: Mapping[str, FunctionRewardGroup],
    judge: JudgeGroup | None,
    before: Callable[[], object] = lambda: None,
) -> EngineHandles:
    """Handles by which a rollout controller reaches engines and reward functions.

    Args:
        rollout: the engines.
        functions, judge: as of `Roles`.
        before: is called before each turn of the engines.
    """
    hosts, ranks = rollout.layout.tp, rollout.ranks  # of an engine the first host's rank answers
    groups = list(dict.fromkeys(functions.values()))
    scorers = tuple(actor for group in groups for actor in group.ranks.actors)

    def check(*, ask: bool = False) -> None:
        for group in [rollout, *groups]:
            group.ranks.check("generate")
        if ask:
            if hosts > 1:  # the first host may only say that it has lost another, before that one's end is known there
                time.sleep(GRACE_S)
                rollout.check_part().wait()
            rollout.take_offload_stats().wait()
            check_judge(judge)

    @contextmanager
    def watched() -> Iterator[Callable[[], None]]:
        members = range(len(ranks.actors))
        with waits.on(ranks, "generate", members) as wait:
            try:
                yield lambda: wait.progress(members)
            except StandsStillError as found:
                end_of_standstill(found, ranks, "generate")

    def take_turn() -> None:
        before()
        rollout.take_turn().result()

    return EngineHandles(
        tuple(ranks.actors[::hosts]), tuple(ranks.nodes[::hosts]), CONCURRENT, hosts, scorers, check, watched, take_turn
    )


@dataclass(frozen=True)
class Serving:
    """The roles of an evaluation alone.

    Args:
        rollout: the engines, with the weights of the run's model directory.
        functions: who calls the reward functions, by `PlannedSet.scorer`.
        reward_model: where a set has no functions.
        judge: that functions ask.
        starting: the start of each role.
    """

    rollout: RolloutGroup
    functions: Mapping[str, FunctionRewardGroup]
    reward_model: ValueGroup | None
    judge: JudgeGroup | None
    starting: Mapping[str, Future[Any]]


def check_judge(judge: JudgeGroup | None) -> int:
    """Count how often servers of the judge were started again. Raises EngineError if one is dead for good."""
    return sum(judge.check().result()) if judge is not None else 0


@contextmanager
def judging(judge: JudgeGroup | None) -> Iterator[dict[str, float]]:
    """Raise what the judge died of, in place of errors of functions that asked it. Fill in its metrics after the block.

    Raises:
        EngineError: a server of the judge is dead for good, whatever functions made of that.
    """
    values: dict[str, float] = {}
    try:
        yield values
    except UserError:
        check_judge(judge)
        raise
    restarts = check_judge(judge)
    if judge is not None:
        values[metrics.JUDGE_RESTARTS] = restarts


@contextmanager
def start_roles(recipe: Recipe, run: Run) -> Iterator[Roles]:
    """Start Ray and every role's processes; end them all when the block is left, however it is left.

    The roles build their models and engines at the same time; `wait_for` says when one is ready.
    """
    with _begun(recipe, run) as start:
        record_prediction(recipe, start.devices, run.train, run.directory)
        yield start.roles()


@contextmanager
def start_serving(recipe: EvaluationRecipe, run: Run) -> Iterator[Serving]:
    """Start the roles of an evaluation alone, as `start_roles` does."""
    with _begun(recipe, run) as start:
        yield start.serving()


@contextmanager
def _begun(recipe: Recipe, run: Run) -> Iterator[_Start]:
    roles = recipe.device_maps
    pools = recipe.placement.pools
    with ExitStack() as stack:
        # Entered first and so left last: when the groups are gone, nobody waits for them any more.
        waiters = stack.enter_context(ThreadPoolExecutor(thread_name_prefix="start"))
        log = _StartLog()
        log.say("Ray" if recipe.placement.cluster is None else f"joining the Ray cluster {recipe.placement.cluster}")
        ray_session.start_ray(
            cpu_slots=highest_cpu_slot([*roles.values(), *pools.values()]),
            address=recipe.placement.cluster,
            limits=recipe.limits,
            run=recipe.directory,
        )
        stack.callback(ray_session.stop_ray)
        nodes = resource_pool.cluster_nodes()
        devices = pool_devices(roles, pools, nodes)
        models = ("actor", *recipe.models)
        if recipe.runs_ahead:
            check_apart(recipe.trainer, recipe.rollout, models, devices)
        check_offload(recipe.megatron_roles, recipe.rollout if recipe.starts_engines else None, devices)
        if recipe.asked_judge is not None:
            check_judge_devices(recipe.asked_judge, devices)
        if recipe.all_functions:
            devices.setdefault("reward", devices["rollout"][:1])
            check_reward_devices(len(devices["reward"]))
        resources = resource_pool.reserve(devices, recipe.limits.placement_s)
        stack.callback(resource_pool.release, resources)
        if not recipe.placement.shared_gpus:
            _check_nobody_else(resources, nodes, is_attached=recipe.placement.cluster is not None)
        log.roles(devices)
        if leased := leased_engines(recipe.rollout, models, devices):
            count = len(devices["rollout"]) // recipe.rollout.engine.tp
            log.say(f"rollout.lease: engines {', '.join(map(str, leased))} of {count} generate while a step waits")
        yield _Start(recipe, run, stack, waiters, devices, nodes, resources, log)


def _check_nobody_else(resources: Mapping[str, ResourcePool], nodes: Sequence[Node], *, is_attached: bool) -> None:
    """The GPUs of the models and engines, while no process of theirs is there."""
    bundles = [bundle for role, pool in resources.items() if role != "reward" for bundle in pool.bundles]
    if is_attached or len(nodes) > 1:
        check_bundles_free(bundles, nodes, WAIT_S)
    else:
        gpus = {bundle.device.index: bundle.visible for bundle in bundles if bundle.device.kind == "cuda"}
        check_gpus_free(gpus, WAIT_S)


class _StartLog:
    """Lines of a start, each with the seconds since this was made. Any thread may use it."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def say(self, what: str) -> None:
        """Print one line."""
        log.info(f"start {time.monotonic() - self._began:5.1f} s  {what}")

    def roles(self, devices: Mapping[str, Sequence[Device]]) -> None:
        """Say which roles start, and on how many devices."""
        self.say("starting " + ", ".join(f"{role} ({_amount(of_role)})" for role, of_role in devices.items()))

    def ready_after[R](self, role: str, start: Callable[[], R]) -> R:
        """Start a role and say that it is ready, before anybody who waits for it says more."""
        result = start()
        self.say(f"{role} is ready")
        return result


def _amount(devices: Sequence[Device]) -> str:
    kind = "GPU" if devices[0].kind == "cuda" else "CPU slot"
    return f"{len(devices)} {kind}{'s' if len(devices) > 1 else ''}"


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
        log: _StartLog,
    ) -> None:
        self._recipe, self._run, self._stack, self._waiters = recipe, run, stack, waiters
        self._log, self.devices, self._resources = log, devices, resources
        self._specs = RoleSpecs(recipe, run, devices, nodes).all()
        self._entering = threading.Lock()
        self._one_by_one = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="start"))
        self._starting: dict[str, Future[Any]] = {}

    def _groups(self) -> dict[str, RoleGroup]:
        """Every role; their processes are there, and their models and engines are being built."""
        keep_logs(
            self._run.log_directory.resolve().parent,
            processes_by_host(self._specs, self.devices),
            in_place=self._run.resumption is not None and self._run.resumption.in_place,
            private=self._recipe.private,
        )
        building = {spec.role: self._waiters.submit(self._build, spec) for spec in self._specs}
        try:
            groups = {role: future.result() for role, future in building.items()}
        finally:
            wait(building.values())  # each that is there is known to the stack, and ends with it
        for spec in self._specs:
            if spec.judge is not None:
                self._start(self._waiters, groups[spec.role], spec)
        in_turn = {spec.turn: spec for spec in self._specs if spec.turn is not None}
        for _, spec in sorted(in_turn.items()):
            self._start(self._one_by_one, groups[spec.role], spec)
        return groups

    def serving(self) -> Serving:
        """The roles of an evaluation alone, as `roles`."""
        groups = self._groups()
        scoring = groups.get("reward_model")
        return Serving(
            rollout=_typed(groups["rollout"], RolloutGroup),
            functions={what: _typed(groups["reward"], FunctionRewardGroup) for what in self._recipe.all_functions},
            reward_model=_typed(scoring, ValueGroup) if scoring is not None else None,
            judge=self._judge(groups),
            starting=self._starting,
        )

    def roles(self) -> Roles:
        """Every role; their processes are there, and their models and engines are being built."""
        groups = self._groups()
        reference, teacher, rollout = groups.get("reference"), groups.get("teacher"), groups.get("rollout")
        return Roles(
            actor=_typed(groups["actor"], PolicyGroup),
            rollout=_typed(rollout, RolloutGroup) if rollout is not None else None,
            reference=_typed(reference, PolicyGroup) if reference is not None else None,
            teacher=teacher if isinstance(teacher, TeacherGroup | TeacherEngineGroup) else None,
            scalar={role: group for role, group in groups.items() if isinstance(group, ValueGroup)},
            functions={what: _typed(groups["reward"], FunctionRewardGroup) for what in self._recipe.all_functions},
            judge=self._judge(groups),
            starting=self._starting,
            trained=self._recipe.trained_roles,
            devices=len({device for role, of_role in self.devices.items() if role != "reward" for device in of_role}),
            leased=leased_engines(self._recipe.rollout, ("actor", *self._recipe.models), self.devices),
        )

    def _build(self, spec: RoleSpec) -> RoleGroup:
        """The processes of a role, which end with the run; its `start()` has been called where it takes no turn."""
        if spec.note is not None:
            log.info(spec.note)
        group = spec.group(
            spec.role,
            spec.worker,
            self._resources[spec.role],
            spec.layout,
            *spec.arguments,
            devices_per_rank=spec.devices_per_rank,
            ranks_per_store=spec.ranks_per_store,
            log_dir=self._run.log_directory,
            environment=spec.environment,
            call_timeout_s=spec.call_s,
            start_timeout_s=max(START_TIMEOUT_S, spec.start_s),
            quiet_s=self._recipe.limits.quiet_s,
            progress=_progress_limits(self._recipe.limits),
            sample_costs=spec.sample_costs,
            **spec.settings,
        )
        with self._entering:
            self._stack.enter_context(group)
            if spec.turn is None and spec.judge is None:
                self._start(self._waiters, group, spec)
        return group

    def _start(self, waiters: ThreadPoolExecutor, group: RoleGroup, spec: RoleSpec) -> None:
        if spec.judge is None:
            start = partial(_start, group, spec.start_s)
        else:
            functions = _typed(group, FunctionRewardGroup)
            start = partial(self._start_functions, functions, spec, self._starting["judge"])
        self._starting[spec.role] = waiters.submit(self._log.ready_after, spec.role, start)

    def _start_functions(self, group: FunctionRewardGroup, spec: RoleSpec, judge: Future[list[str]]) -> Any:
        """Start functions of which some ask the judge, once it is there."""
        assert spec.judge is not None
        servers = JudgeServers(tuple(judge.result()), KEY_VARIABLE, spec.judge.identity)
        return group.start(judge=servers, judge_key=spec.judge.key).result(spec.start_s)

    def _judge(self, groups: Mapping[str, RoleGroup]) -> JudgeGroup | None:
        return _typed(groups["judge"], JudgeGroup) if "judge" in groups else None


def processes_by_host(specs: Sequence[RoleSpec], devices: Mapping[str, Sequence[Device]]) -> dict[int, set[str]]:
    """Names of the logs that the ranks of each host write, and the engines of these.

    Args:
        specs: of the roles.
        devices: of each.
    """
    processes: dict[int, set[str]] = {}
    for spec in specs:
        for number, device in enumerate(devices[spec.role]):
            rank = number // spec.devices_per_rank
            names = processes.setdefault(device.node, set())
            names.add(f"{spec.role}-{rank}")
            if spec.group in _ENGINE_LOGS:
                names.add(f"{_ENGINE_LOGS[spec.group]}-{rank}")
    return processes


def _progress_limits(limits: LimitsConfig) -> ProgressLimits | None:
    return None if limits.progress_s is None else ProgressLimits(limits.progress_s, limits.compile_s)


def _start(group: RoleGroup, limit_s: float) -> Any:
    """Start a role. Raises DamagedCheckpointError where a rank could not load its state."""
    answers = group.start().result(limit_s)
    for answer in answers if isinstance(answers, list) else ():
        if isinstance(answer, CheckpointFailure):
            raise DamagedCheckpointError(answer.reason)
    return answers


def _typed[G: RoleGroup](group: RoleGroup, kind: type[G]) -> G:
    assert isinstance(group, kind)
    return group


def wait_for(roles: Roles | Serving, *names: str) -> None:
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
