"""The checkpoint that a run resumes from: found, compared with the recipe and described before anything starts."""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine3d.checkpoint.hf import MODEL
from engine3d.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    RoleSummary,
    Skipped,
    file_entry,
    find_checkpoints,
    read_complete,
    read_manifest,
    verify_hint,
    write_manifest,
)
from engine3d.checkpoint.reading.verify import damaged_description, damaged_shard
from engine3d.errors import UserError
from engine3d.input_files import FileError, read_text
from engine3d.platform import platform
from engine3d.training.config import TrainConfig
from hybridflow.checkpoint.compatibility import Difference, changes, contradictions, is_accepted
from hybridflow.checkpoint.contents import contradictions_of_run
from hybridflow.checkpoint.driver_state import DRIVER, RunState
from hybridflow.checkpoint.own_code import changed_code, code_checksums
from hybridflow.cluster.hosts.checks.host_check import check_writable
from hybridflow.config.reading.yaml_loader import public_settings
from hybridflow.config.recipe import Recipe
from hybridflow.config.run import CheckpointConfig
from hybridflow.rewards.config import RewardConfig
from hybridflow.rollout.config import RolloutRole
from hybridflow.rundir.file_names import RECIPE
from hybridflow.rundir.kept_recipe import saved_to
from hybridflow.rundir.run_record import started_from

SMALL_BYTES = 8 << 30
"""Shards of a checkpoint that are no larger in all are compared with their checksums before roles start: seconds from a
local disk. Larger ones are compared by the ranks that load them, each of which reads its own part anyway."""
WARMED_UP = "warmed-up"
"""The model after the warm-up, next to the checkpoints: the reference policy of all of them."""
RUN_IDENTITY = ".run"
"""The file of a run's directory that says which run's it is, wherever the directory is moved to."""
_MOST_IDENTITY_BYTES = 4096


@dataclass(frozen=True)
class Resumption:
    """The checkpoint that a run resumes from.

    Args:
        directory: of the checkpoint.
        manifest: what it says of itself.
        state: the driver's; None in a checkpoint of weights alone, as an import makes: the run starts with them.
        in_place: the run's own directory is continued, with its metrics and logs.
        accepted: what makes this run another than the checkpoint's and `checkpoint.accept` takes, by its name.
        changed_code: files of code that have changed, by their setting.
    """

    directory: Path
    manifest: Manifest
    state: RunState | None
    in_place: bool
    accepted: tuple[str, ...] = ()
    changed_code: tuple[str, ...] = ()

    @property
    def has_same_prompts(self) -> bool:
        """True if the prompts are those of the checkpoint, in their order."""
        return not any(_is_of_prompts(name) for name in self.accepted)

    def role(self, name: str) -> Path:
        """The directory of a role's state."""
        return self.directory / name


def _is_of_prompts(name: str) -> bool:
    """True if a difference of this name can mean other training prompts, or another order of them."""
    of_other_prompts = name.startswith("data.files.sft") or name.endswith((".eval_path", ".sft_path"))
    return name.partition(".")[0] in ("seed", "tokenizer", "data") and not of_other_prompts


