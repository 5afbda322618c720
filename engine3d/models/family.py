"""Specification of a model before anything is built: its family, its sizes, its rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from engine3d.errors import UserError
from engine3d.layout import Coordinates, Layout
from engine3d.models import blocks
from engine3d.models.files.hf_config import HFConfig
from engine3d.models.rope import KINDS, Rope
from engine3d.models.rules import (
    ExpertNumbering,
    ExpertOrder,
    HFTensor,
    LocalParameter,
    ModelRules,
    Rule,
    local_parameters,
    multiplications,
    padded_vocabulary,
)
from engine3d.models.sizes import Sizes


@dataclass(frozen=True)
class Family:
    """A model family: everything about it that is not common to all decoders.

    Args:
        name: as HuggingFace's model_type has it.
        architecture: as a config's `architectures` has it.
        sizes: reads and checks a config.
        layer: the rules of one layer, by its number.
        megatron: further arguments of Megatron's TransformerConfig.
        ropes: the kinds of rotary embeddings that it may have.
        rope_base: base of their frequencies where the config has none.
        rotary_share: share of a head that turns with the position where the config says none; 1.0 allows no other. A
            function reads it from a config that says it in a way of its own, which no other key may contradict.
        published: keys of published configs, and their only value here, which SGLang needs and transformers leaves out
            of what it saves.
        flat_rope: True if SGLang reads the base of rotary embeddings and the share of a head next to `rope_parameters`,
            where files saved by transformers do not have them.
        other_names: further values of model_type of the same layers, of which transformers has no class.
        multi_token: beginning of the names of layers for multi-token prediction in files, of which the config says
            nothing; None where they are numbered after the model's own, and the config has their count.
        text: model_type of the `text_config` that has the values of a language model next to a vision tower; None where
            the config is a language model's. The tower is not trained (`multi_token`).
    """

    name: str
    architecture: str
    sizes: Callable[[HFConfig], Sizes]
    layer: Callable[[Sizes, int], tuple[Rule, ...]]
    megatron: Callable[[Sizes], dict[str, Any]] = lambda sizes: {}
    ropes: tuple[str, ...] = KINDS
    rope_base: float = 10000.0
    rotary_share: float | Callable[[HFConfig], float] = 1.0
    published: Mapping[str, Any] = field(default_factory=dict)
    flat_rope: bool = False
    other_names: tuple[str, ...] = ()
    multi_token: str | None = None
    text: str | None = None

    @property
    def model_types(self) -> tuple[str, ...]:
        """Values of model_type in a config."""
        return (self.name, *self.other_names)

    @property
    def value_architecture(self) -> str:
        """The same backbone with a scalar head."""
        return self.architecture.replace("ForCausalLM", "ForSequenceClassification")

    @property
    def biased_value_architecture(self) -> str:
        """The same backbone with a scalar head that has a bias."""
        return self.architecture.replace("ForCausalLM", "ForTokenClassification")


@dataclass(frozen=True)
class ModelSpec:
    """A model as its config describes it.

    Args:
        family: the model's family.
        config: its HuggingFace config.
        sizes: what the family read from it.
        rope: its rotary position embeddings.
        directory: where it was read from, if from a directory.
        value_head: whether a scalar head takes the place of the output layer, as in a critic or a reward model.
        expert_order: how the experts of one rank are numbered.
        unquantised: modules (`rules.module_of`) that the model in fp8 leaves in its dtype (`Fp8Settings.applied`).
        mtp: True if the layer for multi-token prediction is part of the model, because it is trained.
    """

    family: Family
    config: HFConfig
    sizes: Sizes
    rope: Rope
    directory: Path | None = None
    value_head: bool = False
    expert_order: ExpertOrder = "ascending"
    unquantised: frozenset[str] = frozenset()
    mtp: bool = False
    adapters: ClassVar[bool] = False
    """True of a specification of a model's adapters."""

    @property
    def hf_config(self) -> dict[str, Any]:
        """The parsed `config.json`."""
        return self.config.complete

    @property
    def value_bias(self) -> bool:
        """True if the value head has a bias; a new one has none."""
        return self.value_head and self.family.biased_value_architecture in self.config.texts("architectures")

    @cached_property
    def rules(self) -> ModelRules:
        """The model's weight rules, used in both directions."""
        layers = tuple(map(self._layer, range(self.sizes.layers)))
        last = blocks.head(self.sizes, self.value_head, self.value_bias)
        per_token = self.sizes.experts_per_token
        return ModelRules(
            first=blocks.embedding(self.sizes),
            layers=layers,
            last=last,
            experts=self.sizes.experts,
            layer_costs=tuple(multiplications(rules, per_token) for rules in layers),
            head_cost=multiplications(last, per_token),
            mtp=blocks.multi_token(self.sizes, self._layer(self.sizes.layers - 1)) if self.mtp else (),
        )

    def _layer(self, number: int) -> tuple[Rule, ...]:
        rules = self.family.layer(self.sizes, number)
        return tuple(rule.without_fp8(number, self.unquantised) for rule in rules) if self.unquantised else rules

    @property
    def hf_tensors(self) -> dict[str, HFTensor]:
        """Every tensor of the HuggingFace model, by name, in the order of its files."""
        return self.rules.hf_tensors

    def hf_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor of the HuggingFace model."""
        return self.hf_tensors[name].shape

    def local_parameters(
        self, layout: Layout, coordinates: Coordinates, *, transformer_engine: bool
    ) -> list[LocalParameter]:
        """Every parameter of a rank with its slices, from shapes alone. The layout must pass `check_layout`."""
        return local_parameters(
            self.rules,
            layout,
            coordinates,
            transformer_engine=transformer_engine,
            expert_order=self.expert_order,
        )

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary, without padding."""
        return self.sizes.vocabulary

    def padded_vocabulary(self, layout: Layout) -> int:
        """Columns of the logits over all tp ranks. Those past `vocab_size` belong to no token, and their weights are 0.

        They must be left out of a softmax.
        """
        return padded_vocabulary(self.sizes.vocabulary, layout.tp)

    def expert_numbering(self, layout: Layout) -> ExpertNumbering:
        """Numbering of a layer's experts in files; of a model with experts."""
        return ExpertNumbering(self.sizes.experts // layout.ep, self.expert_order)

    def check_layout(self, layout: Layout) -> None:
        """Refuse a layout that does not divide the model.

        Raises:
            UserError: names the size of the layout, its value, and what would be accepted.
        """
        sizes = self.sizes
        _check_stages(layout, sizes.layers)
        _divides("tp", layout.tp, "num_attention_heads", sizes.heads)
        if sizes.groups % layout.tp and layout.tp % sizes.groups:
            raise UserError(
                f"layout: tp={layout.tp}: expected a divisor or a multiple of num_key_value_heads={sizes.groups}"
            )
        if sizes.norm_over_heads:  # ranks that share a key would count it several times
            _divides("tp", layout.tp, "num_key_value_heads", sizes.groups)
        heads = sizes.heads * (1 + sizes.output_gate) + 2 * sizes.groups
        _divides("tp", layout.tp, "rows of q, k and v", heads * sizes.head_dim)
        if sizes.delta is not None:
            # Of a sequence that cp ranks share each computes some heads, over all tokens.
            product = "tp" if layout.cp == 1 else "tp * cp"
            _divides(product, layout.tp * layout.cp, "linear_num_key_heads", sizes.delta.key_heads)
        if sizes.latent is not None:
            if sizes.latent.query_rank is not None:
                _divides("tp", layout.tp, "q_lora_rank", sizes.latent.query_rank)
            rows = sizes.latent.key_value_rank + sizes.latent.rotary_dim
            _divides("tp", layout.tp, "kv_lora_rank + qk_rope_head_dim", rows)
        _divides("tp", layout.tp, "intermediate size of the shared expert", sizes.shared_ffn)
        if not all(sizes.sparse) or not sizes.sparse:
            _divides("tp", layout.tp, "intermediate_size", sizes.ffn)
        if sizes.experts:
            _divides("ep", layout.ep, "num_experts", sizes.experts)
            _divides("etp", layout.etp, "moe_intermediate_size", sizes.expert_ffn)
            if sizes.expert_biases and layout.etp > 1:
                raise UserError(
                    f"layout: etp={layout.etp}: expected 1, because experts of {self.family.architecture} have biases, "
                    "which Megatron-Core adds on every rank that shares an expert"
                )
        elif layout.ep * layout.etp > 1:
            raise UserError(
                f"layout: ep={layout.ep} etp={layout.etp}: expected 1 for both, "
                f"because {self.family.architecture} has no experts"
            )

    def of_trainer(self, layout: Layout, *, transformer_engine: bool) -> ModelSpec:
        """The same with its experts numbered so that, where they can, they ascend in a trainer's memory.

        Megatron-Core's buffers are filled from the last parameter to the first. Transformer Engine's layers, as they
        are used here, register the last expert first; else the experts of a rank are numbered from the last to the
        first, where groups of experts stay complete.
        """
        sizes = self.sizes
        per_rank, per_group = sizes.experts // layout.ep, sizes.experts // sizes.expert_groups
        keeps_groups = sizes.expert_groups == 1 or per_rank % per_group == 0 or per_group % per_rank == 0
        return replace(self, expert_order="descending" if keeps_groups and not transformer_engine else "ascending")

    def parameter_count(self) -> int:
        """Parameters of the complete model; a tied output layer counts once, and buffers do not."""
        return self._parameters

    @cached_property
    def _parameters(self) -> int:
        return sum(_elements(tensor) for tensor in self.hf_tensors.values() if not tensor.buffer)

    def active_parameter_count(self) -> int:
        """Parameters that a token is multiplied by: no embedding look-up, and only the experts it is routed to."""
        sizes = self.sizes
        total = self.parameter_count() - (0 if sizes.tied and not self.value_head else sizes.vocabulary * sizes.hidden)
        expert = 3 * sizes.hidden * sizes.expert_ffn
        if sizes.expert_biases:
            expert += 2 * sizes.expert_ffn + sizes.hidden
        return total - (sum(sizes.sparse) + self.mtp) * (sizes.experts - sizes.experts_per_token) * expert


def _elements(tensor: HFTensor) -> int:
    count = 1
    for size in tensor.shape:
        count *= size
    return count


def _check_stages(layout: Layout, layers: int) -> None:
    if layout.pp > layers:
        raise UserError(f"layout: pp={layout.pp}: expected at most num_hidden_layers={layers}")
    if layout.virtual_stages > layers:
        raise UserError(
            f"layout: pp*vpp = {layout.pp}*{layout.vpp} = {layout.virtual_stages} stages: expected at most "
            f"num_hidden_layers={layers}"
        )
    if layout.stages is not None and sum(layout.stages) != layers:
        raise UserError(
            f"layout: stages={','.join(map(str, layout.stages))} add up to {sum(layout.stages)} layers, expected "
            f"num_hidden_layers={layers}"
        )


def _divides(key: str, value: int, what: str, size: int) -> None:
    if size % value:
        raise UserError(f"layout: {key}={value}: expected a divisor of {what}={size}")
