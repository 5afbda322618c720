"""Precision contract of a model in fp8: which tensors are quantised, in which blocks, and with which scales.

The format is DeepSeek's. A quantised tensor is float8_e4m3fn in blocks of 128 x 128 from its first element on, the last
ones smaller. The tensor NAME_scale_inv next to it has one float32 a block, by which the block's values are multiplied.

Weight rules say which tensors are quantised (`HFTensor.fp8`): the matrices of attention and of all MLPs. Routers,
norms, biases, embedding and output layer keep their precision, and so does latent attention's kv_b_proj, which SGLang
would quantise once more by its own rule. `Fp8Settings` leave out first and last layers and shared experts too: a model
specification with them applied has `HFTensor.fp8` false there, and everyone asks that. Nothing depends on a layout, so
that one export serves every engine.

Scales are powers of two. Four significant bits times a power of two are exact in bfloat16: what is trained after a
dequantisation is what was published, and quantising it again changes no value.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models.family import ModelSpec
from engine3d.models.rules import Box, Cut, ExpertNumbering, HFTensor, Rule, Segment, Shard, TensorSlice, module_of
from engine3d.settings import Settings
from engine3d.startup.lazy_imports import torch

Precision = Literal["fp8"]
"""Precision of quantised weights."""


def _refuse_mxfp8(precision: object) -> object:
    if precision == "mxfp8":
        raise ValueError(
            "'mxfp8' has a scale for 32 values of a row, and was not tried: trainer and engines have one for a block "
            "of 128 x 128 here, on GPUs of compute capability 9 alone; expected 'fp8' there, or null"
        )
    return precision


SetPrecision = Annotated[Precision | None, BeforeValidator(_refuse_mxfp8)]
"""Type of a setting for it."""

BLOCK = 128
"""Rows and columns of a block."""
GEMM_TOKENS = 16
"""Number of tokens of which Transformer Engine's GEMMs of quantised operands need a multiple."""
LARGEST = 448.0
"""Largest value of float8_e4m3fn."""
FP8_DTYPE = "float8_e4m3fn"
_ABSORBED = ".kv_b_proj.weight"
"""End of the name of a matrix that SGLang reads in fp8 and dequantises, and that is not quantised here."""
_SMALLEST_PEAK = 1e-4
"""A block without a larger value is scaled as if it had this one, as in DeepGEMM: the scale of zeros is a number."""
_BAND_ELEMENTS = 1 << 22
"""Elements that are quantised at a time, in float32."""

QUANTISATION_CONFIG: Mapping[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [BLOCK, BLOCK],
    "activation_scheme": "dynamic",
}
"""The `quantization_config` of a config.json by which SGLang and transformers read the format."""


class Fp8Settings(Settings):
    """Matrices that stay in `dtype` where a model is in fp8: in training, engines and exports alike."""

    num_layers_at_start_in_bf16: int = Field(
        0, ge=0, description="first layers whose matrices stay in dtype where the model is in fp8"
    )
    num_layers_at_end_in_bf16: int = Field(
        0, ge=0, description="last layers whose matrices stay in dtype where the model is in fp8"
    )
    shared_experts_in_bf16: bool = Field(False, description="leave shared experts in dtype where the model is in fp8")

    @property
    def given(self) -> dict[str, Any]:
        """Settings that leave something out."""
        return {name: value for name, value in self.model_dump().items() if value}

    def applied(self, spec: ModelSpec) -> ModelSpec:
        """The model with these matrices left in its dtype.

        Raises:
            UserError: names the setting. The model has too few layers, or no shared experts.
        """
        layers, first = spec.sizes.layers, self.num_layers_at_start_in_bf16
        last = layers - self.num_layers_at_end_in_bf16
        if first >= last:
            raise UserError(
                f"fp8.num_layers_at_start_in_bf16={first} and num_layers_at_end_in_bf16={layers - last}: expected "
                f"fewer than num_hidden_layers={layers} together, so that a layer is in fp8"
            )
        if self.shared_experts_in_bf16 and not spec.sizes.shared_ffn:
            raise UserError(
                f"fp8.shared_experts_in_bf16=true: {spec.family.architecture} has no shared experts; expected false"
            )
        modules = {
            module_of(tensor.name).format(layer=number)
            for number, rules in enumerate(replace(spec, unquantised=frozenset()).rules.layers if self.given else ())
            for rule in rules
            for tensor in rule.cut.tensors
            if tensor.fp8 and (not first <= number < last or (self.shared_experts_in_bf16 and is_shared(rule)))
        }
        return spec if modules == spec.unquantised else replace(spec, unquantised=frozenset(modules))


