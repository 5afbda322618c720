"""Adapters of a model as rules: they follow from the rules of the linear layers, with the names of PEFT's files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import ClassVar

from engine3d.errors import UserError
from engine3d.models.family import ModelSpec
from engine3d.models.lora.config import LoraConfig
from engine3d.models.rules import (
    ColumnParallel,
    Cut,
    GateUp,
    HFTensor,
    ModelRules,
    QueryGroups,
    Replicated,
    RowParallel,
    Rule,
    Segment,
    Shard,
    Vocabulary,
)

A, B = "lora_A", "lora_B"


@dataclass(frozen=True)
class AdapterSpec(ModelSpec):
    """The adapters of a model, as a specification of their own: rules, tensors and parameters are the adapters'.

    Tensors have the names of PEFT's files without the prefix `base_model.model.`.

    Args:
        lora: their settings.
    """

    lora: LoraConfig = field(default_factory=LoraConfig)
    adapters: ClassVar[bool] = True

    @classmethod
    def of(cls, spec: ModelSpec, lora: LoraConfig) -> AdapterSpec:
        """Make the specification of a model's adapters.

        Raises:
            UserError: a target matches no linear layer, or the rank exceeds a side of a matrix.
        """
        _check(spec, lora)
        return cls(**{entry.name: getattr(spec, entry.name) for entry in fields(spec)}, lora=lora)

    @cached_property
    def rules(self) -> ModelRules:
        """The adapters' rules, layer by layer. Pipeline stages are the model's."""
        base = super().rules
        layers = tuple(
            tuple(adapter for rule in layer for adapter in _adapter_rules(rule, self.lora)) for layer in base.layers
        )
        return replace(base, first=(), layers=layers, last=(), mtp=())


def linear_layers(rules: ModelRules) -> Iterator[tuple[Rule, HFTensor]]:
    """Linear layers that adapters may have, each with its rule: those of attention, MLP and experts."""
    for layer in rules.layers:
        for rule in layer:
            if is_linear(rule):
                yield from ((rule, tensor) for tensor in rule.cut.tensors)


def is_linear(rule: Rule) -> bool:
    """True if the rule is of linear layers that adapters may have."""
    cut = rule.cut
    matrices = all(len(tensor.shape) == 2 and not tensor.stacked for tensor in cut.tensors)
    return matrices and isinstance(cut, ColumnParallel | GateUp | QueryGroups) and not isinstance(cut, Vocabulary)


def module_name(tensor: str) -> str:
    """Name of the linear layer of a weight, or of an adapter's tensor."""
    return tensor.removesuffix(".weight").removesuffix(f".{A}").removesuffix(f".{B}")


def weight_name(parameter: str) -> str:
    """Name of the weight that has a parameter as its A or B, of one of a model's parameters."""
    layer, _, last = parameter.rpartition(".")
    return f"{layer}.weight{last[len(A) :]}"


def target_names(spec: ModelSpec) -> tuple[str, ...]:
    """Names of the linear layers of a model that may have adapters."""
    return tuple(dict.fromkeys(_last_name(tensor) for _, tensor in linear_layers(spec.rules)))


def _last_name(tensor: HFTensor) -> str:
    return module_name(tensor.name).rpartition(".")[2]


def _check(spec: ModelSpec, lora: LoraConfig) -> None:
    names = target_names(spec)
    targets = names if lora.targets is None else lora.targets
    for target in targets:
        if target not in names:
            raise UserError(
                f"lora.targets: {target} matches no linear layer of {spec.family.architecture} that may have adapters; "
                f"expected names of {', '.join(names)}"
            )
    for _, tensor in linear_layers(spec.rules):
        if (target := _last_name(tensor)) in targets and lora.rank > min(tensor.shape):
            raise UserError(
                f"lora.rank={lora.rank}: expected at most {min(tensor.shape)}, the smaller side of {target} "
                f"({tensor.shape[0]} x {tensor.shape[1]})"
            )


def _adapter_rules(rule: Rule, lora: LoraConfig) -> Iterator[Rule]:
    if not is_linear(rule):
        return
    targeted = frozenset(
        tensor.name for tensor in rule.cut.tensors if lora.targets is None or _last_name(tensor) in lora.targets
    )
    if not targeted:
        return
    cuts = _cuts(rule.cut, targeted, lora.rank)
    other_cuts: tuple[Cut | None, Cut | None] = (None, None)
    if rule.transformer_engine_cut is not None:
        other_cuts = _cuts(rule.transformer_engine_cut, targeted, lora.rank)
    for name, cut, other in zip((A, B), cuts, other_cuts, strict=True):
        other_name = None if rule.transformer_engine is None else _renamed(rule.transformer_engine, name)
        yield Rule(_renamed(rule.name, name), cut, other_name, other)


def _renamed(parameter: str, name: str) -> str:
    """The name of an adapter's parameter next to a weight."""
    module, _, expert = parameter.rpartition(".weight")
    return f"{module}.{name}{expert}"


def _cuts(cut: Cut, targeted: frozenset[str], rank: int) -> tuple[Cut, Cut]:
    """The cuts of A and B: A is complete where outputs are cut, B where inputs are."""

    def first(tensor: HFTensor) -> HFTensor:
        return HFTensor(f"{module_name(tensor.name)}.{A}.weight", (rank, tensor.shape[1]))

    def second(tensor: HFTensor) -> HFTensor:
        return HFTensor(f"{module_name(tensor.name)}.{B}.weight", (tensor.shape[0], rank), "zeros")

    if isinstance(cut, RowParallel):
        return RowParallel(first(cut.tensor)), Replicated(second(cut.tensor))
    kept = tuple(tensor for tensor in cut.tensors if tensor.name in targeted)
    rows = _with_tensors(cut, second)
    return Stacked(tuple(map(first, kept))), _Targeted(rows, tuple(map(second, kept)))


def _with_tensors(cut: Cut, change: Callable[[HFTensor], HFTensor]) -> Cut:
    tensors = {entry.name: getattr(cut, entry.name) for entry in fields(cut)}  # type: ignore[arg-type]
    changed = {name: change(value) for name, value in tensors.items() if isinstance(value, HFTensor)}
    return replace(cut, **changed)  # type: ignore[type-var]


@dataclass(frozen=True, slots=True)
class Stacked(Cut):
    """Tensors one after another, complete on every rank."""

    stacked: tuple[HFTensor, ...]
    replicated: ClassVar[bool] = True

    @property
    def tensors(self) -> tuple[HFTensor, ...]:
        return self.stacked

    def segments(self, shard: Shard) -> Iterator[Segment]:
        start = 0
        for tensor in self.stacked:
            yield Segment(tensor, 0, start, tensor.shape[0])
            start += tensor.shape[0]

    def local_length(self, count: int) -> int:
        return sum(tensor.shape[0] for tensor in self.stacked)


@dataclass(frozen=True, slots=True)
class _Targeted(Cut):
    """Some tensors of a cut. Rows of the others stay 0."""

    cut: Cut
    targeted: tuple[HFTensor, ...]

    @property
    def replicated(self) -> bool:  # type: ignore[override]
        return self.cut.replicated

    @property
    def tensors(self) -> tuple[HFTensor, ...]:
        return self.targeted

    def segments(self, shard: Shard) -> Iterator[Segment]:
        return (segment for segment in self.cut.segments(shard) if segment.tensor in self.targeted)

    def local_length(self, count: int) -> int:
        return self.cut.local_length(count)