def find_resumption(recipe: Recipe) -> tuple[Resumption | None, list[str]]:
    """Find the checkpoint that `resume` asks for.

    Returns:
        The resumption, None for a fresh start; and lines that the user should know.

    Raises:
        UserError: there is no such checkpoint, it lacks a role that the recipe trains, the recipe contradicts it, or a
            directory of checkpoints would get those of two runs, or what there is is damaged.
    """
    root, verify = recipe.checkpoint_directory, recipe.checkpoint.verify
    saves = recipe.checkpoint.save_interval is not None
    if recipe.resume == "none":
        if saves and not root.is_relative_to(recipe.directory):  # where earlier ones are moved aside with the run
            _check_room(root, None)
        return None, []
    if recipe.resume == "auto":
        directory, notes = _newest(root, recipe.directory, verify=verify)
    else:
        directory, notes = _named(Path(recipe.resume), verify=verify)
    if directory is None:
        return None, notes
    manifest = read_manifest(directory)
    state = RunState.read(directory) if (directory / DRIVER).is_file() else None
    if saves and recipe.resume != "auto":  # which has found that nothing sound comes after it
        _check_room(root, directory)
    check_saved_roles(recipe.trained_roles, recipe.algorithm.name, directory, manifest.roles)
    inputs = state.inputs if state is not None else {}
    differences = contradictions(recipe, directory / MODEL, manifest.roles, manifest.recipe, inputs)
    accepted = _accepted(recipe.checkpoint.accept, directory, differences)
    saves_first = recipe.warmup is not None and saves and manifest.step == 0
    if state is None and saves_first and directory.parent.resolve() == root.resolve():
        raise UserError(
            f"resume: {directory} holds weights alone, and the checkpoint after the warm-up would have its name; "
            "expected another checkpoint.dir, or no warmup"
        )
    if state is not None and recipe.reference_is_warmed_up:
        _check_warmed_up(directory, verify=verify)
    in_place = state is not None and run_identity(recipe.directory) == state.run
    after = f"after step {state.step}" if state is not None else "from the weights alone"
    notes.append(f"resume: {after}, from {directory}")
    notes += [f"resume: {change}" for change in changes(public_settings(recipe), manifest.recipe)]
    code = changed_code(inputs, code_checksums(recipe.functions, recipe.environment))
    notes += [f"resume: {name}: the file has changed since the checkpoint" for name in code]
    return Resumption(directory, manifest, state, in_place, accepted, tuple(code)), notes


def run_identity(directory: Path) -> str | None:
    """Identity of the run in a directory; None where there is none.

    Raises:
        FileError: the file cannot be read.
    """
    try:
        return read_text(directory / RUN_IDENTITY, _MOST_IDENTITY_BYTES).strip()
    except FileError as error:
        if error.errno == errno.ENOENT:
            return None
        raise


def inexact_because(
    train: TrainConfig, rollout: RolloutRole | None, functions: Mapping[str, RewardConfig]
) -> list[str]:
    """Settings by which a resumed run may differ from an uninterrupted one.

    Args:
        train: settings of training.
        rollout: settings of the engines; None in a run without any.
        functions: of rewards and costs.
    """
    reasons = []
    if rollout is not None and not rollout.engine.deterministic:
        reasons.append("rollout.engine.deterministic=false (generated tokens)")
    if rollout is not None and not rollout.weights.flush_cache:
        reasons.append("rollout.weights.flush_cache=false (keys and values that older weights made)")
    reasons += [
        f"on_failure={function.on_failure} of reward {function.name} (what fails may depend on time)"
        for config in functions.values()
        for function in config.functions
        if function.on_failure != "stop"
    ]
    if platform.gpus and not train.deterministic:
        reasons.append("train.deterministic=false (order of sums on a GPU)")
    return reasons


def check_checkpoint_directory(settings: CheckpointConfig, directory: Path) -> Path:
    """Check that checkpoints can be written where the recipe wants them, as far as can be seen without trying.

    A directory that the run makes within its own is as good as `run_dir`, which is checked by itself.

    Args:
        settings: of checkpoints.
        directory: of the run's checkpoints.

    Returns:
        The directory.

    Raises:
        UserError: they cannot.
    """
    is_made = settings.dir is None and not directory.exists()
    if settings.save_interval is not None and not is_made:
        check_writable("checkpoint.dir", directory)
    return directory