NOTHING_LEFT_OUT = Fp8Settings()


def is_shared(rule: Rule) -> bool:
    """True of a parameter of shared experts."""
    return ".shared_experts." in rule.name


def is_quantised_layer(spec: ModelSpec, number: int) -> bool:
    """True if matrices of a layer are in fp8 where the model is."""
    return any(tensor.fp8 for rule in spec.rules.layers[number] for tensor in rule.cut.tensors)


def quantises_shared_experts(spec: ModelSpec) -> bool:
    """True if shared experts of the model in fp8 are, or there are none."""
    shared = [rule for rules in spec.rules.layers for rule in rules if is_shared(rule)]
    return not shared or any(tensor.fp8 for rule in shared for tensor in rule.cut.tensors)


def scale_name(tensor: str) -> str:
    """Name of the scales of a quantised tensor."""
    return f"{tensor}_scale_inv"


def scale_box(box: Box) -> Box:
    """The blocks that a box of a quantised tensor touches, as a box of its scales."""
    return tuple((start // BLOCK, -(-stop // BLOCK)) for start, stop in box)


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a tensor: its blocks along each dimension."""
    return tuple(-(-size // BLOCK) for size in shape)


def quantisation_config(spec: ModelSpec, also: Collection[str] = ()) -> dict[str, Any]:
    """The `quantization_config` of a model in fp8, with the modules of the matrices that keep their precision.

    Args:
        spec: the model.
        also: names of tensors that are in fp8 besides those of the contract, as files may have `kv_b_proj`.
    """
    matrices = (tensor for tensor in spec.hf_tensors.values() if len(tensor.shape) == 2)
    kept = dict.fromkeys(module_of(tensor.name) for tensor in matrices if not (tensor.fp8 or tensor.name in also))
    return {**QUANTISATION_CONFIG, "modules_to_not_convert": list(kept)}


def quantised_as(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    """The model, quantised as its `quantization_config` says."""
    return replace(spec, unquantised=frozenset(config["modules_to_not_convert"]))


def quantised_as_stored(spec: ModelSpec, in_fp8: Collection[str]) -> ModelSpec:
    """The model, quantised as files are that engines load.

    Args:
        spec: the model.
        in_fp8: names of the tensors of the files in fp8.

    Raises:
        UserError: names a tensor of which engines load no scales, or two that they join and of which one is in fp8.
    """
    spec = replace(spec, unquantised=frozenset())
    joined: dict[str, list[str]] = {}
    for name, tensor in spec.hf_tensors.items():
        if name in in_fp8 and not tensor.fp8 and not name.endswith(_ABSORBED):
            raise UserError(f"{name} is in fp8, and engines load no scales of it; expected 16 bits")
    for layer, rules in enumerate(spec.rules.layers):
        for rule in rules:
            tensors = [tensor for tensor in rule.cut.tensors if tensor.fp8]
            for expert in range(spec.sizes.experts if rule.per_expert else 1):
                names = [tensor.at(layer, expert).name for tensor in tensors]
                if names:
                    # SGLang computes both of these as `fused_qkv_a_proj_with_mqa`.
                    module = module_of(names[0]).replace(".q_a_proj", ".kv_a_proj_with_mqa")
                    joined.setdefault(module, []).extend(names)
    kept: set[str] = set()
    for names in joined.values():
        others = [name for name in names if name not in in_fp8]
        if others and len(others) < len(names):
            quantised = next(name for name in names if name in in_fp8)
            raise UserError(f"{quantised} is in fp8 and {others[0]} is not, which engines join; expected both, or none")
        kept.update(map(module_of, others))
    return replace(spec, unquantised=frozenset(kept))


def quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix, or rows and columns of one that begin with a block.

    The scale of a block is 2^ceil(log2(peak / 448)), with its largest absolute value as the peak, and at least 1e-4.
    Source: DeepGEMM's `per_block_cast_to_fp8`, of which SGLang has a copy (sglang.srt.layers.quantization.fp8_utils).

    Args:
        values: [rows, columns], of any floating-point dtype.

    Returns:
        The values in float8_e4m3fn, [rows, columns], and float32 scales, [ceil(rows / 128), ceil(columns / 128)].
    """
    rows, columns = values.shape
    quantised = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=values.device)
    scales = torch.empty(scale_shape((rows, columns)), dtype=torch.float32, device=values.device)
    step = max(1, _BAND_ELEMENTS // (BLOCK * max(1, columns))) * BLOCK
    for first in range(0, rows, step):
        band = values[first : first + step].detach().float()
        blocks = torch.nn.functional.pad(band, (0, -columns % BLOCK, 0, -len(band) % BLOCK))
        blocks = blocks.view(-1, BLOCK, blocks.shape[1] // BLOCK, BLOCK)
        scale = _power_of_two(blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(_SMALLEST_PEAK) / LARGEST)
        scaled = (blocks * (1.0 / scale)).view(len(blocks) * BLOCK, -1)
        quantised[first : first + len(band)] = scaled[: len(band), :columns].to(torch.float8_e4m3fn)
        scales[first // BLOCK : first // BLOCK + len(blocks)] = scale.view(len(blocks), -1)
    return quantised, scales


def rounded(values: torch.Tensor) -> torch.Tensor:
    """Quantise a matrix in blocks, as `quantise` does, and dequantise it: exact in its dtype.

    Args:
        values: [rows, columns], of any floating-point dtype.
    """
    rows, columns = values.shape
    return dequantise(*quantise(values), ((0, rows), (0, columns))).to(values.dtype)


def rounded_rows(values: torch.Tensor) -> torch.Tensor:
    """Quantise the last dimension in groups of 128 elements with a scale for each, and dequantise it.

    The scale of a group is 2^ceil(log2(peak / 448)). Source: Transformer Engine's Float8BlockScaling, for activations.

    Args:
        values: [..., columns], of any floating-point dtype. Groups of its leading dimensions are independent.
    """
    columns = values.shape[-1]
    groups = torch.nn.functional.pad(values.detach().float(), (0, -columns % BLOCK)).unflatten(-1, (-1, BLOCK))
    scale = _power_of_two(groups.abs().amax(dim=-1, keepdim=True) / LARGEST)
    quantised = (groups * (1.0 / scale)).to(torch.float8_e4m3fn)
    return (quantised.float() * scale).flatten(-2)[..., :columns].to(values.dtype)


def quantiser(matrices: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
    """Return a function that quantises the current elements of matrices: on a GPU by one kernel, with the same bits.

    Args:
        matrices: elements, as `quantise` takes them, and the memory of their values and scales, as it returns them, all
            on one device. Columns follow one another in memory, and so do rows of values and of scales.
    """
    if matrices and matrices[0][0].is_cuda:
        from engine3d.models.quantisation.kernels import quantise_bands

        return quantise_bands(matrices, block=BLOCK, largest=LARGEST, smallest_peak=_SMALLEST_PEAK)

    def run() -> None:
        for elements, values, scales in matrices:
            quantised = quantise(elements)
            values.copy_(quantised[0])
            scales.copy_(quantised[1])

    return run


def dequantise(values: torch.Tensor, scales: torch.Tensor, box: Box) -> torch.Tensor:
    """Dequantise a box of a quantised matrix: each value times the scale of its block.

    Args:
        values: of the box, [rows, columns].
        scales: of `scale_box(box)`, of any floating-point dtype and with any values.
        box: its position in the matrix.

    Returns:
        float32, [rows, columns].
    """
    scales = scales.float()
    for dimension, (start, stop) in enumerate(box):
        blocks = torch.arange(start, stop, device=scales.device) // BLOCK - start // BLOCK
        scales = scales.index_select(dimension, blocks)
    return values.float() * scales


def _power_of_two(values: torch.Tensor) -> torch.Tensor:
    """The smallest powers of two that are at least as large as positive float32 values, by their bits."""
    bits = values.view(torch.int32)
    exponents = (bits >> 23) + (bits & 0x7FFFFF != 0).to(torch.int32)
    return (exponents.clamp(1, 254) << 23).view(torch.float32)


def served_shapes(spec: ModelSpec, precision: Precision | None) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of `served_tensors`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in spec.hf_tensors.items():
        shapes[name] = tensor.shape
        if precision is not None and tensor.fp8:
            shapes[scale_name(name)] = scale_shape(tensor.shape)
    return shapes


def served_tensors(
    spec: ModelSpec, dtype: torch.dtype, precision: Precision | None
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor of a model, as files and engines have them: scales follow what they scale.

    Args:
        spec: the model.
        dtype: of tensors that are neither quantised nor buffers.
        precision: of the model; None quantises nothing.
    """
    dtypes: dict[str, torch.dtype] = {}
    for name, tensor in spec.hf_tensors.items():
        if precision is not None and tensor.fp8:
            dtypes |= {name: torch.float8_e4m3fn, scale_name(name): torch.float32}
        else:
            dtypes[name] = torch.float32 if tensor.buffer else dtype
    return {name: (shape, dtypes[name]) for name, shape in served_shapes(spec, precision).items()}


def stored_tensors(
    tensor: HFTensor, box: Box, values: torch.Tensor, dtype: torch.dtype, precision: Precision | None
) -> Iterator[tuple[str, Box, torch.Tensor]]:
    """A box of a tensor in the form that files and engines have: itself, or its quantised values and their scales.

    Args:
        tensor: of the HuggingFace model.
        box: of it; of a quantised tensor one that passes `check_shards`.
        values: of the box.
        dtype: of tensors that are not quantised. It is also the one that is quantised, whatever `values` have.
        precision: of the model; None quantises nothing.

    Yields:
        Names, boxes and values.
    """
    if precision is None or not tensor.fp8:
        yield tensor.name, box, values
        return
    quantised, scales = quantise(values.to(dtype))
    yield tensor.name, box, quantised
    yield scale_name(tensor.name), scale_box(box), scales


def check_experts(spec: ModelSpec) -> None:
    """Refuse models whose experts have no format in fp8, so that most of the model would silently stay in 16 bits.

    Raises:
        UserError: names the model.
    """
    if spec.sizes.expert_biases:
        raise UserError(
            f"fp8: the experts of {spec.family.architecture} are tensors of all experts, of which the format has no "
            "blocks; expected another model, or no fp8"
        )


def check_shards(spec: ModelSpec, layout: Layout, *, transformer_engine: bool) -> None:
    """Refuse a layout whose ranks would each have a part of a block, since nobody could compute its scale.

    Args:
        spec: the model.
        layout: of the trainer. It must pass the model's `check_layout`.
        transformer_engine: True if the model is built from Transformer Engine's layers.

    Raises:
        UserError: names the tensor, its rows or columns on a rank, and the sizes that fit; or see `check_experts`.
    """
    check_experts(spec)
    for layer, rules in enumerate(spec.rules.layers):
        for rule in rules:
            key, count = ("etp", layout.etp) if rule.per_expert else ("tp", layout.tp)
            cut = rule.local_cut(transformer_engine)
            if cut.replicated or not cut.tensors[0].fp8 or (divided := _divided_block(cut, count)) is None:
                continue
            fit = [size for size in range(1, count) if count % size == 0 and _divided_block(cut, size) is None]
            tensor, (start, stop) = divided
            raise UserError(
                f"fp8: layout {key}={count} cuts {tensor.at(layer, 0).name} within a block of {BLOCK} x {BLOCK} (a "
                f"rank has {'columns' if cut.axis else 'rows'} {start} to {stop}), expected {key}="
                f"{' or '.join(map(str, fit))}"
            )


def check_trained_blocks(spec: ModelSpec, layout: Layout, *, transformer_engine: bool) -> None:
    """Refuse models and layouts whose parameters have other blocks than the tensors that they are made of.

    Training quantises parameters as they are on a rank, and engines get the blocks of tensors: with a head of 64 rows
    a block would have rows of keys and of values. Transformer Engine also quantises kv_b_proj of latent attention.

    Args:
        spec: the model.
        layout: of the trainer.
        transformer_engine: True if the model is built from Transformer Engine's layers.

    Raises:
        UserError: names the tensor and its rows or columns; or see `check_experts`.
    """
    check_experts(spec)
    if spec.sizes.latent is not None:
        raise UserError(
            f"precision=fp8: {spec.family.architecture} has latent attention, with which training in fp8 was not "
            "tried; expected null"
        )
    if spec.sizes.delta is not None:
        raise UserError(
            f"precision=fp8: {spec.family.architecture} has gated delta nets, with which training in fp8 was not "
            "tried; expected null"
        )
    for layer, rules in enumerate(spec.rules.layers):
        for rule in rules:
            count = layout.etp if rule.per_expert else layout.tp
            cut = rule.local_cut(transformer_engine)
            if not cut.tensors[0].fp8 or (segment := _moved_block(cut, count)) is None:
                continue
            what = "columns" if cut.axis else "rows"
            first = segment.hf_start
            raise UserError(
                f"precision=fp8: {what} {first} to {first + segment.length} of {segment.tensor.at(layer, 0).name} are "
                f"{what} {segment.local_start} to {segment.local_start + segment.length} of a parameter, expected "
                f"multiples of {BLOCK}: by other sizes of heads and MLPs, or a smaller {_key(rule.per_expert)}"
            )


def _key(per_expert: bool) -> str:
    return "etp" if per_expert else "tp"


def _moved_block(cut: Cut, count: int) -> Segment | None:
    """A segment that begins or ends within a block of the tensor or of the parameter; None if no rank has one."""
    length = cut.local_length(count)
    for rank in range(1 if cut.replicated else count):
        for segment in cut.segments(Shard(rank, count, ExpertNumbering(1))):
            stop = segment.hf_start + segment.length
            ends = segment.local_start + segment.length == length and stop == segment.tensor.shape[cut.axis]
            if segment.hf_start % BLOCK or segment.local_start % BLOCK or (segment.length % BLOCK and not ends):
                return segment
    return None


def _divided_block(cut: Cut, count: int) -> tuple[HFTensor, tuple[int, int]] | None:
    """A tensor and its range on a rank that begins or ends within a block; None if no rank has one."""
    for rank in range(count):
        bounds: dict[HFTensor, tuple[int, int]] = {}
        for segment in cut.segments(Shard(rank, count, ExpertNumbering(1))):
            stop = segment.hf_start + segment.length
            first, last = bounds.get(segment.tensor, (segment.hf_start, stop))
            bounds[segment.tensor] = min(first, segment.hf_start), max(last, stop)
        for tensor, (first, last) in bounds.items():
            if first % BLOCK or (last % BLOCK and last != tensor.shape[cut.axis]):
                return tensor, (first, last)
    return None


def joined_slices(slices: Iterable[TensorSlice]) -> list[tuple[str, Box, tuple[TensorSlice, ...]]]:
    """The boxes of HuggingFace tensors that the slices of a parameter make up, each with its slices.

    Query groups give a parameter several slices of a tensor, which follow one another there. Slices that do not, such
    as those of sections, are boxes of their own.
    """
    boxes: list[tuple[str, Box, tuple[TensorSlice, ...]]] = []
    for tensor_slice in sorted(slices, key=lambda tensor_slice: (tensor_slice.hf_name, tensor_slice.hf_box)):
        (first, last), *rest = tensor_slice.hf_box
        if boxes and boxes[-1][0] == tensor_slice.hf_name:
            name, ((start, stop), *others), joined = boxes[-1]
            if stop == first and others == rest:
                boxes[-1] = name, ((start, last), *rest), (*joined, tensor_slice)
                continue
        boxes.append((tensor_slice.hf_name, tensor_slice.hf_box, (tensor_slice,)))
    return boxes


def matrices_of(
    parameter: torch.Tensor, box: Box, slices: Sequence[TensorSlice], values: torch.Tensor, scales: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None:
    """Views of a parameter, and the memory of their values and scales, that `quantiser` takes for a box of a tensor.

    Args:
        parameter: that has the slices.
        box: of the tensor, which the slices make up.
        slices: of one tensor (`joined_slices`).
        values, scales: contiguous memory of the box.

    Returns:
        None if a slice begins or ends within a block: the box must be joined first.
    """
    matrices = []
    (first, stop), columns = box
    for tensor_slice in slices:
        (begin, end), its_columns = tensor_slice.hf_box
        if its_columns != columns or (begin - first) % BLOCK or ((end - first) % BLOCK and end != stop):
            return None
        rows, blocks = slice(begin - first, end - first), slice((begin - first) // BLOCK, -(-(end - first) // BLOCK))
        matrices.append((parameter[_indices(tensor_slice.local_box)], values[rows], scales[blocks]))
    return matrices


def joined_values(parameter: torch.Tensor, box: Box, slices: Sequence[TensorSlice]) -> torch.Tensor:
    """Values of the slices of one tensor as the box that they make up: of one slice a view of the parameter."""
    if len(slices) == 1:
        return slices[0].to_hf(parameter[_indices(slices[0].local_box)])
    shape = [stop - start for start, stop in box]
    values = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
    for tensor_slice in slices:
        within = tuple(
            (start - first, stop - first) for (start, stop), (first, _) in zip(tensor_slice.hf_box, box, strict=True)
        )
        values[_indices(within)] = tensor_slice.to_hf(parameter[_indices(tensor_slice.local_box)])
    return values


def _indices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)
