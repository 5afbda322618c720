"""Specs of all roles of a run: a list, one a role, made from the recipe alone."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine3d.errors import amount
from engine3d.layout import Layout
from engine3d.memory.serving import cache_of_a_token
from engine3d.models import load_model_spec
from engine3d.platform import platform
from engine3d.reshard.describe.shards import Location
from engine3d.training.flops import sequence_flops
from hybridflow.batch.remote_batch import SampleCosts
from hybridflow.checkpoint.resume import WARMED_UP
from hybridflow.cluster.devices.device_map import Device, Node
from hybridflow.config.fit.episodes import OF_SAMPLING
from hybridflow.config.recipe import Recipe
from hybridflow.planning.checks.engine import hosts_of_engine
from hybridflow.planning.checks.placement import leased_engines
from hybridflow.planning.memory.samples import Lengths, cache_tokens, teacher_cache_tokens
from hybridflow.roles.groups import (
    FunctionRewardGroup,
    JudgeGroup,
    ModelGroup,
    PolicyGroup,
    RolloutGroup,
    TeacherEngineGroup,
    TeacherGroup,
    ValueGroup,
    begin_in_turn,
)
from hybridflow.roles.judge import JudgeWorker
from hybridflow.roles.judge_identity import judge_identity
from hybridflow.roles.policy import PolicyWorker
from hybridflow.roles.reward import FunctionRewardWorker
from hybridflow.roles.rollout import RolloutWorker
from hybridflow.roles.teacher import TeacherEngineWorker, TeacherWorker
from hybridflow.roles.value import ValueWorker
from hybridflow.rundir.status.lock import SHARDS
from hybridflow.trainer.startup.run_setup import Run

_PARSER_S = 300.0
"""Seconds for the import of SGLang's parsers of tool calls, which takes 10 s of processor time."""
# An engine says itself that it did not start in time; its rank is given a little longer.
_MARGIN_S = 30.0

_LANGUAGE_MODELS: Mapping[str, tuple[type[ModelGroup], type]] = {
    "actor": (PolicyGroup, PolicyWorker),
    "reference": (PolicyGroup, PolicyWorker),
    "teacher": (TeacherGroup, TeacherWorker),
}
"""The models without a scalar head: their groups and workers."""

RoleGroup = ModelGroup | RolloutGroup | FunctionRewardGroup | TeacherEngineGroup | JudgeGroup


@dataclass(frozen=True)
class AskedJudge:
    """The judge, as functions have to know it before its servers are there.

    Args:
        identity: by which its verdicts are kept.
        key: that its servers ask for.
    """

    identity: str
    key: str


@dataclass(frozen=True)
class RoleSpec:
    """The spec that a role is started with.

    Args:
        role: its name, and that of its devices.
        group: the class of its handle.
        worker: is built on every rank with `arguments` and `settings`.
        layout: of its ranks.
        arguments, settings: of the worker, by position and by keyword.
        start_s: limit of its `start()`, in seconds.
        call_s: limit of every other call, in seconds.
        devices_per_rank: more than one for an engine that runs several itself.
        ranks_per_store: how many ranks, one after the other, meet at a store of theirs; all if None, none if 0.
        environment: of its ranks.
        sample_costs: by which a batch is sharded over them.
        turn: its place among the roles that start one after another; None for one that waits for no other.
        note: a line for whoever follows the start.
        judge: that it asks, where it starts after that one is there.
    """

    role: str
    group: type[RoleGroup]
    worker: type
    layout: Layout
    arguments: tuple[Any, ...]
    settings: Mapping[str, Any]
    start_s: float
    call_s: float
    devices_per_rank: int = 1
    ranks_per_store: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    sample_costs: SampleCosts = list
    turn: int | None = None
    note: str | None = None
    judge: AskedJudge | None = None


