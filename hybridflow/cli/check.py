"""Commands that look at a recipe without starting its run.

`hybridflow check` finds what is wrong with it, `hybridflow data` shows its prompts as the model reads them, and
`hybridflow doctor` checks this host, or the nodes of a running Ray cluster, and the recipe there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from engine3d.errors import UserError, shortened
from engine3d.startup.imports import quick_imports
from hybridflow.cli.common.recipe_arguments import add_recipe, check_name, checked_recipes, loaded_recipes
from hybridflow.cluster.devices.device_map import Node
from hybridflow.cluster.driver_link import driver_link
from hybridflow.cluster.hosts.description import checked_role

if TYPE_CHECKING:
    from hybridflow.config.recipe import Recipe

_MOST_GB = 1e9
_MOST_SHOWN = 1000


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `hybridflow check`."""
    add_recipe(parser)
    parser.add_argument("--memory", action="store_true", help="say what GPUs and nodes will hold in each phase")
    parser.add_argument(
        "--print",
        dest="print_recipe",
        action="store_true",
        help="print the recipe with base, overrides and every default, as YAML that train accepts; all else on stderr",
    )
    parser.add_argument("--nodes", type=_count, metavar="N", help="number of nodes, in place of this machine")
    parser.add_argument("--gpus-per-node", type=_count, metavar="N", help="GPUs of each of these nodes (8)")
    parser.add_argument(
        "--roles", metavar="ROLE,...", help="of these nodes, such as train,train,rollout: what a launcher gives each to"
    )
    parser.add_argument("--gpu-gb", type=_gigabytes, metavar="GB", help="memory of each GPU, in 1e9 bytes")
    parser.add_argument("--host-gb", type=_gigabytes, metavar="GB", help="memory of each node, in 1e9 bytes")


