"""`hybridflow plan`: placement, layouts and engines of a run on a cluster, with the seconds of a step by phase."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine3d.errors import UserError, shortened
from engine3d.startup.imports import quick_imports
from hybridflow.cli.common.recipe_arguments import add_recipe, loaded_recipes
from hybridflow.cluster.devices.device_map import MOST_GPUS, MOST_NODES, DeviceKind, Node

if TYPE_CHECKING:
    from hybridflow.config.recipe import Recipe
    from hybridflow.planning.search.run_plan import RunPlan
    from hybridflow.planning.time.hardware import Profile
    from hybridflow.planning.time.workload import Workload

_WHAT_IFS = "rollout-gpus=+N, fp8, staleness=N, link=RATE, response-tokens=N or prompt-tokens=N"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `hybridflow plan`."""
    add_recipe(parser)
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="hosts of the cluster (1)")
    parser.add_argument(
        "--gpus", metavar="GPU:N", help="kind and number of each host's GPUs (h200:8), or a profile's file"
    )
    parser.add_argument("--profile", metavar="FILE", help="plan for this machine, as hybridflow profile measured it")
    parser.add_argument("--link", metavar="RATE", help="of each GPU to other hosts, such as 400Gb")
    parser.add_argument("--gpu-gb", type=float, metavar="GB", help="memory of each GPU, in 1e9 bytes; the profile's")
    parser.add_argument("--prompt-tokens", type=int, metavar="N", help="mean of the prompts, which are not read then")
    parser.add_argument("--response-tokens", type=int, metavar="N", help="mean of the responses (max_new_tokens)")
    parser.add_argument(
        "--spread", type=float, default=0.0, metavar="S", help="of the logarithm of responses' lengths, such as 0.8 (0)"
    )
    parser.add_argument("--count", type=int, default=3, metavar="N", help="plans to show (3)")
    parser.add_argument("--explain", action="store_true", help="show where each second of the first plan comes from")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the recipe of the first plan")
    parser.add_argument(
        "--what-if", action="append", default=[], metavar="CHANGE", help=f"also plan with {_WHAT_IFS}; repeatable"
    )


@dataclass(frozen=True)
class PlannedCluster:
    """Cluster of a plan.

    Args:
        profile: of its GPUs.
        nodes: hosts.
        gpus_per_node: of each.
        extra: further GPUs, for engines.
    """

    profile: Profile
    nodes: int
    gpus_per_node: int
    extra: int = 0

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node + self.extra

    @property
    def kind(self) -> DeviceKind:
        """Kind of the devices."""
        return "cpu" if self.profile.gpu == "cpu" else "cuda"


@dataclass(frozen=True)
class PlannedLengths:
    """Lengths of a plan's prompts and responses, as the options give them."""

    prompt_tokens: int | None
    response_tokens: int | None
    spread: float


def run(parsed: argparse.Namespace) -> int:
    """Run `hybridflow plan`.

    Raises:
        UserError: an option is wrong, nothing fits, or the recipe to write would not pass its checks.
    """
    recipes = loaded_recipes(parsed)
    if len(recipes) > 1:
        raise UserError(f"plan with several actors: expected --actor with one of {', '.join(recipes)}")
    recipe = next(iter(recipes.values()))
    if parsed.count < 1:
        raise UserError(f"--count {parsed.count}: expected at least 1")
    if parsed.spread and parsed.response_tokens is None:
        raise UserError(f"--spread {parsed.spread:g}: expected --response-tokens with it, the mean of the responses")
    if parsed.profile is None:
        cluster = named_cluster(parsed.gpus or "h200:8", parsed.nodes, parsed.link, parsed.gpu_gb)
    else:
        cluster = _profiled_cluster(parsed)
    lengths = PlannedLengths(parsed.prompt_tokens, parsed.response_tokens, parsed.spread)
    if parsed.write is not None and (parsed.write.exists() or not parsed.write.parent.is_dir()):
        wrong = "exists" if parsed.write.exists() else "no such directory"
        raise UserError(f"--write {parsed.write}: {wrong}, expected a new file in a directory that exists")
    with quick_imports():
        from hybridflow.planning.search import plan_text
        from hybridflow.planning.search.recipe_work import plan_overrides

    changes = [_parsed_change(text, cluster) for text in parsed.what_if]
    plans, work = planned(recipe, cluster, lengths, count=parsed.count + 1)
    print(_head(cluster, work, parsed))
    print("\n".join(plan_text.table(plans, work, cluster.profile, count=parsed.count)))
    if parsed.explain:
        print("\n".join(plan_text.explanation(plans[0], cluster.profile)))
    for change in changes:
        print(_what_if(change, recipe, cluster, lengths, plans[0]))
    if parsed.write is not None:
        settings = plan_overrides(recipe.placement, recipe.rollout.engine, plans[0], kind=cluster.kind)
        written = written_recipe(parsed, settings, cluster)
        parsed.write.write_text(written)
        print(f"{parsed.write}: the recipe of plan 1")
    return 0


