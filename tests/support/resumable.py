"""Recipes, and checkpoints as their runs make them but for the state of the roles."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as torch_checkpoint

from engine3d.checkpoint.digests.chunk_checksums import ChunkChecksum, checksum_file, checksum_text
from engine3d.checkpoint.manifest import Hash, Manifest, RoleSummary, file_entry, step_directory, write_manifest
from engine3d.checkpoint.metadata import METADATA, parse_metadata
from engine3d.errors import UserError
from engine3d.models import load_model_spec
from hybridflow.checkpoint.compatibility import input_checksums
from hybridflow.checkpoint.driver_state import RandomState, RunState
from hybridflow.checkpoint.resume import find_resumption
from hybridflow.checkpoint.set_results import Best, MeasuredSet
from hybridflow.config.initial_model import create_model
from hybridflow.config.recipe import Recipe, load_recipe

DEMO = Path(__file__).parents[2] / "launch/recipes/demo.yaml"
SMALL = ("data.arithmetic.train_size=64", "evaluation.eval.prompts=16", "checkpoint.save_interval=1")


def a_recipe(directory: Path, *overrides: str) -> Recipe:
    return load_recipe(DEMO, [f"run_dir={directory}", "name=small", *SMALL, *overrides])


def make_checkpoint(
    recipe: Recipe,
    step: int,
    root: Path | None = None,
    run: str = "first",
    model: Path | None = None,
    roles: tuple[str, ...] | None = None,
    first_measured: dict[str, MeasuredSet] | None = None,
    last_measured: dict[str, MeasuredSet] | None = None,
    best: Best | None = None,
) -> Path:
    """A complete checkpoint as a run of the recipe makes it, with zeros as weights, of all trained roles if None."""
    roles = recipe.trained_roles if roles is None else roles
    directory = step_directory(root or recipe.checkpoint_directory, step)
    directory.mkdir(parents=True)
    copied = directory / "model"
    if model is None:
        create_model(recipe.model, copied, seed=recipe.seed)
    else:
        shutil.copytree(model, copied)
    (copied / "model.safetensors").unlink()
    state = RunState(
        step=step,
        policy_version=step + 1,
        samples_drawn=10,
        sampler={"count": 64, "seed": 1, "position": 8 * step},
        updates=step,
        steps_without_update=0,
        first_measured=first_measured or {},
        last_measured=last_measured or {},
        best=best,
        random=RandomState.capture(),
        run=run,
        inputs=input_checksums(recipe.algorithm.name, recipe.model.path, recipe.data),
    )
    files = [*state.write(directory), *copied.iterdir()]
    for role in roles:
        files += write_role(directory, role, value_head=role != "actor")
    manifest = Manifest(
        step=step,
        created="2026-01-01T00:00:00+00:00",
        roles={role: RoleSummary("dp=2 ep=2", 2, "float32", role != "actor", 1000, step) for role in roles},
        recipe=recipe.model_dump(mode="json"),
        software={},
        files=tuple(file_entry(directory, path) for path in files),
    )
    write_manifest(directory, manifest)
    return directory


def write_role(checkpoint: Path, role: str, *, value_head: bool) -> list[Path]:
    """Write zeros as the weights of a role, of the model that lies in a checkpoint. Its files."""
    spec = load_model_spec(checkpoint / "model", value_head=value_head)
    state = {f"weight/{name}": torch.zeros(tensor.shape) for name, tensor in spec.hf_tensors.items()}
    directory = checkpoint / role
    writer = torch_checkpoint.FileSystemWriter(directory, single_file_per_rank=True, thread_count=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that this process is alone
        torch_checkpoint.save(state, storage_writer=writer, no_dist=True)
    seal_pieces(checkpoint, role)
    return sorted(directory.iterdir())


def seal_pieces(checkpoint: Path, role: str) -> None:
    """Write the checksums of all pieces of a role's only shard."""
    shard = checkpoint / role / "__0_0.distcp"
    stored = parse_metadata((checkpoint / role / METADATA).read_bytes(), "metadata").storage_data
    data = shard.read_bytes()
    chunks = [
        ChunkChecksum(info.offset, info.length, Hash(data[info.offset : info.offset + info.length]).checksum())
        for info in stored.values()
    ]
    (checkpoint / role / checksum_file(0)).write_bytes(checksum_text({shard.name: chunks}))


def refusal(recipe: Recipe) -> list[str]:
    with pytest.raises(UserError) as caught:
        find_resumption(recipe)
    return str(caught.value).splitlines()