def check(parsed: argparse.Namespace) -> int:
    """Run `hybridflow check`.

    Raises:
        UserError: something is wrong with the recipe.
    """
    recipes = loaded_recipes(parsed)
    if not parsed.print_recipe:
        return _check_recipes(parsed, recipes)
    if len(recipes) > 1:
        raise UserError(f"--print with several actors: expected --actor with one of {', '.join(recipes)}")
    from hybridflow.config.reading.yaml_loader import settings_yaml

    with contextlib.redirect_stdout(sys.stderr):
        code = _check_recipes(parsed, recipes)
    print(settings_yaml(next(iter(recipes.values()))), end="")
    return code


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `hybridflow data`."""
    add_recipe(parser)
    parser.add_argument(
        "--show", type=_shown_count, default=3, metavar="N", help="prompts of each phase that are shown (3)"
    )
    parser.add_argument(
        "--characters", type=_shown_count, default=600, metavar="N", help="of each text that is shown, at most (600)"
    )


def data(parsed: argparse.Namespace) -> int:
    """Run `hybridflow data`.

    Raises:
        UserError: something is wrong with the data.
    """
    from hybridflow.planning.data.report import data_lines

    for name, recipe in loaded_recipes(parsed).items():
        lines = data_lines(recipe, show=parsed.show, characters=parsed.characters)
        print("\n".join([*([f"actor {name}"] if name else []), *lines]))
    return 0


def doctor(parsed: argparse.Namespace) -> int:
    """Run `hybridflow doctor`.

    Raises:
        UserError: something is wrong with which a run would fail. The last line says that it cannot start.
        EngineError: a node of the cluster does not answer.
    """
    from hybridflow.cluster.hosts.launch_plan import CAN_START, CANNOT_START
    from hybridflow.sandbox.opening import means_of_this_machine

    print(asyncio.run(means_of_this_machine()), flush=True)
    try:
        _check_nodes(parsed)
    except UserError as error:
        raise UserError(f"{error}\n{CANNOT_START}") from None
    print(CAN_START, flush=True)
    return 0


def _check_recipes(parsed: argparse.Namespace, recipes: dict[str, Recipe], *, starts: bool = False) -> int:
    """Check recipes. `starts`: also that none has the name of a run, which a recipe that is only checked may have."""
    nodes = _named_nodes(parsed)
    nodes = _assumed_nodes(recipes) if nodes is None else nodes
    # With --memory the ledger is shown first, and then refuses.
    recipes = checked_recipes(
        parsed,
        nodes,
        gpu_bytes=_bytes(parsed.gpu_gb),
        host_bytes=_bytes(parsed.host_gb),
        must_fit=not parsed.memory,
        here=nodes is None,
        dry_run=True,
        recipes=recipes,
    )
    from hybridflow.planning.checks.recipe import check_nobody_else
    from hybridflow.planning.memory.estimate import recipe_ledger

    for name, recipe in recipes.items():
        if parsed.memory:
            ledger = recipe_ledger(recipe, nodes, parsed.gpu_gb, parsed.host_gb)
            print("\n".join([*([f"actor {name}"] if name else []), *ledger.lines()]))
            ledger.check()
        if nodes is None:
            check_nobody_else(recipe.device_maps, recipe.placement)
    print(f"{parsed.recipe}: nothing wrong found")
    for recipe in recipes.values() if nodes is None else ():
        try:
            check_name(recipe.directory, recipe.resume, overwrite=recipe.overwrite)
        except UserError as error:
            refusal = f"hybridflow train would refuse it now: {error}"
            if starts:
                raise UserError(refusal) from None
            print(refusal)
    return 0


def _assumed_nodes(recipes: Mapping[str, Recipe]) -> list[Node] | None:
    """The nodes of a recipe for GPUs on a machine that has none; None for this machine, or the hosts of a launch."""
    if driver_link() is not None:
        return None
    with quick_imports():
        from hybridflow.planning.checks.placement import assumed_nodes

    nodes = assumed_nodes(list(recipes.values()))
    if nodes is not None:
        roles = [node.role for node in nodes if node.role is not None]
        given = f" --roles {','.join(roles)}" if len(roles) == len(nodes) else ""
        print(
            f"this machine has no GPUs: checked as with --nodes {len(nodes)} --gpus-per-node {nodes[0].gpus}{given}",
            flush=True,
        )
    return nodes


def _named_nodes(parsed: argparse.Namespace) -> list[Node] | None:
    """The nodes that the options name; None for this machine."""
    from hybridflow.cluster.devices.device_map import MOST_GPUS, MOST_NODES

    if parsed.nodes is None and parsed.gpus_per_node is None:
        if parsed.roles is not None:
            raise UserError(f"--roles {shortened(parsed.roles)} of this machine, expected --nodes beside it")
        return None
    count = 1 if parsed.nodes is None else parsed.nodes
    gpus = 8 if parsed.gpus_per_node is None else parsed.gpus_per_node
    for option, value, most in (("--nodes", count, MOST_NODES), ("--gpus-per-node", gpus, MOST_GPUS)):
        if not 1 <= value <= most:
            raise UserError(f"{option} {value}: expected a whole number of at least 1 and at most {most:,}")
    roles: list[str | None] = [None] * count
    if parsed.roles is not None:
        roles = [checked_role(role) for role in parsed.roles.split(",")]
        if len(roles) != count:
            raise UserError(
                f"--roles {shortened(parsed.roles)}: {len(roles)} roles, expected one for each of {count} nodes"
            )
    return [Node(f"node {number}", gpus=gpus, cpu_slots=0, role=role) for number, role in enumerate(roles)]


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else round(gigabytes * 1e9)


def _gigabytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= _MOST_GB:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and at most {_MOST_GB:g}, found {shortened(text)}")
    return value


def _count(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, found {shortened(text)}") from None


def _shown_count(text: str) -> int:
    if not text.isdecimal() or int(text) > _MOST_SHOWN * 1000:
        raise argparse.ArgumentTypeError(f"expected a whole number, found {shortened(text)}")
    return int(text)


def _check_nodes(parsed: argparse.Namespace) -> None:
    """Check the nodes of a recipe, and then the recipe on them as `hybridflow check` does."""
    from hybridflow.cluster.hosts.network.network_settings import check_used

    recipes = loaded_recipes(parsed)
    with quick_imports():
        from hybridflow.trainer.startup.node_checks import doctor as check_nodes

    recipe, link = next(iter(recipes.values())), driver_link()
    check_used(recipe.network, 1 if link is None else len(link.hosts), recipe.placement.cluster)
    check_nodes(recipe)
    if recipe.placement.cluster is None:
        words = [parsed.recipe, *parsed.overrides, *([f"--actor={parsed.actor}"] if parsed.actor is not None else [])]
        parser = argparse.ArgumentParser()
        add_check_arguments(parser)
        _check_recipes(parser.parse_args(words), recipes, starts=True)
    else:
        checked_recipes(parsed, recipes=recipes)
