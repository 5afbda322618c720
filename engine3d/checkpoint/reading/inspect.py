"""Description of a checkpoint's contents for a person to read. Nothing large is opened."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from engine3d.checkpoint.manifest import FileEntry, Manifest, RoleSummary, read_manifest, visible_damage
from engine3d.checkpoint.metadata import read_metadata
from engine3d.dtypes import ITEMSIZES
from engine3d.errors import UserError, amount, one_line
from engine3d.input_files import MOST_LIST_BYTES, FileError, read_json_object

DRIVER = "driver.json"
"""State of the driver, stored next to the roles' state."""

_KINDS = ("weight", "exp_avg", "exp_avg_sq")
_MARGIN = "  "


@dataclass(frozen=True)
class _Kind:
    """The tensors of one kind in a role's state: the weights, or one of the moments."""

    name: str
    tensors: int
    nbytes: int
    dtypes: frozenset[str]

    def __str__(self) -> str:
        return f"{self.name} {self.tensors:,} tensors, {amount(self.nbytes)} of {', '.join(sorted(self.dtypes))}"


def inspect_checkpoint(directory: Path) -> str:
    """A checkpoint described in lines of text.

    Raises:
        UserError: it has no manifest that can be read.
    """
    manifest = read_manifest(directory)
    lines = [f"checkpoint {directory}", f"step {manifest.step}, saved {manifest.created}"]
    lines += _driver_lines(directory)
    for name, summary in manifest.roles.items():
        lines.append(f"{name}: {_role(summary)}")
        lines += [_MARGIN + line for line in _tensor_lines(directory, manifest, name)]
    lines.append(f"files: {_files(manifest.files)}")
    lines += [_MARGIN + f"{folder}: {_files(files)}" for folder, files in _by_folder(manifest).items()]
    if manifest.software:
        lines.append("software: " + ", ".join(f"{name} {version}" for name, version in manifest.software.items()))
    lines += [f"incomplete: {line}" for line in _absent(directory, manifest.files)]
    return "\n".join(one_line(line) for line in lines)  # of a manifest, which others may have written


def _role(summary: RoleSummary) -> str:
    head = ", value head" if summary.value_head else ""
    step = "weights alone" if summary.optimizer_step is None else f"optimizer step {summary.optimizer_step:,}"
    ranks = f"{summary.world_size:,} rank" + ("s" if summary.world_size > 1 else "")
    return f"{summary.parameters:,} parameters{head}, {step}; trained in {summary.dtype} on {ranks}, {summary.layout}"


def _driver_lines(directory: Path) -> list[str]:
    path = directory / DRIVER
    try:
        driver = read_json_object(path, MOST_LIST_BYTES) if path.exists() else {}
    except FileError as error:
        return [f"driver: {DRIVER} cannot be read: {error.reason}"]
    return ["driver: " + ", ".join(_driver_values(driver))] if driver else []


def _driver_values(driver: dict[str, Any]) -> Iterator[str]:
    for key, value in driver.items():
        if isinstance(value, int | float | str):
            yield f"{key.replace('_', ' ')} {value}"
    algorithm = driver.get("algorithm")
    states = {"prompts": driver.get("sampler")} | (algorithm if isinstance(algorithm, dict) else {})
    for name, state in states.items():
        if isinstance(state, dict):
            yield f"{name.replace('_', ' ')} {', '.join(f'{key} {value}' for key, value in state.items())}"
    if isinstance(best := driver.get("best"), dict):
        yield f"best checkpoint step {best.get('step')}, {best.get('metric')} {best.get('value')}"
    groups = driver.get("groups")
    ledger = groups.get("ledger") if isinstance(groups, dict) else None
    if isinstance(ledger, dict) and isinstance(buffered := ledger.get("groups"), list):
        yield f"buffered groups {len(buffered):,}"


def _tensor_lines(directory: Path, manifest: Manifest, role: str) -> list[str]:
    try:
        return [str(kind) for kind in _kinds(directory, manifest, role)]
    except UserError as error:
        return [str(error).removeprefix(f"checkpoint {directory}: ")]


def _kinds(directory: Path, manifest: Manifest, role: str) -> Iterator[_Kind]:
    tensors = read_metadata(directory, manifest, role).tensors
    for kind in _KINDS:
        of_kind = [tensor for key, tensor in tensors.items() if key.startswith(f"{kind}/")]
        if of_kind:
            nbytes = sum(prod(tensor.shape) * ITEMSIZES[tensor.dtype] for tensor in of_kind)
            yield _Kind(kind, len(of_kind), nbytes, frozenset(tensor.dtype for tensor in of_kind))


def _by_folder(manifest: Manifest) -> dict[str, list[FileEntry]]:
    by_folder: dict[str, list[FileEntry]] = {}
    for entry in manifest.files:
        folder, slash, _ = entry.path.partition("/")
        by_folder.setdefault(folder + slash, []).append(entry)
    return by_folder


def _files(files: Iterable[FileEntry]) -> str:
    sizes = [entry.size for entry in files]
    return f"{len(sizes):,}, {amount(sum(sizes))}"


def _absent(directory: Path, files: Iterable[FileEntry]) -> list[str]:
    reasons = [(entry.path, visible_damage(directory, entry)) for entry in files]
    return [f"{path} {reason}" for path, reason in reasons if reason]
