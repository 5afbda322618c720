"""Work and limits of a search from a recipe, and the settings of a recipe from a plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import combinations
from typing import Any

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models import ModelSpec
from engine3d.training.config import TrainConfig
from hybridflow.config.recipe import Recipe
from hybridflow.planning.checks.feature_matrix import is_refused, layout_sizes
from hybridflow.planning.checks.model import check_megatron
from hybridflow.planning.checks.prompt import encoded_prompts
from hybridflow.planning.memory.estimate import recipe_specs
from hybridflow.planning.search.role_choices import SearchSettings
from hybridflow.planning.search.run_plan import ROLLOUT, RunPlan
from hybridflow.planning.time.generation import EngineShape
from hybridflow.planning.time.workload import RoleWork, Workload, drawn_lengths

_OPTIONAL = ("reference", "teacher", "critic", "cost_critic", "reward_model", "cost_model")


def recipe_work(
    recipe: Recipe,
    specs: Mapping[str, ModelSpec],
    *,
    prompt_tokens: int | None = None,
    response_tokens: int | None = None,
    spread: float = 0.0,
) -> Workload:
    """The work of a step of a recipe.

    Args:
        recipe: the run.
        specs: of the actor and of each model next to it; see `recipe_specs`.
        prompt_tokens: mean of the prompts, which are read if None.
        response_tokens: mean of the responses; the longest if None.
        spread: standard deviation of the logarithm of their lengths.

    Raises:
        UserError: the prompts cannot be read.
    """
    if prompt_tokens is None:
        try:
            encoded = encoded_prompts(recipe, specs["actor"])
        except UserError as error:
            raise UserError(f"{error}; or give their mean length, such as --prompt-tokens 512") from None
        lengths = [len(tokens) for tokens in encoded.train.tokens]
        mean, longest_prompt = sum(lengths) / max(1, len(lengths)), encoded.lengths.prompt
    else:
        mean, longest_prompt = float(prompt_tokens), prompt_tokens
    longest = recipe.rollout.sampling.max_new_tokens
    if response_tokens is not None and not 1 <= response_tokens <= longest:
        raise UserError(f"--response-tokens {response_tokens}: expected 1 to rollout.sampling.max_new_tokens={longest}")
    response = float(response_tokens or longest)
    several = recipe.trainer.updates_per_step > 1 and recipe.trainer.max_staleness == 0
    correction = recipe.algorithm.correction
    recomputes = several if correction is None else bool(correction.needs_proximal)
    roles = [
        RoleWork(
            role,
            specs[role],
            settings.train,
            trained=settings.trained,
            passes=int(recomputes) if role == "actor" else 1,
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
    )


def search_settings(
    recipe: Recipe,
    specs: Mapping[str, ModelSpec],
    staleness: int | None = None,
    *,
    gpus_per_node: int = 8,
    gpus: bool = True,
) -> SearchSettings:
    """The limits of a search for a recipe.

    Args:
        recipe: the run.
        specs: of its models.
        staleness: in place of the recipe's.
        gpus_per_node: of the cluster.
        gpus: the devices are GPUs.

    Raises:
        UserError: the recipe has what the search does not plan for.
    """
    check_planned_for(recipe)
    engine = recipe.rollout.engine
    base = EngineShape(
        cascade=engine.cascade_attention,
        peers=engine.peer_collectives,
        fused_sampling=engine.fused_sampling,
        local_experts_only=engine.local_experts_only,
        fp8=engine.precision == "fp8",
        dtype=engine.dtype,
        cache_itemsize=engine.cache_itemsize,
        graphs=engine.cuda_graph,
        recomputes=recipe.rollout.stream is not None and recipe.rollout.stream.on_new_weights == "recompute",
    )
    plain = not (engine.deterministic or engine.token_versions or engine.release_weights or engine.precision)
    return SearchSettings(
        base=base,
        staleness=recipe.trainer.max_staleness if staleness is None else staleness,
        stream=recipe.rollout.stream is not None,
        shared=recipe.rollout.weights.share,
        release=engine.release_weights,
        attention_dp=plain and recipe.rollout.stream is None,
        accepts=_Accepted(recipe, specs, gpus_per_node, gpus=gpus),
    )


def check_planned_for(recipe: Recipe) -> None:
    """Refuse a recipe whose step no model predicts.

    Raises:
        UserError: names what the recipe has.
    """
    for role in recipe.megatron_roles.values():
        if role.train.precision is not None:
            raise UserError(f"plan: {role.setting}.precision={role.train.precision} is not planned for; expected null")
    if recipe.rollout.lease or recipe.asked_judge is not None or recipe.teacher_engine is not None:
        setting = "rollout.lease=true" if recipe.rollout.lease else "a model with engines of its own"
        raise UserError(f"plan: {setting} is not planned for; expected a recipe without")


class _Accepted:
    """Layouts and settings of which the feature matrix has every pair, and that a check would not refuse."""

    def __init__(self, recipe: Recipe, specs: Mapping[str, ModelSpec], gpus_per_node: int, *, gpus: bool) -> None:
        self._recipe = recipe
        self._roles = recipe.megatron_roles
        self._specs = specs
        self._gpus_per_node = gpus_per_node
        self._gpus = gpus
        self._known: dict[frozenset[str], bool] = {}

    def __call__(self, role: str, layout: Layout, config: TrainConfig) -> bool:
        items = frozenset(self._items(role, layout, config))
        if items not in self._known:
            self._known[items] = not any(is_refused(*pair) for pair in combinations(sorted(items), 2))
        if not self._known[items]:
            return False
        settings, spec = self._roles[role], self._specs[role]
        if config.has_copy_engine_dispatcher(spec.sizes, layout) and self._gpus_per_node % (layout.ep * layout.etp):
            return False
        try:
            if settings.trained:
                config.check_trained(spec.sizes, layout)
            check_megatron(config, settings.setting, spec, layout, trained=settings.trained, gpus=self._gpus)
        except UserError:
            return False
        return True

    def _items(self, role: str, layout: Layout, config: TrainConfig) -> list[str]:
        recipe, spec = self._recipe, self._specs[role]
        model = self._roles[role]
        items = [spec.family.name, *layout_sizes(layout), "packing" if config.packing else "padding"]
        items += ["critic"] * spec.value_head + ["offload"] * model.offload
        if model.trained:
            items += ["recomputation"] * (config.recompute != "none")
            items += ["optimizer_offload"] * config.optimizer.offload
            items += ["routing_replay"] * (config.routing_replay != "none")
            items += ["checkpoints"] * (recipe.checkpoint.save_interval is not None)
        if recipe.starts_engines:
            items.append("resharding")
            items += ["fp8"] * (role == "actor" and recipe.rollout.engine.precision is not None)
        return items


def plan_specs(recipe: Recipe) -> dict[str, ModelSpec]:
    """Read the sizes of every model of a recipe."""
    return recipe_specs(recipe.model, recipe.models)


def plan_overrides(recipe: Recipe, plan: RunPlan, *, kind: str = "cuda") -> list[str]:
    """Settings, as `key=value`, with which a recipe runs as planned.

    Args:
        recipe: the run.
        plan: its placement and layouts.
        kind: of the devices.
    """
    settings: dict[str, Any] = {f"placement.{role}": None for role in _OPTIONAL if getattr(recipe.placement, role)}
    settings["placement.pools"] = {}
    for group in plan.groups:
        last = group.first + group.gpus - 1
        devices = f"{kind}:{group.first}" + (f"-{last}" if group.gpus > 1 else "")
        settings |= {f"placement.{role}": devices for role in group.roles}
    settings |= _train_settings(plan, "actor", "train")
    for role in plan.roles:
        if role != "actor":
            config = plan.roles[role].config.model_dump(mode="json") | {"routing_replay": "none"}
            layout = _layout(plan.roles[role].layout)
            tokens = _micro_batch_tokens(plan, role)
            settings[f"{role}.train"] = config | {"layout": layout, "micro_batch_tokens": tokens}
            settings[f"{role}.offload"] = role in plan.offloaded
    if plan.engines is not None:
        settings |= _engine_settings(recipe, plan)
        settings["trainer.max_staleness"] = plan.staleness
    return [f"{name}={json.dumps(value)}" for name, value in settings.items()]


def layout_override(plan: RunPlan) -> str:
    """The layout of a plan's actor, as `key=value`."""
    return f"train.layout={json.dumps(_layout(plan.roles['actor'].layout))}"


def fixed_engines(recipe: Recipe, devices: int) -> EngineShape:
    """The engines of a recipe on their devices."""
    engine = recipe.rollout.engine
    return EngineShape(
        tp=engine.tp,
        ep=engine.ep,
        attention_dp=engine.attention_dp,
        engines=max(1, devices // engine.tp),
        requests=engine.max_running_requests,
        cascade=engine.cascade_attention,
        peers=engine.peer_collectives,
        fused_sampling=engine.fused_sampling,
        local_experts_only=engine.local_experts_only,
        fp8=engine.precision == "fp8",
        dtype=engine.dtype,
        cache_itemsize=engine.cache_itemsize,
        graphs=engine.cuda_graph,
        recomputes=recipe.rollout.stream is not None and recipe.rollout.stream.on_new_weights == "recompute",
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


def _engine_settings(recipe: Recipe, plan: RunPlan) -> dict[str, Any]:
    assert plan.engines is not None
    shape = plan.engines.shape
    of_engine = {
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
    elif recipe.placement.actor.startswith("cuda"):
        of_engine |= {"memory_saver": True}
    return {"rollout.engines": None} | {f"rollout.engine.{name}": value for name, value in of_engine.items()}
