"""Comparison of two checkpoints of one model, of any layouts: tensor by tensor, in bounded memory."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine3d.checkpoint.digests.chunk_checksums import ChunkChecksums
from engine3d.checkpoint.manifest import read_complete, verify_hint
from engine3d.checkpoint.metadata import StoredChunk, read_metadata
from engine3d.errors import UserError

_WEIGHT = "weight/"


class SavedTensors:
    """Tensors of a role in a checkpoint, each assembled from the chunks that its ranks wrote.

    Args:
        checkpoint: the directory of one step.
        role: one of those that it holds.

    Raises:
        UserError: the checkpoint is incomplete, or has no such role.
    """

    def __init__(self, checkpoint: Path, role: str) -> None:
        manifest = read_complete(checkpoint)
        if role not in manifest.roles:
            raise UserError(f"checkpoint {checkpoint} has no {role}, only {', '.join(manifest.roles)}")
        self._checkpoint, self._directory = checkpoint, checkpoint / role
        self._checksums = ChunkChecksums(self._directory)
        metadata = read_metadata(checkpoint, manifest, role)
        self.shapes: dict[str, tuple[int, ...]] = {
            key: tensor.shape for key, tensor in metadata.tensors.items() if "/" in key
        }
        """Of every tensor, by its key, such as "weight/lm_head.weight"."""
        self._chunks: dict[str, list[StoredChunk]] = {key: [] for key in self.shapes}
        for stored in metadata.stored:
            if stored.key in self._chunks:
                self._chunks[stored.key].append(stored)

    def read(self, key: str) -> Tensor:
        """The complete tensor, in the dtype in which it was saved.

        Raises:
            UserError: what was saved of it cannot be read, or is damaged.
        """
        tensor: Tensor | None = None
        for stored in sorted(self._chunks[key], key=lambda stored: (stored.file, stored.start)):
            values = self._read_chunk(stored)
            if tensor is None:
                tensor = torch.empty(self.shapes[key], dtype=values.dtype)
            region = tensor
            for dimension, (start, size) in enumerate(zip(stored.offset, values.shape, strict=True)):
                region = region.narrow(dimension, start, size)
            region.copy_(values)
        if tensor is None:
            raise UserError(f"checkpoint {self._checkpoint}: {self._directory.name} has no chunks of {key}")
        return tensor

    def _read_chunk(self, stored: StoredChunk) -> Tensor:
        file = stored.file
        named = f"checkpoint {self._checkpoint}: {self._directory.name}/{file}"
        try:
            with (self._directory / file).open("rb") as stream:
                stream.seek(stored.start)
                data = stream.read(stored.length)
            if self._checksums.covers(file) and (why := self._checksums.compare(file, stored.start, [data])):
                raise UserError(f"{named} {why} ({stored.key}); {verify_hint(self._checkpoint)}")
            values: Tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            return values
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"{named} cannot be read ({reason}); {verify_hint(self._checkpoint)}") from None


@dataclass(frozen=True)
class TensorsCompared:
    """Difference between the tensors of a role in two checkpoints.

    Args:
        tensors: how many were compared: weights, and the optimizer's moments where both have them.
        differing: keys of those whose bits differ.
        largest: difference of an element of a weight.
        largest_in: key of the weight that has it; none where weights do not differ.
        of_change: norm of the difference of all weights, over the norm of their difference from an earlier checkpoint;
            nan where there is none, or nothing has changed.
        of_weights: the same over the norm of the weights.
    """

    tensors: int
    differing: tuple[str, ...]
    largest: float
    largest_in: str
    of_change: float
    of_weights: float


def compare_checkpoints(one: Path, other: Path, role: str, *, before: Path | None = None) -> TensorsCompared:
    """Compare what two checkpoints hold of a role.

    Args:
        one, other: directories of one step each.
        role: that both hold.
        before: a checkpoint that both have come from.

    Raises:
        UserError: one cannot be read, or they are of different models.
    """
    left, right = SavedTensors(one, role), SavedTensors(other, role)
    if left.shapes != right.shapes:
        key = sorted(left.shapes.items() ^ right.shapes.items())[0][0]
        raise UserError(f"checkpoints {one} and {other}: their {role} differ in {key}, expected the same model")
    earlier = SavedTensors(before, role) if before is not None else None
    differing, largest, largest_in = [], 0.0, ""
    difference, change, size = 0.0, 0.0, 0.0
    for key, mine, its in _pairs(left, right):
        apart = not _same_bits(mine, its)
        differing += [key] if apart else []
        if not key.startswith(_WEIGHT):
            continue
        if earlier is not None and key in earlier.shapes:
            change += _squares(mine.double() - earlier.read(key).double())
        size += _squares(mine.double())
        if apart:
            distance = mine.double() - its.double()
            difference += _squares(distance)
            if not (most := float(distance.abs().max())) <= largest:
                largest, largest_in = most, key
    return TensorsCompared(
        len(left.shapes),
        tuple(differing),
        largest,
        largest_in,
        of_change=math.sqrt(difference / change) if change else (0.0 if not difference else math.nan),
        of_weights=math.sqrt(difference / size) if size else math.nan,
    )


def _pairs(left: SavedTensors, right: SavedTensors) -> Iterator[tuple[str, Tensor, Tensor]]:
    for key in left.shapes:
        yield key, left.read(key), right.read(key)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _squares(values: Tensor) -> float:
    return float(values.square().sum())
