"""Contradictions within a checkpoint of a run whose files are what its manifest says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from engine3d.checkpoint.contents import contradictions_within
from engine3d.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from engine3d.errors import UserError
from hybridflow.checkpoint.driver_state import DRIVER, RunState
from hybridflow.config.recipe import Recipe


def contradictions_of_run(directory: Path) -> Iterator[str]:
    """Lines on contradictions in a checkpoint: of manifest, roles and shards, of the driver's state, and of the recipe.

    Args:
        directory: of the checkpoint, whose files are those of its manifest.

    Raises:
        UserError: it has no manifest that can be read.
    """
    manifest = read_manifest(directory)
    yield from contradictions_within(directory, manifest)
    yield from _of_recipe(manifest)
    yield from _of_driver(directory, manifest)


def _of_recipe(manifest: Manifest) -> Iterator[str]:
    for role in _trained_roles(manifest.recipe):
        if role not in manifest.roles:
            yield f"{MANIFEST} names no {role}, which its recipe trains"
        elif manifest.roles[role].value_head != (role != "actor"):
            ends, expected = ("a value head", "logits") if role == "actor" else ("logits", "a value head")
            yield f"{MANIFEST} says that the {role} ends in {ends}, expected {expected}"


def _trained_roles(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The roles that a recipe trains; none of a checkpoint of no run, or of settings that another version wrote."""
    try:
        return Recipe.model_validate(settings).trained_roles if settings else ()
    except (ValidationError, UserError):
        return ()


def _of_driver(directory: Path, manifest: Manifest) -> Iterator[str]:
    listed = {entry.path for entry in manifest.files}
    for path in sorted((directory / DRIVER, *directory.glob("*.safetensors"))):
        if path.name not in listed and path.exists():
            yield f"{path.name} is not listed in {MANIFEST}"
    if DRIVER not in listed:
        if manifest.recipe:
            yield f"{MANIFEST} lists no {DRIVER}, the state of its run's driver"
        return
    try:
        state = RunState.read(directory)
    except UserError as error:
        yield str(error).removeprefix(f"{directory}/")
        return
    if state.step != manifest.step:
        yield f"{DRIVER} is of step {state.step}, {MANIFEST} of step {manifest.step}"
    count, position = int(state.sampler["count"]), int(state.sampler["position"])
    for number, prompt in (state.groups.draws if state.groups is not None else {}).items():
        if not (0 <= number < position and 0 <= prompt < count):
            yield f"{DRIVER} holds samples of draw {number}, prompt {prompt}, after {position} draws of {count} prompts"
            return
