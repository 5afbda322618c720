"""Weights between HuggingFace files and the ranks' parameters, by the rules: each rank reads and writes its own."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

from engine3d.durable import bring_to_disk, naming
from engine3d.errors import EngineError, UserError
from engine3d.layout import Coordinates, Layout
from engine3d.models.blocks import EMBEDDING, OUTPUT_LAYER
from engine3d.models.family import ModelSpec
from engine3d.models.files.multi_token import LAYERS_KEY, VISION_TOWER, KeptTensors, has_vision_tower, is_kept
from engine3d.models.files.safetensors_files import (
    DTYPES,
    INDEX_FILE,
    ExportFiles,
    ExportPlan,
    TensorFiles,
    name_beside_tower,
    plan_export,
)
from engine3d.models.precision import (
    Precision,
    check_shards,
    joined_slices,
    joined_values,
    quantisation_config,
    scale_name,
    served_tensors,
    stored_tensors,
)
from engine3d.models.quantisation.stored import (
    QUANTISATION_KEY,
    QUANTISATION_KEYS,
    check_quantisation,
    fp8_tensors,
    mxfp4_tensors,
    named_method,
)
from engine3d.models.rules import Box, LocalParameter, is_adapter
from engine3d.platform import platform
from engine3d.startup.lazy_imports import dist, torch

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def check_weights(spec: ModelSpec, directory: str | Path, *, needs_head: bool = False) -> None:
    """Check from the files' headers alone that every tensor of the model is there with its shape.

    Args:
        needs_head: refuse files without a value head, for a model whose head nobody trains.

    Raises:
        UserError: names the tensor, the file, and the expected and the found shape.
    """
    with TensorFiles(Path(directory)) as files:
        _check(spec, files)
        _check_tied(spec, files)
        if needs_head:
            _check_head(spec, files, directory)


def weight_notes(spec: ModelSpec, directory: str | Path) -> list[str]:
    """Notes on files that pass `check_weights`, a line each, about tensors that are not read."""
    notes = []
    with TensorFiles(Path(directory)) as files:
        in_fp8, in_mxfp4 = fp8_tensors(files.tensors), mxfp4_tensors(files.tensors)
        known = spec.hf_tensors.keys() | map(scale_name, in_fp8)
        unread = [name for name in files.tensors if name not in known and not _is_known(spec, name)]
    if count := len(in_fp8 & spec.hf_tensors.keys()):
        notes.append(f"{count:,} tensors of the files are in fp8: they are dequantised when they are read")
    elif in_mxfp4:
        notes.append(f"{len(in_mxfp4):,} tensors of the files are in MXFP4: they are dequantised when they are read")
    elif (method := named_method(spec.hf_config)) is not None:
        notes.append(f"config.json names a quantisation ({method}), and the weights are not quantised: it is ignored")
    if unread:
        more = f" and {len(unread) - 1} more" if unread[1:] else ""
        notes.append(f"tensor {unread[0]}{more} of the files: not part of {spec.family.architecture}, and not read")
    return notes


def _is_known(spec: ModelSpec, name: str) -> bool:
    """True of tensors that checkpoints of the family have next to the model's own."""
    return is_kept(spec, name) or name == OUTPUT_LAYER or name.endswith("rotary_emb.inv_freq")


def _check_tied(spec: ModelSpec, files: TensorFiles) -> None:
    """Refuse an output layer of its own where the config says that it is the embedding."""
    if not spec.sizes.tied or spec.value_head or OUTPUT_LAYER not in files.tensors:
        return
    files.check(OUTPUT_LAYER, spec.hf_shape(EMBEDDING))
    if files.differ(OUTPUT_LAYER, EMBEDDING):
        raise UserError(
            f"tensor {OUTPUT_LAYER} in {files.tensors[OUTPUT_LAYER].path}: differs from {EMBEDDING}, and config.json "
            "has tie_word_embeddings=true, by which SGLang leaves it out and transformers does not; expected "
            "tie_word_embeddings=false, or no such tensor"
        )


