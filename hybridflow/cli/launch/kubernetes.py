"""`hybridflow launch kubernetes`: submits a run to KubeRay, by the files of `launch/kubernetes/` filled in."""

from __future__ import annotations

import argparse
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from engine3d.errors import UserError, shortened
from engine3d.startup.imports import quick_imports
from hybridflow.cli.launch.kubernetes_manifests import DATA, NAME, KubernetesRun, as_yaml, manifests
from hybridflow.cli.launch.options import FILES, check_count, check_counts, hand_over, host_roles, read_own_file
from hybridflow.cluster.devices.device_map import REWARD, Node, pool_devices
from hybridflow.cluster.hosts.network.network_settings import check_used
from hybridflow.config.reading.yaml_loader import read_with_overrides
from hybridflow.errors.redaction import redacted, redacted_keys

OPTIONS = ("image", "claim", "namespace", "cpus-per-node", "memory-per-node", "shared-memory")
"""Options that no other launcher has."""
_FILES = ("service-account.yaml", "recipe.yaml", "rayjob.yaml")
_CPUS, _MEMORY, _SHARED_MEMORY, _RESTARTS = 64, "512Gi", "64Gi", 3
_MOST_NAME = 47
"""Longest name of a RayJob: KubeRay makes longer names of it."""
_DIGITS = 8
_MOST_BYTES = 1_000_000
"""Largest recipe: a config map holds 1 MiB."""
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)
_IMAGE = re.compile(r"[\w.:/@-]+", re.ASCII)
_QUANTITY = re.compile(r"[1-9][0-9]*(Mi|Gi|Ti|M|G|T)", re.ASCII)


def add_arguments(parser: argparse._ArgumentGroup) -> None:
    """Add the options that no other launcher has."""
    parser.add_argument("--image", metavar="IMAGE", help="of all pods: the repository's Dockerfile with KUBERNETES=1")
    parser.add_argument("--claim", metavar="NAME", help="persistent volume claim that all pods write to")
    parser.add_argument("--namespace", metavar="NAME", help="(that of kubectl)")
    parser.add_argument("--cpus-per-node", type=int, metavar="N", help=f"cores of each ({_CPUS})")
    parser.add_argument("--memory-per-node", metavar="SIZE", help=f"of each ({_MEMORY})")
    parser.add_argument("--shared-memory", metavar="SIZE", help=f"of it, /dev/shm ({_SHARED_MEMORY})")


def run(parsed: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        UserError: an option or the recipe is wrong, or Kubernetes refuses the job.
        EngineError: Kubernetes does not answer.
    """
    objects = as_yaml(
        manifests([read_own_file("kubernetes", FILES / "kubernetes" / name) for name in _FILES], requested_run(parsed))
    )
    if parsed.dry_run:
        print(objects, end="")
    else:
        print(_submit(objects))
    return 0


def requested_run(parsed: argparse.Namespace) -> KubernetesRun:
    """Return the run that the options and the recipe request.

    Raises:
        UserError: an option is wrong, or the recipe, or its placement on such nodes.
    """
    with quick_imports():
        from hybridflow.config.actors import load_one_recipe

    check_counts(parsed)
    roles: list[str | None] = list(host_roles(parsed.role, parsed.nodes)) or [None] * parsed.nodes
    cpus = _CPUS if parsed.cpus_per_node is None else parsed.cpus_per_node
    restarts = _RESTARTS if parsed.max_restarts is None else parsed.max_restarts
    check_count("--cpus-per-node", cpus, 4096)
    if restarts < 0:
        raise UserError(f"--max-restarts {restarts}: expected at least 0")
    recipe = load_one_recipe(parsed.recipe, parsed.overrides)
    check_used(recipe.network, parsed.nodes, "auto")
    data, _ = read_with_overrides(Path(parsed.recipe), parsed.overrides)
    _check_recipe(data)
    gpus = parsed.gpus_per_node or 0
    nodes = [
        Node(f"node {index}", 0 if role == REWARD else gpus, parsed.cpu_slots or cpus, role)
        for index, role in enumerate(roles)
    ]
    pool_devices(recipe.device_maps, recipe.placement.pools, nodes)
    return KubernetesRun(
        name=_name(recipe.name),
        recipe=_recipe_text(data),
        overrides=["placement.cluster=auto", "--again"],
        roles=roles,
        image=_word(parsed, "image", _IMAGE, "such as registry.example/hybridflow:1"),
        claim=_word(parsed, "claim", _CLAIM, "the name of a persistent volume claim"),
        gpus=gpus,
        cpus=cpus,
        memory=_word(parsed, "memory-per-node", _QUANTITY, "such as 512Gi", _MEMORY),
        shared_memory=_word(parsed, "shared-memory", _QUANTITY, "such as 64Gi", _SHARED_MEMORY),
        cpu_slots=parsed.cpu_slots,
        restarts=restarts,
        save_s=recipe.checkpoint.on_stop_s or 0.0,
        namespace=None if parsed.namespace is None else _word(parsed, "namespace", _LABEL, "the name of a namespace"),
    )


def _word(
    parsed: argparse.Namespace, option: str, form: re.Pattern[str], expected: str, default: str | None = None
) -> str:
    value = getattr(parsed, option.replace("-", "_"))
    value = default if value is None else value
    if value is None:
        raise UserError(f"launch kubernetes: --{option} is missing: expected {expected}")
    if not form.fullmatch(value):
        raise UserError(f"--{option} {shortened(value)}: expected {expected}")
    return str(value)


def _name(run: str) -> str:
    """Return the name of a run's objects, as Kubernetes accepts it."""
    name = f"{NAME}-{re.sub(r'[^a-z0-9]+', '-', run.lower()).strip('-')}"
    if len(name) <= _MOST_NAME:
        return name
    digest = hashlib.sha256(run.encode()).hexdigest()[:_DIGITS]  # of names that begin alike
    return f"{name[: _MOST_NAME - _DIGITS - 1].strip('-')}-{digest}"


def _check_recipe(data: Mapping[str, Any]) -> None:
    """Refuse settings of a recipe that its pods would lack."""
    placement = data.get("placement")
    cluster = placement.get("cluster") if isinstance(placement, Mapping) else None
    if cluster not in (None, "auto"):
        raise UserError(
            f"placement.cluster={shortened(str(cluster))}: launch kubernetes makes a cluster for the run, expected null"
        )
    if data.get("overwrite"):
        raise UserError(
            "overwrite=true: each start of the job's driver would begin again; expected another name, or the directory "
            "of the earlier run removed"
        )
    for key in redacted_keys(redacted(data)):
        raise UserError(
            f"{'.'.join(map(str, key))} is a secret, which whoever may read config maps would see; expected it in the "
            "environment, from a Secret (--dry-run prints the pods)"
        )
    directory = data.get("run_dir")
    if isinstance(directory, str) and directory.startswith("/") and not Path(directory).is_relative_to(DATA):
        raise UserError(
            f"run_dir={shortened(directory)} is in each pod alone; expected a directory on the volume: relative, or "
            f"below {DATA}"
        )


def _recipe_text(data: Mapping[str, Any]) -> str:
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)
    if (size := len(text.encode())) > _MOST_BYTES:
        raise UserError(f"launch kubernetes: the recipe has {size:,} bytes, expected at most {_MOST_BYTES:,}")
    return text


def _submit(objects: str) -> str:
    """Submit the manifests, and return kubectl's output."""
    command = ["kubectl", "apply", "-f", "-"]
    return hand_over("kubernetes", command, objects, prints="the objects", refuses="refuses")
