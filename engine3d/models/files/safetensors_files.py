"""Safetensors files of a HuggingFace model: what they hold, slices of it, and files written by many ranks at once.

Headers are read and written here, without the tensors: shapes can be checked before anything is built, and every rank
knows where each element of an export lies without asking another.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open

from engine3d.durable import naming
from engine3d.errors import UserError, shortened
from engine3d.input_files import (
    MOST_LIST_BYTES,
    JsonError,
    check_regular,
    is_file_name,
    json_kind,
    open_regular,
    parse_json,
    read_json_object,
)
from engine3d.models.files.other_files import other_weights
from engine3d.models.precision import BLOCK, dequantise, scale_box, scale_name, scale_shape
from engine3d.models.quantisation import mxfp4
from engine3d.models.quantisation.mxfp4 import MXFP4
from engine3d.models.rules import Box
from engine3d.startup.lazy_imports import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PUBLISHERS_FILE = "consolidated.safetensors"
DTYPES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
"""Types of weights that are not quantised, by their names in the files, with the bytes of an element."""
FP8 = "F8_E4M3"
"""Type of weights that are dequantised when they are read (`precision`), of one byte an element."""
_MOST_HEADER_BYTES = 32 << 20
"""Largest header of a file, some 200,000 tensors. The format itself allows 100 MB."""
_BUFFER_BYTES = 64 << 20
_SAMPLED_TENSORS, _SAMPLED_ELEMENTS = 1024, 4096


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: its safetensors dtype name and its shape."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, without reading them.

    Raises:
        UserError: the file does not exist, is not a safetensors file, is shorter or longer than its header says, or has
            dtypes or offsets of tensors that the format does not know.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > size - 8:
            raise UserError(f"{path}: not a whole safetensors file: its header does not fit its {size} bytes")
        if length > _MOST_HEADER_BYTES:
            raise UserError(f"{path}: a header of {length:,} bytes, expected at most {_MOST_HEADER_BYTES:,}")
        try:
            header = parse_json(file.read(length))
        except JsonError as error:
            raise UserError(f"{path}: not a safetensors file: its header cannot be read ({error})") from None
    if not isinstance(header, dict):
        raise UserError(f"{path}: not a safetensors file: its header is {json_kind(header)}, expected an object")
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    for name, entry in entries.items():
        if not _is_entry(entry):
            raise UserError(
                f"{path}: damaged header: tensor {shortened(name)}: expected dtype, a shape of whole numbers and two "
                f"data_offsets, found {shortened(json.dumps(entry))}"
            )
    tensors = {name: StoredTensor(path, entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}
    ends = [entry["data_offsets"][1] for entry in entries.values()]
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise UserError(f"{path}: damaged: expected {expected} bytes by its header, found {size}")
    try:
        with safe_open(path, framework="pt"):  # which knows what dtypes there are, and where tensors may lie
            return tensors
    except SafetensorError as error:
        raise UserError(f"{path}: damaged: safetensors cannot read it: {' '.join(str(error).split())}") from None


def _is_entry(entry: Any) -> bool:
    """True if a value of a header describes a tensor."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    numbers = entry.get("shape"), entry.get("data_offsets")
    if not all(isinstance(sizes, list) and all(type(size) is int and size >= 0 for size in sizes) for sizes in numbers):
        return False
    return len(entry["data_offsets"]) == 2


LANGUAGE_MODEL, _ALONE = "model.language_model.", "model."
"""Beginning of names of a language model's tensors next to a vision tower, and where there is none."""
_ALL_EXPERTS = re.compile(r"(.*\.mlp\.experts\.)(gate_up|down)_proj")


def name_beside_tower(name: str) -> str:
    """The name, next to a vision tower, of a language model's tensor."""
    return LANGUAGE_MODEL + name.removeprefix(_ALONE) if name.startswith(_ALONE) else name


