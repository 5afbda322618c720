"""Files of a run that need a disk shared by several hosts, where its directory is on none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine3d.errors import UserError
from hybridflow.cluster.devices.device_map import Device
from hybridflow.cluster.hosts.description import Host, listed
from hybridflow.cluster.ray.node_actors import nodes_apart
from hybridflow.config.recipe import Recipe
from hybridflow.planning.checks.placement import planned_devices
from hybridflow.roles.config import PlacementConfig
from hybridflow.rundir.file_names import EXPORT


@dataclass(frozen=True)
class SharedFiles:
    """Files that ranks of some roles write or read together, and the driver.

    Args:
        setting: by which there are any.
        what: they are.
        roles: whose ranks use them.
        directory: where.
        expected: in place of the setting.
    """

    setting: str
    what: str
    roles: tuple[str, ...]
    directory: Path
    expected: str


def shared_files(recipe: Recipe) -> Iterator[SharedFiles]:
    """All that a run of a recipe has."""
    models, trained = tuple(recipe.models), recipe.trained_roles
    checkpoints, directory = recipe.checkpoint_directory, recipe.directory
    elsewhere = "checkpoint.dir on a disk that all of them see"
    if recipe.model.create is not None:
        everybody = ("actor", "rollout", "reward", *models)
        yield SharedFiles("model.create", "the model that the driver makes", everybody, directory, "model.path")
    if recipe.checkpoint.save_interval is not None:
        setting = f"checkpoint.save_interval={recipe.checkpoint.save_interval}"
        yield SharedFiles(setting, "checkpoints", trained, checkpoints, f"{elsewhere}, or save_interval=null")
    followers = tuple(role for role, model in recipe.models.items() if model.path is None)
    if recipe.warmup is not None and followers:
        begins = f"what {', '.join(followers)} begin{'s' if len(followers) == 1 else ''} with"
        yield SharedFiles("warmup", begins, ("actor", *followers), checkpoints, f"{elsewhere}, or warmup=null")
    if recipe.trainer.export:
        yield SharedFiles(
            "trainer.export=true",
            "the trained model",
            ("actor",),
            directory / EXPORT,
            "trainer.export=false; hybridflow checkpoint export makes it of a checkpoint",
        )
    if recipe.rollout.verify_weights:
        yield SharedFiles(
            "rollout.verify_weights=true",
            "exports that engines are compared with",
            ("actor", "rollout"),
            directory,
            "rollout.verify_weights=false",
        )


def refusals(
    files: Sequence[SharedFiles],
    devices: Mapping[str, Sequence[Device]],
    hosts: Sequence[Host],
    apart: Callable[[Path], Collection[int]],
) -> list[str]:
    """A line for each setting whose files hosts would have to share that do not.

    Args:
        files: of the run.
        devices: of each role.
        hosts: of the launch.
        apart: the hosts that see another directory at a path than host 0.
    """
    lines = []
    for file in files:
        using = {device.node for role in file.roles for device in devices.get(role, ())}
        if using <= {0} or not (differing := sorted(using & set(apart(file.directory)))):
            continue
        names = listed([hosts[index].name for index in differing])
        lines.append(
            f"{file.setting}: {file.what} would be in {file.directory}, which is another directory on {names} than on "
            f"{hosts[0].name}; expected {file.expected}, or run_dir on a disk that all of them see"
        )
    return lines


def check_shared_disks(
    files: Iterable[SharedFiles],
    roles: Mapping[str, str],
    placement: PlacementConfig,
    hosts: Sequence[Host],
    apart: Collection[int],
    *,
    checkpoints: Path | None,
) -> None:
    """Refuse what the hosts of this process's launch would have to share, and do not.

    Args:
        files: of the run.
        roles: the device map or pool of every role.
        placement: with the pools and the cluster.
        hosts: of the launch.
        apart: those that see another directory at `run_dir` than host 0.
        checkpoints: `checkpoint.dir`.

    Raises:
        UserError: a line for each setting.
        EngineError: a host does not answer.
    """
    nodes = [host.node for host in hosts]
    if len(hosts) == 1 or (devices := planned_devices(roles, placement, nodes)) is None:
        return
    devices.setdefault("reward", devices.get("rollout", ())[:1])

    def seen_apart(directory: Path) -> Collection[int]:
        return nodes_apart(directory, "checkpoint.dir") if directory == checkpoints else apart

    if lines := refusals(list(files), devices, hosts, seen_apart):
        raise UserError("\n".join(lines))