def _check_head(spec: ModelSpec, files: TensorFiles, directory: str | Path) -> None:
    lacking = [name for name, tensor in spec.hf_tensors.items() if tensor.optional and name not in files.tensors]
    if lacking:
        raise UserError(
            f"{directory}: no tensor {lacking[0]}, expected a model with a value head "
            f"({spec.family.value_architecture}), because it is not trained and would score everything 0"
        )


def check_finite_weights(spec: ModelSpec, directory: str | Path, *, limit_s: float) -> tuple[int, int]:
    """Look for weights that are nan or infinite, one file after another, for a limited time.

    Args:
        spec: the model.
        directory: of its files, which are sound, see `check_weights`.
        limit_s: seconds after which no other tensor is begun.

    Returns:
        Bytes that were looked at, and bytes of all tensors.

    Raises:
        UserError: names the tensor, the file and the element.
    """
    began = time.monotonic()
    with TensorFiles(Path(directory)) as files:
        stored = {name: files.tensors[name] for name in spec.hf_tensors if name in files.tensors}
        by_file = sorted(stored.items(), key=lambda item: str(item[1].path))
        sizes = {name: prod(tensor.shape) * DTYPES.get(tensor.dtype, 1) for name, tensor in by_file}
        looked_at = 0
        for name, size in sizes.items():
            if time.monotonic() - began > limit_s:
                break
            if (indices := files.not_finite(name)) is not None:
                raise UserError(
                    f"tensor {name} in {files.tensors[name].path}: element {list(indices)} is nan or infinite, "
                    "expected finite weights"
                )
            looked_at += size
    return looked_at, sum(sizes.values())


def load_weights(
    model: torch.nn.Module,
    spec: ModelSpec,
    layout: Layout,
    coordinates: Coordinates,
    directory: str | Path,
    *,
    needs_head: bool = False,
) -> tuple[str, ...]:
    """Fill a rank's parameters from safetensors files, reading only its slices.

    Values are cast to each parameter's dtype. Rows that pad the vocabulary become zero. A value head that the files
    lack becomes zero too: every value is then 0, until the head is trained.

    Args:
        needs_head: refuse files without a value head, for a model whose head nobody trains.

    Returns:
        the HuggingFace names of tensors that the files lack and that were initialised instead: only a value head's.

    Raises:
        UserError: a tensor or file is missing, misshapen or damaged, or a weight is nan or infinite.
    """
    parameters = rank_parameters(model, spec, layout, coordinates)
    initialised: list[str] = []
    with TensorFiles(Path(directory)) as files, torch.no_grad():
        _check(spec, files)
        if needs_head:
            _check_head(spec, files, directory)
        for local, parameter in parameters:
            if sum(_elements(tensor_slice.local_box) for tensor_slice in local.slices) < parameter.numel():
                parameter.zero_()
            for tensor_slice in local.slices:
                target = tensor_slice.to_hf(parameter[_slices(tensor_slice.local_box)])
                if tensor_slice.hf_name in files.tensors:
                    target.copy_(files.read(tensor_slice.hf_name, tensor_slice.hf_box))
                    if not bool(target.isfinite().all()):
                        raise UserError(
                            f"tensor {tensor_slice.hf_name} in {files.tensors[tensor_slice.hf_name].path}: a weight is "
                            f"nan or infinite as {str(target.dtype).removeprefix('torch.')}, expected finite weights"
                        )
                else:
                    target.fill_(1.0 if spec.hf_tensors[tensor_slice.hf_name].init == "ones" else 0.0)
                    initialised.append(tensor_slice.hf_name)
    return tuple(initialised)


