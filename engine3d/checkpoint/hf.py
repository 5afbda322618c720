"""HuggingFace directories out of checkpoints and into them, by one process in bounded memory."""

from __future__ import annotations

import functools
import io
import pickle
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine3d.checkpoint.digests.chunk_checksums import ChunkChecksums
from engine3d.checkpoint.manifest import (
    FileEntry,
    Manifest,
    RoleSummary,
    file_entry,
    read_complete,
    step_directory,
    verify_hint,
    write_manifest,
)
from engine3d.checkpoint.metadata import StoredChunk, difference, read_metadata, stored_spec
from engine3d.checkpoint.reading.verify import check_described
from engine3d.errors import EngineError, UserError
from engine3d.models import ModelSpec, check_weights, load_model_spec
from engine3d.models.files.multi_token import LAYERS_KEY, KeptTensors, has_vision_tower, may_have_multi_token_layers
from engine3d.models.files.safetensors_files import ExportFiles, TensorFiles
from engine3d.models.files.weights import TOKENIZER_FILES, begin_export, finish_export, plan_model_export, write_index
from engine3d.models.precision import NOTHING_LEFT_OUT, Fp8Settings, Precision, check_experts, stored_tensors
from engine3d.models.quantisation.stored import fp8_tensors, mxfp4_tensors
from engine3d.models.rules import Box, HFTensor
from engine3d.startup.lazy_imports import torch

if TYPE_CHECKING:
    from torch import Tensor


MODEL = "model"
"""The folder of a checkpoint with the config and the tokenizer of the actor's model."""

_WEIGHT = "weight/"
_IMPORTED, _IMPORTED_ROLE = "imported", "actor"


@dataclass(frozen=True)
class Exported:
    """Result of an export.

    Args:
        dtype: of the tensors, buffers and scales aside.
        nbytes: of all files of tensors.
    """

    dtype: str
    nbytes: int


