"""Checkpoints of a few tensors, made without an engine."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch
from torch.distributed import checkpoint as torch_checkpoint

from engine3d.checkpoint.manifest import MANIFEST, Manifest, RoleSummary, file_entry, step_directory, write_manifest

FACTS = RoleSummary("tp=2 dp=2", 4, "bfloat16", False, 1000, 12)


def describe(directory: Path, step: int = 12, **changes: object) -> Manifest:
    """The manifest of all other files that lie in a directory."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST)
    entries = tuple(file_entry(directory, path) for path in files)
    metadata = {"created": "2026-01-02T03:04:05+00:00", "roles": {"actor": FACTS}, "recipe": {}, "software": {}}
    return Manifest(step=step, files=entries, **metadata | changes)  # type: ignore[arg-type]


def make_checkpoint(root: Path, step: int = 12) -> Path:
    """Two files and a manifest."""
    directory = step_directory(root, step)
    (directory / "actor").mkdir(parents=True)
    (directory / "actor" / "weights").write_bytes(b"weights" * 1000)
    (directory / "driver.json").write_text('{"policy_version": 13}')
    write_manifest(directory, describe(directory, step))
    return directory


def make_checkpoint_of_tensors(root: Path, step: int = 12, roles: tuple[str, ...] = ("actor",)) -> Path:
    """Real role directories: four tensors and one moment each, and an object, in two files."""
    directory = step_directory(root, step)
    generator = torch.Generator().manual_seed(step)
    for role in roles:
        names = [f"weight/layer{number}.weight" for number in range(4)] + ["exp_avg/layer0.weight"]
        state = {name: torch.randn(64, 32, generator=generator) for name in names}
        writer = torch_checkpoint.FileSystemWriter(directory / role, single_file_per_rank=True, thread_count=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that this process is alone
            torch_checkpoint.save(state | {"common": {"step": 1}}, storage_writer=writer, no_dist=True)
    metadata = {"step": step, "policy_version": 13, "sampler": {"count": 64, "position": 32}, "groups": None}
    metadata |= {"algorithm": {"kl_controller": {"coefficient": 0.25}}}
    (directory / "driver.json").write_text(json.dumps(metadata))
    changes = {"roles": dict.fromkeys(roles, FACTS), "software": {"torch": "1.2.3"}}
    write_manifest(directory, describe(directory, step, **changes))
    return directory
