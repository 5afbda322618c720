"""Reads what describes a role's tensors, `.metadata`, without trusting it: it is a pickle, and unpickling runs code."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine3d.checkpoint.manifest import Hash, Manifest, RoleSummary
from engine3d.dtypes import ITEMSIZES
from engine3d.errors import UserError
from engine3d.input_files import FileError, is_file_name, read_bytes
from engine3d.models import load_model_spec
from engine3d.models.lora.config import LoraConfig
from engine3d.models.lora.spec import AdapterSpec

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata as TorchMetadata

    from engine3d.models import ModelSpec

METADATA = ".metadata"
_WEIGHT = "weight/"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor: where it begins and how large it is, in elements of each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChunkedTensor:
    """A tensor of a role's state: its shape, the name of its dtype, and the chunks that make it up."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """Bytes of a file that hold a chunk of a tensor, or an object.

    Args:
        key: of the tensor or object, such as "weight/lm_head.weight".
        offset: of the chunk in its tensor; empty of an object.
        file: name of the file in the role's directory.
        start, length: bytes of the file.
    """

    key: str
    offset: tuple[int, ...]
    file: str
    start: int
    length: int

    @property
    def stop(self) -> int:
        """The byte after the last one."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Metadata:
    """The tensors of a role's state by key, and the contents of its files."""

    tensors: dict[str, ChunkedTensor]
    stored: tuple[StoredChunk, ...]

    @property
    def weights(self) -> dict[str, ChunkedTensor]:
        """The model's tensors, by name."""
        return {key.removeprefix(_WEIGHT): tensor for key, tensor in self.tensors.items() if key.startswith(_WEIGHT)}


class _StandIn:
    """An object of a torch class: its pickled state, which nothing interprets while the pickle is read."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Bytes(_StandIn): ...


class _Chunk(_StandIn): ...


class _Index(_StandIn): ...


class _Metadata(_StandIn): ...


class _Properties(_StandIn): ...


class _StorageInfo(_StandIn): ...


class _StorageMeta(_StandIn): ...


class _Tensor(_StandIn): ...


def _unused(*values: object) -> None:
    """Stand for a path, a layout or a memory format."""


_DESCRIPTIONS = "torch.distributed.checkpoint.metadata"
_STAND_INS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): dict,
    ("pathlib", "Path"): _unused,
    ("pathlib", "PosixPath"): _unused,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _unused,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    (_DESCRIPTIONS, "_MEM_FORMAT_ENCODING"): _unused,
    (_DESCRIPTIONS, "BytesStorageMetadata"): _Bytes,
    (_DESCRIPTIONS, "ChunkStorageMetadata"): _Chunk,
    (_DESCRIPTIONS, "Metadata"): _Metadata,
    (_DESCRIPTIONS, "MetadataIndex"): _Index,
    (_DESCRIPTIONS, "StorageMeta"): _StorageMeta,
    (_DESCRIPTIONS, "TensorProperties"): _Properties,
    (_DESCRIPTIONS, "TensorStorageMetadata"): _Tensor,
    **{("torch", dtype): dtype for dtype in ITEMSIZES},
}
"""All that torch and Megatron-Core put into one. None of the originals does anything but hold values."""


def read_metadata(checkpoint: Path, manifest: Manifest, role: str) -> Metadata:
    """Read which tensors a role's files hold, and where, without torch.

    The bytes are unpickled only if they are those that were saved, and only into descriptions of tensors.

    Args:
        checkpoint: its directory.
        manifest: of the checkpoint.
        role: one of the manifest's.

    Raises:
        UserError: it is missing, not listed, changed since it was saved, or describes no tensors.
    """
    path = f"{role}/{METADATA}"
    where = f"checkpoint {checkpoint}: {path}"
    entry = next((entry for entry in manifest.files if entry.path == path), None)
    if entry is None:
        raise UserError(f"{where} is not listed in the manifest")
    try:
        data = read_bytes(checkpoint / path, entry.size)
    except FileError as error:
        raise UserError(f"{where} {error.reason}") from None
    if Hash(data).checksum() != entry.checksum:
        raise UserError(f"{where} is damaged: its checksum is not that of the manifest")
    loaded = _load(data, where, _STAND_INS)
    try:
        metadata = _checked(loaded)
    except (TypeError, KeyError, ValueError, AttributeError, IndexError):
        raise UserError(f"{where} does not describe tensors") from None
    for stored in metadata.stored:
        _check_file(stored.file, where)
    return metadata


def stored_spec(model: Path, summary: RoleSummary) -> ModelSpec:
    """Read the specification of the weights that a checkpoint has of a role: of a model, or of its adapters.

    Args:
        model: directory of the config of the role's model.
        summary: of the role.

    Raises:
        UserError: as `load_model_spec`; or the adapters do not fit the model.
    """
    spec = replace(load_model_spec(model, value_head=summary.value_head), mtp=summary.mtp)
    if (adapters := summary.adapters) is None:
        return spec
    return AdapterSpec.of(spec, LoraConfig(rank=adapters.rank, alpha=adapters.alpha, targets=adapters.targets))


def difference(spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Describe the first difference between stored tensors, by name, and those of a model. None if there is none."""
    for name, tensor in spec.hf_tensors.items():
        if name not in shapes:
            return f"it has no tensor {name}"
        if shapes[name] != tensor.shape:
            return f"tensor {name} has shape {list(shapes[name])}, expected {list(tensor.shape)}"
    if more := shapes.keys() - spec.hf_tensors.keys():
        return f"it has tensor {min(more)}, which the model has not"
    return None