def _head(cluster: PlannedCluster, work: Workload, parsed: argparse.Namespace) -> str:
    given = ", all of max_new_tokens (--response-tokens gives their mean)" if work.generates else ""
    given = "" if parsed.response_tokens else given
    return (
        f"{cluster.nodes} x {cluster.gpus_per_node} {cluster.profile.name}, {work.tokens:,} tokens a sequence, "
        f"of which {work.response:,.0f} of the response{given}"
    )


def _profiled_cluster(parsed: argparse.Namespace) -> PlannedCluster:
    """The cluster of hosts like this one, by its own profile."""
    with quick_imports():
        from hybridflow.planning.measure.machine import check_machine
        from hybridflow.planning.time.hardware import load_profile
    if parsed.gpus is not None:
        raise UserError(f"--profile {parsed.profile} is of this machine, --gpus {parsed.gpus} of others: expected one")
    profile = load_profile(parsed.profile)
    check_machine(parsed.profile, profile)
    return named_cluster(f"{parsed.profile}:{profile.hardware.gpus_per_node}", parsed.nodes, parsed.link, parsed.gpu_gb)


def named_cluster(gpus: str, nodes: int, link: str | None, gpu_gb: float | None = None) -> PlannedCluster:
    """The cluster that options name.

    Args:
        gpus: such as "h200:8", or a profile's file, with or without the number of a host's GPUs.
        nodes: hosts.
        link: such as "400Gb"; the profile's if None.
        gpu_gb: memory of a GPU, in 1e9 bytes; the profile's if None.

    Raises:
        UserError: names the option.
    """
    with quick_imports():
        from hybridflow.planning.time.hardware import load_profile
    name, colon, count = gpus.rpartition(":")
    if not colon:
        name, count = gpus, "8"
    if not count.isdecimal() or not 1 <= int(count) <= MOST_GPUS:
        raise UserError(f"--gpus {shortened(gpus)}: expected a kind and a number from 1 to {MOST_GPUS}, such as h200:8")
    if not 1 <= nodes <= MOST_NODES:
        raise UserError(f"--nodes {nodes}: expected a whole number of at least 1 and at most {MOST_NODES:,}")
    try:
        profile = load_profile(name)
    except UserError as error:
        raise UserError(f"--gpus {shortened(gpus)}: {error}") from None
    profile = profile.with_cluster(int(count), link)
    if gpu_gb is not None:
        if not 0 < gpu_gb < 1e6:
            raise UserError(f"--gpu-gb {gpu_gb:g}: expected a number above 0")
        profile = replace(profile, hardware=replace(profile.hardware, memory=round(gpu_gb * 1e9)))
    return PlannedCluster(profile, nodes, int(count))


def planned(
    recipe: Recipe,
    cluster: PlannedCluster,
    lengths: PlannedLengths,
    *,
    count: int = 2,
    alone: bool = False,
) -> tuple[list[RunPlan], Workload]:
    """Plan a recipe on a cluster.

    Args:
        recipe: the run.
        cluster: where it is to run.
        lengths: of prompts and responses.
        count: most plans.
        alone: engines have GPUs of their own.

    Returns:
        The plans, the fastest first, and the work of a step.

    Raises:
        UserError: nothing fits.
    """
    with quick_imports():
        from hybridflow.planning.memory.estimate import recipe_specs
        from hybridflow.planning.search.placements import PlacementSearch
        from hybridflow.planning.search.recipe_work import recipe_work, search_settings
    specs = recipe_specs(recipe)
    work = recipe_work(
        recipe,
        specs,
        prompt_tokens=lengths.prompt_tokens,
        response_tokens=lengths.response_tokens,
        spread=lengths.spread,
    )
    per_node = cluster.profile.hardware.gpus_per_node
    settings = search_settings(recipe, specs, gpus_per_node=per_node, gpus=cluster.kind == "cuda")
    search = PlacementSearch(work, cluster.profile, replace(settings, alone=alone or settings.alone))
    return search.best(cluster.gpus, count), work


