"""The commands `hybridflow checkpoint ...`: look into checkpoints, and turn them into models and models into them."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from engine3d.checkpoint.manifest import MANIFEST, Skipped, find_checkpoints, read_manifest
from engine3d.checkpoint.reading.inspect import inspect_checkpoint
from engine3d.checkpoint.reading.verify import Damage, verify_checkpoint
from engine3d.errors import UserError, amount, one_line, shortened
from engine3d.models.precision import Precision
from hybridflow.rundir.file_names import CHECKPOINTS
from hybridflow.rundir.kept_recipe import saved_to

_TENSORS_NAMED = 3
_MOST_GB = 1e9
_SHARD_GB = 5.0


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Teach a parser the commands; `run` takes what it has parsed."""
    commands = parser.add_subparsers(dest="action", metavar="COMMAND", required=True)
    saved = "a checkpoint; or a run's directory or a directory of checkpoints, for the newest whole one in it"

    listed = commands.add_parser("list", help="list the checkpoints of a run, with their values and the best one")
    listed.add_argument("directory", metavar="DIR", type=Path, help="a run's directory, or a directory of checkpoints")

    inspect = commands.add_parser("inspect", help="show what is in a checkpoint")
    inspect.add_argument("directory", metavar="DIR", type=Path, help=saved)

    verify = commands.add_parser(
        "verify", help="compare every file with its checksum, and what they say with each other"
    )
    verify.add_argument("directory", metavar="DIR", type=Path, help=saved)

    export = commands.add_parser("export", help="write a model as a HuggingFace directory")
    export.add_argument("directory", metavar="DIR", type=Path, help=saved)
    export.add_argument("out", metavar="OUT", type=Path, help="the directory to make")
    export.add_argument("--role", default="actor", help="whose weights (actor)")
    export.add_argument("--dtype", choices=("bfloat16", "float32", "float16"), help="of the tensors (that of the run)")
    export.add_argument("--precision", choices=get_args(Precision), help="quantise in DeepSeek's block format (no)")
    export.add_argument(
        "--max-shard-gb", type=_gigabytes, metavar="GB", help=f"largest file, 1e9 bytes ({_SHARD_GB:g})"
    )

    adapters = export.add_mutually_exclusive_group()
    adapters.add_argument("--adapter", action="store_true", help="write the adapters as a directory of PEFT")
    adapters.add_argument("--merged", action="store_true", help="write the model with the adapters merged")
    export.add_argument(
        "--base", metavar="MODEL", type=Path, help="with --merged or layers for multi-token prediction: their model"
    )
    export.add_argument(
        "--no-multi-token",
        action="store_true",
        help="leave out layers for multi-token prediction, which engines ignore",
    )
    export.add_argument("--no-verify", action="store_true", help="export what is there, whatever the checksums say")

    imported = commands.add_parser("import", help="make a checkpoint of a HuggingFace directory, to start from")
    imported.add_argument("model", metavar="MODEL", type=Path, help="HuggingFace directory with safetensors")
    imported.add_argument("out", metavar="OUT", type=Path, help="directory of checkpoints")


def run(parsed: argparse.Namespace) -> int:
    """Do what was asked for; returns the exit code.

    Raises:
        UserError: bad input.
        EngineError: a file could not be written.
    """
    match parsed.action:
        case "list":
            print("\n".join(_listed(parsed.directory)))
        case "inspect":
            print(inspect_checkpoint(_checkpoint(parsed.directory)))
        case "verify":
            return _verify(_checkpoint(parsed.directory))
        case "export":
            _export(parsed)
        case "import":
            from engine3d.checkpoint.hf import import_checkpoint

            with _unused_root(parsed.out):
                import_checkpoint(parsed.model, parsed.out)
            print(f"imported {parsed.model} into {parsed.out}")
    return 0


@contextlib.contextmanager
def _unused_root(root: Path) -> Iterator[None]:
    """A directory of checkpoints that no run uses meanwhile."""
    from hybridflow.rundir.status.lock import hold

    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = hold(root, "import OUT")
    except OSError as error:
        raise UserError(f"import: cannot use {root}: {error.strerror}") from None
    with lock:
        yield


