"""Work and limits of a search from a recipe, and the settings of a recipe from a plan."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models import ModelSpec
from engine3d.models.lora.config import LoraConfig
from engine3d.rollout.config import RolloutConfig
from engine3d.rollout.served import check_on_gpus, check_served
from engine3d.training.config import TrainConfig
from hybridflow.cluster.devices.device_map import Device, DeviceKind
from hybridflow.config.recipe import Recipe
from hybridflow.data.given_responses import GivenResponses
from hybridflow.data.prompts import Prompts
from hybridflow.planning.checks.engine import check_engine_nodes, check_served_adapters
from hybridflow.planning.checks.feature_matrix import RunFeatures, check_pairs
from hybridflow.planning.checks.model import check_megatron
from hybridflow.planning.checks.prompt import encoded_prompts
from hybridflow.planning.data.prompts import prompt_limit
from hybridflow.planning.search.engines import engine_config
from hybridflow.planning.search.role_choices import SearchSettings
from hybridflow.planning.search.run_plan import ROLLOUT, RunPlan
from hybridflow.planning.time.generation import EngineShape
from hybridflow.planning.time.workload import RoleWork, Workload, drawn_lengths
from hybridflow.roles.config import MegatronRole, PlacementConfig
from hybridflow.rollout.config import RolloutRole

_MOST_SPREAD = 3.0
"""Largest spread of the logarithm of lengths: one in six responses would be twenty times as long as the median."""
_OPTIONAL = ("reference", "teacher", "critic", "cost_critic", "reward_model", "cost_model")


def recipe_work(
    recipe: Recipe,
    specs: Mapping[str, ModelSpec],
    *,
    prompt_tokens: int | None = None,
    response_tokens: float | None = None,
    spread: float = 0.0,
) -> Workload:
    """The work of a step of a recipe.

    Args:
        recipe: the run.
        specs: of the actor and of each model next to it; see `recipe_specs`.
        prompt_tokens: mean of the prompts, which are read if None, with the responses that the data have.
        response_tokens: mean of the responses; that of the data, or the longest, if None.
        spread: standard deviation of the logarithm of their lengths.

    Raises:
        UserError: the prompts cannot be read, or a length is impossible.
    """
    longest = recipe.rollout.sampling_table.longest_response
    given_responses = not recipe.algorithm.needs_engines
    if prompt_tokens is None:
        try:
            encoded = encoded_prompts(recipe, specs["actor"])
        except UserError as error:
            raise UserError(f"{error}; or give their mean length, such as --prompt-tokens 512") from None
        lengths = [len(tokens) for tokens in encoded.train.tokens]
        mean, longest_prompt = sum(lengths) / max(1, len(lengths)), encoded.lengths.prompt
        if (of_data := mean_response(encoded.train)) is not None:
            longest, response_tokens = encoded.lengths.response, response_tokens or of_data
    else:
        limit = prompt_limit(recipe.rollout, recipe.model, given=given_responses)
        if not 1 <= prompt_tokens <= limit:
            raise UserError(f"--prompt-tokens {prompt_tokens}: expected 1 to {limit}, what the context has for them")
        mean, longest_prompt = float(prompt_tokens), prompt_tokens
        if given_responses:  # which are not read, and are of any length
            longest = max(1, min(limit - prompt_tokens, max(longest, math.ceil(response_tokens or 0))))
    if response_tokens is not None and not 1 <= response_tokens <= longest:
        most = "the longest of the data," if given_responses else "rollout.sampling.max_new_tokens="
        raise UserError(f"--response-tokens {response_tokens}: expected 1 to {most}{longest}")
    if not (0 <= spread <= _MOST_SPREAD):
        raise UserError(f"--spread {spread:g}: expected a number from 0 to {_MOST_SPREAD:g}, such as 0.8")
    response = float(response_tokens or longest)
    several = recipe.trainer.updates_per_step > 1 and not recipe.trainer.off_policy
    correction = recipe.algorithm.correction
    recomputes = several if correction is None else bool(correction.needs_proximal)
    # The reference that is the actor without its adapters is a further pass of the actor.
    of_actor = int(recomputes) + (recipe.algorithm.needs_reference and recipe.reference_is_base)
    roles = [
        RoleWork(
            role,
            specs[role],
            settings.train,
            trained=settings.trained,
            passes=of_actor if role == "actor" else 1,
            setting=settings.setting,
        )
        for role, settings in recipe.megatron_roles.items()
        if role in specs
    ]
    return Workload(
        tuple(roles),
        prompts=recipe.trainer.prompts_per_step,
        samples=recipe.samples_per_step // recipe.trainer.prompts_per_step,
        prompt=mean,
        longest_prompt=longest_prompt,
        lengths=drawn_lengths(response, longest, spread),
        longest=longest,
        mini_batches=recipe.trainer.mini_batches,
        epochs=recipe.trainer.epochs,
        generates=recipe.starts_engines,
        staleness=recipe.trainer.max_staleness,
    )


def mean_response(train: Prompts) -> float | None:
    """Mean tokens of the responses that training data have; None where engines generate them."""
    if not isinstance(train, GivenResponses):
        return None
    lengths = [len(tokens) for both in train.responses for tokens in both]
    return max(1.0, sum(lengths) / max(1, len(lengths)))


def search_settings(
    recipe: Recipe,
    specs: Mapping[str, ModelSpec],
    *,
    gpus_per_node: int = 8,
    gpus: bool = True,
) -> SearchSettings:
    """The limits of a search for a recipe.

    Args:
        recipe: the run.
        specs: of its models.
        gpus_per_node: of the cluster.
        gpus: the devices are GPUs.

    Raises:
        UserError: the recipe has what the search does not plan for.
    """
    check_planned_for(recipe.megatron_roles.values(), recipe.served_roles, lease=recipe.rollout.lease)
    engine = recipe.rollout.engine
    if recipe.train.fp8.given and gpus:
        setting = f"train.fp8.{min(recipe.train.fp8.given)}"
        raise UserError(f"plan: {setting} was not tried on GPUs; expected none")
    if engine.draft_tokens:
        raise UserError(f"plan: rollout.engine.draft_tokens={engine.draft_tokens} was not tried; expected 0")
    plain = not (engine.deterministic or engine.token_versions or engine.release_weights or engine.altered_policy)
    engines = recipe.rollout if recipe.starts_engines else None
    features = RunFeatures(engines, recipe.checkpoint.save_interval, recipe.environment is not None)
    return SearchSettings(
        base=_engine_features(recipe.rollout),
        engine=engine,
        gpus=gpus,
        stream=recipe.rollout.stream is not None,
        shared=recipe.rollout.weights.share,
        release=engine.release_weights,
        attention_dp=plain and recipe.rollout.stream is None,
        accepts=_Accepted(recipe.megatron_roles, specs, features, gpus_per_node, gpus=gpus),
        accepts_engines=_AcceptedEngines(
            recipe.rollout, recipe.served_adapters, specs["actor"], gpus_per_node, "cuda" if gpus else "cpu"
        ),
    )


def _engine_features(rollout: RolloutRole) -> EngineShape:
    """Features of engines, with sizes of 1."""
    engine, stream = rollout.engine, rollout.stream
    return EngineShape(
        cascade=engine.cascade_attention,
        peers=engine.peer_collectives,
        fused_sampling=engine.fused_sampling,
        local_experts_only=engine.local_experts_only,
        fp8=engine.precision == "fp8",
        dtype=engine.dtype,
        cache_itemsize=engine.cache_itemsize,
        graphs=engine.cuda_graph,
        recomputes=stream is not None and stream.on_new_weights == "recompute",
    )


def check_planned_for(models: Iterable[MegatronRole], served: Sequence[str], *, lease: bool) -> None:
    """Refuse a recipe whose step no model predicts.

    Args:
        models: the actor and every Megatron-Core model next to it.
        served: models that engines of their own serve, but the actor.
        lease: of `rollout`.

    Raises:
        UserError: names what the recipe has.
    """
    for role in models:
        if role.train.precision is not None:
            raise UserError(f"plan: {role.setting}.precision={role.train.precision} is not planned for; expected null")
    if lease or served:
        setting = "rollout.lease=true" if lease else "a model with engines of its own"
        raise UserError(f"plan: {setting} is not planned for; expected a recipe without")


class _Accepted:
    """Layouts and settings of which the feature matrix has every pair, and that a check would not refuse."""

    def __init__(
        self,
        roles: Mapping[str, MegatronRole],
        specs: Mapping[str, ModelSpec],
        features: RunFeatures,
        gpus_per_node: int,
        *,
        gpus: bool,
    ) -> None:
        self._roles = roles
        self._specs = specs
        self._features = features
        self._gpus_per_node = gpus_per_node
        self._gpus = gpus
        self._known: dict[tuple[str, frozenset[str]], UserError | None] = {}

    def __call__(self, role: str, layout: Layout, config: TrainConfig) -> None:
        settings, spec = replace(self._roles[role], train=config), self._specs[role]
        items = self._features.of_model(settings, spec, layout)
        key = (role, frozenset(items))
        if key not in self._known:
            self._known[key] = _refusal(lambda: check_pairs(role, items))
        if (refusal := self._known[key]) is not None:
            raise refusal
        if config.has_copy_engine_dispatcher(spec.sizes, layout) and self._gpus_per_node % (layout.ep * layout.etp):
            raise UserError(f"{settings.setting}.copy_engine_dispatcher=true with experts on several nodes ({layout})")
        if settings.trained:
            config.check_trained(spec.sizes, layout)
        check_megatron(config, settings.setting, spec, layout, trained=settings.trained, gpus=self._gpus)


class _AcceptedEngines:
    """Engines that a check would not refuse with the model and on the nodes that they are on."""

    def __init__(
        self, rollout: RolloutRole, adapters: LoraConfig | None, spec: ModelSpec, gpus_per_node: int, kind: DeviceKind
    ) -> None:
        self._rollout = rollout
        self._adapters = adapters
        self._spec = spec
        self._served: dict[tuple[int, int, int], UserError | None] = {}
        self._known: dict[EngineShape, UserError | None] = {}
        self._gpus_per_node = gpus_per_node
        self._kind = kind

    def __call__(self, shape: EngineShape) -> None:
        if shape not in self._known:
            self._known[shape] = _refusal(lambda: self._check(shape))
        if (refusal := self._known[shape]) is not None:
            raise refusal

    def _check(self, shape: EngineShape) -> None:
        rollout = self._rollout.model_copy(update={"engine": engine_config(self._rollout.engine, shape)})
        key = (shape.tp, shape.ep, shape.attention_dp)
        if key not in self._served:
            self._served[key] = _refusal(lambda: check_served(self._spec, rollout.engine))
        if (refusal := self._served[key]) is not None:
            raise refusal
        ranks = (divmod(rank, self._gpus_per_node) for rank in range(shape.ranks))
        devices = [Device(node, self._kind, index) for node, index in ranks]
        check_engine_nodes(rollout, devices)
        if self._kind == "cuda":
            check_on_gpus(self._spec)
        if self._adapters is not None:
            check_served_adapters(rollout, self._adapters, self._spec, devices)


def _refusal(check: Callable[[], None]) -> UserError | None:
    try:
        check()
    except UserError as error:
        return error
    return None


def plan_overrides(
    placement: PlacementConfig, engine: RolloutConfig, plan: RunPlan, *, kind: str = "cuda"
) -> list[str]:
    """Settings, as `key=value`, with which a recipe runs as planned.

    Args:
        placement: of the recipe.
        engine: settings of the recipe's engines.
        plan: placement and layouts of the run.
        kind: of the devices.
    """
    settings: dict[str, Any] = {f"placement.{role}": None for role in _OPTIONAL if getattr(placement, role)}
    settings["placement.pools"] = {}
    for group in plan.groups:
        last = group.first + group.gpus - 1
        devices = f"{kind}:{group.first}" + (f"-{last}" if group.gpus > 1 else "")
        settings |= {f"placement.{role}": devices for role in group.roles}
    settings |= _train_settings(plan, "actor", "train")
    for role in plan.roles:
        if role != "actor":
            config = plan.roles[role].config.model_dump(mode="json")
            layout = _layout(plan.roles[role].layout)
            tokens = _micro_batch_tokens(plan, role)
            settings[f"{role}.train"] = config | {"layout": layout, "micro_batch_tokens": tokens}
            settings[f"{role}.offload"] = role in plan.offloaded
    if plan.engines is not None:
        settings |= _engine_settings(engine, plan, kind)
        settings["trainer.max_staleness"] = plan.staleness
    return [f"{name}={json.dumps(value)}" for name, value in settings.items()]


def layout_override(plan: RunPlan) -> str:
    """The layout of a plan's actor, as `key=value`."""
    return f"train.layout={json.dumps(_layout(plan.roles['actor'].layout))}"