class RoleSpecs:
    """The spec of each kind of role.

    Args:
        recipe: of the run.
        run: its directory, model, prompts and checkpoint.
        devices: of each role.
        nodes: of the cluster.
    """

    def __init__(
        self, recipe: Recipe, run: Run, devices: Mapping[str, Sequence[Device]], nodes: Sequence[Node]
    ) -> None:
        self._recipe, self._run, self._devices = recipe, run, devices
        self._locations = {role: [_location(device, nodes) for device in of_role] for role, of_role in devices.items()}
        self._published = [run.directory / SHARDS / f"actor-{rank}" for rank in range(len(devices.get("actor", ())))]
        judge = recipe.asked_judge
        self._judge = AskedJudge(judge_identity(judge), secrets.token_urlsafe(32)) if judge is not None else None
        self._turns = {role: turn for turn, role in enumerate(begin_in_turn(recipe.offloaded_roles, devices))}

    def all(self) -> list[RoleSpec]:
        """Every role of the run, in the order in which their processes are started.

        The engine first, since it takes longest; the functions last, since they are needed last.
        """
        recipe = self._recipe
        models = [self.model(role) for role in (*(("actor",) if recipe.trains else ()), *recipe.models)]
        engines = [self.rollout()] if recipe.starts_engines else []
        engines += [self.teacher_engine()] if recipe.teacher_engine is not None else []
        engines += [self.judge()] if recipe.asked_judge is not None else []
        return [*engines, *models, *([self.functions()] if recipe.all_functions else [])]

    def model(self, role: str) -> RoleSpec:
        """A Megatron-Core model: a language model, or one with a scalar head."""
        recipe, run, ranks = self._recipe, self._run, len(self._devices[role])
        config = recipe.train_config(role)
        group, worker = _LANGUAGE_MODELS.get(role, (ValueGroup, ValueWorker))
        directory = self._model_directory(role)
        spec = load_model_spec(directory, value_head=role not in _LANGUAGE_MODELS)
        trainable = role in recipe.trained_roles
        return RoleSpec(
            role,
            group,
            worker,
            config.layout.layout(ranks),
            (directory, config),
            {
                "trainable": trainable,
                "seed": recipe.seed,
                "locations": self._locations[role],
                "publish": self._published if role == "actor" else (),
                "engine_precision": recipe.rollout.engine.precision
                if role == "actor" and recipe.starts_engines
                else None,
                # A model that does not learn is the initial one, however far the run has come.
                "checkpoint": run.resumption.role(role) if run.resumption is not None and trainable else None,
                "verify_checkpoint": recipe.checkpoint.verify,
                "saves_in_background": trainable and recipe.checkpoint.saves_in_background,
                "offload": role in recipe.offloaded_roles,
            },
            start_s=config.start_timeout_s,
            call_s=recipe.limits.call_s,
            environment=platform.training_environment(
                ranks,
                deterministic=config.deterministic,
                sends_to_engines=role == "actor"
                and recipe.starts_engines
                and recipe.rollout.weights.transport == "collective",
            ),
            sample_costs=lambda lengths: sequence_flops(spec, lengths).tolist(),
            turn=self._turns.get(role),
        )

    def rollout(self) -> RoleSpec:
        """The engines."""
        recipe, run, devices = self._recipe, self._run, self._devices["rollout"]
        sources: Mapping[Device, Path] = {}
        if recipe.rollout.weights.share:
            sources = dict(zip(self._devices["actor"], self._published, strict=True))
        engine = recipe.rollout.engine
        hosts = hosts_of_engine(devices, engine.tp)
        # An engine's tensor-parallel ranks here are its hosts, each of which runs a share of SGLang's.
        layout = replace(recipe.rollout.layout(len(devices)), tp=hosts)
        lengths = Lengths.of(recipe.rollout, recipe.sets, run.train.tokens, run.sets)
        tokens = cache_tokens(recipe.rollout, recipe.groups_in_flight, lengths, layout.dp, devices[0].kind)
        # It serves nothing before the actor's weights have come: no need to read others from the disk.
        arguments = {**({"load_format": "dummy"} if recipe.trains else {}), **engine.server_args}
        given = {
            "seed": recipe.seed + engine.seed,
            "server_args": arguments,
            "max_total_tokens": tokens,
            "token_versions": recipe.rollout.token_versions,
            "routes": recipe.has_routes,
        }
        return RoleSpec(
            "rollout",
            RolloutGroup,
            RolloutWorker,
            layout,
            (run.model_directory, engine.model_copy(update=given)),
            {
                "locations": self._locations["rollout"],
                "weight_sources": [sources.get(device) for device in devices],
                "keeps_memory": self._generate_throughout(layout.dp),
                "restarts": recipe.rollout.engine_restarts > 0,
                "adapters": recipe.served_adapters,
                "fp8": recipe.train.fp8,
            },
            start_s=engine.start_timeout_s + _MARGIN_S,
            call_s=recipe.limits.call_s,
            devices_per_rank=engine.tp // hosts,
            ranks_per_store=hosts if hosts > 1 else 0,
            turn=self._turns.get("rollout"),
            note=self._cache_note(tokens),
        )

    def _generate_throughout(self, engines: int) -> tuple[int, ...]:
        """Engines that generate while models compute, next to others that are leased."""
        recipe = self._recipe
        leased = leased_engines(recipe.rollout, ("actor", *recipe.models), self._devices)
        return tuple(number for number in range(engines) if number not in leased) if leased else ()

    def teacher_engine(self) -> RoleSpec:
        """The engines that serve a teacher."""
        recipe, run, devices = self._recipe, self._run, self._devices["teacher"]
        engine, teacher = recipe.teacher_engine, recipe.teacher
        assert engine is not None and teacher is not None
        layout = Layout(dp=len(devices) // engine.tp)
        lengths = Lengths.of(recipe.rollout, recipe.sets, run.train.tokens, run.sets)
        samples = recipe.trainer.prompts_per_step * recipe.rollout.samples_per_prompt
        tokens = teacher_cache_tokens(engine, samples, lengths, layout.dp, devices[0].kind)
        given = {"seed": recipe.seed + engine.seed, "max_total_tokens": tokens}
        return RoleSpec(
            "teacher",
            TeacherEngineGroup,
            TeacherEngineWorker,
            layout,
            (teacher.path, engine.model_copy(update=given)),
            {},
            start_s=engine.start_timeout_s + _MARGIN_S,
            call_s=recipe.limits.call_s,
            devices_per_rank=engine.tp,
            ranks_per_store=0,
        )

    def judge(self) -> RoleSpec:
        """The servers of the judge."""
        recipe, devices = self._recipe, self._devices["judge"]
        assert recipe.asked_judge is not None and self._judge is not None
        judge, config = recipe.asked_judge, recipe.asked_judge.engine
        return RoleSpec(
            "judge",
            JudgeGroup,
            JudgeWorker,
            Layout(dp=len(devices) // config.tp),
            (judge.path, config),
            {"key": self._judge.key, "restarts": judge.restarts},
            start_s=config.start_timeout_s + _MARGIN_S,
            call_s=recipe.limits.call_s,
            devices_per_rank=config.tp,
            ranks_per_store=0,
        )

    def functions(self) -> RoleSpec:
        """The ranks that call the functions of rewards and costs."""
        recipe, run = self._recipe, self._run
        of_a_step = recipe.trainer.prompts_per_step * recipe.rollout.samples_per_prompt
        samples = max(
            [of_a_step, *(len(run.sets[name]) * planned.settings.samples for name, planned in recipe.sets.items())]
        )
        functions = [function for config in recipe.all_functions.values() for function in config.functions]
        environments = []
        if (environment := recipe.environment) is not None:
            parser_s = 0.0 if environment.tools is None else _PARSER_S
            environments = [environment.load_timeout_s + parser_s]
        chat = recipe.data.files.chat if recipe.data.files is not None else None
        phases = (run.train, *run.sets.values())
        fields = tuple(dict.fromkeys(field for phase in phases for field in phase.fields()))
        return RoleSpec(
            "reward",
            FunctionRewardGroup,
            FunctionRewardWorker,
            Layout(dp=len(self._devices["reward"])),
            (
                recipe.all_functions,
                run.model_directory,
                fields,
                Path.cwd(),
                recipe.environment,
                chat,
                recipe.rollout.sampling.model_dump(include=set(OF_SAMPLING)),
            ),
            {},
            start_s=max([*(function.load_timeout_s for function in functions), *environments]) + _MARGIN_S,
            call_s=_MARGIN_S + max(function.limit_s(samples) for function in functions),
            ranks_per_store=0,
            judge=self._judge,
        )

    def _model_directory(self, role: str) -> Path:
        """The HuggingFace directory of the weights that a model starts with, where it has no checkpoint."""
        recipe, run = self._recipe, self._run
        model = recipe.models.get(role)
        if model is not None and model.path is not None:
            return model.path
        resumes = run.resumption is not None and run.resumption.state is not None
        if role == "reference" and resumes and recipe.reference_is_warmed_up:
            return recipe.checkpoint_directory / WARMED_UP
        return run.model_directory

    def _cache_note(self, tokens: int) -> str:
        """The size of an engine's KV cache, which is much of what an engine takes."""
        engine, sizes = self._recipe.rollout.engine, load_model_spec(self._run.model_directory).sizes
        cache = tokens // engine.attention_dp * cache_of_a_token(sizes, engine.attention_tp, engine.cache_itemsize)
        said = "rollout.engine.max_total_tokens" if engine.max_total_tokens is not None else "all that a step needs"
        return f"rollout: KV cache of {tokens:,} tokens ({said}), {amount(cache)} of each device"


def _location(device: Device, nodes: Sequence[Node]) -> Location:
    return Location(f"node {device.node} ({nodes[device.node].name})", f"{device.kind}:{device.index}")