def _newest(root: Path, run: Path, *, verify: bool) -> tuple[Path | None, list[str]]:
    """The newest sound checkpoint in `root` or where the run in `run` has saved so far, or the one that it began with;
    and notes.
    """
    saved = None
    with contextlib.suppress(UserError):  # a recipe that was killed while it was written
        saved = saved_to(run)
    if saved is not None and saved.resolve() != root.resolve():
        ahead = next(iter(find_sound(saved, most_bytes=None)[0]), None)
        behind = next(iter(find_sound(root, most_bytes=None)[0]), None)
        if ahead is not None and (behind is None or ahead.name > behind.name):
            directory, notes = _newest(saved, run, verify=verify)
            return directory, [*notes, f"resume: this run has saved to {saved} so far, and to {root} from now on"]
    complete, skipped = find_sound(root, most_bytes=SMALL_BYTES if verify else None)
    # Of those that are older than the newest whole one nobody needs to hear.
    newer = [skip for skip in skipped if not complete or skip.directory.name > complete[0].name]
    notes = [f"resume: skipped {skip.directory}: {skip.reason}" for skip in newer]
    if not complete:
        # A save that was killed leaves no manifest: it never was a checkpoint.
        if damaged := [skip for skip in skipped if (skip.directory / MANIFEST).exists()]:
            raise UserError(
                f"resume=auto: no checkpoint in {root} is whole ({_reasons(damaged)}); {verify_hint()}, resume=none "
                "starts afresh"
            )
        if (first := started_from(run, root)) is not None:
            notes.append(f"resume: no whole checkpoint in {root}; resuming from {first}, as this run's last start did")
            return _named(first, verify=verify)[0], notes
        return None, [*notes, f"resume: no whole checkpoint in {root}; starting afresh"]
    return complete[0], notes


def find_sound(root: Path, *, most_bytes: int | None = SMALL_BYTES) -> tuple[list[Path], list[Skipped]]:
    """Find complete checkpoints as `find_checkpoints` does, without newest ones in which `damage_of` finds damage.

    Raises:
        UserError: the directory cannot be read, or a newer version has saved there.
    """
    complete, skipped = find_checkpoints(root)
    if newer := next((skip for skip in skipped if skip.newer), None):
        raise UserError(f"checkpoint {newer.directory}: {newer.reason}")
    while complete and (damage := damage_of(complete[0], most_bytes)):
        skipped.append(Skipped(complete.pop(0), damage))
    return complete, skipped


def damage_of(directory: Path, most_bytes: int | None = SMALL_BYTES) -> str | None:
    """Find damage in a checkpoint: first its files against the manifest, then what they mean. None if there is none.

    Args:
        directory: of the checkpoint.
        most_bytes: shards that are larger in all are not read: the ranks that load them compare each piece. None are
            read where it is None.

    Raises:
        UserError: it has no manifest that can be read.
    """
    return (
        damaged_description(directory)
        or next(contradictions_of_run(directory), None)
        or (None if most_bytes is None else damaged_shard(directory, most_bytes=most_bytes))
    )


def _named(path: Path, *, verify: bool) -> tuple[Path, list[str]]:
    """The checkpoint that a path means: itself, or the newest whole one of a directory of them, or of a run."""
    path = path.absolute()
    if not path.is_dir():
        expected = "expected none, auto, a checkpoint, a directory of them, or a run's directory"
        raise UserError(f"resume: no such directory: {path}; {expected}")
    if (path / MANIFEST).exists() or re.fullmatch(r"step-\d+", path.name):
        read_complete(path)
        if damage := damage_of(path, SMALL_BYTES if verify else None):
            raise UserError(f"resume: checkpoint {path}: {damage}; {verify_hint(path)}")
        return path, []
    if (path / RECIPE).is_file():
        run, saved = path, saved_to(path)
        if saved is None:
            raise UserError(f"resume: the run in {run} has saved no checkpoint (checkpoint.save_interval)")
        path = saved
    complete, skipped = find_sound(path, most_bytes=SMALL_BYTES if verify else None)
    if not complete:
        raise UserError(f"resume: no whole checkpoint in {path}" + (f" ({_reasons(skipped)})" if skipped else ""))
    return complete[0], [f"resume: skipped {skip.directory}: {skip.reason}" for skip in skipped]


def _reasons(skipped: Iterable[Skipped]) -> str:
    return "; ".join(f"{skip.directory.name}: {skip.reason}" for skip in skipped)