def fixed_engines(rollout: RolloutRole, devices: int) -> EngineShape:
    """The engines of a recipe on their devices."""
    engine = rollout.engine
    return replace(
        _engine_features(rollout),
        tp=engine.tp,
        ep=engine.ep,
        attention_dp=engine.attention_dp,
        engines=max(1, devices // engine.tp),
        requests=engine.max_running_requests,
    )


def _train_settings(plan: RunPlan, role: str, setting: str) -> dict[str, Any]:
    proposal = plan.roles[role]
    settings: dict[str, Any] = {
        f"{setting}.layout": _layout(proposal.layout),
        f"{setting}.micro_batch_tokens": _micro_batch_tokens(plan, role),
        f"{setting}.recompute": proposal.config.recompute,
        f"{setting}.optimizer.offload": proposal.config.optimizer.offload,
    }
    if not proposal.config.optimizer.offload:
        settings[f"{setting}.optimizer.overlap_offload"] = False
    return settings


def _layout(layout: Layout) -> dict[str, int]:
    return {name: getattr(layout, name) for name in ("tp", "pp", "ep", "etp", "cp", "vpp")}


def _micro_batch_tokens(plan: RunPlan, role: str) -> int:
    batch = plan.roles[role].batch
    return max(1, batch.tokens * batch.together)


def _engine_settings(engine: RolloutConfig, plan: RunPlan, kind: str) -> dict[str, Any]:
    assert plan.engines is not None
    shape = plan.engines.shape
    of_engine: dict[str, Any] = {
        "tp": shape.tp,
        "ep": shape.ep,
        "attention_dp": shape.attention_dp,
        "max_running_requests": shape.requests,
        "max_total_tokens": plan.engines.cache_tokens,
        "peer_collectives": shape.peers,
        "local_experts_only": shape.local_experts_only,
    }
    if not any({"actor", ROLLOUT} <= {*group.roles} for group in plan.groups):
        of_engine |= {"release_weights": False}
    elif kind == "cuda":
        of_engine |= {"memory_saver": True}
    if kind == "cuda" and engine.mem_fraction_static < plan.engines.memory_share:
        of_engine |= {"mem_fraction_static": plan.engines.memory_share}
    return {"rollout.engines": None} | {f"rollout.engine.{name}": value for name, value in of_engine.items()}
