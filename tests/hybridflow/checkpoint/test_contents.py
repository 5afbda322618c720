"""Checkpoints that somebody has edited and sealed again: each contradiction is a line, and none is resumed from."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine3d.checkpoint.manifest import MANIFEST, Manifest, file_entry, read_manifest, write_manifest
from engine3d.checkpoint.reading.verify import verify_checkpoint
from engine3d.errors import UserError
from hybridflow.checkpoint.contents import contradictions_of_run
from hybridflow.checkpoint.resume import find_resumption
from hybridflow.cli.main import main
from tests.support.resumable import a_recipe, make_checkpoint, refusal, seal_pieces, write_role


def seal(checkpoint: Path, **changes: Any) -> None:
    """Write a manifest of the current files, with the previous settings but for `changes`."""
    manifest: Manifest = read_manifest(checkpoint)
    files = tuple(
        file_entry(checkpoint, path)
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    )
    write_manifest(checkpoint, dataclasses.replace(manifest, **{"files": files, **changes}))


def edit_driver(checkpoint: Path, **changes: Any) -> None:
    """Change values of the driver's state; None removes one."""
    path = checkpoint / "driver.json"
    document = json.loads(path.read_text()) | changes
    path.write_text(
        json.dumps({name: value for name, value in document.items() if name not in changes or value is not None})
    )
    seal(checkpoint)


def without_role(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint / "actor")
    seal(checkpoint, roles={})


def without_driver(checkpoint: Path) -> None:
    (checkpoint / "driver.json").unlink()
    seal(checkpoint)


def swap_shards(checkpoint: Path) -> None:
    """Replace the actor's shard by that of another model."""
    config = checkpoint / "model" / "config.json"
    text = config.read_text()
    config.write_text(json.dumps(json.loads(text) | {"num_hidden_layers": 1}))
    write_role(checkpoint, "other", value_head=False)
    config.write_text(text)
    (checkpoint / "other" / "__0_0.distcp").replace(checkpoint / "actor" / "__0_0.distcp")
    shutil.rmtree(checkpoint / "other")
    seal(checkpoint)


def swap_roles(checkpoint: Path) -> None:
    """Replace all files of a role by those of another model."""
    shutil.rmtree(checkpoint / "actor")
    write_role(checkpoint, "actor", value_head=True)
    seal(checkpoint)


def move_pieces(checkpoint: Path) -> None:
    """Move the entries of a shard by one byte, with checksums of the bytes there."""
    shard = checkpoint / "actor" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[1:] + b"\0")
    seal_pieces(checkpoint, "actor")
    document = json.loads((checkpoint / "actor" / "__0.checksums.json").read_text())
    moved = {
        file: [[start + 1, length, digest] for start, length, digest in chunks] for file, chunks in document.items()
    }
    (checkpoint / "actor" / "__0.checksums.json").write_text(json.dumps(moved))
    seal(checkpoint)


def cut_shard(checkpoint: Path) -> None:
    shard = checkpoint / "actor" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-100])
    seal(checkpoint)


EDITS: dict[str, tuple[Callable[[Path], None], str]] = {
    "step": (lambda checkpoint: seal(checkpoint, step=10**9), "manifest.json is that of step 1000000000"),
    "no role": (lambda checkpoint: seal(checkpoint, roles={}), "manifest.json names no role"),
    "no role and no files of it": (without_role, "manifest.json names no role"),
    "a role without files": (
        lambda checkpoint: seal(
            checkpoint, roles=dict.fromkeys(("actor", "critic"), read_manifest(checkpoint).roles["actor"])
        ),
        "critic/.metadata is not listed in the manifest",
    ),
    "a head": (
        lambda checkpoint: seal(
            checkpoint, roles={"actor": dataclasses.replace(read_manifest(checkpoint).roles["actor"], value_head=True)}
        ),
        "actor/ does not fit model/config.json: it has no tensor score.weight",
    ),
    "swapped roles": (swap_roles, "actor/ does not fit model/config.json: it has no tensor lm_head.weight"),
    "moved pieces": (move_pieces, "actor/__0_0.distcp has no chunk at bytes 0 to "),
    "cut shard": (cut_shard, "actor/.metadata places weight/"),
    "no driver": (without_driver, "manifest.json lists no driver.json, the state of its run's driver"),
    "step of the driver": (
        lambda checkpoint: edit_driver(checkpoint, step=4),
        "driver.json is of step 4, manifest.json of step 2",
    ),
    "negative step": (
        lambda checkpoint: edit_driver(checkpoint, step=-5),
        "driver.json is not the state of a run's driver: step: expected at least 0, found -5",
    ),
    "no sampler": (
        lambda checkpoint: edit_driver(checkpoint, sampler=None),
        "driver.json is not the state of a run's driver: it has no sampler",
    ),
    "sampler": (
        lambda checkpoint: edit_driver(checkpoint, sampler={"count": 64, "seed": 1, "position": -8}),
        "driver.json is not the state of a run's driver: sampler.position: -8, expected a whole number from 0",
    ),
    "random states": (
        lambda checkpoint: edit_driver(checkpoint, random={"python": [], "numpy": [], "torch": ""}),
        "driver.json is not the state of a run's driver: random: ",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EDITS)
def test_an_edited_checkpoint_is_a_line_of_verify_and_not_resumed_from(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = a_recipe(tmp_path)
    older, checkpoint = make_checkpoint(recipe, 1), make_checkpoint(recipe, 2)
    assert list(contradictions_of_run(checkpoint)) == []
    edit, line = EDITS[name]
    edit(checkpoint)
    capsys.readouterr()
    assert main(["checkpoint", "verify", str(checkpoint)]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said and all(line.startswith(f"hybridflow: checkpoint {checkpoint}: ") for line in said)
    # Of a shard it says what lies in it, and so more than is looked for before a run resumes.
    assert line in said[0] or "actor/__0_0.distcp holds other chunks than were saved: bytes " in said[0]
    resumption, notes = find_resumption(a_recipe(tmp_path, "resume=auto"))
    assert resumption is not None and resumption.directory == older
    assert notes[0].startswith(f"resume: skipped {checkpoint}: {line}") and len(notes) == 2
    [refused] = refusal(a_recipe(tmp_path, f"resume={checkpoint}"))
    assert line in refused


def test_swapped_shards_are_seen_by_the_checksums_of_pieces(tmp_path: Path) -> None:
    recipe = a_recipe(tmp_path)
    older, checkpoint = make_checkpoint(recipe, 1), make_checkpoint(recipe, 2)
    swap_shards(checkpoint)
    [damage] = verify_checkpoint(checkpoint)
    assert damage.file == "actor/__0_0.distcp"
    assert damage.reason.startswith("holds other chunks than were saved: bytes ")
    resumption, notes = find_resumption(a_recipe(tmp_path, "resume=auto"))
    assert resumption is not None and resumption.directory == older
    assert notes[0].startswith(f"resume: skipped {checkpoint}: actor/")


def test_a_step_that_no_run_has_is_refused(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(a_recipe(tmp_path), 2)
    huge = checkpoint.with_name(f"step-{10**30}")
    path = checkpoint / MANIFEST
    checkpoint.rename(huge)
    manifest = read_manifest(huge)
    write_manifest(huge, dataclasses.replace(manifest, step=10**30))
    with pytest.raises(UserError, match=r"manifest.json .*expected at most 1,000,000,000,000, found"):
        read_manifest(huge)
    assert not path.exists()
    assert "is whole" in refusal(a_recipe(tmp_path, "resume=auto"))[0]
