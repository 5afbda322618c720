"""Pairs of model family, layout and features that a test has run together. `check` refuses all other pairs.

`feature_matrix.yaml` and docs/models.md are made from the marks of the tests by docs/generate_models.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from engine3d.errors import UserError

if TYPE_CHECKING:
    from engine3d.layout import Layout
    from engine3d.models import ModelSpec
    from engine3d.training.config import TrainConfig
    from hybridflow.roles.config import MegatronRole
    from hybridflow.rollout.config import RolloutRole

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen2_moe",
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "glm4_moe",
    "minimax_m2",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5_moe",
    "qwen3_5",
)
LAYOUT = ("tp", "pp", "vpp", "stages", "ep", "etp", "cp", "dp")
"""Sizes of a layout that may be above 1, and stages that are given."""
FEATURES = (
    "packing",
    "padding",
    "recomputation",
    "offload",
    "optimizer_offload",
    "routing_replay",
    "critic",
    "streams",
    "episodes",
    "checkpoints",
    "resharding",
    "drafts",
    "mtp",
    "fp8",
    "fp8_training",
    "fp8_exceptions",
    "lora",
)
ITEMS = (*FAMILIES, *LAYOUT, *FEATURES)
DATA = Path(__file__).with_suffix(".yaml")


@cache
def proven_runs() -> tuple[frozenset[str], ...]:
    """Items that tests have run together, each set once."""
    return tuple(frozenset(run.split()) for run in yaml.safe_load(DATA.read_text()))


@cache
def proven_pairs() -> frozenset[frozenset[str]]:
    """Pairs of items that tests have run together."""
    return frozenset(frozenset(pair) for run in proven_runs() for pair in combinations(run, 2))


def check_tested(
    roles: Mapping[str, MegatronRole],
    specs: Mapping[str, ModelSpec | None],
    layouts: Mapping[str, Layout],
    features: RunFeatures,
) -> None:
    """Refuse models of a recipe that use a pair of items that no test has run together.

    Args:
        roles: the actor and every Megatron-Core model next to it.
        specs: the model of each role, where it is known.
        layouts: of each role.
        features: of the run.

    Raises:
        UserError: names the pair, and items with which the first of them was tested.
    """
    for role, spec in specs.items():
        if spec is not None:
            check_pairs(role, features.of_model(roles[role], spec, layouts[role]))


@dataclass(frozen=True)
class RunFeatures:
    """Settings of a run that decide which items its models use.

    Args:
        rollout: settings of the engines; None where none generate.
        save_interval: steps between checkpoints; None without any.
        episodes: True if samples are episodes of an environment.
    """

    rollout: RolloutRole | None
    save_interval: int | None
    episodes: bool

    def of_model(self, model: MegatronRole, spec: ModelSpec, layout: Layout) -> dict[str, str]:
        """Items that a model uses, each with the setting that asks for it.

        Args:
            model: its role and settings.
            spec: of the model.
            layout: of its ranks.
        """
        role, config, setting = model.name, model.train, model.setting
        items = {spec.family.name: f"{spec.family.name} models"}
        for name, size in layout_sizes(layout).items():
            items[name] = f"dp={size}" if name == "dp" else f"{setting}.layout.{name}={size}"
        items["packing" if config.packing else "padding"] = f"{setting}.packing={str(config.packing).lower()}"
        if spec.value_head:
            items["critic"] = "a scalar head"
        if model.offload:
            items["offload"] = f"{role}.offload=true"
        if config.precision is not None:
            items["fp8_training"] = f"{setting}.precision={config.precision}"
        if config.fp8.given:
            items["fp8_exceptions"] = f"{setting}.fp8.{min(config.fp8.given)}"
        if model.trained:
            items |= _of_training(config, setting, self.save_interval)
        if self.rollout is not None:
            items["resharding"] = "weights in rollout engines"
            if role == "actor" and (precision := self.rollout.engine.precision) is not None:
                items["fp8"] = f"rollout.engine.precision={precision}"
            if role == "actor" and (drafts := self.rollout.engine.draft_tokens):
                items["drafts"] = f"rollout.engine.draft_tokens={drafts}"
            if self.rollout.stream is not None:
                items["streams"] = "rollout.stream"
            if self.episodes and role == "actor":
                items["episodes"] = "environment"
        return items


def layout_sizes(layout: Layout) -> dict[str, Any]:
    """Sizes of a layout that are above 1, and its stages if they are given."""
    sizes = {name: getattr(layout, name, None) for name in LAYOUT}
    return {name: size for name, size in sizes.items() if size not in (None, 1)}


def _of_training(config: TrainConfig, setting: str, save_interval: int | None) -> dict[str, str]:
    """Items of a model that is trained."""
    items = dict[str, str]()
    if config.recompute != "none":
        items["recomputation"] = f"{setting}.recompute={config.recompute}"
    if config.optimizer.offload:
        items["optimizer_offload"] = f"{setting}.optimizer.offload=true"
    if (routes := getattr(config, "routing_replay", "none")) != "none":
        items["routing_replay"] = f"{setting}.routing_replay={routes}"
    if config.mtp is not None:
        items["mtp"] = f"{setting}.mtp"
    if config.lora is not None:
        items["lora"] = f"{setting}.lora"
    if save_interval is not None:
        items["checkpoints"] = f"checkpoint.save_interval={save_interval}"
    return items


def check_pairs(role: str, items: Mapping[str, str]) -> None:
    """Refuse items of a model of which no test has run two together.

    Args:
        role: of the model.
        items: with the setting that asks for each.

    Raises:
        UserError: see `check_tested`.
    """
    missing = [pair for pair in combinations(items, 2) if is_refused(*pair)]
    if not missing:
        return
    one, other = missing[0]
    more = f" (the first of {len(missing)} such pairs)" if len(missing) > 1 else ""
    raise UserError(
        f"{role}: {items[one]} with {items[other]} was not tested{more}; {other} was tested with "
        f"{', '.join(tested_with(other)) or 'nothing'} (docs/models.md)"
    )


def is_refused(one: str, other: str) -> bool:
    """True if no test has run two items together, and `check` refuses them.

    Episodes leave tokens out of the loss: their pairs are shown, and are not refused.
    """
    if "episodes" in (one, other):
        return False
    return frozenset((one, other)) not in proven_pairs()


def tested_with(item: str, items: Iterable[str] = ITEMS) -> list[str]:
    """Items of these with which one was tested, in order."""
    return [other for other in items if other != item and frozenset((item, other)) in proven_pairs()]
