"""Tensors in the files of a model that are not trained: exports have them as they are.

They are layers for multi-token prediction, which the files number after the model's own layers, or have names of their
own for (`Family.multi_token`), and the vision tower next to a language model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from engine3d.errors import UserError
from engine3d.models.blocks import EMBEDDING, OUTPUT_LAYER
from engine3d.models.family import ModelSpec
from engine3d.models.files.safetensors_files import DTYPES, FP8, TensorFiles
from engine3d.models.precision import Precision, scale_name
from engine3d.models.quantisation.stored import fp8_tensors
from engine3d.models.rules import Box
from engine3d.startup.lazy_imports import torch

LAYERS_KEY = "num_nextn_predict_layers"
"""Key of a config for their number."""
DRAFTING_FAMILIES = ("deepseek_v3", "glm4_moe")
"""Families whose layer SGLang was seen to draft with, and that is trained."""
VISION_TOWER = "model.visual."
"""Beginning of the names of a vision tower's tensors."""
_COPIES = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": OUTPUT_LAYER}
"""Tensors that published files repeat within the layer."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def may_have_multi_token_layers(spec: ModelSpec) -> bool:
    """True if the files of the model may have layers for multi-token prediction. One with a value head has none."""
    return not spec.value_head and (spec.family.multi_token is not None or bool(spec.hf_config.get(LAYERS_KEY)))


def is_multi_token(spec: ModelSpec, tensor: str) -> bool:
    """True of a tensor of such a layer."""
    if spec.family.multi_token is not None:
        return tensor.startswith(spec.family.multi_token)
    layer = _LAYER.match(tensor)
    return layer is not None and int(layer[1]) >= spec.sizes.layers


def has_vision_tower(spec: ModelSpec) -> bool:
    """True if the files of the model have a vision tower."""
    return spec.family.text is not None


def is_kept(spec: ModelSpec, tensor: str) -> bool:
    """True of a tensor that is not trained and that exports have."""
    return is_multi_token(spec, tensor) or (has_vision_tower(spec) and tensor.startswith(VISION_TOWER))


def check_drafting_layer(spec: ModelSpec) -> None:
    """Check that a model has one layer for multi-token prediction, complete in its files, numbered after its own.

    It has the tensors of a model's last layer, and those with which it takes a token and the hidden state before it.
    All are in 16 bits, or 32.

    Raises:
        UserError: names the key of the config, or the tensor.
    """
    count, layers = spec.hf_config.get(LAYERS_KEY), spec.sizes.layers
    if count != 1:
        raise UserError(f"model: {LAYERS_KEY}={count}, expected 1: a layer for multi-token prediction drafts")
    if spec.directory is None:
        raise UserError("model.create makes no layer for multi-token prediction, which drafts; expected model.path")
    like, drafting = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    hidden = spec.sizes.hidden
    expected = {
        name.replace(like, drafting, 1): tensor.shape
        for name, tensor in spec.hf_tensors.items()
        if name.startswith(like)
    }
    expected |= {f"{drafting}{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
    expected[f"{drafting}eh_proj.weight"] = hidden, 2 * hidden
    with TensorFiles(spec.directory) as files:
        if in_fp8 := fp8_tensors(files.tensors):
            raise UserError(
                f"model: {spec.directory} has {min(in_fp8)} in fp8, and the layer that drafts is read in 16 bits; "
                "expected 0, or files in bfloat16"
            )
        for name, shape in expected.items():
            if name not in files.tensors:
                raise UserError(f"model: {spec.directory} has no tensor {name}, with which drafts are made")
            files.check(name, shape)


class KeptTensors:
    """Tensors that are not trained, as an export writes them.

    Those in 16 or 32 bits keep their dtypes and bits. Those in fp8 do too in an export in fp8, and are dequantised in
    another. Of a trained layer the files may repeat the model's embedding and output layer: an export repeats its own.

    Args:
        spec: of the model.
        directory: with the model's files; None for none.
        dtype: of the export.
        precision: of the export.
        multi_token: False to leave out layers for multi-token prediction.

    Attributes:
        tensors: shape and dtype in the export, by name.
        copies: tensors of a trained layer that repeat one of the model, and the name of that.

    Raises:
        UserError: a tensor is of a dtype that cannot be read; or the export is in fp8, and the tensors are not.
    """

    def __init__(
        self,
        spec: ModelSpec,
        directory: Path | None,
        dtype: torch.dtype,
        precision: Precision | None = None,
        *,
        multi_token: bool = True,
    ) -> None:
        self._directory, self._as_stored = directory, precision is not None
        self.tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self.copies: dict[str, str] = {}
        tower = has_vision_tower(spec)
        if tower and precision is not None:
            raise UserError(
                f"export: precision={precision} was not tried with {spec.family.architecture}; expected none"
            )
        if directory is None or not (tower or (multi_token and may_have_multi_token_layers(spec))):
            return
        with TensorFiles(directory) as files:
            stored = {
                name: tensor
                for name, tensor in files.tensors.items()
                if is_kept(spec, name)
                and name not in spec.hf_tensors
                and (multi_token or not is_multi_token(spec, name))
            }
            for name, of_model in _copies(spec).items() if spec.mtp else ():
                if stored.pop(name, None) is not None:
                    self.copies[name] = of_model
                    self.tensors[name] = spec.hf_shape(of_model), dtype
            in_fp8 = {name for name, tensor in stored.items() if tensor.dtype == FP8}
            if stored and self._as_stored and not in_fp8:
                raise UserError(
                    f"export: precision={precision} with layers for multi-token prediction in {directory} that are not "
                    "in fp8 was not tried; expected --no-multi-token, which leaves them out"
                )
            scales = set(map(scale_name, in_fp8))
            for name, tensor in stored.items():
                if name in in_fp8 and not self._as_stored:
                    files.check(name, tensor.shape)
                    self.tensors[name] = tensor.shape, dtype
                elif name not in scales or self._as_stored:
                    if tensor.dtype not in (*DTYPES, FP8):
                        files.check(name, tensor.shape)
                    self.tensors[name] = tensor.shape, _torch_dtype(tensor.dtype)

    def with_copies(self, name: str, box: Box, values: torch.Tensor) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """Values of the model's tensor, and the same of each tensor that repeats it."""
        yield name, box, values
        for copy, of_model in self.copies.items():
            if of_model == name:
                yield copy, box, values

    def read(self) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """Read one tensor after another, copies aside: name, complete box and values."""
        stored = {name: shape for name, (shape, _) in self.tensors.items() if name not in self.copies}
        if not stored:
            return
        assert self._directory is not None
        with TensorFiles(self._directory) as files:
            for name, shape in stored.items():
                box = tuple((0, size) for size in shape)
                yield name, box, files.stored(name, box) if self._as_stored else files.read(name, box)


def _copies(spec: ModelSpec) -> dict[str, str]:
    return {
        f"model.layers.{spec.sizes.layers}.{name}": of_model if of_model in spec.hf_tensors else EMBEDDING
        for name, of_model in _COPIES.items()
    }


def _torch_dtype(name: str) -> torch.dtype:
    dtypes = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    return (dtypes | {FP8: torch.float8_e4m3fn})[name]
