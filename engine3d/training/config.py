"""Settings of a training engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models.family import ModelSpec
from engine3d.models.lora.config import LoraConfig
from engine3d.models.precision import Fp8Settings, SetPrecision
from engine3d.models.sizes import ROW_ELEMENTS, Sizes
from engine3d.settings import LONGEST_S, MOST_RANKS, MOST_TOKENS, Settings
from engine3d.training.megatron.options import refusals


class LayoutConfig(Settings):
    """Parallel sizes. The data parallel size follows from the number of ranks.

    Layers are split over `pp` pipeline stages of similar cost in floating point operations for each token, attention's
    scores left out: the last stage has fewer layers, because it has the output layer. `stages` sets the split by hand.
    With `vpp` above 1 each rank has several virtual stages, through which micro-batches pass in turn (the interleaved
    schedule of Narayanan et al. 2021, arXiv 2104.04473). The idle share of a pipeline falls by this factor. Activations
    of more micro-batches are in memory, and stages send more messages.
    """

    tp: int = Field(1, ge=1, le=MOST_RANKS, description="tensor parallel size of dense layers")
    pp: int = Field(1, ge=1, le=MOST_RANKS, description="pipeline stages")
    ep: int = Field(1, ge=1, le=MOST_RANKS, description="expert parallel size")
    etp: int = Field(1, ge=1, le=MOST_RANKS, description="tensor parallel size of expert layers")
    cp: int = Field(
        1, ge=1, le=MOST_RANKS, description="context parallel size: ranks over which long sequences are split"
    )
    vpp: int = Field(
        1, ge=1, le=MOST_RANKS, description="virtual stages of each pipeline stage (interleaved schedule); needs pp"
    )
    stages: list[int] | None = Field(
        None,
        description="layers of each of the pp * vpp virtual stages, in the order in which layers pass through them. "
        "The embedding before the first and the output layer after the last do not count. null: stages of similar cost",
    )

    def layout(self, world_size: int) -> Layout:
        """The layout on world_size ranks; UserError where the sizes do not divide it."""
        return Layout.of_world(
            world_size,
            tp=self.tp,
            pp=self.pp,
            ep=self.ep,
            etp=self.etp,
            cp=self.cp,
            vpp=self.vpp,
            stages=None if self.stages is None else tuple(self.stages),
        )


STATE_SETTINGS = ("precision_aware", "offload", "overlap_offload")
"""Settings of an optimizer that determine dtype and location of its state."""


class OptimizerConfig(Settings):
    """Adam with decoupled weight decay, and its learning-rate schedule.

    The rate rises linearly from 0 over `warmup_steps` updates to `lr`, then stays (constant) or falls to `min_lr` at
    `decay_steps` updates along a straight line or half a cosine.
    """

    lr: float = Field(1e-6, gt=0, le=10, description="learning rate after the warm-up")
    min_lr: float = Field(0.0, ge=0, description="learning rate from decay_steps on; at most lr")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="how the learning rate falls from lr to min_lr"
    )
    warmup_steps: int = Field(0, ge=0, le=1_000_000_000, description="updates over which the rate rises from 0 to lr")
    decay_steps: int | None = Field(
        None,
        gt=0,
        le=1_000_000_000,
        description="the update at which min_lr is reached; linear and cosine need it",
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="Adam's decay of the mean of gradients")
    beta2: float = Field(0.999, ge=0, lt=1, description="Adam's decay of the mean of squared gradients")
    eps: float = Field(1e-8, gt=0, le=1, description="added to the root of the latter")
    weight_decay: float = Field(0.0, ge=0, le=10, description="decoupled weight decay, times the learning rate")
    clip_grad: float = Field(1.0, ge=0, description="largest gradient norm; 0 for no clipping")
    precision_aware: bool = Field(
        False, description="bf16 gradients and moments with fp32 masters (Transformer Engine's FusedAdam)"
    )
    offload: bool = Field(
        False,
        description="keep the state in page-locked host memory; an update brings it to the GPU part by part. float32 "
        "masters stay on the GPU, which precision_aware does without",
    )
    overlap_offload: bool = Field(
        False,
        description="let the state return to host memory beside what others do on the GPU after an update. The GPU has "
        "it until the model's next turn there; otherwise an update waits for it. Needs offload",
    )

    @model_validator(mode="after")
    def _offloads_overlap(self) -> OptimizerConfig:
        if self.overlap_offload and not self.offload:
            raise ValueError("overlap_offload=true does nothing with offload=false; expected offload=true")
        return self

    @model_validator(mode="after")
    def _schedule_is_complete(self) -> OptimizerConfig:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr={self.min_lr} is above lr={self.lr}")
        if self.schedule != "constant" and self.decay_steps is None:
            raise ValueError(f"schedule={self.schedule} needs decay_steps, the update at which min_lr is reached")
        if self.decay_steps is not None and self.warmup_steps >= self.decay_steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} must be below decay_steps={self.decay_steps}")
        for name, given in (("decay_steps", self.decay_steps), ("min_lr", self.min_lr)):
            if given and self.schedule == "constant":
                raise ValueError(f"{name}={given} does nothing with schedule=constant; expected linear or cosine")
        return self


class MtpConfig(Settings):
    """Training of a model's layer for multi-token prediction, with an optimizer of its own.

    It learns the tokens that the policy learns, from states of the policy, which it leaves alone: the policy's gradient
    is bit for bit the same with and without. Schedule and further settings are those of `optimizer`.
    """

    lr: float | None = Field(
        None, gt=0, le=10, description="learning rate after the warm-up; null: that of the model's optimizer"
    )
    clip_grad: float = Field(1.0, ge=0, description="largest gradient norm of the layer; 0 for no clipping")

    def optimizer(self, of_model: OptimizerConfig) -> OptimizerConfig:
        """Settings of the layer's optimizer, from those of the model's."""
        lr = self.lr or of_model.lr
        changed = {"lr": lr, "min_lr": of_model.min_lr * lr / of_model.lr, "clip_grad": self.clip_grad}
        return of_model.model_copy(update=changed)


class TrainConfig(Settings):
    """One model's training: layout, precision and optimizer."""

    layout: LayoutConfig = LayoutConfig()
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="precision of weights and activations in forward and backward passes"
    )
    precision: SetPrecision = Field(
        None,
        description="precision of the GEMMs of attention, MLPs and experts: fp8 quantises their operands. Weights, "
        "gradients and optimizer stay as they are; null: dtype",
    )
    fp8: Fp8Settings = Fp8Settings()
    optimizer: OptimizerConfig = OptimizerConfig()
    mtp: MtpConfig | None = Field(
        None,
        description="train the layer for multi-token prediction with which engines draft, apart from the model; null: "
        "leave it as it is in the model's files",
    )
    lora: LoraConfig | None = Field(
        None, description="train low-rank adapters and leave the model as it is; null: train all weights"
    )
    micro_batch_tokens: int = Field(
        8192,
        ge=1,
        le=MOST_TOKENS,
        description="most tokens of a micro-batch, which cp ranks share; a longer sequence is alone",
    )
    logits_tokens: int | None = Field(
        None,
        ge=1,
        le=MOST_TOKENS,
        description="most tokens of a micro-batch whose logits are there at a time; null: all. Fewer need less memory, "
        "and the output layer is computed twice in an update",
    )
    packing: bool = Field(True, description="lay sequences end to end; otherwise pad each to the longest")
    sequence_parallel: bool = Field(True, description="split activations over tp where tp is above 1")
    fused_experts: bool = Field(
        True,
        description="compute a layer's experts as one fused operation with grouped GEMMs where ranks gather each "
        "other's tokens or ep is 1 (bf16, Hopper): faster, and fewer activations are kept for the backward pass. "
        "Megatron-Core's own operations otherwise",
    )
    copy_engine_dispatcher: bool = Field(
        False,
        description="with fused_experts and ep above 1, on one host: the GPUs' copy engines dispatch tokens into the "
        "memory of other ranks, and leave all processors to grouped GEMMs, some of which NCCL's kernels would hold",
    )
    predicted_expert_capacity: bool = Field(
        False,
        description="with fused_experts and ep above 1: allocate the rows of a layer's experts before their number "
        "is known, a sixteenth more than the largest so far, so that no host waits for its GPU in each layer. An "
        "update in which a layer's rows do not fit is computed again",
    )
    fused_query_key: bool = Field(
        False,
        description="make queries and keys of the mixed projection by one kernel, with their norms and rotary "
        "embedding, each way; of models with such norms (Qwen3)",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none",
        description="what the backward pass computes again in place of keeping it: nothing, norms and activation "
        "functions, or whole layers",
    )
    recompute_layers: int | None = Field(
        None, ge=1, description="with recompute=full: number of layers of each virtual pipeline stage; null: all"
    )
    routing_replay: Literal["none", "update", "rollout"] = Field(
        "none",
        description="experts that an update gives a token to: none, those that its own routers choose; update, those "
        "of the pass that computed the old log-probs; rollout, those of the engine that drew the sample, in that pass "
        "too. Weights of experts are always of the live routers",
    )
    older_routes: Literal["keep", "live"] = Field(
        "keep",
        description="with routing_replay=rollout: routes of tokens that older weights drew than those before the step. "
        "keep, replay them; live, let the live routers choose",
    )
    deterministic: bool = Field(
        False, description="make the same bits in every run, also on a GPU, where attention is then slower"
    )
    timeout_s: float = Field(600.0, gt=0, le=LONGEST_S, description="limit of any collective operation")
    start_timeout_s: float = Field(
        1800.0, gt=0, le=LONGEST_S, description="limit of building the model and loading its weights"
    )
    megatron: dict[str, Any] = Field(
        default_factory=dict,
        description="further fields of Megatron-Core's TransformerConfig, as they are named there: those of "
        "docs/megatron_options.md",
    )

    def with_mtp(self, spec: ModelSpec) -> ModelSpec:
        """The model, with its layer for multi-token prediction if that is trained."""
        return spec if self.mtp is None else replace(spec, mtp=True)

    def gathers_tokens(self, layout: Layout) -> bool:
        """True if ranks that share experts gather each other's tokens, and so need as many each."""
        return layout.ep * layout.etp > 1 and self.megatron.get("moe_token_dispatcher_type") == "allgather"

    @property
    def balances_experts(self) -> bool:
        """True if there are load-balancing losses of experts."""
        coefficients = self.megatron.get("moe_aux_loss_coeff", 0.0)
        return any(coefficients) if isinstance(coefficients, list) else coefficients > 0

    @property
    def has_flash_attention(self) -> bool:
        """True if attention is FlashAttention's, whatever Transformer Engine prefers."""
        return self.megatron.get("attention_backend") == "flash"

    def has_fused_experts(self, sizes: Sizes, layout: Layout) -> bool:
        """True if experts are fused, on a GPU that has the kernels."""
        together = layout.ep == 1 or self.gathers_tokens(layout)
        unsplit = layout.etp == 1 and (layout.tp == 1 or self.sequence_parallel)
        rows = self.dtype == "bfloat16" and not (sizes.hidden % ROW_ELEMENTS or sizes.expert_ffn % ROW_ELEMENTS)
        adapted = self.lora is not None and self.lora.adapts_mlps
        plain = self.precision is None and not (sizes.mlp_bias or sizes.expert_biases or adapted)
        return self.fused_experts and together and unsplit and rows and plain

    def shares_fused_experts(self, sizes: Sizes, layout: Layout) -> bool:
        """True if a model's experts are fused, and sharded over several ranks."""
        return bool(sizes.experts) and layout.ep > 1 and self.has_fused_experts(sizes, layout)

    def has_copy_engine_dispatcher(self, sizes: Sizes, layout: Layout) -> bool:
        """True if copy engines dispatch tokens to the ranks that share experts."""
        return self.copy_engine_dispatcher and self.shares_fused_experts(sizes, layout)

    def has_predicted_capacity(self, sizes: Sizes, layout: Layout) -> bool:
        """True if row capacity of the ranks that share experts is predicted, before the number of rows is known."""
        return self.predicted_expert_capacity and self.shares_fused_experts(sizes, layout)

    def check_trained(self, sizes: Sizes, layout: Layout) -> None:
        """Refuse settings with which a model cannot be trained.

        Raises:
            UserError: names the setting.
        """
        if sizes.experts and layout.tp > 1 and not self.sequence_parallel:
            raise UserError(
                f"sequence_parallel=false with tp={layout.tp}: expected true, because the model has experts, which "
                "would learn from every token once for each tp rank"
            )

    @field_validator("megatron")
    @classmethod
    def _options_were_tried(cls, options: dict[str, Any]) -> dict[str, Any]:
        if errors := refusals(options):
            raise ValueError("; ".join(errors))
        return options

    @model_validator(mode="after")
    def _has_masters(self) -> TrainConfig:
        if self.dtype == "float32" and self.optimizer.precision_aware:
            raise ValueError(
                "optimizer.precision_aware=true with dtype=float32, whose masters Transformer Engine does not update: "
                "expected dtype=bfloat16, or false"
            )
        return self

    @model_validator(mode="after")
    def _older_routes_are_replayed(self) -> TrainConfig:
        if self.older_routes == "live" and self.routing_replay != "rollout":
            raise ValueError(f"older_routes=live needs routing_replay=rollout, found {self.routing_replay}")
        return self

    @model_validator(mode="after")
    def _layers_are_computed_again(self) -> TrainConfig:
        if self.recompute_layers is not None and self.recompute != "full":
            raise ValueError(f"recompute_layers={self.recompute_layers} needs recompute=full, found {self.recompute}")
        return self