def parse_metadata(data: bytes, where: str) -> TorchMetadata:
    """Unpickle descriptions of tensors as torch's reader takes them, and nothing else.

    Raises:
        UserError: it is something else; begins with `where`.
    """
    from torch.distributed.checkpoint.metadata import Metadata as TorchMetadata

    loaded = _load(data, where, {})
    if not isinstance(loaded, TorchMetadata):
        raise UserError(f"{where} does not describe tensors")
    for stored in (loaded.storage_data or {}).values():
        _check_file(getattr(stored, "relative_path", ""), where)
    return loaded


def _load(data: bytes, where: str, stand_ins: Mapping[tuple[str, str], Any]) -> Any:
    try:
        return _Unpickler(io.BytesIO(data), stand_ins).load()
    except Exception as error:  # what a pickle that is none raises is not defined
        raise UserError(f"{where} cannot be read: {' '.join(str(error).split())}") from None


def _check_file(name: object, where: str) -> None:
    if not (isinstance(name, str) and is_file_name(name)):
        raise UserError(f"{where} names the file {str(name)!r}, expected one of its own directory")


def _checked(loaded: Any) -> Metadata:
    """The same in types of this module. Raises one of several errors for values of other types."""
    state = _state(loaded, _Metadata)
    tensors = {
        _text(key): _tensor(entry)
        for key, entry in state["state_dict_metadata"].items()
        if not isinstance(entry, _Bytes)
    }
    return Metadata(tensors, tuple(_stored(*item) for item in (state["storage_data"] or {}).items()))


def _tensor(entry: Any) -> ChunkedTensor:
    state = _state(entry, _Tensor)
    dtype, *_ = _state(state["properties"], _Properties)
    if dtype not in ITEMSIZES:
        raise ValueError(dtype)
    chunks = [_state(chunk, _Chunk) for chunk in state["chunks"]]
    return ChunkedTensor(
        _sizes(state["size"]), dtype, tuple(Chunk(_sizes(chunk["offsets"]), _sizes(chunk["sizes"])) for chunk in chunks)
    )


def _stored(key: Any, entry: Any) -> StoredChunk:
    index, info = _state(key, _Index), _state(entry, _StorageInfo)
    offset = index.get("offset")  # objects have none
    start, length = _sizes((info["offset"], info["length"]))
    return StoredChunk(
        _text(index["fqn"]), () if offset is None else _sizes(offset), _text(info["relative_path"]), start, length
    )


def _state(loaded: Any, kind: type[_StandIn]) -> Any:
    if type(loaded) is not kind:
        raise TypeError(loaded)
    return loaded.state


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _sizes(values: Any) -> tuple[int, ...]:
    if type(values) is not tuple or not all(type(value) is int for value in values):
        raise TypeError(values)
    return values


class _Unpickler(pickle.Unpickler):
    """Takes descriptions of tensors alone: as stand-ins, where there are some, or as torch's own objects."""

    def __init__(self, data: io.BytesIO, stand_ins: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(data)
        self._stand_ins = stand_ins

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STAND_INS:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which describes no tensor")
        return self._stand_ins[module, name] if self._stand_ins else super().find_class(module, name)