def _check_room(root: Path, resumed: Path | None) -> None:
    """Refuse to add to checkpoints in `root` that the run does not follow from."""
    complete, _ = find_sound(root, most_bytes=None) if resumed is not None else find_checkpoints(root)
    if resumed is None:
        others, remedy = complete, "resume=auto resumes from the newest"
    else:
        earlier = root.resolve() == resumed.resolve().parent
        others = [checkpoint for checkpoint in complete if not earlier or checkpoint.name > resumed.name]
        remedy = f"remove them to resume from {resumed.name}"
    if others:
        names = ", ".join(checkpoint.name for checkpoint in others[:3]) + (", ..." if len(others) > 3 else "")
        raise UserError(
            f"checkpoint.dir: {root} holds checkpoints of another course of training ({names}); {remedy}, or choose "
            "another directory"
        )


def _accepted(accept: Sequence[str], directory: Path, differences: Sequence[Difference]) -> tuple[str, ...]:
    """Names of the differences that make the recipe another run. Raises UserError for those that `checkpoint.accept`
    lacks.
    """
    refused = [difference for difference in differences if not is_accepted(accept, difference.name)]
    if refused:
        heading = f"resume: {directory} is of another run than this recipe; checkpoint.accept takes what may differ"
        raise UserError("\n".join([heading, *map(str, refused)]))
    return tuple(difference.name for difference in differences)


def check_saved_roles(
    trained: Sequence[str], algorithm: str, directory: Path, saved: Mapping[str, RoleSummary]
) -> None:
    """Check that every role that the recipe trains can be resumed from what was saved.

    Args:
        trained: roles that the resumed run trains.
        algorithm: its name.
        directory: of the checkpoint.
        saved: the roles that it holds.

    Raises:
        UserError: a role is missing, or has a value head in place of logits or the other way round.
    """
    if missing := [role for role in trained if role not in saved]:
        raise UserError(
            f"resume: {directory} has no {' and no '.join(missing)}, only {', '.join(saved) or 'no role at all'}; "
            f"algorithm.name={algorithm} trains {', '.join(trained)}"
        )
    for role in trained:
        if saved[role].value_head != (role != "actor"):
            ending, expected = ("a value head", "logits") if role == "actor" else ("logits", "a value head")
            raise UserError(f"resume: {directory}: the {role} ends in {ending}, expected {expected}")


def seal_warmed_up(directory: Path) -> None:
    """Give the model after the warm-up a manifest, by which a resumed run knows that it is what was written.

    Raises:
        OSError: it cannot be read or written to.
    """
    files = tuple(file_entry(directory, path) for path in sorted(directory.iterdir()))
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    write_manifest(directory, Manifest(step=0, created=created, roles={}, recipe={}, software={}, files=files))


def _check_warmed_up(checkpoint: Path, *, verify: bool) -> None:
    warmed_up = checkpoint.parent / WARMED_UP
    if not warmed_up.is_dir():
        raise UserError(
            f"resume: next to {checkpoint} there is no {WARMED_UP}, the run's model after the warm-up, which is its "
            "reference policy"
        )
    sealed = (warmed_up / MANIFEST).exists()  # older versions gave it no manifest
    if verify and sealed and (damage := damaged_description(warmed_up)):
        raise UserError(f"resume: {warmed_up}, the reference policy of {checkpoint.name}: {damage}")


def keep_warmed_up(checkpoints: Path, resumption: Resumption) -> None:
    """Put the reference policy of a run that resumes under another name next to its own checkpoints too."""
    source, kept = resumption.directory.parent / WARMED_UP, checkpoints / WARMED_UP
    if resumption.state is not None and not kept.exists():
        shutil.copytree(source, kept, copy_function=_link_or_copy)


def _link_or_copy(source: str, kept: str) -> None:
    try:
        os.link(source, kept)  # nothing is ever changed in place there
    except OSError:
        shutil.copy2(source, kept)