def export_weights(
    model: torch.nn.Module,
    spec: ModelSpec,
    layout: Layout,
    coordinates: Coordinates,
    directory: str | Path,
    dtype: torch.dtype,
    *,
    precision: Precision | None = None,
    max_shard_bytes: float = 5e9,
    group: dist.ProcessGroup | None = None,
    merged: Callable[[torch.Tensor], torch.Tensor] | None = None,
    multi_token: bool = False,
) -> None:
    """Write the model as a HuggingFace directory; every rank of the layout calls this together.

    Nothing is gathered: the ranks write their own elements into the same files. They are written next to `directory`
    and renamed at the end, so that a half-written export is never taken for a complete one.

    Args:
        model: the rank's model.
        spec: of the model. It gives config.json, and its directory the tokenizer's files.
        layout: of the model.
        coordinates: of this rank.
        directory: target, which must not exist.
        dtype: of the written tensors, those in fp8 aside.
        precision: fp8 quantises the tensors of the contract (`precision`).
        max_shard_bytes: largest file, unless a single tensor is larger.
        group: the ranks of the layout, if they are not all ranks.
        merged: gives a parameter with its adapter (`Adapters.merged`), if there are adapters.
        multi_token: True to write the layers for multi-token prediction of the model's directory, too.

    Raises:
        UserError: the directory exists already, or the layout divides blocks of fp8.
        EngineError: writing failed, on this rank or on another.
    """
    directory = Path(directory)
    partial = directory.with_name(f".{directory.name}.partial")
    if precision is not None:
        check_shards(spec, layout, transformer_engine=platform.has_transformer_engine)
    further = KeptTensors(spec, spec.directory, dtype, precision, multi_token=multi_token)
    plan = plan_model_export(spec, dtype, max_shard_bytes, precision, further)
    files = ExportFiles(plan, partial)
    leader = not dist.is_initialized() or dist.get_rank(group) == 0

    def create() -> None:
        if leader:
            begin_export(directory, partial)
            files.create()

    def write() -> None:
        for local, parameter in rank_parameters(model, spec, layout, coordinates):
            for name, box, slices in joined_slices(local.slices if local.owner else ()):
                values = joined_values(parameter.data if merged is None else merged(parameter), box, slices)
                for stored in stored_tensors(spec.hf_tensors[name], box, values, dtype, precision):
                    for one in further.with_copies(*stored):
                        files.write(*one)
        for stored in further.read() if leader else ():
            files.write(*stored)
        files.close()

    def finish() -> None:
        if leader:
            write_index(plan, partial)
            finish_export(spec, dtype, partial, directory, precision, further)

    for action in (create, write, finish):
        _on_all_ranks(action, group)


def rank_parameters(
    model: torch.nn.Module, spec: ModelSpec, layout: Layout, coordinates: Coordinates
) -> list[tuple[LocalParameter, torch.Tensor]]:
    """A rank's parameters, each with the result of its rule, and the buffers that have a rule.

    Wrappers around the model are looked through.

    Raises:
        EngineError: the model's parameters are not those of the rules.
    """
    while isinstance(inner := getattr(model, "module", None), torch.nn.Module):
        model = inner
    expected = spec.local_parameters(layout, coordinates, transformer_engine=platform.has_transformer_engine)
    buffers = {local.name for local in expected if local.buffer}
    named = model.named_parameters()
    built: dict[str, torch.Tensor] = {name: tensor for name, tensor in named if is_adapter(name) == spec.adapters}
    built |= {name: buffer for name, buffer in model.named_buffers() if name in buffers}
    if difference := sorted(built.keys() ^ {local.name for local in expected}):
        raise EngineError(f"model {spec.family.name}: the rules and the built model differ in {', '.join(difference)}")
    for local in expected:
        if local.shape != tuple(built[local.name].shape):
            shape = list(built[local.name].shape)
            raise EngineError(f"parameter {local.name}: the rules say shape {list(local.shape)}, the model has {shape}")
    return [(local, built[local.name]) for local in expected]


def plan_model_export(
    spec: ModelSpec,
    dtype: torch.dtype,
    max_shard_bytes: float,
    precision: Precision | None = None,
    further: KeptTensors | None = None,
) -> ExportPlan:
    """The files of a complete model, with the tensors that are not trained."""
    tensors = served_tensors(spec, dtype, precision) | (further.tensors if further is not None else {})
    shapes = {name: shape for name, (shape, _) in tensors.items()}
    others = {name: other for name, (_, other) in tensors.items() if other != dtype}
    renamed = {name: name_beside_tower(name) for name in spec.hf_tensors} if has_vision_tower(spec) else {}
    return plan_export(shapes, dtype, max_shard_bytes, others, renamed)


