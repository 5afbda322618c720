"""A HuggingFace directory with random weights, for demonstrations and measurements."""

from __future__ import annotations

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path

from engine3d.errors import UserError
from engine3d.models.family import ModelSpec
from engine3d.models.files.multi_token import has_vision_tower
from engine3d.models.files.safetensors_files import ExportFiles
from engine3d.models.files.weights import begin_export, finish_export, plan_model_export, write_index
from engine3d.models.rules import HFTensor
from engine3d.startup.lazy_imports import torch

_ROWS_BYTES = 64 << 20
_EMBEDDINGS = ".embed_tokens.weight"


def initialise_random(
    spec: ModelSpec,
    directory: str | Path,
    seed: int,
    dtype: torch.dtype,
    *,
    embedding_std: float | None = None,
    max_shard_bytes: float = 5e9,
) -> None:
    """Write config.json and safetensors files with random weights.

    Weights are normal with the config's initializer_range, norms are one, biases of linear layers zero. What a tensor
    holds depends on the seed, its name and the dtype alone. Every core makes one at a time, and has at most 64 MiB of
    it in memory.

    Args:
        spec: the model.
        directory: where to write; must not exist.
        seed: of the random numbers.
        dtype: of the written tensors.
        embedding_std: standard deviation of the table of embeddings; None for the config's initializer_range, with
            which the hidden states of all tokens become alike within a few layers, and routers send all to few experts.
        max_shard_bytes: largest file, unless a single tensor is larger.

    Raises:
        UserError: the directory exists already; `embedding_std` is of a table that is the output layer too; or as of
            `check_may_be_made`.
    """
    check_may_be_made(spec)
    if embedding_std is not None and spec.sizes.tied:
        raise UserError("embedding_std: the table is the output layer too (tie_word_embeddings); expected None")
    directory = Path(directory)
    partial = directory.with_name(f".{directory.name}.partial")
    plan = plan_model_export(spec, dtype, max_shard_bytes)
    files = ExportFiles(plan, partial)
    begin_export(directory, partial)
    files.create()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="random weights") as pool:
        made = [
            pool.submit(_write_random, files, tensor, seed, _deviation(spec, tensor, embedding_std))
            for tensor in spec.hf_tensors.values()
        ]
        for future in made:
            future.result()
    files.close()
    write_index(plan, partial)
    finish_export(spec, dtype, partial, directory)


def check_may_be_made(spec: ModelSpec) -> None:
    """Refuse a model that has more than its language model, which alone can be made.

    Raises:
        UserError: names the architecture.
    """
    if has_vision_tower(spec):
        raise UserError(
            f"{spec.config.source}: {spec.family.architecture} has a vision tower, which is not made; expected a "
            "directory with its weights (model.path)"
        )


def _deviation(spec: ModelSpec, tensor: HFTensor, embedding_std: float | None) -> float:
    if embedding_std is not None and tensor.name.endswith(_EMBEDDINGS):
        return embedding_std
    return spec.sizes.initializer_range


def _write_random(files: ExportFiles, tensor: HFTensor, seed: int, deviation: float) -> None:
    # torch's CPU generator takes 32 bits of a seed.
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(f"{seed} {tensor.name}".encode()))
    rest = tensor.shape[1:]
    step = max(1, _ROWS_BYTES // (4 * max(1, prod(rest))))
    for first in range(0, tensor.shape[0], step):
        last = min(first + step, tensor.shape[0])
        values = torch.empty((last - first, *rest), dtype=torch.float32, device="cpu")
        if tensor.init == "normal":
            values.normal_(0.0, deviation, generator=generator)
        else:
            values.fill_(1.0 if tensor.init == "ones" else 0.0)
        files.write(tensor.name, ((first, last), *((0, size) for size in rest)), values)