@dataclass(frozen=True, slots=True)
class _FileSlice:
    """A tensor of the files, or the rows of one expert in a tensor of all experts.

    Args:
        name: in the files.
        shape: of the slice.
        expert: None for the complete tensor.
        row: the first one of the slice.
    """

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    row: int = 0


def _slices_of(name: str, stored: StoredTensor) -> Iterator[tuple[str, _FileSlice]]:
    """The tensors, by the names of a language model alone, that a tensor of one next to a vision tower consists of."""
    alone = _ALONE + name.removeprefix(LANGUAGE_MODEL)
    match = _ALL_EXPERTS.fullmatch(alone)
    if match is None or len(stored.shape) != 3:
        yield alone, _FileSlice(name, stored.shape)
        return
    experts, rows, columns = stored.shape
    linears = ("gate", "up") if match[2] == "gate_up" else ("down",)
    if rows % len(linears):
        raise UserError(f"tensor {name} in {stored.path}: {rows} rows of gate and up, expected an even number")
    rows //= len(linears)
    for expert in range(experts):
        for index, linear in enumerate(linears):
            yield f"{match[1]}{expert}.{linear}_proj.weight", _FileSlice(name, (rows, columns), expert, index * rows)


class TensorFiles:
    """The safetensors files of a model directory, opened for slices.

    Raises:
        UserError: no weights, or a file that is missing, damaged or does not hold what the index says.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open: dict[Path, Any] = {}
        self._slices: dict[str, _FileSlice] = {}

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.clear()

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Every tensor by name: those that transformers and SGLang read. Two of MXFP4 are one, dequantised.

        Those of a language model next to a vision tower have the names of one alone, and each of its experts tensors of
        its own.
        """
        tensors = dict(self._in_files)
        for name, blocks in self._in_files.items():
            base = name.removesuffix(mxfp4.BLOCKS)
            scales = self._in_files.get(base + mxfp4.SCALES)
            if base == name or scales is None or {blocks.dtype, scales.dtype} != {"U8"}:
                continue
            if len(blocks.shape) == 4 and blocks.shape == (*scales.shape, mxfp4.BLOCK // 2):
                del tensors[name], tensors[base + mxfp4.SCALES]
                experts, rows, count, _ = blocks.shape
                tensors[base] = StoredTensor(blocks.path, MXFP4, (experts, count * mxfp4.BLOCK, rows))
        for name in [name for name in tensors if name.startswith(LANGUAGE_MODEL)]:
            stored = tensors.pop(name)
            for alone, file_slice in _slices_of(name, stored):
                if alone in tensors:
                    raise UserError(f"tensor {alone}: in {tensors[alone].path}, and as part of {name} in {stored.path}")
                tensors[alone] = StoredTensor(stored.path, stored.dtype, file_slice.shape)
                self._slices[alone] = file_slice
        return tensors

    @cached_property
    def _in_files(self) -> dict[str, StoredTensor]:
        """Every tensor of the files by name."""
        present = sorted(self.directory.glob("*.safetensors"))
        for path in present:
            check_regular(path)  # SGLang opens them all
        index, single = self.directory / INDEX_FILE, self.directory / SINGLE_FILE
        if not os.path.lexists(index):
            if not os.path.lexists(single):
                raise UserError(
                    f"model {self.directory}: has no weights; expected {SINGLE_FILE} or {INDEX_FILE}"
                    f"{other_weights(self.directory)}"
                )
            others = [path.name for path in present if path != single]
            if others and others != [_PUBLISHERS_FILE]:  # of two files, SGLang leaves that one out
                raise UserError(
                    f"model {self.directory}: {others[0]} next to {SINGLE_FILE}: SGLang reads both, and transformers "
                    f"the latter; expected one of them, or an {INDEX_FILE}"
                )
            return read_header(single)
        files = read_json_object(index, MOST_LIST_BYTES).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(name, str) and name for name in files.values()):
            raise UserError(f"{index}: expected a JSON object with weight_map: the file of each tensor by its name")
        if single.exists() and set(files.values()) != {SINGLE_FILE}:
            raise UserError(
                f"model {self.directory}: {SINGLE_FILE} next to {INDEX_FILE}: transformers reads the former, and "
                "SGLang the files of the latter; expected one of them"
            )
        headers: dict[str, dict[str, StoredTensor]] = {}
        for name in sorted(set(files.values())):
            if not is_file_name(name):
                raise UserError(f"{index}: names {name!r}, expected a file of its own directory")
            if not (self.directory / name).exists():
                raise UserError(f"{self.directory / name}: no such file, though {INDEX_FILE} names it")
            headers[name] = read_header(self.directory / name)
        for name, file in files.items():
            if name not in headers[file]:
                raise UserError(f"tensor {name}: not in {self.directory / file}, though {INDEX_FILE} says so")
        tensors: dict[str, StoredTensor] = {}
        for header in headers.values():  # also tensors that the index does not name: both libraries read whole files
            if twice := sorted(tensors.keys() & header.keys()):
                raise UserError(f"tensor {twice[0]}: in {tensors[twice[0]].path} and in {header[twice[0]].path}")
            tensors |= header
        return tensors

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a tensor that is missing, has another shape, or a dtype that cannot be read."""
        if name not in self.tensors:
            raise UserError(f"tensor {name}: missing in {self.directory}; expected with shape {list(shape)}")
        stored = self.tensors[name]
        if stored.shape != shape:
            raise UserError(f"tensor {name} in {stored.path}: expected shape {list(shape)}, found {list(stored.shape)}")
        if stored.dtype == FP8:
            self._check_scales(name, stored)
        elif stored.dtype not in DTYPES and stored.dtype != MXFP4:
            accepted = ", ".join(DTYPES)
            raise UserError(
                f"tensor {name} in {stored.path}: dtype {stored.dtype}, expected {accepted}; "
                "quantised weights must be converted first"
            )

    def _check_scales(self, name: str, stored: StoredTensor) -> None:
        scales, shape = self.tensors.get(scale_name(name)), scale_shape(stored.shape)
        if len(shape) != 2:
            raise UserError(
                f"tensor {name} in {stored.path}: dtype {FP8} of {len(shape)} dimensions, expected a matrix"
            )
        if scales is None:
            raise UserError(
                f"tensor {name} in {stored.path}: dtype {FP8} without {scale_name(name)}, expected its scales of shape "
                f"{list(shape)}, a number for each block of {BLOCK} x {BLOCK}"
            )
        if scales.shape != shape or scales.dtype not in DTYPES:
            raise UserError(
                f"tensor {scale_name(name)} in {scales.path}: {scales.dtype} of shape {list(scales.shape)}, expected "
                f"{', '.join(DTYPES)} of shape {list(shape)}: a scale for each block of {BLOCK} x {BLOCK}"
            )

    def read(self, name: str, box: Box) -> torch.Tensor:
        """The elements `box` of a tensor, on the CPU, in the file's dtype, or dequantised to float32."""
        if self.tensors[name].dtype == MXFP4:
            experts, columns, rows = box
            first, last = columns[0] // mxfp4.BLOCK, -(-columns[1] // mxfp4.BLOCK)
            blocks = self.stored(name + mxfp4.BLOCKS, (experts, rows, (first, last), (0, mxfp4.BLOCK // 2)))
            values = mxfp4.dequantise(blocks, self.stored(name + mxfp4.SCALES, (experts, rows, (first, last))))
            return values[..., columns[0] - first * mxfp4.BLOCK : columns[1] - first * mxfp4.BLOCK].transpose(1, 2)
        values = self.stored(name, box)
        if self.tensors[name].dtype != FP8:
            return values
        return dequantise(values, self.stored(scale_name(name), scale_box(box)), box)

    def stored(self, name: str, box: Box) -> torch.Tensor:
        """The elements `box` of a tensor, on the CPU, as they are in the file."""
        file_slice = self._slices.get(name) if name in self.tensors else None
        name = name if file_slice is None else file_slice.name
        path = self._in_files[name].path
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt", device="cpu")
        if file_slice is None or file_slice.expert is None:
            return self._open[path].get_slice(name)[tuple(slice(start, stop) for start, stop in box)]
        rows, columns = box
        rows = rows[0] + file_slice.row, rows[1] + file_slice.row
        return self._open[path].get_slice(name)[file_slice.expert, slice(*rows), slice(*columns)]

    def differ(self, name: str, other: str) -> bool:
        """True if two tensors of one shape have other values, in whatever dtypes."""
        rows, *others = self.tensors[name].shape
        step = max(1, _BUFFER_BYTES // (4 * max(1, prod(others))))
        for first in range(0, rows, step):
            box = ((first, min(first + step, rows)), *((0, size) for size in others))
            if not torch.equal(self.read(name, box).double(), self.read(other, box).double()):
                return True
        return False

    def not_finite(self, name: str) -> tuple[int, ...] | None:
        """Indices of the first element of a tensor that is nan or infinite; None if there is none."""
        rows, *others = self.tensors[name].shape
        step = max(1, _BUFFER_BYTES // (4 * max(1, prod(others))))
        for first in range(0, rows, step):
            values = self.read(name, ((first, min(first + step, rows)), *((0, size) for size in others)))
            if not bool(values.isfinite().all()):
                row, *indices = (~values.isfinite()).nonzero()[0].tolist()
                return (first + row, *indices)
        return None

    def fingerprint(self) -> str:
        """Compute a fingerprint of the weights, in seconds for a model of any size, however they are cut into files.

        It hashes every tensor's name, dtype and shape, and some thousand elements from the middle of each, or of a
        thousand tensors evenly chosen where there are more.
        """
        digest = hashlib.sha256()
        names = sorted(self.tensors)
        sampled = set(names[:: -(-len(names) // _SAMPLED_TENSORS)])
        for name in names:
            stored = self.tensors[name]
            digest.update(f"{name} {stored.dtype} {stored.shape}\n".encode())
            if name in sampled and 0 not in stored.shape:
                read = self.read if stored.dtype == MXFP4 else self.stored
                values = read(name, _middle(stored.shape, _SAMPLED_ELEMENTS)).contiguous()
                digest.update(values.flatten().view(torch.uint8).numpy().tobytes())
        return f"sampled-sha256:{digest.hexdigest()}"


def _middle(shape: tuple[int, ...], elements: int) -> Box:
    """A box around the middle of a tensor, of about `elements` at most: complete in its last dimensions."""
    box: list[tuple[int, int]] = []
    for size in reversed(shape):
        count = max(1, min(size, elements))
        start = (size - count) // 2
        box.insert(0, (start, start + count))
        elements //= count
    return tuple(box)


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file to write: its header, its size in bytes, and where in it each tensor starts."""

    name: str
    header: bytes
    size: int
    offsets: dict[str, int]


@dataclass(frozen=True)
class ExportPlan:
    """The files of an export, which every rank computes alike from shapes."""

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    files: tuple[FilePlan, ...]
    names: Mapping[str, str] = MappingProxyType({})
    """Names in the files of tensors that have another there."""

    @cached_property
    def file_of(self) -> dict[str, FilePlan]:
        return {name: file for file in self.files for name in file.offsets}

    def index(self) -> dict[str, Any]:
        """The contents of the index file."""
        total = sum(prod(shape) * self.dtypes[name].itemsize for name, shape in self.shapes.items())
        return {
            "metadata": {"total_size": total},
            "weight_map": {self.names.get(name, name): file.name for name, file in self.file_of.items()},
        }


@cache
def _dtype_names() -> dict[torch.dtype, str]:
    names = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
    return names | {torch.float8_e4m3fn: FP8}


def plan_export(
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    max_shard_bytes: float,
    others: Mapping[str, torch.dtype] = MappingProxyType({}),
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> ExportPlan:
    """Spread tensors over files of at most max_shard_bytes each, in order; a larger tensor has a file of its own.

    Args:
        shapes: of the tensors, by name.
        dtype: of all tensors but `others`.
        max_shard_bytes: largest file.
        others: dtypes of tensors that have another.
        renamed: names in the files of tensors that have another there.

    Raises:
        UserError: a dtype that the files cannot hold.
    """
    accepted = [known for known, name in _dtype_names().items() if name in DTYPES]
    if dtype not in accepted:
        raise UserError(f"export: dtype {dtype}: expected one of {', '.join(map(str, accepted))}")
    dtypes = {name: others.get(name, dtype) for name in shapes}
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size = prod(shape) * dtypes[name].itemsize
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    names = [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    if len(shards) == 1:
        names = [SINGLE_FILE]
    files = tuple(_plan_file(name, shard, shapes, dtypes, renamed) for name, shard in zip(names, shards, strict=True))
    return ExportPlan(shapes, dtypes, files, renamed)


def _plan_file(
    name: str,
    tensors: list[str],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    renamed: Mapping[str, str],
) -> FilePlan:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    start = 0
    for tensor in tensors:
        stop = start + prod(shapes[tensor]) * dtypes[tensor].itemsize
        starts[tensor] = start
        header[renamed.get(tensor, tensor)] = {
            "dtype": _dtype_names()[dtypes[tensor]],
            "shape": list(shapes[tensor]),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = 8 + len(text)
    offsets = {tensor: data + starts[tensor] for tensor in tensors}
    return FilePlan(name, len(text).to_bytes(8, "little") + text, data + start, offsets)


class ExportFiles:
    """The files of an export, written box by box by any number of processes and threads at once."""

    def __init__(self, plan: ExportPlan, directory: Path) -> None:
        self.plan = plan
        self.directory = directory
        self._open: dict[str, int] = {}
        self._opening = threading.Lock()

    def create(self) -> None:
        """Create the files with their headers, at full size. One process calls this before any other writes."""
        for file in self.plan.files:
            path = self.directory / file.name
            with naming(path), path.open("wb") as created:
                created.write(file.header)
                created.truncate(file.size)

    def write(self, name: str, box: Box, values: torch.Tensor) -> None:
        """Write the elements `box` of a tensor. At most 64 MiB of them are copied at a time."""
        file = self.plan.file_of[name]
        with self._opening:
            if file.name not in self._open:
                self._open[file.name] = os.open(self.directory / file.name, os.O_WRONLY)
            descriptor = self._open[file.name]
        dtype = self.plan.dtypes[name]
        itemsize = dtype.itemsize
        row = prod(values.shape[1:]) * itemsize
        step = max(1, _BUFFER_BYTES // max(1, row))
        for first in range(0, values.shape[0], step):
            rows = values[first : first + step].detach().to(device="cpu", dtype=dtype).contiguous()
            start = box[0][0] + first
            row_box = ((start, start + rows.shape[0]), *box[1:])
            data = memoryview(rows.view(-1).view(torch.uint8).numpy())
            position = 0
            for offset, length in _runs(self.plan.shapes[name], row_box):
                end = position + length * itemsize
                with naming(self.directory / file.name):
                    _write_all(descriptor, data[position:end], file.offsets[name] + offset * itemsize)
                position = end

    def close(self) -> None:
        """Make what was written durable."""
        for name, descriptor in self._open.items():
            with naming(self.directory / name):
                os.fsync(descriptor)
                os.close(descriptor)
        self._open.clear()


def _runs(shape: tuple[int, ...], box: Box) -> Iterator[tuple[int, int]]:
    """The runs (first element, length) of a box in a row-major tensor, in the order of the box's own elements."""
    split = len(shape) - 1
    while split > 0 and box[split] == (0, shape[split]):
        split -= 1
    strides = [prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    start, stop = box[split]
    for leading in itertools.product(*(range(*box[dimension]) for dimension in range(split))):
        offset = sum(index * stride for index, stride in zip(leading, strides, strict=False))
        yield offset + start * strides[split], (stop - start) * strides[split]


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