def export_checkpoint(
    checkpoint: Path,
    out: Path,
    *,
    role: str = "actor",
    dtype: str | None = None,
    precision: Precision | None = None,
    max_shard_bytes: float = 5e9,
    verify: bool = True,
    base: Path | None = None,
    multi_token: bool = True,
    model_of_run: Path | None = None,
) -> Exported:
    """Write the weights of a checkpoint, of whatever layout, as a HuggingFace directory.

    The chunks that the checkpoint's ranks wrote are read one after another, and each goes to its position in the files.
    In memory there are at most three of them, and the list of all; with a precision also the tensor that is quantised.
    What is read is compared with its checksum: each
    chunk, the model's config and its tokenizer. The directory is written next to `out` and renamed at the end.

    Args:
        checkpoint: the directory of one step.
        out: where to write; must not exist.
        role: whose weights.
        dtype: of the written tensors; that of the run if None. The model's float32 buffers stay float32.
        precision: fp8 quantises values of that dtype, as the run's engines get them: `train.fp8` of the run holds.
        max_shard_bytes: largest file, unless a single tensor is larger.
        verify: false exports what is there, whatever the checksums say.
        base: directory with the tensors that are not trained (`multi_token`), which no checkpoint has; None for the
            run's model.
        multi_token: False to leave out layers for multi-token prediction, as for engines.
        model_of_run: where the run's model is now; None for where it was.

    Returns:
        What was written.

    Raises:
        UserError: no such checkpoint or role, `out` exists, the checkpoint is damaged, or its tensors are not those of
            the model whose config it holds.
        EngineError: writing failed.
    """
    manifest = read_complete(checkpoint)
    if role not in manifest.roles:
        accepted = ", ".join(sorted(manifest.roles))
        raise UserError(f"export: {checkpoint} has no role {role}; expected one of {accepted}")
    if manifest.roles[role].adapters is not None:
        raise UserError(f"export: {checkpoint} has adapters and no weights of a model; expected --adapter or --merged")
    if verify:
        check_described(checkpoint, role)
    model = model_files(checkpoint, role)
    if not model.is_dir():
        model = checkpoint / MODEL
    spec = stored_spec(model, manifest.roles[role])
    if precision is not None and spec.mtp:
        raise UserError(
            f"export: precision={precision} was not tried with a trained layer for multi-token prediction; expected "
            "none"
        )
    if precision is not None:
        check_experts(spec)
        spec = fp8_settings(manifest, role).applied(spec)
    saved = RoleWeights(checkpoint, manifest, role, verify=verify)
    saved.check(spec, model.name)
    spec = replace(spec, mtp=spec.mtp and multi_token)
    written = _dtype(dtype) if dtype is not None else _dtype_of(manifest.roles[role])
    kept = multi_token or has_vision_tower(spec)
    source = _source_of_kept(checkpoint, manifest, spec, base, model_of_run) if kept else None
    further = KeptTensors(spec, source, written, precision, multi_token=multi_token)
    if base is not None and not further.tensors and not spec.mtp:
        raise UserError(
            f"export: --base {base} has no layers for multi-token prediction; expected --no-multi-token in its place"
        )
    plan = plan_model_export(spec, written, max_shard_bytes, precision, further)
    quantised = {name for name, tensor in spec.hf_tensors.items() if precision is not None and tensor.fp8}
    partial = out.with_name(f".{out.name}.partial")
    files = ExportFiles(plan, partial)
    try:
        begin_export(out, partial)
        files.create()
        for name, box, values in saved.chunks(spec.hf_tensors.keys() - quantised):
            for stored in further.with_copies(name, box, values):
                files.write(*stored)
        for name in sorted(quantised):
            for stored in stored_tensors(*saved.complete(spec.hf_tensors[name]), written, precision):
                files.write(*stored)
        for stored in further.read():
            files.write(*stored)
        files.close()
        write_index(plan, partial)
        finish_export(spec, written, partial, out, precision, further)
    except OSError as error:
        raise EngineError(f"export: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    of_dtype = str(written).removeprefix("torch.")
    return Exported(f"{precision} and {of_dtype}" if precision else of_dtype, sum(file.size for file in plan.files))


def fp8_settings(manifest: Manifest, role: str) -> Fp8Settings:
    """`train.fp8` of the run, or of a role with settings of its own; the actor's are those of a role without."""
    of_role = (manifest.recipe.get(role) or {}).get("train")
    train: dict[str, Any] = of_role or manifest.recipe.get("train") or {}
    if role != "actor" and not of_role and train.get("precision") is None:  # what engines leave out is of the actor
        return NOTHING_LEFT_OUT
    return Fp8Settings(**train.get("fp8", {}))


def _source_of_kept(
    checkpoint: Path, manifest: Manifest, spec: ModelSpec, base: Path | None, model_of_run: Path | None
) -> Path | None:
    """Check the directory with a vision tower or layers for multi-token prediction of a checkpoint's model.

    None without any, and where the run's model is gone whose layer the checkpoint has.

    Raises:
        UserError: there is no such directory, or it has another model; none is known, and the model has such tensors;
            or `base` is given, and no such tensors exist.
    """
    tower = has_vision_tower(spec)
    kept, otherwise = "layers for multi-token prediction", ", or --no-multi-token"
    if tower:
        kept, otherwise = "vision tower", ""
    if not tower and not may_have_multi_token_layers(spec):
        if base is not None:
            raise UserError(
                f"export: --base {base} is the model of --merged, or has layers for multi-token prediction, of which "
                f"{checkpoint} has none; expected no --base"
            )
        return None
    known = base or model_of_run or manifest.recipe.get("model", {}).get("path")
    if known is None:
        if tower:
            raise UserError(
                f"export: {checkpoint} is without the vision tower of its model; expected --base of that model"
            )
        if not manifest.recipe and (count := spec.hf_config.get(LAYERS_KEY)):  # imported
            raise UserError(
                f"export: {checkpoint} is without the layers for multi-token prediction of its model "
                f"({LAYERS_KEY}={count}); expected --base of that model, or --no-multi-token"
            )
        return None
    given = Path(known)
    if spec.mtp and base is None and not given.is_dir():  # the checkpoint has the layer
        return None
    if not given.is_dir():
        raise UserError(
            f"export: no directory {given}, the model of {checkpoint} with the {kept}, which exports have; "
            f"expected --base of that model{otherwise}"
        )
    if load_model_spec(given).sizes != spec.sizes:
        raise UserError(
            f"export: {given} is another model than that of {checkpoint}, whose {kept} an export has; expected "
            "--base of that model"
        )
    return given


def import_checkpoint(model: Path, out: Path) -> None:
    """Make a checkpoint of a HuggingFace model, from which a run can start: step 0, with the actor's weights alone.

    The tensors have the dtypes of the files, which are mapped, not read into memory.

    Args:
        model: HuggingFace directory with config.json and safetensors.
        out: folder of checkpoints; the new one is `step-00000000` in it.

    Raises:
        UserError: no such model, files that are missing or damaged, or the checkpoint exists.
        EngineError: writing failed.
    """
    spec = load_model_spec(model)
    check_weights(spec, model)
    with TensorFiles(model) as files:
        in_fp8 = fp8_tensors(files.tensors) & spec.hf_tensors.keys()
        if quantised := sorted(in_fp8 | mxfp4_tensors(files.tensors)):
            raise UserError(
                f"import: {model} has weights in {'fp8' if in_fp8 else 'MXFP4'}, such as {quantised[0]}, expected "
                "bfloat16, float16 or float32; a run reads the directory itself as its model"
            )
    directory = step_directory(out, 0)
    if directory.exists():
        raise UserError(f"import: {directory} exists already; expected a folder without it")
    try:
        write_manifest(directory, _imported(spec, model, directory))
    except BaseException as error:
        shutil.rmtree(directory, ignore_errors=True)
        if isinstance(error, OSError):
            raise EngineError(f"import: {error}") from error
        raise


def _imported(spec: ModelSpec, model: Path, directory: Path) -> Manifest:
    """Everything of an imported checkpoint but its manifest, and the manifest."""
    from engine3d.checkpoint.writing.writer import write_tensors  # Megatron-Core is imported where it is needed

    role = directory / _IMPORTED_ROLE
    role.mkdir(parents=True)
    tensors = {}
    with TensorFiles(model) as files:
        for name, tensor in spec.hf_tensors.items():
            box = tuple((0, size) for size in tensor.shape)
            tensors[_WEIGHT + name] = (files.read(name, box), box, tensor.shape)
        # "imported" is no layout, so that no rank looks for its random states.
        written = write_tensors(role, tensors, {"optimizer_step": 0, "scheduler_steps": 0, "layout": _IMPORTED})
    entries = [replace(entry, path=f"{_IMPORTED_ROLE}/{entry.path}") for entry in written]
    parameters = [tensors[_WEIGHT + name][0] for name, tensor in spec.hf_tensors.items() if not tensor.buffer]
    summary = RoleSummary(
        layout=_IMPORTED,
        world_size=1,
        dtype=", ".join(sorted({str(values.dtype).removeprefix("torch.") for values in parameters})),
        value_head=False,
        parameters=spec.parameter_count(),
        optimizer_step=None,
    )
    return Manifest(
        step=0,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        roles={_IMPORTED_ROLE: summary},
        recipe={},
        software={package: version(package) for package in ("torch", "megatron-core")},
        files=(*entries, *copy_model_files(model, directory)),
    )


def copy_model_files(model: Path, checkpoint: Path, role: str | None = None) -> list[FileEntry]:
    """Copy a model's config and tokenizer into a checkpoint, so that an export needs nothing else.

    Args:
        model: HuggingFace directory.
        checkpoint: the directory of one step.
        role: whose model it is; None for that of all roles that have none of their own.

    Returns:
        The copies, with paths relative to the checkpoint.

    Raises:
        EngineError: the directory has no model any more.
    """
    if not (model / "config.json").is_file():
        raise EngineError(f"{model} has no config.json any more, without which a checkpoint is of no model")
    target = checkpoint / MODEL if role is None else model_files(checkpoint, role)
    target.mkdir(parents=True, exist_ok=True)
    names = [name for name in ("config.json", *TOKENIZER_FILES) if (model / name).is_file()]
    for name in names:
        shutil.copyfile(model / name, target / name)
    return [file_entry(checkpoint, target / name) for name in names]


def model_files(checkpoint: Path, role: str) -> Path:
    """Path of the config and the tokenizer of a role that has a model of its own."""
    return checkpoint / f"{role}-{MODEL}"


class RoleWeights:
    """Weights of a role in a checkpoint, as its ranks wrote them: each tensor in chunks.

    Raises:
        UserError: the checkpoint's description of them cannot be read.
    """

    def __init__(self, checkpoint: Path, manifest: Manifest, role: str, *, verify: bool) -> None:
        self._checkpoint = checkpoint
        self._directory = checkpoint / role
        self._checksums = ChunkChecksums(self._directory)
        self._verify = verify
        self._metadata = read_metadata(checkpoint, manifest, role)

    def check(self, spec: ModelSpec, folder: str) -> None:
        """Refuse tensors that are not those of the model whose config is in a folder, or incomplete."""
        weights = self._metadata.weights
        if mismatch := difference(spec, {name: tensor.shape for name, tensor in weights.items()}):
            whose = f"checkpoint {self._checkpoint}: {self._directory.name}/ does not fit {folder}/config.json"
            raise UserError(f"{whose}: {mismatch}")
        for name, tensor in weights.items():
            elements, there = prod(tensor.shape), sum(prod(chunk.shape) for chunk in tensor.chunks)
            if there != elements:
                raise UserError(
                    f"checkpoint {self._checkpoint}: tensor {name} has {elements} elements, its chunks {there}"
                )

    def chunks(self, names: Collection[str]) -> Iterator[tuple[str, Box, Tensor]]:
        """Yield every chunk of some tensors: the tensor's name, its box there, its values. Files are read in order."""
        by_file: dict[str, list[StoredChunk]] = {}
        for name in names:
            for stored in self._by_tensor.get(name, ()):
                by_file.setdefault(stored.file, []).append(stored)
        for file, chunks in sorted(by_file.items()):
            try:
                with (self._directory / file).open("rb") as stream:
                    for stored in sorted(chunks, key=lambda stored: stored.start):
                        name = stored.key.removeprefix(_WEIGHT)
                        stream.seek(stored.start)
                        data = stream.read(stored.length)
                        self._compare(file, stored.start, data, name)
                        values = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
                        del data
                        bounds = zip(stored.offset, values.shape, strict=True)
                        box = tuple((first, first + size) for first, size in bounds)
                        yield name, box, values
            except (OSError, EOFError, RuntimeError, pickle.UnpicklingError, ValueError) as error:
                raise self._damaged(file, f"cannot be read ({' '.join(str(error).split())})") from error

    def complete(self, tensor: HFTensor) -> tuple[HFTensor, Box, Tensor]:
        """A tensor, its box, and its values, from all of its chunks."""
        values: Tensor | None = None
        for _, box, chunk in self.chunks([tensor.name]):
            if values is None:
                values = torch.empty(tensor.shape, dtype=chunk.dtype)
            values[tuple(slice(start, stop) for start, stop in box)] = chunk
        assert values is not None, "check comes first"
        return tensor, tuple((0, size) for size in tensor.shape), values

    @cached_property
    def _by_tensor(self) -> dict[str, list[StoredChunk]]:
        """The chunks of each tensor of the weights."""
        chunks: dict[str, list[StoredChunk]] = {}
        for stored in self._metadata.stored:
            if stored.key.startswith(_WEIGHT) and stored.key in self._metadata.tensors:
                chunks.setdefault(stored.key.removeprefix(_WEIGHT), []).append(stored)
        return chunks

    def _compare(self, file: str, start: int, data: bytes, name: str) -> None:
        if self._verify and self._checksums.covers(file) and (why := self._checksums.compare(file, start, [data])):
            raise self._damaged(file, f"{why} ({name})")

    def _damaged(self, file: str, reason: str) -> UserError:
        named = f"checkpoint {self._checkpoint}: {self._directory.name}/{file}"
        return UserError(f"{named} {reason}; {verify_hint(self._checkpoint)}")


def _dtype_of(summary: RoleSummary) -> torch.dtype:
    """The dtype that a role was trained in; of an import of several dtypes one that holds the values of all."""
    return functools.reduce(torch.promote_types, map(_dtype, summary.dtype.split(", ")))


def _dtype(name: str) -> torch.dtype:
    resolved = getattr(torch, name, None)
    if not isinstance(resolved, torch.dtype):
        raise UserError(f"export: dtype {name}: expected such as bfloat16, float16 or float32")
    return resolved
