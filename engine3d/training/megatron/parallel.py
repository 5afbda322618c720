"""Start and end Megatron-Core's process groups for a layout."""

from __future__ import annotations

import gc
import os
from datetime import timedelta

import torch.distributed as dist

from engine3d.errors import UserError
from engine3d.layout import Coordinates, Layout
from engine3d.platform import platform
from engine3d.rendezvous import STORE_VARIABLE, join


def initialise(layout: Layout, *, seed: int, timeout_s: float) -> Coordinates:
    """Join the world described by torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT).

    The variable ENGINE3D_STORE, the address of a store (`engine3d.rendezvous`), stands for the last two.

    Args:
        layout: must have as many ranks as the world.
        seed: of the random states; ranks that hold different weights draw differently.
        timeout_s: limit of every collective operation, in seconds; Megatron-Core's groups count in whole minutes.

    Returns:
        This rank's coordinates.

    Raises:
        UserError: the layout has another number of ranks than the world.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if layout.world_size != world_size:
        raise UserError(f"layout: {layout} has {layout.world_size} ranks, the world has {world_size}")
    platform.prepare_training()
    from megatron.core import parallel_state, tensor_parallel

    gc.collect()  # models that were closed refer to released groups
    platform.stay_near(platform.device(int(os.environ.get("LOCAL_RANK", "0"))))
    timeout = timedelta(seconds=timeout_s)
    if not dist.is_initialized():
        # Given a device, PyTorch would make the communicator of each group at once, also of the many of one rank.
        if address := os.environ.get(STORE_VARIABLE):
            store, rank = join(address, timeout_s), int(os.environ["RANK"])
            dist.init_process_group(
                platform.collective_backend, timeout=timeout, store=store, rank=rank, world_size=world_size
            )
        else:
            dist.init_process_group(platform.collective_backend, timeout=timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return layout.coordinates(dist.get_rank())


def release() -> None:
    """End Megatron-Core's groups and stay in the world, so that another layout can be started.

    Threads or device memory of a group are free once nothing refers to it, at the latest when another layout starts.
    """
    from megatron.core import parallel_state

    from engine3d.models.experts import token_dispatcher

    token_dispatcher.release()
    groups = parallel_state._global_process_group_list or []
    parallel_state.destroy_model_parallel()  # which only forgets them
    for group in groups:
        if group is not None:
            dist.destroy_process_group(group)


def leave() -> None:
    """Leave the world; nothing can be started after it in this process. Does nothing where there is no world."""
    if dist.is_initialized():
        dist.destroy_process_group()