@dataclass(frozen=True)
class _Change:
    """A what-if: its text, and what is other than in the plan."""

    text: str
    name: str
    number: int | None
    cluster: PlannedCluster


def _parsed_change(text: str, cluster: PlannedCluster) -> _Change:
    name, _, value = text.partition("=")
    number = int(value) if re.fullmatch(r"\+?[0-9]{1,6}", value) else None
    if name == "link" and value:
        return _Change(text, name, None, replace(cluster, profile=cluster.profile.with_cluster(link=value)))
    if name == "rollout-gpus" and number:
        return _Change(text, name, number, replace(cluster, extra=number))
    known = (name == "fp8" and not value) or (name == "staleness" and number is not None)
    if not known and not (name in ("response-tokens", "prompt-tokens") and number):
        raise UserError(f"--what-if {shortened(text)}: expected {_WHAT_IFS}")
    return _Change(text, name, number, cluster)


def _what_if(change: _Change, recipe: Recipe, cluster: PlannedCluster, lengths: PlannedLengths, before: RunPlan) -> str:
    """Plan with a change, and return its line."""
    from hybridflow.planning.search.plan_text import change_line

    if change.name == "response-tokens":
        lengths = replace(lengths, response_tokens=change.number)
    if change.name == "prompt-tokens":
        lengths = replace(lengths, prompt_tokens=change.number)
    if change.name == "staleness":
        trainer = recipe.trainer.model_copy(update={"max_staleness": change.number})
        recipe = recipe.model_copy(update={"trainer": trainer})
    if change.name == "fp8":
        rollout = recipe.rollout
        engine = rollout.engine.model_copy(update={"precision": "fp8"})
        weights = rollout.weights.model_copy(update={"share": False})
        recipe = recipe.model_copy(
            update={"rollout": rollout.model_copy(update={"engine": engine, "weights": weights})}
        )
    alone = change.name == "rollout-gpus" and len(before.groups) > 1
    try:
        plans, _ = planned(recipe, change.cluster, lengths, count=1, alone=alone)
    except UserError as error:
        return f"what if {change.text}: {error}"
    return change_line(f"what if {change.text}", before, plans[0])


def written_recipe(parsed: argparse.Namespace, settings: Sequence[str], cluster: PlannedCluster) -> str:
    """The recipe with a plan's settings, as YAML.

    Args:
        parsed: of the command.
        settings: of the plan, as `plan_overrides` gives them.
        cluster: of the plan.

    Raises:
        UserError: it would not pass the checks of `hybridflow check` on that cluster.
    """
    from hybridflow.config.actors import load_one_recipe
    from hybridflow.config.reading.yaml_loader import settings_yaml
    from hybridflow.planning.checks.recipe import check_recipe

    try:
        result = load_one_recipe(parsed.recipe, [*parsed.overrides, *settings], parsed.actor)
        check_recipe(
            result,
            nodes_of(cluster),
            gpu_bytes=cluster.profile.hardware.memory if cluster.kind == "cuda" else None,
            here=False,
        )
    except UserError as error:
        raise UserError(f"--write: plan 1 does not pass `hybridflow check`: {error}") from None
    return settings_yaml(result)


def nodes_of(cluster: PlannedCluster) -> Sequence[Node]:
    """The nodes of a cluster, as checks take them."""
    cpu = cluster.kind == "cpu"
    return [
        Node(f"node {number}", gpus=0 if cpu else cluster.gpus_per_node, cpu_slots=cluster.gpus_per_node if cpu else 0)
        for number in range(cluster.nodes)
    ]