def begin_export(directory: Path, partial: Path) -> None:
    """Make the directory that an export is written to before it is renamed."""
    if directory.exists():
        raise UserError(f"export: {directory} exists already; expected a new directory")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def write_index(plan: ExportPlan, partial: Path) -> None:
    """Write the index of the files, where there are several."""
    if len(plan.files) > 1:
        with naming(partial / INDEX_FILE):
            (partial / INDEX_FILE).write_text(json.dumps(plan.index(), indent=2) + "\n")


def finish_export(
    spec: ModelSpec,
    dtype: torch.dtype,
    partial: Path,
    directory: Path,
    precision: Precision | None = None,
    further: KeptTensors | None = None,
) -> None:
    """Add config.json and the tokenizer's files, and give the directory its name."""
    for name in TOKENIZER_FILES:
        if spec.directory is not None and (spec.directory / name).is_file():
            shutil.copyfile(spec.directory / name, partial / name)
    config = exported_config(spec, str(dtype).removeprefix("torch."))
    if (spec.mtp or (further is not None and further.tensors)) and LAYERS_KEY in spec.hf_config:
        config[LAYERS_KEY] = spec.hf_config[LAYERS_KEY]
    if precision is not None:
        config[QUANTISATION_KEY] = quantisation_config(spec)
    with naming(partial / "config.json"):
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in (*partial.iterdir(), partial):  # else the name may be on the disk before its contents
        bring_to_disk(path)
    partial.rename(directory)
    bring_to_disk(directory.parent)


def exported_config(spec: ModelSpec, dtype: str) -> dict[str, Any]:
    """The config.json of an export: the model's own, with the dtype and the kind of head that the files have.

    It names no quantisation, and none of the Python files of `auto_map`. `finish_export` adds the
    number of layers for multi-token prediction.
    """
    absent = (*QUANTISATION_KEYS, LAYERS_KEY, "auto_map")
    config = {key: value for key, value in spec.hf_config.items() if key not in absent}
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    if spec.config.outer is not None and "dtype" in spec.config.values:
        config["text_config"] = {**spec.config.values, "dtype": dtype}
    if spec.value_head:
        labels = {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        family = spec.family
        architecture = family.biased_value_architecture if spec.value_bias else family.value_architecture
        config |= {"architectures": [architecture], **labels}
    return config


def _check(spec: ModelSpec, files: TensorFiles) -> None:
    check_quantisation(files.directory, spec.hf_config, files.tensors, spec.hf_tensors)
    for name, tensor in spec.hf_tensors.items():
        if not (tensor.optional and name not in files.tensors):
            files.check(name, tensor.shape)
    if has_vision_tower(spec) and not any(name.startswith(VISION_TOWER) for name in files.tensors):
        raise UserError(
            f"{files.directory}: no tensor {VISION_TOWER}*, expected the vision tower of {spec.family.architecture}, "
            "which exports have"
        )


def _on_all_ranks(action: Callable[[], None], group: dist.ProcessGroup | None) -> None:
    """Run an action on every rank and wait for all; if it fails on one, it fails on all and nobody waits in vain."""
    error: Exception | None = None
    try:
        action()
    except Exception as caught:  # raised again below, once the other ranks know
        error = caught
    if dist.is_initialized():
        messages: list[str | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(messages, str(error) if error else None, group=group)
        failed = [(rank, message) for rank, message in enumerate(messages) if message]
        if failed and error is None:
            raise EngineError(f"export: rank {failed[0][0]} failed: {failed[0][1]}")
    if isinstance(error, OSError):
        raise EngineError(f"export: {error}") from error
    if error is not None:
        raise error


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _elements(box: Box) -> int:
    return prod(stop - start for start, stop in box)
