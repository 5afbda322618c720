"""Megatron-Core's distributed optimizer and learning-rate schedule from our settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine3d.errors import UserError
from engine3d.platform import platform
from engine3d.startup.lazy_imports import torch
from engine3d.training.config import TrainConfig

_FLOAT32, _BFLOAT16 = 4, 2


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """What there is of an element of a weight beside itself, in bytes.

    Args:
        gradient: in the buffer that gradients are added up in.
        master: a float32 weight, which is on the device.
        moments: Adam's two, and with them what a bf16 weight lacks to float32 where it has no master.
    """

    gradient: int
    master: int
    moments: int


def element_bytes(config: TrainConfig) -> ElementBytes:
    """By the dtype of the model and the settings of its optimizer."""
    if config.dtype == "float32":
        return ElementBytes(gradient=_FLOAT32, master=0, moments=2 * _FLOAT32)
    if config.optimizer.precision_aware:
        # Transformer Engine keeps the 16 bits by which a float32 weight differs from the bf16 one.
        return ElementBytes(gradient=_BFLOAT16, master=0, moments=3 * _BFLOAT16)
    return ElementBytes(gradient=_FLOAT32, master=_FLOAT32, moments=2 * _FLOAT32)


def of_buffers(optimizer: Any) -> list[Any]:
    """Of Megatron-Core's optimizer, those that hold parameters on this rank: one for each kind of buffer."""
    every = getattr(optimizer, "chained_optimizers", [optimizer])
    return [each for each in every if not each.is_stub_optimizer]


def wrap_for_training(module: Any, config: TrainConfig) -> Any:
    """The module in Megatron-Core's DistributedDataParallel: gradients in contiguous buffers, summed over dp."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=not config.optimizer.precision_aware,
        use_distributed_optimizer=True,
        overlap_grad_reduce=False,
        average_in_collective=False,
    )
    model = DistributedDataParallel(module.config, settings, module)
    _add_weight_gradients_at_once(module)

    def finalise(chunks: list[Any], num_tokens: Any = None, **arguments: Any) -> None:
        # The loss carries its own weights: no division by a number of tokens.
        finalize_model_grads(chunks, None, **arguments)

    module.config.finalize_model_grads_func = finalise
    return model


def _add_weight_gradients_at_once(module: Any) -> None:
    """Let Transformer Engine's layers add their weights' gradients to the buffers by the product that makes them.

    Megatron-Core has one setting for these and for its own layers, which need apex for it. Experts whose products are
    one kernel add theirs after it (`models.grouped_products`).
    """
    for layer in module.modules():
        if hasattr(layer, "fuse_wgrad_accumulation"):
            layer.fuse_wgrad_accumulation = True


def build_optimizer(model: Any, config: TrainConfig) -> tuple[Any, Any]:
    """Adam, its state split over data-parallel ranks, and the schedule of its learning rate."""
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
        [model],
        use_gloo_process_groups=False,
    )
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
