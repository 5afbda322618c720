"""Megatron-Core's distributed optimizer and learning-rate schedule from our settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine3d.errors import UserError
from engine3d.platform import platform
from engine3d.startup.lazy_imports import torch
from engine3d.training.config import TrainConfig

if TYPE_CHECKING:
    from engine3d.models.lora.modules import Adapters

_FLOAT32, _BFLOAT16 = 4, 2


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """Bytes of training for one element of a weight, without the weight itself.

    Args:
        gradient: in the buffer of gradients.
        master: a float32 weight, on the device.
        moments: Adam's two, and the remainder of a bf16 weight to float32 where it has no master.
    """

    gradient: int
    master: int
    moments: int


def element_bytes(config: TrainConfig) -> ElementBytes:
    """Compute the bytes by the dtype of the model and the settings of its optimizer."""
    if config.dtype == "float32":
        return ElementBytes(gradient=_FLOAT32, master=0, moments=2 * _FLOAT32)
    if config.optimizer.precision_aware:
        # Transformer Engine keeps the 16 bits by which a float32 weight differs from the bf16 one.
        return ElementBytes(gradient=_BFLOAT16, master=0, moments=3 * _BFLOAT16)
    return ElementBytes(gradient=_FLOAT32, master=_FLOAT32, moments=2 * _FLOAT32)


def buffer_optimizers(optimizer: Any) -> list[Any]:
    """Optimizers within Megatron-Core's that have parameters on this rank: one for each kind of buffer."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [inner for inner in chained if not inner.is_stub_optimizer]


def wrap_for_training(module: Any, config: TrainConfig, adapters: Adapters | None = None) -> list[Any]:
    """The model's chunks in Megatron-Core's DistributedDataParallel: gradients in buffers, summed over dp.

    Args:
        module: the model.
        config: the settings.
        adapters: of the model, whose gradients are summed over the ranks that share them.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    from engine3d.models.build import model_chunks

    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=not config.optimizer.precision_aware,
        use_distributed_optimizer=True,
        overlap_grad_reduce=False,
        average_in_collective=False,
    )
    modules = model_chunks(module)
    chunks = [DistributedDataParallel(chunk.config, settings, chunk) for chunk in modules]
    _fuse_weight_gradients(module, fused=adapters is None)

    def finalise(chunks: list[Any], num_tokens: Any = None, **arguments: Any) -> None:
        # The loss carries its own weights: no division by a number of tokens.
        finalize_model_grads(chunks, None, **arguments)
        if adapters is not None:
            adapters.reduce_gradients()

    modules[0].config.finalize_model_grads_func = finalise
    return chunks


def _fuse_weight_gradients(module: Any, *, fused: bool) -> None:
    """Make Transformer Engine's layers add their weights' gradients to the buffers in the GEMM that computes them.

    Megatron-Core has one setting for these and for its own layers, which need apex for it. Experts with a grouped GEMM
    add theirs after it (`models.experts.grouped_gemm`). Weights with adapters have no gradients.
    """
    for layer in module.modules():
        if hasattr(layer, "fuse_wgrad_accumulation"):
            layer.fuse_wgrad_accumulation = fused


def build_optimizer(chunks: list[Any], config: TrainConfig) -> tuple[Any, Any]:
    """Adam, its state split over data-parallel ranks, and the schedule of its learning rate.

    Args:
        chunks: of the model, each wrapped for training.
        config: the settings.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    settings = config.optimizer
    dtype = getattr(torch, config.dtype)
    aware: dict[str, Any] = {}
    if settings.precision_aware:
        if not platform.has_transformer_engine:
            raise UserError("train.optimizer.precision_aware=true needs Transformer Engine, which is absent here")
        aware = {
            "use_precision_aware_optimizer": True,
            "main_grads_dtype": torch.bfloat16,
            "exp_avg_dtype": torch.bfloat16,
            "exp_avg_sq_dtype": torch.bfloat16,
        }
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
            **aware,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
    for earlier in getattr(optimizer, "chained_optimizers", [optimizer])[:-1]:
        # Megatron-Core gathers the weights of all buffers after the step of each optimizer: here after the last alone.
        earlier._defer_param_sync = True
    decay_steps = settings.decay_steps or max(1, settings.warmup_steps + 1)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return optimizer, scheduler
