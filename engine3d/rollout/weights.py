"""What a directory of safetensors holds, so that an update that does not fit is refused before an engine is touched."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from engine3d.errors import UserError

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(directory: Path) -> Shapes:
    """The shape of every tensor in a directory's *.safetensors, from their headers. Raises UserError naming a file."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UserError(f"{directory} holds no *.safetensors")
    shapes: Shapes = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} is not a whole safetensors file: {error}") from error
    return shapes


def check_weights_fit(directory: Path, expected: Shapes) -> None:
    """Check that a directory holds tensors of the expected names and shapes, all of them and no others.

    SGLang's own loader keeps the old value of a tensor that is missing, and says nothing.
    """
    found = tensor_shapes(directory)
    for name, shape in expected.items():
        if name not in found:
            raise UserError(f"{directory} lacks the tensor {name} of shape {list(shape)}")
        if found[name] != shape:
            raise UserError(f"{directory}: tensor {name} has shape {list(found[name])}; the engine has {list(shape)}")
    if extra := found.keys() - expected.keys():
        raise UserError(f"{directory} holds the tensor {min(extra)}, which the engine's model has not")