def _export(parsed: argparse.Namespace) -> None:
    from engine3d.checkpoint.adapters import export_adapter, export_merged
    from engine3d.checkpoint.hf import export_checkpoint

    if parsed.base is not None and parsed.adapter:
        raise UserError("export: --adapter needs no model; expected no --base")
    if parsed.adapter and parsed.precision:
        raise UserError("export: --precision with --adapter, whose files are in 16 or 32 bits; expected none")
    if (parsed.adapter or parsed.merged) and (parsed.dtype or parsed.max_shard_gb):
        raise UserError("export: --dtype and --max-shard-gb were not tried with adapters; expected none")
    if parsed.no_multi_token and (parsed.adapter or (parsed.base is not None and not parsed.merged)):
        raise UserError(
            "export: --no-multi-token with --adapter or --base, which has no other use; expected one of them"
        )
    checkpoint, verify = _checkpoint(parsed.directory), not parsed.no_verify
    if parsed.adapter:
        exported = export_adapter(checkpoint, parsed.out, role=parsed.role, verify=verify)
    elif parsed.merged:
        exported = export_merged(
            checkpoint,
            parsed.out,
            parsed.base,
            role=parsed.role,
            precision=parsed.precision,
            verify=verify,
            multi_token=not parsed.no_multi_token,
        )
    else:
        exported = export_checkpoint(
            checkpoint,
            parsed.out,
            role=parsed.role,
            dtype=parsed.dtype,
            precision=parsed.precision,
            max_shard_bytes=(parsed.max_shard_gb or _SHARD_GB) * 1e9,
            verify=verify,
            base=parsed.base,
            multi_token=not parsed.no_multi_token,
        )
    size = amount(exported.nbytes)
    print(f"exported the {parsed.role} to {parsed.out}: {exported.dtype}, {size}")


def _verify(checkpoint: Path) -> int:
    files = read_manifest(checkpoint).files
    started = time.perf_counter()
    lines = [_line(damage) for damage in verify_checkpoint(checkpoint)]
    if not lines:  # what damaged files say is of no interest
        from hybridflow.checkpoint.contents import contradictions_of_run

        lines = list(contradictions_of_run(checkpoint))
    for line in lines:
        print(one_line(f"hybridflow: checkpoint {checkpoint}: {line}"), file=sys.stderr)
    if lines:
        return 1
    seconds = time.perf_counter() - started
    size = amount(sum(entry.size for entry in files))
    print(f"{checkpoint}: whole: {len(files):,} files, {size}, read in {seconds:.1f} s")
    return 0


def _listed(path: Path) -> list[str]:
    """A line for each whole checkpoint, the oldest first, with what was measured of its step for `keep_best`."""
    from hybridflow.checkpoint.set_results import read_best, value_of
    from hybridflow.rundir.kept_recipe import kept_setting

    newest = _checkpoint(path)
    best = read_best(newest)
    complete, _ = find_checkpoints(newest.parent)
    lines = []
    for directory in reversed(complete):
        manifest = read_manifest(directory)
        size = amount(sum(entry.size for entry in manifest.files))
        line = f"{directory.name}  step {manifest.step}, saved {manifest.created}, {size}"
        metric = kept_setting(manifest.recipe, "checkpoint.keep_best.metric")
        if isinstance(metric, str) and (value := value_of(directory, metric)) is not None:
            line += f"  {metric} {value:.4g}"
        lines.append(one_line(line) + ("  best" if best is not None and best.step == manifest.step else ""))
    return lines


def _line(damage: Damage) -> str:
    if not damage.tensors:
        return f"{damage.file} {damage.reason}"
    more = len(damage.tensors) - _TENSORS_NAMED
    named = ", ".join(damage.tensors[:_TENSORS_NAMED]) + (f" and {more:,} more" if more > 0 else "")
    return f"{damage.file} {damage.reason}; damaged with it: {named}"


def _checkpoint(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest whole one in it, which is then said."""
    try:
        if not path.is_dir():
            raise UserError(f"checkpoint: no such directory: {path}")
        if (path / MANIFEST).exists() or path.absolute().name.startswith("step-"):
            return path
    except PermissionError as error:
        raise UserError(f"checkpoint: {path} cannot be read: {error.strerror}") from None
    skipped: list[Skipped] = []
    for root in (path, saved_to(path) or path / CHECKPOINTS):
        complete, others = find_checkpoints(root)
        skipped += others
        if complete:
            for incomplete in skipped:
                if incomplete.directory.name > complete[0].name:
                    print(f"skipped {incomplete.directory}: {incomplete.reason}")
            print(f"newest whole checkpoint: {complete[0]}")
            return complete[0]
    reasons = "; ".join(f"{incomplete.directory.name}: {incomplete.reason}" for incomplete in skipped)
    raise UserError(f"checkpoint: no whole checkpoint in {path}" + (f" ({reasons})" if reasons else ""))


def _gigabytes(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) <= _MOST_GB:
            return value
    raise argparse.ArgumentTypeError(f"{shortened(text)}: expected a number above 0 and at most {_MOST_GB:g}")
